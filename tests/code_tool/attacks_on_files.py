"""Attacks that read what the sandbox must not know: secrets of processes, files, facts of files, the machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import pytest
from attack import Attack
from attack_targets import (
    EnvironmentVariable,
    FileFact,
    FolderNames,
    SecretFile,
    SharedMemoryFile,
    SystemFile,
    WordsOf,
)
from kernel_objects import KernelLog, Segment
from victim_processes import Owner, Stranger

import strands_rollout

_PACKAGE: Final = Path(strands_rollout.__file__).parent
_SITE_PACKAGES: Final = Path(pytest.__file__).parents[1]
_READ: Final = "print(open(TARGET['path'], errors='replace').read(15_000))"
_CLEAN: Final = "it starts its children with a clean environment too"
_NO_PTRACE: Final = "Yama, or a container without CAP_SYS_PTRACE, keeps processes from each other's memory"
_SYSTEM_FILES: Final = (
    "/etc/passwd", "/etc/hosts", "/proc/self/mounts", "/proc/net/tcp", "/proc/kallsyms", "/proc/modules", "/proc/keys",
    "/proc/interrupts", "/proc/sysvipc/shm", "/proc/partitions", "/proc/sys/kernel/random/boot_id",
    "/sys/kernel/uevent_seqnum",
)  # fmt: skip

_READ_MEMORY: Final = """
with open(f"/proc/{TARGET['pid']}/mem", "rb", buffering=0) as memory:
    memory.seek(TARGET["address"])
    print(memory.read(TARGET["length"]))
