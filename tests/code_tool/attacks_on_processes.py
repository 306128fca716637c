"""Attacks that start other programs, processes and threads."""

from __future__ import annotations

from functools import partial
from typing import Final

from attack import Attack
from host_view import Program, Sight
from signs import more_than, threads_above

_SLEEP: Final = "program = next(p for p in ('/bin/sleep', '/usr/bin/sleep') if os.path.exists(p))\nbe_known()\n"
_PROGRAMS: Final = {
    "system": "os.system('sleep ' + TARGET['nap'])",
    "subprocess": "import subprocess\nsubprocess.run([program, TARGET['nap']])",
    "shell": "import subprocess\nsubprocess.run('sleep ' + TARGET['nap'], shell=True)",
    "popen": "os.popen('sleep ' + TARGET['nap']).read()",
    "exec": "os.execv(program, ['sleep', TARGET['nap']])",
    "exec-by-handle": "os.execve(os.open(program, os.O_RDONLY), ['sleep', TARGET['nap']], {})",
    "execveat": "arguments = (ctypes.c_char_p * 3)(b'sleep', TARGET['nap'].encode(), None)\n"
    "syscall('execveat', -100, program.encode(), arguments, None, 0)",
    "posix-spawn": "os.waitpid(os.posix_spawn(program, ['sleep', TARGET['nap']], {}), 0)",
    "libc-system": "libc.system(b'sleep ' + TARGET['nap'].encode())",
    "loader": "import glob\nloader = (glob.glob('/lib64/ld-linux*') + glob.glob('/lib/ld-*'))[0]\n"
    "os.execv(loader, [loader, program, TARGET['nap']])",
    "memory-file": "import shutil\nhandle = os.memfd_create('sleep', 0)\nwith open(program, 'rb') as source:\n"
    "    os.write(handle, source.read())\nos.execve(f'/proc/self/fd/{handle}', ['sleep', TARGET['nap']], {})",
    "copy-in-the-scratch": "import shutil\nshutil.copy(program, 'mine')\nos.chmod('mine', 0o755)\n"
    "os.execv('./mine', ['sleep', TARGET['nap']])",
    "script-in-the-scratch": "open('mine', 'w').write('#!/bin/sh\\nsleep $1')\nos.chmod('mine', 0o755)\n"
    "os.execv('./mine', ['./mine', TARGET['nap']])",
    "new-python": "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(9)', TARGET['nap']])",
    "new-python-by-spawn": "import subprocess\n"
    "subprocess.run([sys.executable, '-Ic', 'import time; time.sleep(9)', TARGET['nap']])",
    "exec-in-a-thread": "threading.Thread(target=os.execv, args=(program, ['sleep', TARGET['nap']])).start()\n"
    "time.sleep(0.3)",
}
_SELDOM: Final = {
    "copy-in-the-scratch": "the scratch directory may be mounted noexec",
    "script-in-the-scratch": "the scratch directory may be mounted noexec",
    "loader": "the loader may lie elsewhere",
}
_IN_THE_CHILD: Final = "if pid == 0:\n    time.sleep(9)\n    os._exit(0)\nhold()"
_MACHINE_CODE: Final = (
    """
be_known()
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("{code}"))
pid = ctypes.PYFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
assert pid >= 0, pid
"""
    + _IN_THE_CHILD
)


def _raw_fork(name: str, flags: int = 0) -> str:
    """Fork by a number of a system call. PyDLL, since the child needs the interpreter's lock."""
    return f"""
be_known()
keep_lock = ctypes.PyDLL(None, use_errno=True).syscall
pid = checked(keep_lock(number(TARGET["syscalls"][{name}]), number({flags}), *[number(0)] * 4))
{_IN_THE_CHILD}
"""


