"""Attacks on files: secrets that lie around, and files that are not the code's own."""

import os
import site
import sys
from functools import partial
from pathlib import Path
from typing import Final

import numpy
import pytest
from attack import Attack
from attack_targets import (
    EnvironmentVariable,
    FileFact,
    FolderNames,
    ForeignFolder,
    Possessions,
    ScratchRoot,
    SecretFile,
    SharedMemoryFile,
    SystemFile,
    WordsOf,
)
from host_view import Sight
from kernel_objects import KernelLog, Segment
from signs import holds_device, writes
from victims import Owner, Stranger

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
    Attack("source-of-another-package", _READ, partial(WordsOf, path=_SITE_PACKAGES / "_pytest" / "main.py")),
    Attack("source-of-the-package", _READ, partial(WordsOf, path=_PACKAGE / "code_tool" / "tool.py")),
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


_CREATE: Final = "open(TARGET['path'], 'w').close()"
_ONLY_ROOT: Final = "only root may"
_OTHER_DISK: Final = "the scratch directory may be on another file system"
_CHANGES: Final = {
    "write": "open(TARGET['path'], 'w').write('mine')",
    "truncate": "os.truncate(TARGET['path'], 0)",
    "open-and-truncate": "os.open(TARGET['path'], os.O_RDONLY | os.O_TRUNC)",
    "delete": "os.unlink(TARGET['path'])",
    "rename": "os.rename(TARGET['path'], TARGET['path'] + '.mine')",
    "write-through-symlink": "os.symlink(TARGET['path'], 'mine')\nopen('mine', 'a').write('mine')",
    "write-below-proc-root": "open('/proc/self/root' + TARGET['path'], 'a').write('mine')",
    "write-through-path-handle": "h = os.open(TARGET['path'], os.O_PATH)\n"
    "open(f'/proc/self/fd/{h}', 'a').write('mine')",
    "mode": "os.chmod(TARGET['path'], 0o4777)",
    "mode-of-a-handle": "h = os.open(TARGET['path'], os.O_PATH)\nos.chmod(f'/proc/self/fd/{h}', 0o777)",
    "mode-by-fchmodat2": "syscall('fchmodat2', -100, TARGET['path'].encode(), 0o777, 0)",
    "time": "os.utime(TARGET['path'], (1, 1))",
    "attribute": "os.setxattr(TARGET['path'], 'user.mine', b'1')",
    "new-file": "open(TARGET['folder'] + '/mine', 'w').close()",
    "new-folder": "os.mkdir(TARGET['folder'] + '/mine')",
    "new-symlink": "os.symlink('/', TARGET['folder'] + '/mine')",
    "new-fifo": "os.mkfifo(TARGET['folder'] + '/mine')",
    "new-file-through-folder-handle": "f = os.open(TARGET['folder'], os.O_PATH)\nos.open('mine', os.O_CREAT, dir_fd=f)",
    "new-socket": "socket.socket(socket.AF_UNIX).bind(TARGET['folder'] + '/mine')",
    "new-file-without-name": "h = os.open(TARGET['folder'], os.O_TMPFILE | os.O_RDWR)\n"
    "checked(libc.linkat(h, b'', -100, (TARGET['folder'] + '/mine').encode(), 0x1000))",
    "mode-of-the-folder": "os.chmod(TARGET['folder'], 0o700)",
    "owner": "os.chown(TARGET['path'], 12345, 12345)",
    "move-into-the-scratch": "os.rename(TARGET['path'], 'mine')",
    "hard-link-into-the-scratch": "os.link(TARGET['path'], 'mine')",
    "hard-link-out-of-the-scratch": "open('a', 'w').close()\nos.link('a', TARGET['folder'] + '/mine')",
    "move-out-of-the-scratch": "open('a', 'w').close()\nos.rename('a', TARGET['folder'] + '/mine')",
    "mount-over-it": "checked(libc.mount(b'mine', TARGET['folder'].encode(), b'tmpfs', 0, None))",
    "left-to-cleanup": "os.symlink(TARGET['folder'], 'mine')\nos.mkdir('d')\nos.symlink(TARGET['folder'], 'd/mine')",
}
_SELDOM: Final = {
    "mode-by-fchmodat2": "the kernel may be older than 6.6",
    "attribute": "the file system may have no attributes",
    "new-file-without-name": "the kernel wants CAP_DAC_READ_SEARCH for it",
    "owner": _ONLY_ROOT,
    "move-into-the-scratch": _OTHER_DISK,
    "hard-link-into-the-scratch": _OTHER_DISK,
    "hard-link-out-of-the-scratch": _OTHER_DISK,
    "move-out-of-the-scratch": _OTHER_DISK,
}
_NEVER: Final = {
    "mount-over-it": "it would change the mounts of the machine",
    "left-to-cleanup": "it removes links, and not what they lead to",
}
_FOLDERS: Final = {
    "tmp": "/tmp",
    "var-tmp": "/var/tmp",
    "shared-memory": "/dev/shm",
    "home": str(Path.home()),
    "current-folder": str(Path.cwd()),
    "package": str(_PACKAGE),
    "sandbox-code": str(_PACKAGE / "code_tool" / "local" / "sandbox"),
    "site-packages": next(p for p in [*site.getsitepackages(), *sys.path] if Path(p, "numpy").is_dir()),
    "numpy": str(Path(numpy.__file__).parent),
    "standard-library": str(Path(os.__file__).parent),
    "programs": str(Path(sys.executable).parent),
}
_PERMITTED: Final = {name: path for name, path in _FOLDERS.items() if os.access(path, os.W_OK)}
_DEVICES: Final = (
    "mem", "kmem", "port", "kmsg", "fuse", "kvm", "net/tun", "ptmx", "tty", "tty0", "loop-control", "loop0", "hwrng",
    "userfaultfd", "autofs", "nvidiactl", "nvidia0", "vhost-net", "vsock", "console",
)  # fmt: skip