"""
_COPY_MEMORY: Final = """
class Piece(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(TARGET["length"])
here = ctypes.byref(Piece(ctypes.addressof(buffer), TARGET["length"]))
there = ctypes.byref(Piece(TARGET["address"], TARGET["length"]))
checked(libc.process_vm_readv(TARGET["pid"], here, number(1), there, number(1), number(0)))
print(buffer.raw)
"""
_TRACE_MEMORY: Final = """
libc.ptrace.restype = number
checked(libc.ptrace(number(16), number(TARGET["pid"]), None, None))
os.waitpid(TARGET["pid"], 0x40000000)
places = [ctypes.c_void_p(TARGET["address"] + 8 * i) for i in range(8)]
print(struct.pack("8q", *[libc.ptrace(number(2), number(TARGET["pid"]), place, None) for place in places]))
libc.ptrace(number(17), number(TARGET["pid"]), None, None)
"""


def _has_words(path: str) -> bool:
    """Whether this machine has such a file; in containers some are hidden behind empty ones."""
    try:
        return bool(Path(path).read_bytes()[:4000].strip())
    except OSError:
        return False


OF_PROCESSES: Final = (
    Attack("environment", "print(dict(os.environ))", EnvironmentVariable, never_on_plain=_CLEAN),
    Attack(
        "environment-in-libc",
        "libc.getenv.restype = ctypes.c_char_p\nprint(libc.getenv(b'STRANDS_ATTACK_SECRET'))",
        EnvironmentVariable,
        never_on_plain=_CLEAN,
    ),
    Attack(
        "environment-it-started-with",
        "each(lambda: open('/proc/self/environ').read(), lambda: open(f'/proc/{os.getppid()}/environ').read())",
        EnvironmentVariable,
        never_on_plain=_CLEAN,
    ),
    Attack("environment-of-another-process", "print(open(f\"/proc/{TARGET['pid']}/environ\").read())", Stranger),
    Attack("arguments-of-another-process", "print(open(f\"/proc/{TARGET['pid']}/cmdline\").read())", Stranger),
    Attack("memory-of-another-process", _READ_MEMORY, Stranger, seldom_on_plain=_NO_PTRACE),
    Attack("memory-of-another-process-copied", _COPY_MEMORY, Stranger, seldom_on_plain=_NO_PTRACE),
    Attack("memory-of-another-process-traced", _TRACE_MEMORY, Stranger, seldom_on_plain=_NO_PTRACE),
    Attack("memory-of-the-owner", _READ_MEMORY, Owner, seldom_on_plain=_NO_PTRACE),
    Attack("memory-of-the-owner-copied", _COPY_MEMORY, Owner, seldom_on_plain=_NO_PTRACE),
    Attack(
        "memory-shared-by-key",
        """
libc.shmat.restype = ctypes.c_void_p
print(ctypes.string_at(libc.shmat(checked(libc.shmget(TARGET["key"], 0, 0)), None, 0o10000), TARGET["length"]))
""",
        Segment,
    ),
    Attack("memory-shared-as-a-file", _READ, SharedMemoryFile),
    Attack(
        "kernel-log",
        "log = ctypes.create_string_buffer(8192)\nchecked(libc.klogctl(3, log, 8192))\nprint(log.value.decode())",
        KernelLog,
        seldom_on_plain="the kernel may refuse its log (dmesg_restrict)",
    ),
)

OF_FILES: Final = (
    Attack("file-ssh-key", _READ, partial(SecretFile, mode=0o600)),
    Attack("file-labels", _READ, SecretFile),
    Attack("file-below-proc-root", "print(open('/proc/self/root' + TARGET['path']).read())", SecretFile),
    Attack("file-through-dots", "print(open('../' * 40 + TARGET['path']).read())", SecretFile),
    Attack("file-after-chdir", "os.chdir(TARGET['folder'])\nprint(open('labels.jsonl').read())", SecretFile),
    Attack("file-through-symlink", "os.symlink(TARGET['path'], 'mine')\nprint(open('mine').read())", SecretFile),
    Attack(
        "file-through-hard-link",
        "os.link(TARGET['path'], 'mine')\nprint(open('mine').read())",
        SecretFile,
        seldom_on_plain="the scratch directory may be on another file system",
    ),
    Attack(
        "file-through-folder-handle",
        """
folder = os.open(TARGET["folder"], os.O_RDONLY | os.O_DIRECTORY)
print(os.read(os.open("labels.jsonl", 0, dir_fd=folder), 999))
""",
        SecretFile,
    ),
    Attack(
        "file-through-path-handle",
        "handle = os.open(TARGET['path'], os.O_PATH)\nprint(open(f'/proc/self/fd/{handle}').read())",
        SecretFile,
    ),
    Attack(
        "file-through-openat2",
        "print(os.read(syscall('openat2', -100, TARGET['path'].encode(), (ctypes.c_uint64 * 3)(), 24), 999))",
        SecretFile,
        seldom_on_plain="old container runtimes don't know openat2",
    ),
    Attack(
        "file-through-file-handle",
        """
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
checked(libc.name_to_handle_at(-100, TARGET["path"].encode(), handle, ctypes.byref(ctypes.c_int()), 0))
print(os.read(checked(libc.open_by_handle_at(os.open(".", os.O_RDONLY), handle, 0)), 999))
""",
        SecretFile,
        seldom_on_plain="the kernel wants CAP_DAC_READ_SEARCH for it",
    ),
    Attack(
        "file-through-every-handle",
        """
os.open("/", os.O_PATH)
for handle in range(256):
    for path in (TARGET["path"][1:], "../" * 20 + TARGET["path"][1:]):
        try:
            print(os.read(os.open(path, 0, dir_fd=handle), 999))
        except OSError:
            pass
""",
        SecretFile,
    ),
    Attack("names-in-a-folder", "print(os.listdir(TARGET['folder']))", partial(FileFact, fact="name")),
    *(
        Attack(f"names-in-{name}", "print(os.listdir(TARGET['folder'])[:50])", partial(FolderNames, folder=folder))
        for name, folder in {
            "the-root-folder": "/",
            "site-packages": str(_SITE_PACKAGES),
            "the-package": str(_PACKAGE),
            "etc": "/etc",
            "proc": "/proc/self/fdinfo/..",
        }.items()
    ),
    Attack(
        "time-of-a-file",
        "print(os.stat(TARGET['path']).st_mtime_ns)",
        partial(FileFact, fact="time"),
        open_on_isolated="Landlock knows no right to ask for a file's facts: who knows a path can",
    ),
    Attack("goal-of-a-link", "print(os.readlink(TARGET['folder'] + '/link'))", partial(FileFact, fact="link")),
    Attack(
        "attribute-of-a-file",
        "print(os.getxattr(TARGET['path'], 'user.label'))",
        partial(FileFact, fact="attribute"),
        seldom_on_plain="the file system may have no attributes",
    ),
    Attack("labels-of-the-package", _READ, partial(WordsOf, path=_PACKAGE / "data" / "train.jsonl")),
    Attack("demo-labels-of-the-package", _READ, partial(WordsOf, path=_PACKAGE / "data" / "demo.jsonl")),
    Attack("source-of-another-package", _READ, partial(WordsOf, path=_SITE_PACKAGES / "_pytest" / "main.py")),
    Attack("source-of-the-package", _READ, partial(WordsOf, path=_PACKAGE / "reward.py")),
    Attack(
        "source-of-the-package-imported",
        "import inspect, strands_rollout.errors\nprint(inspect.getsource(strands_rollout.errors)[:9000])",
        partial(WordsOf, path=_PACKAGE / "errors.py"),
    ),
    *(
        Attack(f"system-file{path.replace('/', '-')}", _READ, partial(SystemFile, path=path))
        for path in _SYSTEM_FILES
        if _has_words(path)
    ),
)