_FORKS: Final = {
    "fork": "be_known()\npid = os.fork()\n" + _IN_THE_CHILD,
    "fork-with-terminal": "be_known()\npid, _ = os.forkpty()\n" + _IN_THE_CHILD,
    "fork-by-libc": "be_known()\npid = checked(ctypes.PyDLL(None).fork())\n" + _IN_THE_CHILD,
    "fork-by-number": _raw_fork("'fork'"),
    "vfork-by-number": _raw_fork("'vfork'"),
    "clone-by-number": _raw_fork("'clone'", 17),
    "clone-as-a-sibling": _raw_fork("'clone'", 0x8000 | 17),
    "clone-in-a-new-user-namespace": _raw_fork("'clone'", 0x1000_0000 | 17),
    "clone3": "be_known()\narguments = struct.pack('11Q', 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)\n"
    "pid = checked(ctypes.PyDLL(None, use_errno=True).syscall(number(435), arguments, number(88)))\n" + _IN_THE_CHILD,
    "fork-in-a-thread": "be_known()\ndef split():\n    if os.fork() == 0:\n        time.sleep(9)\n    hold()\n"
    "threading.Thread(target=split).start()",
    "multiprocessing": "be_known()\nimport multiprocessing\n"
    "multiprocessing.get_context('fork').Process(target=time.sleep, args=(9,)).start()\nhold()",
    "fork-as-32-bit": _MACHINE_CODE.format(code="b802000000cd804898c3"),  # mov eax, 2; int 0x80; cdqe; ret
    "fork-as-x32": _MACHINE_CODE.format(code="b8390000400f05c3"),  # mov eax, 0x40000039; syscall; ret
}
_FORKS_SELDOM: Final = {
    "fork-by-number": "this kind of processor has no fork",
    "vfork-by-number": "this kind of processor has no vfork",
    "clone-in-a-new-user-namespace": "the machine may refuse user namespaces",
    "clone3": "a container may refuse clone3",
    "fork-as-32-bit": "the kernel may run no 32-bit code",
    "fork-as-x32": "few kernels know x32",
}
_DAEMON: Final = """
be_known()
{before}
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    {inside}
    for number in (1, 2, 15):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(30)
    os._exit(0)
"""
_SILENT: Final = "null = os.open('/dev/null', os.O_RDWR)\n    [os.dup2(null, handle) for handle in (0, 1, 2)]"

ALL: Final = (
    *(
        Attack(
            f"start-{name}",
            _SLEEP + code,
            Program,
            seldom_on_plain=_SELDOM.get(name, ""),
        )
        for name, code in _PROGRAMS.items()
    ),
    *(
        Attack(name, code, partial(Sight, shows=more_than(1)), seldom_on_plain=_FORKS_SELDOM.get(name, ""))
        for name, code in _FORKS.items()
    ),
    Attack(
        "fork-300-times",
        """
be_known()
for _ in range(300):
    if os.fork() == 0:
        time.sleep(9)
        os._exit(0)
hold()
""",
        partial(Sight, shows=more_than(250)),
    ),
    Attack(
        "fork-bomb",
        "be_known()\nfor _ in range(7):\n    os.fork()\nhold()",
        partial(Sight, shows=more_than(100)),
    ),
    Attack("daemon", _DAEMON.format(before="", inside=_SILENT), partial(Sight, shows=more_than(0), after=True)),
    Attack(
        "daemon-that-holds-the-output",
        _DAEMON.format(before="", inside="print('alive', flush=True)"),
        partial(Sight, shows=more_than(0), after=True),
    ),
    Attack(
        "thread-that-outlives-the-main-thread",
        "be_known()\nthreading.Thread(target=time.sleep, args=(30,)).start()\nsyscall('exit', 0)",
        partial(Sight, shows=more_than(0), after=True),
        never_on_plain="it ends the whole group at the time limit",
        timeout_s=1,
    ),
    Attack(
        "500-threads",
        """
be_known()
threading.stack_size(65536)
for _ in range(500):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
hold()
""",
        partial(Sight, shows=threads_above(400)),
    ),
)