_IN_FOLDER: Final = "os.mkdir(TARGET['name'])\nos.chdir(TARGET['name'])\n"
_LEAVINGS: Final = {
    "itself-renamed": "open(TARGET['name'], 'w').close()\nos.rename(os.getcwd(), '../' + TARGET['name'])",
    "a-folder-renamed": _IN_FOLDER + "os.rename(os.getcwd(), '../../' + TARGET['name'])",
    "folders-without-permission": _IN_FOLDER
    + "os.makedirs('a/b/c')\nopen('a/b/f', 'w').close()\nos.chmod('a/b', 0)\nos.chmod('a', 0)",
    "deep-folders": _IN_FOLDER + "for _ in range(5000):\n    os.mkdir('d' * 9)\n    os.chdir('d' * 9)",
    "long-names": _IN_FOLDER
    + "for c in 'abcdefghijklmnopqrstu':\n    os.mkdir(c * 255)\n    os.chdir(c * 255)\n"
    + "open(b'\\xff\\n\\x01 ', 'w').close()",
    "immutable-file": _IN_FOLDER
    + "import fcntl\nf = open('a', 'w')\nfcntl.ioctl(f, 0x40086602, struct.pack('l', 0x10))",
    "scratch-without-permission": "open(TARGET['name'], 'w').close()\nos.chmod('.', 0)",
    "foreign-owner": _IN_FOLDER
    + "os.mkdir('a')\nopen('a/a', 'w').close()\nos.chown('a', 12345, 12345)\nos.chown('.', 12345, 12345)",
    "many-files": _IN_FOLDER + "for i in range(400):\n    os.close(os.open(f'a{i}', os.O_CREAT))",
    "hidden-files": _IN_FOLDER + "os.mkdir('...')\nopen('.../.a', 'w').close()\nopen('-rf', 'w').close()",
}
_CLEANED: Final = (
    "folders-without-permission", "long-names", "scratch-without-permission", "foreign-owner", "many-files",
    "hidden-files", "deep-folders",
)  # fmt: skip

ALL: Final = (
    *(
        Attack(f"change-{name}", code, Possessions, _NEVER.get(name, ""), _SELDOM.get(name, ""))
        for name, code in _CHANGES.items()
    ),
    Attack("change-own-mode-0600-file", _CHANGES["write"], partial(Possessions, mode=0o600, folder_mode=0o700)),
    *(Attack(f"new-file-in-{name}", _CREATE, partial(ForeignFolder, folder=path)) for name, path in _PERMITTED.items()),
    Attack("new-file-in-parent-of-the-scratch", _CREATE, lambda stage: ForeignFolder(stage, stage.scratch_root)),
    *(
        Attack(
            f"open-for-writing-{path.name}",
            "be_known()\nfile = open(TARGET['path'], 'r+b')\nhold()",
            lambda stage, path=path: Sight(stage, writes(str(path)), path=str(path)),
        )
        for path in (
            _PACKAGE / "code_tool" / "tool.py",
            _PACKAGE / "data" / "train.jsonl",
            Path(numpy.__file__),
            Path(os.__file__),
        )
        if os.access(path, os.W_OK)
    ),
    Attack("change-shared-memory-file", "open(TARGET['path'], 'r+').write('mine')", SharedMemoryFile),
    Attack(
        "open-devices",
        f"""
be_known()
kept = []
for name in {_DEVICES!r}:
    for mode in (os.O_RDWR, os.O_RDONLY):
        try:
            kept.append(os.open("/dev/" + name, mode | os.O_NOCTTY | os.O_NONBLOCK))
        except OSError:
            pass
assert kept
hold()
""",
        partial(Sight, shows=holds_device),
    ),
    Attack(
        "make-a-device",
        """
be_known()
os.mknod("log", 0o20666, os.makedev(1, 11))
device = os.open("log", os.O_RDONLY | os.O_NONBLOCK)
hold()
""",
        partial(Sight, shows=holds_device),
        seldom_on_plain=f"{_ONLY_ROOT}, and not where the file system allows no devices",
    ),
    *(
        Attack(
            f"leave-{name}",
            code,
            ScratchRoot,
            never_on_plain="it deletes that all the same" if name in _CLEANED else "",
            seldom_on_plain=_ONLY_ROOT if name == "immutable-file" else "",
        )
        for name, code in _LEAVINGS.items()
    ),
)
