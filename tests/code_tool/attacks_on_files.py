"""Attacks on files: reading secrets, and changing other users' files."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Final

import numpy
import pytest
from attack import Attack
from attack_targets import (
    EnvironmentVariable,
    ExistingFile,
    ExistingFolder,
    FileFact,
    ForeignFiles,
    ScratchRoot,
    SecretFile,
    WatchedFolder,
)
from host_view import ObservedProcesses
from signs import holds_device
from victims import OtherProcess

import strands_rollout

_PACKAGE: Final = Path(strands_rollout.__file__).parent
_SITE_PACKAGES: Final = Path(pytest.__file__).parents[1]
_READ: Final = "print(open(TARGET['path'], errors='replace').read(15_000))"
_CLEAN: Final = "it starts its children with a clean environment too"
_NO_PTRACE: Final = "Yama, or a container without CAP_SYS_PTRACE, keeps processes from each other's memory"
_READ_MEMORY: Final = """
with open(f"/proc/{TARGET['pid']}/mem", "rb", buffering=0) as memory:
    memory.seek(TARGET["address"])
    print(memory.read(TARGET["length"]))
"""
OF_PROCESSES: Final = (
    Attack("environment", "print(dict(os.environ))", EnvironmentVariable, skip_on_plain=_CLEAN),
    Attack(
        "environment-it-started-with",
        "try_all(lambda: open('/proc/self/environ').read(), lambda: open(f'/proc/{os.getppid()}/environ').read())",
        EnvironmentVariable,
        skip_on_plain=_CLEAN,
    ),
    Attack("environment-of-another-process", "print(open(f\"/proc/{TARGET['pid']}/environ\").read())", OtherProcess),
    Attack("memory-of-another-process", _READ_MEMORY, OtherProcess, may_fail_on_plain=_NO_PTRACE),
)

_CREATION: Final = 0x100
_WATCHES: Final = {
    "inotify": (
        f"watch = checked(libc.inotify_init())\n"
        f"checked(libc.inotify_add_watch(watch, TARGET['folder'].encode(), {_CREATION}))\n",
        "",
    ),
    "fanotify": (
        f"watch = checked(libc.fanotify_init(0xC00, 0))\n"
        f"checked(libc.fanotify_mark(watch, 1, ctypes.c_uint64({_CREATION}), -100, TARGET['folder'].encode()))\n",
        "it needs Linux 5.13",
    ),
}
_NEWS: Final = "print(os.read(watch, 4096).replace(bytes(1), b' '))"

OF_FILES: Final = (
    Attack("file-ssh-key", _READ, partial(SecretFile, mode=0o600)),
    Attack("file-labels", _READ, SecretFile),
    Attack("file-below-proc-root", "print(open('/proc/self/root' + TARGET['path']).read())", SecretFile),
    Attack("file-through-symlink", "os.symlink(TARGET['path'], 'mine')\nprint(open('mine').read())", SecretFile),
    Attack(
        "file-through-hard-link",
        "os.link(TARGET['path'], 'mine')\nprint(open('mine').read())",
        SecretFile,
        may_fail_on_plain="the scratch directory may be on another file system",
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
    Attack("target-of-a-link", "print(os.readlink(TARGET['folder'] + '/link'))", partial(FileFact, fact="link")),
    Attack(
        "attribute-of-a-file",
        "print(os.getxattr(TARGET['path'], 'user.label'))",
        partial(FileFact, fact="attribute"),
        may_fail_on_plain="the file system may have no attributes",
    ),
    *(
        Attack(f"watch-a-folder-by-{name}", code + _NEWS, WatchedFolder, may_fail_on_plain=reason)
        for name, (code, reason) in _WATCHES.items()
    ),
    Attack("labels-of-the-package", _READ, partial(ExistingFile, path=_PACKAGE / "data" / "train.jsonl")),
    Attack("source-of-another-package", _READ, partial(ExistingFile, path=_SITE_PACKAGES / "_pytest" / "main.py")),
    Attack(
        "source-of-the-package-imported",
        "import inspect, strands_rollout.errors\nprint(inspect.getsource(strands_rollout.errors)[:9000])",
        partial(ExistingFile, path=_PACKAGE / "errors.py"),
    ),
    Attack("system-file", _READ, partial(ExistingFile, path=Path("/etc/passwd"))),
)

_CREATE: Final = "open(TARGET['path'], 'w').close()"
_ONLY_ROOT: Final = "only root may"
_OTHER_DISK: Final = "the scratch directory may be on another file system"
_CHANGES: Final = {
    "write": "open(TARGET['path'], 'w').write('mine')",
    "truncate": "os.truncate(TARGET['path'], 0)",
    "delete": "os.unlink(TARGET['path'])",
    "rename": "os.rename(TARGET['path'], TARGET['path'] + '.mine')",
    "write-through-path-handle": "h = os.open(TARGET['path'], os.O_PATH)\n"
    "open(f'/proc/self/fd/{h}', 'a').write('mine')",
    "mode": "os.chmod(TARGET['path'], 0o4777)",
    "time": "os.utime(TARGET['path'], (1, 1))",
    "attribute": "os.setxattr(TARGET['path'], 'user.mine', b'1')",
    "new-file": "open(TARGET['folder'] + '/mine', 'w').close()",
    "new-folder": "os.mkdir(TARGET['folder'] + '/mine')",
    "new-symlink": "os.symlink('/', TARGET['folder'] + '/mine')",
    "new-fifo": "os.mkfifo(TARGET['folder'] + '/mine')",
    "new-socket": "socket.socket(socket.AF_UNIX).bind(TARGET['folder'] + '/mine')",
    "owner": "os.chown(TARGET['path'], 12345, 12345)",
    "move-into-the-scratch": "os.rename(TARGET['path'], 'mine')",
    "hard-link-into-the-scratch": "os.link(TARGET['path'], 'mine')",
    "move-out-of-the-scratch": "open('a', 'w').close()\nos.rename('a', TARGET['folder'] + '/mine')",
    "mount-over-it": "checked(libc.mount(b'mine', TARGET['folder'].encode(), b'tmpfs', 0, None))",
}
_MAY_FAIL_ON_PLAIN: Final = {
    "attribute": "the file system may have no attributes",
    "owner": _ONLY_ROOT,
    "move-into-the-scratch": _OTHER_DISK,
    "hard-link-into-the-scratch": _OTHER_DISK,
    "move-out-of-the-scratch": _OTHER_DISK,
}
_SKIP_ON_PLAIN: Final = {"mount-over-it": "it would change the mounts of the machine"}
_FOLDERS: Final = {
    "tmp": "/tmp",
    "shared-memory": "/dev/shm",
    "package": str(_PACKAGE),
    "numpy": str(Path(numpy.__file__).parent),
    "standard-library": str(Path(os.__file__).parent),
    "programs": str(Path(sys.executable).parent),
}
_PERMITTED: Final = {name: path for name, path in _FOLDERS.items() if os.access(path, os.W_OK)}
_DEVICES: Final = ("mem", "kmsg", "fuse", "kvm", "net/tun", "ptmx", "tty", "loop-control", "nvidia0", "console")

_IN_FOLDER: Final = "os.mkdir(TARGET['name'])\nos.chdir(TARGET['name'])\n"
_OUT: Final = """
for above in (TARGET["root"] + "/", "../", "../../"):
    try:
        os.rename(os.getcwd(), above + TARGET["name"])
        break
    except OSError:
        pass
