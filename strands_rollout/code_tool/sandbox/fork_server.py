"""The fork server: a process that has imported everything, and does nothing but fork children and reap them.

It never sees code or output, so that no child inherits another run's. Its one command socket comes from the supervisor,
which sends JSON messages, one per packet:

- `{"do": "fork", "place": 3}` with three descriptors: stdout, stderr, control
- `{"do": "signal", "place": 3, "signal": 9}`
- `{"do": "limit", "place": 3, "threads": 200}`: the soft RLIMIT_NPROC

and receives `{"is": "up", ...}` once, `{"is": "forked", "place": 3, "pid": 4711, "user": null}`, `{"is": "ended",
"place": 3, "exit_code": -9}`, and `{"is": "failed", "place": 3, "reason": ...}`. It ends when the supervisor does.

Before it is up it tries the layers of confinement in a real child: none is promised that does not hold.

A forked child takes its descriptors, is confined, says so, then runs the code that it is sent. On its control socket it
writes to the supervisor: READY, or FAILED and a reason in JSON; then, for each piece of code that it is sent in a frame
(`{"code": ..., "session": false}`), STARTED, then DONE and one byte, the exit code. Without a session it ends after
that; the supervisor need not wait for it, since the kernel takes milliseconds to free the memory of such a process.
Code can find the socket and write DONE itself: its call is over then, with an exit code of its choice, as after
`os._exit`; what it does then is ended, or stopped until the session's next call.
"""

import _sitebuiltins
import atexit
import builtins
import contextlib
import dbm.dumb
import gc
import importlib
import itertools
import json
import mmap
import multiprocessing.context
import os
import pkgutil
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from strands_rollout.code_tool.sandbox import DONE, FAILED, READY, STARTED, FrameReader, code_runner, frame, scratch
from strands_rollout.code_tool.sandbox.confinement import Confinement, LayerError, LibraryFinder, Workplace
from strands_rollout.code_tool.sandbox.kernel import ChildLimits, files_as, prctl

_CONTROL: Final = 3
_EXCEPTION: Final = 1
_LOCKS: Final = ("Barrier", "BoundedSemaphore", "Condition", "Event", "Lock", "RLock", "Semaphore")


def become_child(confinement: Confinement, place: Workplace, descriptors: tuple[int, int, int]) -> None:
    """Turn a fork of the fork server into a process that runs code; never returns."""
    try:
        _take_descriptors(descriptors, confinement.kept_descriptors(), place)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        confinement.apply(place)
        if place.ruleset is not None:
            place.ruleset.close()
        _look_fresh("/" if confinement.changes_root else place.folder)
        if "syscalls" in confinement.enforced:
            _share_nothing()
        os.write(_CONTROL, READY)
    except LayerError as e:
        _fail(e.layer, str(e))
    except BaseException as e:  # whatever it is, this fork must not return into the fork server's loop
        _fail(None, f"{type(e).__name__}: {e}")
    try:
        _serve(socket.socket(fileno=_CONTROL))
    except BaseException as e:  # code that is too long for the memory, or that broke what reads the next
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(e).__name__}: the next code can't be read. {e}\n".encode())
    finally:
        os._exit(_EXCEPTION)


def _take_descriptors(descriptors: tuple[int, int, int], kept: Collection[int], place: Workplace) -> None:
    """Have nothing open but 0 to 3, the kept ones and the ruleset."""
    os.setsid()
    for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), *descriptors)):
        os.dup2(source, target)
    start = _CONTROL + 1
    ruleset = [] if place.ruleset is None else [place.ruleset.fd]
    for number in sorted([*kept, *ruleset]):
        os.closerange(start, number)
        start = number + 1
    # up to the highest that is open: where the kernel can't close a range, each number is a system call
    os.closerange(start, max(start, 1 + max(map(int, os.listdir("/dev/fd")))))  # noqa: PTH208


