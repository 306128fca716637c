"""Attacks on other processes, and by starting some."""

import os
from functools import partial
from typing import Final

from attack import Attack
from host_view import Program, Sight
from ordinary_user import USER_ID
from signs import more_than, threads_above
from victims import Owner, Stranger

_SLEEP: Final = "program = next(p for p in ('/bin/sleep', '/usr/bin/sleep') if os.path.exists(p))\nbe_known()\n"
_PROGRAMS: Final = {
    "system": "os.system('sleep ' + TARGET['nap'])",
    "exec": "os.execv(program, ['sleep', TARGET['nap']])",
    "exec-by-handle": "os.execve(os.open(program, os.O_RDONLY), ['sleep', TARGET['nap']], {})",
    "execveat": "arguments = (ctypes.c_char_p * 3)(b'sleep', TARGET['nap'].encode(), None)\n"
    "syscall('execveat', -100, program.encode(), arguments, None, 0)",
    "posix-spawn": "os.waitpid(os.posix_spawn(program, ['sleep', TARGET['nap']], {}), 0)",
    "loader": "import glob\nloader = (glob.glob('/lib64/ld-linux*') + glob.glob('/lib/ld-*'))[0]\n"
    "os.execv(loader, [loader, program, TARGET['nap']])",
    "memory-file": "import shutil\nhandle = os.memfd_create('sleep', 0)\nwith open(program, 'rb') as source:\n"
    "    os.write(handle, source.read())\nos.execve(f'/proc/self/fd/{handle}', ['sleep', TARGET['nap']], {})",
    "copy-in-the-scratch": "import shutil\nshutil.copy(program, 'mine')\nos.chmod('mine', 0o755)\n"
    "os.execv('./mine', ['sleep', TARGET['nap']])",
    "script-in-the-scratch": "open('mine', 'w').write('#!/bin/sh\\nsleep $1')\nos.chmod('mine', 0o755)\n"
    "os.execv('./mine', ['./mine', TARGET['nap']])",
    "new-python": "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(9)', TARGET['nap']])",
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
    "fork-by-number": _raw_fork("'fork'"),
    "vfork-by-number": _raw_fork("'vfork'"),
    "clone-by-number": _raw_fork("'clone'", 17),
    "clone-as-a-sibling": _raw_fork("'clone'", 0x8000 | 17),
    "clone-in-a-new-user-namespace": _raw_fork("'clone'", 0x1000_0000 | 17),
    "clone3": "be_known()\narguments = struct.pack('11Q', 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)\n"
    "pid = checked(ctypes.PyDLL(None, use_errno=True).syscall(number(435), arguments, number(88)))\n" + _IN_THE_CHILD,
    "fork-in-a-thread": "be_known()\ndef split():\n    if os.fork() == 0:\n        time.sleep(9)\n    hold()\n"
    "threading.Thread(target=split).start()",
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
    time.sleep(300)
    os._exit(0)
"""
_SILENT: Final = "null = os.open('/dev/null', os.O_RDWR)\n    [os.dup2(null, handle) for handle in (0, 1, 2)]"

BY_STARTING: Final = (
    *(
        Attack(f"start-{name}", _SLEEP + code, Program, seldom_on_plain=_SELDOM.get(name, ""))
        for name, code in _PROGRAMS.items()
    ),
    *(
        Attack(name, code, partial(Sight, shows=more_than(1)), seldom_on_plain=_FORKS_SELDOM.get(name, ""))
        for name, code in _FORKS.items()
    ),
    Attack(
        "fork-300-times",
        "be_known()\nfor _ in range(300):\n    if os.fork() == 0:\n        time.sleep(9)\n        os._exit(0)\nhold()",
        partial(Sight, shows=more_than(250)),
    ),
    Attack("fork-bomb", "be_known()\nfor _ in range(7):\n    os.fork()\nhold()", partial(Sight, shows=more_than(100))),
    Attack("daemon", _DAEMON.format(before="", inside=_SILENT), partial(Sight, shows=more_than(0), after=True)),
    Attack(
        "daemon-that-holds-the-output",
        _DAEMON.format(before="", inside="print('alive', flush=True)"),
        partial(Sight, shows=more_than(0), after=True),
    ),
    Attack(
        "thread-that-outlives-the-main-thread",
        "be_known()\nthreading.Thread(target=time.sleep, args=(300,)).start()\nsyscall('exit', 0)",
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
    Attack(
        "200-threads-of-a-process-whose-name-is-no-text",
        """
be_known()
threading.stack_size(65536)
libc.prctl(15, b"\\xff\\nThreads:\\t1", 0, 0, 0)
for _ in range(200):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
libc.prctl(15, TARGET["name"].encode(), 0, 0, 0)
hold()
""",
        partial(Sight, shows=threads_above(150)),
    ),
)


_NO_PTRACE: Final = "Yama, or a container without CAP_SYS_PTRACE, keeps processes from each other"
_SIGNAL_INFO: Final = "struct.pack('iii', {signal}, 0, -1) + bytes(116)"
_ON_A_STRANGER: Final = {
    "kill": "os.kill(TARGET['pid'], 9)",
    "stop": "os.kill(TARGET['pid'], 19)",
    "kill-its-group": "os.killpg(TARGET['pid'], 9)",
    "kill-its-thread": "syscall('tkill', TARGET['pid'], 9)",
    "kill-its-thread-in-its-group": "syscall('tgkill', TARGET['pid'], TARGET['pid'], 9)",
    "kill-by-queue": "checked(libc.sigqueue(TARGET['pid'], 9, None))",
    "kill-by-queue-in-its-group": "syscall('rt_tgsigqueueinfo', TARGET['pid'], TARGET['pid'], 9, "
    + _SIGNAL_INFO.format(signal=9)
    + ")",
    "kill-by-handle": "signal.pidfd_send_signal(os.pidfd_open(TARGET['pid']), 9)",
    "kill-by-folder-of-proc": "syscall('pidfd_send_signal', os.open(f'/proc/{TARGET[\"pid\"]}', 0), 9, None, 0)",
    "priority": "os.setpriority(os.PRIO_PROCESS, TARGET['pid'], 7)",
    "priority-of-its-group": "os.setpriority(os.PRIO_PGRP, TARGET['pid'], 7)",
    "priority-of-its-user": "os.setpriority(os.PRIO_USER, os.getuid(), 7)",
    "schedule": "os.sched_setscheduler(TARGET['pid'], os.SCHED_BATCH, os.sched_param(0))",
    "processors": "os.sched_setaffinity(TARGET['pid'], {min(os.sched_getaffinity(0))})",
    "disk-priority": "syscall('ioprio_set', 1, TARGET['pid'], (3 << 13) | 7)",
    "limits": "import resource\nresource.prlimit(TARGET['pid'], resource.RLIMIT_CPU, (1, 1))",
    "memory-killer-score": "open(f'/proc/{TARGET[\"pid\"]}/oom_score_adj', 'w').write('999')",
    "trace": "checked(libc.ptrace(number(16), number(TARGET['pid']), None, None))\nhold()",
    "trace-by-seizing": "checked(libc.ptrace(number(0x4206), number(TARGET['pid']), None, None))\nhold()",
    "kill-by-file-signal": """
import fcntl
reader, writer = os.pipe()
fcntl.fcntl(reader, fcntl.F_SETOWN, TARGET["pid"])
fcntl.fcntl(reader, 10, 9)
fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
os.write(writer, b"x")
""",
    "kill-by-file-signal-to-its-group": """
import fcntl
reader, writer = os.pipe()
fcntl.fcntl(reader, 15, struct.pack("ii", 2, TARGET["pid"]))
fcntl.fcntl(reader, 10, 9)
fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
os.write(writer, b"x")
""",
    "kill-by-folder-signal": """
import fcntl
folder = os.open(".", os.O_RDONLY)
fcntl.fcntl(folder, fcntl.F_SETOWN, TARGET["pid"])
fcntl.fcntl(folder, 10, 9)
fcntl.fcntl(folder, fcntl.F_NOTIFY, 0x80000004)
open("new", "w").close()
""",
    "overwrite-its-memory": """
with open(f"/proc/{TARGET['pid']}/mem", "r+b", buffering=0) as memory:
    memory.seek(TARGET["address"])
    memory.write(b"MINE")
""",
}
_STRANGER_SELDOM: Final = {
    "trace": _NO_PTRACE,
    "trace-by-seizing": _NO_PTRACE,
    "overwrite-its-memory": _NO_PTRACE,
    "processors": "it needs two processors",
    "kill-by-folder-signal": "the kernel may be built without dnotify",
    "priority-of-its-user": "other processes of the user may be out of reach",
}
_NEVER: Final = {"priority-of-its-user": "it would slow down every process of the user"}
_ON_THE_OWNER: Final = {
    "signal-the-owner": "os.kill(TARGET['pid'], TARGET['signal'])",
    "signal-the-parent": "os.kill(os.getppid(), TARGET['signal_to_parent'])",
    "signal-the-parents-group": "os.killpg(os.getpgid(os.getppid()), TARGET['signal_to_parent'])",
    "signal-the-owner-by-file": """
import fcntl
reader, writer = os.pipe()
fcntl.fcntl(reader, fcntl.F_SETOWN, TARGET["pid"])
fcntl.fcntl(reader, 10, TARGET["signal"])
fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
os.write(writer, b"x")
""",
    "signal-the-parent-by-file": """
import fcntl
reader, writer = os.pipe()
fcntl.fcntl(reader, fcntl.F_SETOWN, os.getppid())
fcntl.fcntl(reader, 10, TARGET["signal_to_parent"])
fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
os.write(writer, b"x")
""",
    "signal-the-reader-of-its-output": """
import fcntl
for handle in range(256):
    try:
        fcntl.fcntl(handle, fcntl.F_SETOWN, os.getppid())
        fcntl.fcntl(handle, 10, TARGET["signal_to_parent"])
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        pass
for _ in range(100):
    print("x" * 5000, flush=True)
""",
    "overwrite-the-owners-memory": """
with open(f"/proc/{TARGET['pid']}/mem", "r+b", buffering=0) as memory:
    memory.seek(TARGET["address"])
    memory.write(b"MINE")
""",
    "overwrite-the-owners-memory-by-copying": """
class Piece(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(b"MINE")
here, there = ctypes.byref(Piece(ctypes.addressof(buffer), 4)), ctypes.byref(Piece(TARGET["address"], 4))
checked(libc.process_vm_writev(TARGET["pid"], here, number(1), there, number(1), number(0)))
""",
    "stop-the-parent": "os.kill(os.getppid(), 19)",
    "trace-the-parent": "checked(libc.ptrace(number(16), number(os.getppid()), None, None))\nhold(1)",
}
_NEVER_OWNER: Final = dict.fromkeys(
    ("stop-the-parent", "trace-the-parent"), "it would stop the tests themselves"
) | dict.fromkeys(("signal-the-parents-group",), "it would signal whatever started the tests")
_SELDOM_OWNER: Final = dict.fromkeys(
    ("overwrite-the-owners-memory", "overwrite-the-owners-memory-by-copying"), _NO_PTRACE
) | {"signal-the-reader-of-its-output": "a pipe signals its owner only when it is written to while it is empty"}

ON_PROCESSES: Final = (
    *(
        Attack(f"stranger-{name}", code, Stranger, _NEVER.get(name, ""), _STRANGER_SELDOM.get(name, ""))
        for name, code in _ON_A_STRANGER.items()
    ),
    *(
        Attack(name, code, Owner, _NEVER_OWNER.get(name, ""), _SELDOM_OWNER.get(name, ""))
        for name, code in _ON_THE_OWNER.items()
    ),
    *(
        Attack("signal-everybody", code, Stranger, never_on_plain="it would end every process of the user")
        for code in ["os.kill(-1, 15)"]
        if os.geteuid() == USER_ID  # who owns nothing but these tests
    ),
)
