import errno
import os
import site
import sys
import sysconfig
from pathlib import Path

import pytest
from ordinary_code import USERS, WORKS

from strands_rollout.code_tool.sandbox import kernel
from strands_rollout.code_tool.sandbox.kernel import Ruleset

KERNEL_ABI = kernel.landlock_abi()
needs_landlock = pytest.mark.skipif(KERNEL_ABI == 0, reason="the kernel has no Landlock")
ABIS = [
    pytest.param(abi, marks=pytest.mark.skipif(abi > KERNEL_ABI, reason=f"the kernel has ABI {KERNEL_ABI}"))
    for abi in range(1, 8)
]

PROLOGUE = """
import ctypes, errno, fcntl, json, os, platform, shutil, signal, socket, subprocess, sys, threading, traceback
from strands_rollout.code_tool.sandbox import kernel, seccomp

def confine(abi=None, user=0, read=(), devices=("/dev/null",)):
    rules = kernel.Ruleset(abi)
    rules.allow_scratch("work")
    for path in read:
        rules.allow_read(path)
    for path in devices:
        rules.allow_device(path)
    if user:
        os.setgroups([]), os.setgid(user), os.setuid(user)
    rules.restrict_self()
    rules.close()

def answer(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except OSError as e:
        return errno.errorcode[e.errno]
    return "done"

def say(**answers):
    print(json.dumps(answers))

"""


@pytest.fixture
def place(confined_folder):
    """Directory with a folder `work` for confined code, and files outside of `work`."""
    folder = Path(confined_folder)
    for directory in (folder / "work", folder / "open"):
        directory.mkdir()
        directory.chmod(0o777)
    for file in (folder / "secret", folder / "open" / "shown"):
        file.write_text("words")
        file.chmod(0o666)
    return folder


@pytest.fixture
def child(place, confined_child):
    return lambda script: confined_child(PROLOGUE + script)


@needs_landlock
@pytest.mark.parametrize("user", USERS)
def test_ruleset_refuses_files_outside(child, user):
    script = f"""
confine(user={user}, read=["open"])
say(
    read=answer(open, "secret"), listing=answer(os.listdir, "."), write=answer(open, "secret", "w"),
    make=answer(open, "new", "w"), folder=answer(os.mkdir, "newer"), remove=answer(os.unlink, "secret"),
    rename=answer(os.rename, "secret", "work/secret"), link=answer(os.link, "secret", "work/secret"),
    symlink=answer(os.symlink, "/etc", "etc"), up=answer(open, "work/../secret"),
    write_shown=answer(open, "open/shown", "a"), take_shown=answer(os.rename, "open/shown", "work/shown"),
    remove_shown=answer(os.unlink, "open/shown"), memory=answer(open, "/proc/self/mem", "wb"),
)
"""
    answers = child(script)
    moves = {answers.pop(name) for name in ("rename", "link", "take_shown")}
    assert moves <= {"EACCES", "EXDEV"}  # EXDEV if another right is missing too
    assert answers == dict.fromkeys(answers, "EACCES")


@needs_landlock
@pytest.mark.parametrize("abi", ABIS)
def test_ruleset_of_every_abi_confines_and_permits_work(child, abi):
    script = f"""
confine({abi}, read=["open", "open/shown"], devices=["/dev/urandom"])
os.chdir("work")
entropy = 0x80045200  # RNDGETENTCNT
with open("f", "w+") as f:
    f.write("x" * 100), f.flush(), f.truncate(10)
os.mkdir("d"), os.rename("f", "g"), os.link("g", "h"), os.symlink("g", "l"), os.truncate("g", 5)
say(
    inside=open("l").read(), refer=answer(os.rename, "g", "d/g"), shown=answer(open, "../open/shown"),
    secret=answer(open, "../secret"), truncate=answer(os.truncate, "../secret", 0),
    execute=answer(os.execv, sys.executable, ["python"]), tidy=answer(shutil.rmtree, "d"),
    port=answer(socket.socket().bind, ("127.0.0.1", 0)), parent=answer(os.kill, os.getppid(), 0),
    ioctl=answer(fcntl.ioctl, os.open("/dev/urandom", os.O_RDONLY), entropy, bytes(4)),
)
"""
    assert child(script) == {
        "inside": "xxxxx",
        "refer": "done" if abi >= 2 else "EXDEV",
        "shown": "done",
        "secret": "EACCES",
        "truncate": "EACCES" if abi >= 3 else "done",
        "execute": "EACCES",
        "tidy": "done",
        "port": "EACCES" if abi >= 4 else "done",
        "parent": "EPERM" if abi >= 6 else "done",
        "ioctl": "EACCES" if abi >= 5 else "done",
    }


@needs_landlock
@pytest.mark.parametrize("user", USERS)
def test_ordinary_code_works_under_ruleset(child, user):
    folders = {sys.base_prefix, sys.prefix, *site.getsitepackages(), sysconfig.get_path("stdlib"), "/proc", "/sys"}
    folders |= {name for name in ("/usr", "/lib", "/lib64", "/etc") if Path(name).exists()}
    script = f"""
WORKS = {WORKS!r}
for code in WORKS.values() if {user} else ():  # the user may not read the libraries, so import them first
    os.makedirs("before"), os.chdir("before"), exec(code, dict(globals())), os.chdir(".."), shutil.rmtree("before")
confine(user={user}, read={sorted(folders)!r})
if seccomp.is_supported():  # code that works under both works under each
    seccomp.install(seccomp.SyscallFilter.for_machine(platform.machine()).program(os.getpid()))
os.chdir("work")
failures = {{}}
for name, code in WORKS.items():
    try:
        exec(code, dict(globals()))
    except BaseException:
        failures[name] = traceback.format_exc()
say(**failures)
"""
    assert child(script) == {}


@needs_landlock
def test_ruleset_closes_descriptor_once_and_on_exec(place):
    rules = Ruleset()
    assert not os.get_inheritable(rules.fd)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    rules.allow_read(str(place / "open"))
    rules.allow_scratch(str(place / "work"))
    rules.allow_device("/dev/null")
    for allow, path in ((rules.allow_scratch, place / "secret"), (rules.allow_device, place / "work")):
        with pytest.raises(OSError, match="irectory"):
            allow(str(path))
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    rules.close()
    rules.close()
    assert rules.fd == -1
    for use in (rules.restrict_self, lambda: rules.allow_read(str(place))):
        with pytest.raises(OSError, match="Bad file descriptor"):
            use()


@needs_landlock
def test_ruleset_uses_newest_known_abi():
    if KERNEL_ABI < kernel.NEWEST_LANDLOCK_ABI:
        pytest.skip(f"the kernel has ABI {KERNEL_ABI}")
    rules = Ruleset(kernel.NEWEST_LANDLOCK_ABI + 5)
    assert rules.abi == kernel.NEWEST_LANDLOCK_ABI
    rules.close()


def test_ruleset_rejects_abi_below_one():
    with pytest.raises(ValueError, match="expected at least 1"):
        Ruleset(0)


def test_landlock_abi_is_zero_without_landlock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(kernel, "syscall", refuse)
    assert kernel.landlock_abi() == 0
    with pytest.raises(OSError, match="offers no Landlock"):
        Ruleset()