def _look_fresh(home: str) -> None:
    """Undo what a fork shares with all other forks: environment, random numbers, a known temporary directory."""
    os.environ.update(HOME=home, TMPDIR=home, PWD=home)
    tempfile.tempdir = None
    os.path.realpath = _real_path  # type: ignore[assignment] # one for all kinds of paths
    # what these do is refused, and shutil.copy and shelve would fail with them
    shutil.copymode = shutil.copystat = dbm.dumb._Database._chmod = _copy_nothing  # type: ignore[attr-defined]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment] # `site`, which makes them, is not imported
    builtins.help = _sitebuiltins._Helper()
    # not those of the fork server: they remember what its descriptors 1 and 2 were
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    _reseed()
    gc.enable()


# module -> what gives its generator other numbers, from the module and a seed of 32 bits. Numba does so by itself after
# a fork, mpmath uses `random`, scipy and pandas numpy's; JAX has no generator without a key.
_RESEEDERS: Final[Mapping[str, Callable[[Any, int], object]]] = {
    "random": lambda module, _: module.seed(),
    "numpy.random": lambda module, seed: module.seed(seed),
    "sympy.core.random": lambda module, _: module.seed(),
    "torch": lambda module, seed: module.default_generator.manual_seed(seed),  # the CPU's; no run has another device
    "tensorflow": lambda module, seed: module.random.set_seed(seed),
    "cupy": lambda module, _: module.random.reset_states(),
    "paddle": lambda module, seed: module.seed(seed),
}


def _reseed() -> None:
    """Give every generator that has been imported other numbers than all other forks have."""
    for name, reseed in _RESEEDERS.items():
        module = sys.modules.get(name)
        if module is not None:
            try:
                reseed(module, int.from_bytes(os.urandom(4), "little"))
            except Exception as e:  # a library's generator may raise anything
                words = f"the random numbers of {name} can't be made different in each run ({type(e).__name__}: {e})"
                raise RuntimeError(f"{words}; take the library off the list, or use another version of it") from e


class _OwnMemory(mmap.mmap):
    """A `mmap.mmap` whose memory without a file is private: shared memory is refused, and nobody is there to share."""

    def __new__(
        cls,
        fileno: int,
        length: int,
        flags: int = mmap.MAP_SHARED,
        prot: int = mmap.PROT_READ | mmap.PROT_WRITE,
        access: int = mmap.ACCESS_DEFAULT,
        offset: int = 0,
        **more: Any,  # noqa: ANN401 - what newer Pythons take
    ) -> Self:
        if fileno == -1 and access != mmap.ACCESS_COPY:
            prot = mmap.PROT_READ if access == mmap.ACCESS_READ else prot
            flags, access = flags & ~mmap.MAP_SHARED | mmap.MAP_PRIVATE, mmap.ACCESS_DEFAULT
        return super().__new__(cls, fileno, length, flags, prot, access, offset, **more)


_OwnMemory.__name__ = _OwnMemory.__qualname__ = "mmap"
_OwnMemory.__module__ = "mmap"


def _share_nothing() -> None:
    """Do with private memory and with threads' locks, in a process that can start no others.

    For `mmap` without a file, and for multiprocessing, whose ThreadPool takes locks: its own are files in /dev/shm.
    """
    mmap.mmap = _OwnMemory  # type: ignore[misc]
    for name in _LOCKS:
        setattr(multiprocessing.context.BaseContext, name, staticmethod(getattr(threading, name)))
        setattr(multiprocessing, name, getattr(threading, name))


def _real_path(path: str | bytes | os.PathLike[str], *, strict: object = False) -> str | bytes:
    """Stand in for `os.path.realpath`, which would fail at any link: links can't be read."""
    if strict is True:  # newer Pythons have other values, which let files be missing
        os.lstat(path)
    return os.path.abspath(path)  # noqa: PTH100


def _copy_nothing(*_: object, **__: object) -> None:
    """Stand in for the copying of permissions and times."""