"""
_REMAINS: Final = {
    "itself-renamed": "open(TARGET['name'], 'w').close()" + _OUT,
    "a-folder-renamed": _IN_FOLDER + _OUT,
    "immutable-file": _IN_FOLDER
    + "import fcntl\nf = open('a', 'w')\nfcntl.ioctl(f, 0x40086602, struct.pack('l', 0x10))",
}

ALL: Final = (
    *(
        Attack(f"change-{name}", code, ForeignFiles, _SKIP_ON_PLAIN.get(name, ""), _MAY_FAIL_ON_PLAIN.get(name, ""))
        for name, code in _CHANGES.items()
    ),
    *(
        Attack(f"new-file-in-{name}", _CREATE, partial(ExistingFolder, folder=path))
        for name, path in _PERMITTED.items()
    ),
    Attack("new-file-in-parent-of-the-scratch", _CREATE, lambda stage: ExistingFolder(stage, stage.scratch_root)),
    Attack(
        "open-devices",
        f"""
take_name()
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
        partial(ObservedProcesses, sign=holds_device),
    ),
    *(
        Attack(f"leave-{name}", code, ScratchRoot, may_fail_on_plain=_ONLY_ROOT if name == "immutable-file" else "")
        for name, code in _REMAINS.items()
    ),
)
