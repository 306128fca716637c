"""Attacks on other processes, and attacks that start processes."""

from functools import partial
from typing import Final

from attack import Attack
from host_view import ObservedProcesses, StartedProgram
from signs import more_than, threads_above
from victims import OtherProcess, Owner

_SLEEP: Final = "program = next(p for p in ('/bin/sleep', '/usr/bin/sleep') if os.path.exists(p))\ntake_name()\n"
_PROGRAMS: Final = {
    "system": "os.system('sleep ' + TARGET['nap'])",
    "exec": "os.execv(program, ['sleep', TARGET['nap']])",
    "execveat": "arguments = (ctypes.c_char_p * 3)(b'sleep', TARGET['nap'].encode(), None)\n"
    "syscall('execveat', -100, program.encode(), arguments, None, 0)",
    "memory-file": "import shutil\nhandle = os.memfd_create('sleep', 0)\nwith open(program, 'rb') as source:\n"
    "    os.write(handle, source.read())\nos.execve(f'/proc/self/fd/{handle}', ['sleep', TARGET['nap']], {})",
}
_IN_THE_CHILD: Final = "if pid == 0:\n    time.sleep(9)\n    os._exit(0)\nhold()"


_FORKS: Final = {
    "fork": "take_name()\npid = os.fork()\n" + _IN_THE_CHILD,
    "clone3": "take_name()\narguments = struct.pack('11Q', 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)\n"
    "pid = checked(ctypes.PyDLL(None, use_errno=True).syscall(number(435), arguments, number(88)))\n" + _IN_THE_CHILD,
}
_FORKS_MAY_FAIL_ON_PLAIN: Final = {"clone3": "a container may refuse clone3"}

BY_STARTING: Final = (
    *(Attack(f"start-{name}", _SLEEP + code, StartedProgram) for name, code in _PROGRAMS.items()),
    *(
        Attack(
            name,
            code,
            partial(ObservedProcesses, sign=more_than(1)),
            may_fail_on_plain=_FORKS_MAY_FAIL_ON_PLAIN.get(name, ""),
        )
        for name, code in _FORKS.items()
    ),
    Attack(
        "fork-bomb",
        "take_name()\nfor _ in range(7):\n    os.fork()\nhold()",
        partial(ObservedProcesses, sign=more_than(100)),
    ),
    Attack(
        "daemon",
        """
take_name()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open("/dev/null", os.O_RDWR)
    [os.dup2(null, handle) for handle in (0, 1, 2)]
    for number in (1, 2, 15):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(300)
    os._exit(0)
""",
        partial(ObservedProcesses, sign=more_than(0), after=True),
    ),
    Attack(
        "thread-that-outlives-the-main-thread",
        "take_name()\nthreading.Thread(target=time.sleep, args=(300,)).start()\nsyscall('exit', 0)",
        partial(ObservedProcesses, sign=more_than(0), after=True),
        skip_on_plain="it ends the whole group at the time limit",
        timeout_s=1,
    ),
    Attack(
        "500-threads",
        """
take_name()
threading.stack_size(65536)
for _ in range(500):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
hold()
""",
        partial(ObservedProcesses, sign=threads_above(400)),
    ),
)


_NO_PTRACE: Final = "Yama, or a container without CAP_SYS_PTRACE, keeps processes from each other"
_ON_OTHER_PROCESS: Final = {
    "kill": "os.kill(TARGET['pid'], 9)",
    "kill-its-group": "os.killpg(TARGET['pid'], 9)",
    "kill-its-thread": "syscall('tgkill', TARGET['pid'], TARGET['pid'], 9)",
    "kill-by-queue": "checked(libc.sigqueue(TARGET['pid'], 9, None))",
    "kill-by-handle": "signal.pidfd_send_signal(os.pidfd_open(TARGET['pid']), 9)",
    "priority": "os.setpriority(os.PRIO_PROCESS, TARGET['pid'], 7)",
    "processors": "os.sched_setaffinity(TARGET['pid'], {min(os.sched_getaffinity(0))})",
    "limits": "import resource\nresource.prlimit(TARGET['pid'], resource.RLIMIT_CPU, (1, 1))",
    "memory-killer-score": "open(f'/proc/{TARGET[\"pid\"]}/oom_score_adj', 'w').write('999')",
    "trace": "checked(libc.ptrace(number(16), number(TARGET['pid']), None, None))\nhold()",
    "kill-by-file-signal": """
import fcntl
reader, writer = os.pipe()
fcntl.fcntl(reader, fcntl.F_SETOWN, TARGET["pid"])
fcntl.fcntl(reader, 10, 9)
fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
os.write(writer, b"x")
""",
    "overwrite-its-memory": """
with open(f"/proc/{TARGET['pid']}/mem", "r+b", buffering=0) as memory:
    memory.seek(TARGET["address"])
    memory.write(b"MINE")
""",
}
_MAY_FAIL_ON_PLAIN: Final = {
    "trace": _NO_PTRACE,
    "overwrite-its-memory": _NO_PTRACE,
    "processors": "it needs two processors",
}
_ON_THE_OWNER: Final = {
    "signal-the-owner": "os.kill(TARGET['pid'], TARGET['signal'])",
    "signal-the-parent": "os.kill(os.getppid(), TARGET['signal_to_parent'])",
}
_SKIP_ON_PLAIN: Final = {"signal-the-parent": "the code's parent is not the owner"}

ON_PROCESSES: Final = (
    *(
        Attack(f"other-process-{name}", code, OtherProcess, may_fail_on_plain=_MAY_FAIL_ON_PLAIN.get(name, ""))
        for name, code in _ON_OTHER_PROCESS.items()
    ),
    *(Attack(name, code, Owner, _SKIP_ON_PLAIN.get(name, "")) for name, code in _ON_THE_OWNER.items()),
)