def _serve(control: socket.socket) -> None:
    """Run what is sent: one piece of code, or in a session one after the other, until the socket closes."""
    namespace = code_runner.prepare_interpreter().__dict__
    orders = FrameReader(control)
    for number in itertools.count(1):
        control.settimeout(None)  # earlier code may have made it non-blocking
        order = orders.next()
        if order is None:
            break
        os.write(_CONTROL, STARTED)
        name = f"<code {number}>" if order["session"] else code_runner.SOURCE_NAME
        exit_code = _run(order["code"], namespace, name)
        if not order["session"]:
            _finish()
        with contextlib.suppress(OSError):  # the code may have closed it; the end of the process has the same meaning
            os.write(_CONTROL, DONE + bytes([exit_code]))
        if not order["session"]:
            os._exit(exit_code)
    os._exit(0)


def _run(code: str, namespace: dict[str, object], name: str) -> int:
    """Run one piece of code and show its error, if any; returns the exit code that a script would have."""
    try:
        code_runner.run_code(code, namespace, name)
    except SystemExit as e:  # what the interpreter makes of `sys.exit(...)`
        if e.code is None or isinstance(e.code, int):
            return (e.code or 0) & 0xFF
        with contextlib.suppress(Exception):  # stderr is the code's to break
            print(e.code, file=sys.stderr)
        return _EXCEPTION
    except BaseException as e:  # the code may raise anything, KeyboardInterrupt included
        with contextlib.suppress(BaseException):  # the code may have replaced the hook, and closed the streams
            sys.excepthook(type(e), e, e.__traceback__)
        return _EXCEPTION
    finally:
        _flush()
    return 0


def _finish() -> None:
    """Do what the interpreter does at its end, but for the costly taking apart of all that was imported."""
    with contextlib.suppress(BaseException):  # what the code registered may raise anything
        threading._shutdown()  # type: ignore[attr-defined] # waits for the code's threads, as the interpreter does
    with contextlib.suppress(BaseException):  # as above
        atexit._run_exitfuncs()
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the streams are the code's to close or replace
            stream.flush()


def _fail(layer: str | None, reason: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_CONTROL, FAILED + json.dumps({"layer": layer, "reason": reason}).encode())
    os._exit(1)


# fmt: off
_STANDARD: Final = (
    "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "gc", "hashlib", "heapq", "inspect",
    "io", "itertools", "json", "keyword", "linecache", "locale", "math", "numbers", "operator", "pprint", "queue",
    "random", "re", "secrets", "shutil", "statistics", "string", "struct", "tempfile", "textwrap", "threading",
    "time", "timeit", "traceback", "types", "typing", "unicodedata", "uuid", "warnings", "zlib",
)
# fmt: on
_SUBMODULES: Final = {
    # it reads a folder of its user's, where confined code may not look
    "matplotlib": ["matplotlib.pyplot", "matplotlib.backends.backend_agg"],
    "numpy": ["numpy.linalg", "numpy.random", "numpy.fft", "numpy.polynomial", "numpy.ma"],
    "sympy": ["sympy.ntheory.modular", "sympy.solvers.diophantine", "sympy.parsing.sympy_parser"],
}
# what is first used is first loaded and cached: about half of the time that a short sympy program takes
_WARM_UP: Final = {
    "numpy": """
from numpy import *
a = array([[4.0, 1.0], [2.0, 3.0]]); linalg.solve(a, a[0]); linalg.eig(a); (a @ a).sum(); str(a); roots([1, -3, 2])
""",
    "sympy": """
from sympy import *
x, y = symbols("x y"); n = symbols("n", integer=True, positive=True)
str(solve(x**2 - 5*x + 6, x)); solve([x + y - 3, x - y - 1], [x, y]); solve(x**3 - 2*x + 1, x)
str(simplify(sin(x)**2 + cos(x)**2 + (x**2 - 1)/(x - 1))); factor(x**3 - 1); expand((x + y)**4)
integrate(x*exp(x), (x, 0, 1)); diff(sin(x)*x, x); limit(sin(x)/x, x, 0); series(exp(x), x, 0, 3)
summation(n, (n, 1, 10)); Matrix([[1, 2], [3, 4]]).det(); factorint(360); isprime(97); Rational(1, 3) + sqrt(8)
binomial(10, 3); N(pi, 20); latex(x**2/2); gcd(12, 18); divisors(12); Eq(x, 1); nsimplify("0.5"); solveset(x**2 - 1, x)
solve([x**2 + y**2 - 5, x - y - 1], [x, y]); Matrix([[2, 1], [1, 3]]).eigenvals(); Matrix([[2, 1], [1, 3]]).inv()
summation(1/(n*(n + 1)), (n, 1, oo)); reduce_inequalities(x**2 < 4, x); Point(0, 0).distance(Point(3, 4))
f = Function("f"); dsolve(f(x).diff(x) - f(x), f(x))
""",
}
_HARMFUL: Final = {
    "antigravity",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "test",
    "this",
    "tkinter",
    "turtle",
    "turtledemo",
    "venv",
}


