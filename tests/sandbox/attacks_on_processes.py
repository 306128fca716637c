"""Attacks that stop, steer or change other processes."""

from __future__ import annotations

import os
from typing import Final

from attack import Attack
from ordinary_user import USER_ID
from victim_processes import Owner, Stranger

_NO_PTRACE: Final = "Yama, or a container without CAP_SYS_PTRACE, keeps processes from each other"
_SIGNAL_INFO: Final = "struct.pack('iii', {signal}, 0, -1) + bytes(116)"
_ON_A_STRANGER: Final = {
    "kill": "os.kill(TARGET['pid'], 9)",
    "kill-politely": "os.kill(TARGET['pid'], 15)",
    "stop": "os.kill(TARGET['pid'], 19)",
    "kill-its-group": "os.killpg(TARGET['pid'], 9)",
    "kill-its-group-as-negative-number": "os.kill(-TARGET['pid'], 9)",
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
    "limits-of-files": "import resource\nresource.prlimit(TARGET['pid'], resource.RLIMIT_NOFILE, (9, 9))",
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
_SELDOM: Final = {
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
) | {
    "signal-the-reader-of-its-output": "a pipe signals its owner only when it is written to while it is empty",
}

ALL: Final = (
    *(
        Attack(f"stranger-{name}", code, Stranger, _NEVER.get(name, ""), _SELDOM.get(name, ""))
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
