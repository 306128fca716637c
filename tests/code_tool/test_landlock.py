import errno
import os
import shutil
import site
import socket
import sys
import sysconfig
from pathlib import Path

import pytest
from ordinary_code import USERS, WORKS

from strands_rollout.code_tool.local.sandbox import landlock
from strands_rollout.code_tool.local.sandbox.landlock import Ruleset

STATIC_PROGRAM = next(Path("/").glob("lib*/ld-*.so*"), Path(sys.executable))  # the loader needs no other file
KERNEL_ABI = landlock.abi_version()
needs_landlock = pytest.mark.skipif(KERNEL_ABI == 0, reason="the kernel offers no Landlock")
ABIS = [
    pytest.param(abi, marks=pytest.mark.skipif(abi > KERNEL_ABI, reason=f"the kernel offers ABI {KERNEL_ABI}"))
    for abi in range(1, 8)
]

PROLOGUE = """
import ctypes, errno, fcntl, json, os, platform, shutil, signal, socket, subprocess, sys, threading, traceback
from strands_rollout.code_tool.local.sandbox import landlock, seccomp

def confine(abi=None, user=0, read=(), devices=("/dev/null",)):
    rules = landlock.Ruleset(abi)
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
    """A directory with a directory `work` for confined code, and files that are not for it."""
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
def test_files_outside_are_out_of_reach(child, user):
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
    assert moves <= {"EACCES", "EXDEV"}  # EXDEV where another right is lacking besides
    assert answers == dict.fromkeys(answers, "EACCES")


@needs_landlock
@pytest.mark.parametrize("user", USERS)
def test_what_is_readable_can_be_read_and_not_executed(child, place, user):
    shutil.copy(STATIC_PROGRAM, place / "open" / "program")
    script = f"""
before = answer(subprocess.run, ["open/program"], capture_output=True)
confine(user={user}, read=["open"])
listing, words = sorted(os.listdir("open")), open("open/shown").read()
say(before=before, after=answer(subprocess.run, ["open/program"]), listing=listing, words=words)
"""
    answers = {"before": "done", "after": "EACCES", "listing": ["program", "shown"], "words": "words"}
    assert child(script) == answers


@needs_landlock
@pytest.mark.parametrize("abi", ABIS)
def test_every_abi_confines_and_lets_work(child, abi):
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
def test_no_special_files_are_made_and_nothing_there_is_executed(child, place, user):
    shutil.copy(STATIC_PROGRAM, place / "work" / "program")
    script = f"""
confine(user={user})
os.chdir("work")
server = socket.socket(socket.AF_UNIX)
say(
    fifo=answer(os.mkfifo, "fifo"), socket=answer(server.bind, "socket"),
    run=answer(subprocess.run, ["./program"], capture_output=True),
    char=answer(os.mknod, "char", 0o20666, os.makedev(1, 3)),
    block=answer(os.mknod, "block", 0o60666, os.makedev(7, 0)),
)
"""
    answers = child(script)
    refused = {"EACCES", "EPERM"}  # EPERM where the user may not make devices anyway
    assert {answers.pop("char"), answers.pop("block")} <= refused
    assert answers == dict.fromkeys(answers, "EACCES")


@needs_landlock
def test_a_device_is_one_node(child):
    script = """
confine()
with open("/dev/null", "r+b", buffering=0) as null:
    null.write(b"x"), null.read()
say(truncating=answer(open, "/dev/null", "w"), zero=answer(open, "/dev/zero"), listing=answer(os.listdir, "/dev"))
"""
    assert child(script) == {"truncating": "done", "zero": "EACCES", "listing": "EACCES"}


@needs_landlock
@pytest.mark.skipif(KERNEL_ABI < 6, reason="signals and abstract sockets are scoped from ABI 6 on")
def test_other_processes_abstract_sockets_and_tcp_are_out_of_reach(child):
    with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as tcp:
        abstract.bind(f"\0landlock-{os.getpid()}")
        abstract.listen()
        script = f"""
confine()
stream = socket.socket(socket.AF_UNIX)
say(
    abstract=answer(stream.connect, "\\0landlock-{os.getpid()}"), parent=answer(os.kill, os.getppid(), 0),
    itself=answer(os.kill, os.getpid(), 0), connect=answer(socket.socket().connect, {tcp.getsockname()!r}),
    loopback=answer(socket.socketpair),
)
"""
        answers = child(script)
    assert {name for name, answer in answers.items() if answer == "done"} == {"itself", "loopback"}
    assert (answers["abstract"], answers["parent"], answers["connect"]) == ("EPERM", "EPERM", "EACCES")


@needs_landlock
def test_one_ruleset_serves_many_forked_children_and_not_the_parent(child):
    script = """
rules = landlock.Ruleset()
rules.allow_scratch("work")
codes = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        rules.restrict_self()
        os._exit(int(answer(open, "secret") == "EACCES"))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
status = open("/proc/self/status").read()
say(children=codes, parent=answer(open, "secret"), privileges="NoNewPrivs:\\t0" in status)
"""
    assert child(script) == {"children": [1, 1, 1], "parent": "done", "privileges": True}


@needs_landlock
@pytest.mark.parametrize("user", USERS)
def test_ordinary_code_works(child, user):
    folders = {sys.base_prefix, sys.prefix, *site.getsitepackages(), sysconfig.get_path("stdlib"), "/proc", "/sys"}
    folders |= {name for name in ("/usr", "/lib", "/lib64", "/etc") if Path(name).exists()}
    script = f"""
WORKS = {WORKS!r}
for name in ("no other program", "no network", "multiprocessing.dummy"):
    del WORKS[name]
for code in WORKS.values() if {user} else ():  # who may not be able to read the libraries: have them imported before
    os.makedirs("before"), os.chdir("before"), exec(code, dict(globals())), os.chdir(".."), shutil.rmtree("before")
confine(user={user}, read={sorted(folders)!r})
if seccomp.is_supported():  # what works under both works under each
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
def test_the_descriptor_is_closed_once_and_on_exec(place):
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
def test_a_newer_abi_than_is_known_is_used_like_the_newest_known():
    if KERNEL_ABI < landlock.NEWEST_ABI:
        pytest.skip(f"the kernel offers ABI {KERNEL_ABI}")
    rules = Ruleset(landlock.NEWEST_ABI + 5)
    assert rules.abi == landlock.NEWEST_ABI
    rules.close()


def test_an_abi_below_one_is_refused():
    with pytest.raises(ValueError, match="expected 1 to 7"):
        Ruleset(0)


def test_a_kernel_without_landlock_is_said_to_have_none(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(landlock, "syscall", refuse)
    assert landlock.abi_version() == 0
    with pytest.raises(OSError, match="offers no Landlock"):
        Ruleset()