def preload(libraries: Iterable[str]) -> None:
    """Import the libraries and what most programs use, and run a little of numpy and sympy if they are among them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _STANDARD:
            importlib.import_module(name)
        for library in libraries:
            importlib.import_module(library)
            for name in _SUBMODULES.get(library, ()):
                with contextlib.suppress(ImportError):  # other versions are cut otherwise
                    importlib.import_module(name)
            with contextlib.suppress(Exception):  # a warm-up is worth no failure
                exec(_WARM_UP.get(library, ""), {})  # noqa: S102 - the constant above


def preload_everything(libraries: Iterable[str]) -> None:
    """Import the whole standard library and all of these libraries: nothing can be imported after a change of root."""
    with warnings.catch_warnings(), Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null):
        warnings.simplefilter("ignore")
        for name in [*sorted(set(sys.stdlib_module_names) - _HARMFUL), *libraries]:
            for module in (name, *_submodules(name)):
                with contextlib.suppress(BaseException):  # what can't be imported here can't be in a child either
                    importlib.import_module(module)


def _submodules(package: str) -> list[str]:
    """Every module in a package, but for its tests and what merely runs when it is imported."""
    with contextlib.suppress(BaseException):  # see above
        importlib.import_module(package)
    places = getattr(sys.modules.get(package), "__path__", [])
    found = []
    for module in pkgutil.iter_modules(places, f"{package}."):
        if module.name.rpartition(".")[2].strip("_") in {"test", "tests", "testing", "main", "conftest", "benchmarks"}:
            continue
        found.append(module.name)
        found += _submodules(module.name) if module.ispkg else []
    return found


_LIMIT_S: Final = 30.0
_PROBE: Final = """
import json, os, resource, socket
broken = {}
def must_fail(layer, what, attempt):
    try:
        attempt()
    except (OSError, ValueError):
        return
    broken[layer] = what
if "files" in enforced:
    must_fail("files", "a file outside could be read", lambda: open("/etc/passwd").close())
    must_fail("files", "a directory outside could be listed", lambda: os.listdir("/etc"))
    must_fail("files", "a file outside could be written", lambda: open("/tmp/strands-rollout-probe", "w").close())
if "syscalls" in enforced:
    must_fail("syscalls", "a socket could be made", lambda: socket.socket())
    must_fail("syscalls", "a limit could be set", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    must_fail("syscalls", "a directory's mode could be changed", lambda: os.chmod(".", 0o777))
if "programs" in enforced:
    must_fail("programs", "a socket could be made", lambda: socket.socket())
if "user" in enforced and 0 in (os.getuid(), os.geteuid(), os.getgid(), os.getegid()):
    broken["user"] = "the code still runs as root"
if "limits" in enforced and resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY:
    broken["limits"] = "memory is not limited"
try:
    for path in readable:
        open(path, "rb").close()
except OSError as e:
    broken["reading"] = f"the code's user can't read Python's own files ({e.filename}: {e.strerror})"
with open("probe", "w") as file:
    file.write(json.dumps(broken))
print(json.dumps(broken), flush=True)
"""


def find_broken_layer(confinement: Confinement, folder: str) -> tuple[str, str] | None:
    """Run a probe under all layers; the first layer that does not hold, or "reading", and why; or None."""
    try:
        place = confinement.make_place(folder, 0)
    except LayerError as e:
        return e.layer, str(e)
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as output, ours, theirs:
        child = os.fork()
        if child == 0:
            become_child(confinement, place, (output.fileno(), output.fileno(), theirs.fileno()))
        theirs.close()
        ours.settimeout(_LIMIT_S)
        try:
            broken = _verdict(confinement, place.user, ours, child, output.fileno())
            if broken is None and not scratch.delete(folder):
                broken = "user", "root may not delete other users' files here (no CAP_DAC_OVERRIDE)"
            return broken
        finally:
            if place.ruleset is not None:
                place.ruleset.close()
            scratch.delete(folder)


def _verdict(
    confinement: Confinement, user: int | None, control: socket.socket, child: int, output: int
) -> tuple[str, str] | None:
    greeting = control.recv(65536)
    may_signal = may_look = True
    if greeting == READY:
        try:
            os.kill(child, 0)
        except PermissionError:
            may_signal = False
        try:
            with files_as(user):
                os.listdir(f"/proc/{child}/fd")  # noqa: PTH208 - as the supervisor does
        except OSError:
            may_look = False
        readable = [] if confinement.changes_root else confinement.sample_files()
        facts = f"enforced = {list(confinement.enforced)!r}\nreadable = {readable!r}\n"  # it can't find these out
        control.sendall(frame({"code": facts + _PROBE, "session": False}))
        if control.recv(1) != STARTED:
            greeting = b""
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if greeting.startswith(FAILED):
        failure = json.loads(greeting[len(FAILED) :])
        if failure["layer"] is not None:
            return failure["layer"], failure["reason"]
        raise RuntimeError(f"the self-test of the sandbox failed: {failure['reason']}")
    printed = os.pread(output, 65536, 0).decode(errors="replace")
    if exit_code != 0:
        raise RuntimeError(f"the self-test of the sandbox ended with {exit_code}: {printed[-2000:]}")
    broken: dict[str, str] = json.loads(printed.splitlines()[-1])
    if not may_signal:
        broken["user"] = "root may not signal other users' processes here (no CAP_KILL)"
    if not may_look and "programs" in confinement.enforced:
        broken["programs"] = "what a process holds open can't be seen here, so that deleted files could not be counted"
    return next(iter(broken.items()), None)


_MAX_MESSAGE: Final = 65536
_POLL_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


class ForkServer:
    """Forks children into places, and reports when they end."""

    def __init__(self, commands: socket.socket, confinement: Confinement, root: str) -> None:
        self._commands = commands
        self._confinement = confinement
        self._root = root
        self._places: dict[int, Workplace] = {}
        self._children: dict[int, int] = {}  # process -> place
        self._supervisor = os.getppid()

    def serve(self, facts: Mapping[str, Any]) -> None:
        """Fork and reap until the supervisor is gone."""
        wakeup, wake = os.pipe()
        for end in (wakeup, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._send(facts)
        while os.getppid() == self._supervisor:
            ready, _, _ = select.select([self._commands.fileno(), wakeup], [], [], _POLL_S)
            if wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                self._reap()
            if self._commands.fileno() in ready and not self._obey():
                break
        for process in self._children:
            _kill(process)

    def _obey(self) -> bool:
        """Carry out one command; False once there will be none."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._commands, _MAX_MESSAGE, 3)
        except ConnectionError:
            return False
        if not message:
            return False
        try:
            command = json.loads(message)
            if command["do"] == "fork":
                self._fork(command["place"], descriptors)
            else:
                self._act_on(command)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, index: int, descriptors: list[int]) -> None:
        try:
            folder = os.path.join(self._root, str(index))  # noqa: PTH118
            self._places[index] = self._confinement.make_place(folder, index, self._places.get(index))
            process = os.fork()
        except (OSError, LayerError) as e:
            self._send({"is": "failed", "place": index, "reason": f"{type(e).__name__}: {e}"})
            return
        if process == 0:
            become_child(self._confinement, self._places[index], (descriptors[0], descriptors[1], descriptors[2]))
        self._children[process] = index
        self._send({"is": "forked", "place": index, "pid": process, "user": self._places[index].user})

    def _act_on(self, command: Mapping[str, Any]) -> None:
        """Signal a child or limit its threads."""
        for process, place in self._children.items():
            if place == command["place"]:  # not reaped yet, so its number is still its own
                with contextlib.suppress(OSError, ValueError):
                    if command["do"] == "signal":
                        os.kill(process, command["signal"])
                    elif sys.platform == "linux":
                        hard = resource.prlimit(process, resource.RLIMIT_NPROC)[1]
                        resource.prlimit(process, resource.RLIMIT_NPROC, (command["threads"], hard))

    def _reap(self) -> None:
        """Report the children that have ended, and end the processes that they left behind."""
        while (ended := _ended_child()) is not None:
            process, exit_code = ended
            index = self._children.pop(process, None)
            self._kill_orphans()
            if index is not None:
                self._places[index].retire()
                self._send({"is": "ended", "place": index, "exit_code": exit_code})

    def _kill_orphans(self) -> None:
        """Kill adopted processes: one that left its group and lost its parent comes here (PR_SET_CHILD_SUBREAPER)."""
        with contextlib.suppress(OSError):
            listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for process in set(map(int, listed)) - self._children.keys():
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._commands.send(json.dumps(message).encode())


def _ended_child() -> tuple[int, int] | None:
    """Reap a child that has ended: its process and exit code."""
    found = None
    try:
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            _kill(found.si_pid)  # its whole group, while its number can't be another's
        process, status = os.waitpid(found.si_pid if found is not None else -1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (process, os.waitstatus_to_exitcode(status)) if process else None


def _kill(process: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL)


def main() -> None:
    """Run as a process: arguments are the number of the command socket and the settings in JSON."""
    started = time.monotonic()
    commands = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    while os.open(os.devnull, os.O_RDONLY) <= 3:
        pass
    limits, programs = ChildLimits(**settings["limits"]), settings["programs"]
    confinement = Confinement(settings["libraries"], limits, settings["disabled"], programs=programs)
    confinement.open_folders()
    sys.meta_path.append(LibraryFinder(confinement.library_folders()))
    # code can import what is in `sys.modules`, whatever the kernel confines: this package is not for it
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__.partition(".")[0]]:
        del sys.modules[name]
    preload(settings["preload"])
    _settle(confinement, settings)
    gc.disable()
    gc.collect()
    gc.freeze()
    start_s = time.monotonic() - started
    facts = {"is": "up", "enforced": confinement.enforced, "missing": confinement.missing, "start_s": start_s}
    ForkServer(commands, confinement, settings["root"]).serve(facts)


def _settle(confinement: Confinement, settings: Mapping[str, Any]) -> None:
    """Try the layers in a real child, and do without those that don't hold."""
    for attempt in range(8):
        if confinement.changes_root:
            preload_everything(settings["preload"])
        broken = find_broken_layer(confinement, os.path.join(settings["root"], f"self-test-{attempt}"))  # noqa: PTH118
        if broken is None:
            return
        layer, reason = broken
        if layer != "reading":
            confinement.give_up(layer, reason)
        elif not confinement.may_read_as_root():
            confinement.give_up("user", reason)
    raise RuntimeError("the self-test of the sandbox never passed")
