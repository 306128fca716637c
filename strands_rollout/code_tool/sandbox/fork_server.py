"""The fork server: a process that imports all libraries, and then only forks, signals, limits and reaps children.

It never sees code or output, so that no child inherits the code or output of another run. The supervisor gives it a
command socket and sends JSON messages on it, one per packet:

- `{"do": "fork", "slot": 3}` with three descriptors: stdout, stderr, control
- `{"do": "signal", "slot": 3, "signal": 9}`
- `{"do": "limit", "slot": 3, "threads": 200}`: the soft RLIMIT_NPROC

If a library can't be imported, the fork server sends `{"is": "broken", "reason": ...}` and exits. Otherwise it sends
`{"is": "up", ...}`, and then a message for each event: `{"is": "forked", "slot": 3, "pid": 4711, "user": null}`,
`{"is": "ended", "slot": 3, "exit_code": -9}`, or `{"is": "failed", "slot": 3, "reason": ...}` if a fork failed. It
exits when the supervisor does.

Before the fork server is up, it tests the layers of confinement in a real child; a layer that fails is reported as
missing. If the test can't be completed, the fork server exits without a message.

A forked child sets up its descriptors, confines itself, and runs the code that it receives. On its control socket it
writes to the supervisor:

- READY, or FAILED and a reason in JSON
- for each piece of code that it receives in a frame (`{"code": ..., "session": false}`): STARTED, then DONE and one
  byte, the exit code

Without a session the child exits after that. The supervisor does not wait for the exit, because the kernel takes
milliseconds to free the memory of such a process. Code can find the socket and write DONE itself. The call then ends
with an exit code chosen by the code, as after `os._exit`; the code is killed, or stopped until the session's next call.
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
from strands_rollout.code_tool.sandbox.confinement import Confinement, LayerError, LibraryFinder, Workspace
from strands_rollout.code_tool.sandbox.kernel import ChildLimits, file_access_as, prctl

_CONTROL_FD: Final = 3
_EXCEPTION_EXIT_CODE: Final = 1
_NICE_INCREMENT: Final = 5  # gives a third of the CPU weight of a process with the executor's priority
_AUTOGROUP_ATTEMPTS: Final = 20
_LOCK_TYPES: Final = ("Barrier", "BoundedSemaphore", "Condition", "Event", "Lock", "RLock", "Semaphore")


def become_child(confinement: Confinement, workspace: Workspace, descriptors: tuple[int, int, int]) -> None:
    """Turn a fork of the fork server into a confined process that runs code; never returns.

    Args:
        confinement: The layers to apply.
        workspace: The child's directory, user and ruleset.
        descriptors: stdout, stderr and the control socket.
    """
    try:
        _leave_process_group(confinement)
        _install_descriptors(descriptors, confinement.descriptors_to_keep(), workspace)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        confinement.apply(workspace)
        if workspace.ruleset is not None:
            workspace.ruleset.close()
        _reset_interpreter("/" if confinement.changes_root else workspace.folder)
        if "syscalls" in confinement.enforced:
            _avoid_shared_memory()
        os.write(_CONTROL_FD, READY)
    except LayerError as e:
        _report_failure(e.layer, str(e))
    except BaseException as e:  # whatever fails, this fork must not return into the fork server's loop
        _report_failure(None, f"{type(e).__name__}: {e}")
    try:
        _serve_code(socket.socket(fileno=_CONTROL_FD))
    except BaseException as e:  # the code did not fit into memory, or earlier code broke this reader
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(e).__name__}: the next code can't be read. {e}\n".encode())
    finally:
        os._exit(_EXCEPTION_EXIT_CODE)


def _leave_process_group(confinement: Confinement) -> None:
    """Begin a process group, or a session if system calls are not filtered.

    In the fork server's session, the child has that session's low priority (see `_lower_priority`). But processes of
    one session may send each other SIGCONT and join each other's process groups. Only the filter prevents that, so
    without it each child gets a session of its own.
    """
    if "syscalls" not in confinement.enforced:
        os.setsid()
        with contextlib.suppress(OSError):  # as in `_lower_priority`, but without retries, which would delay the code
            _lower_autogroup()
        return
    os.setpgid(0, 0)
    # These signals would stop the code until its time limit. The kernel ignores them only for a child with its own
    # session.
    for number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)


def _install_descriptors(descriptors: tuple[int, int, int], kept: Collection[int], workspace: Workspace) -> None:
    """Install the child's descriptors as 0 to 3; close all other descriptors except `kept` and the ruleset's."""
    for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), *descriptors)):
        os.dup2(source, target)
    start = _CONTROL_FD + 1
    ruleset = [] if workspace.ruleset is None else [workspace.ruleset.fd]
    for number in sorted([*kept, *ruleset]):
        os.closerange(start, number)
        start = number + 1
    # stop at the highest open descriptor: without close_range(2) each number costs a system call
    os.closerange(start, max(start, 1 + max(map(int, os.listdir("/dev/fd")))))  # noqa: PTH208


def _reset_interpreter(home: str) -> None:
    """Replace the state inherited from the fork server, and adapt some of Python's functions to the sandbox."""
    os.environ.update(HOME=home, TMPDIR=home, PWD=home)
    tempfile.tempdir = None
    os.path.realpath = _real_path  # type: ignore[assignment] # one function for all kinds of paths
    # shutil.copy and shelve would fail: the sandbox refuses chmod and utime
    shutil.copymode = shutil.copystat = dbm.dumb._Database._chmod = _copy_nothing  # type: ignore[attr-defined]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment] # `site`, which makes them, is not imported
    builtins.help = _sitebuiltins._Helper()
    # the fork server's streams would remember properties of its own descriptors 1 and 2
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    _reseed()
    gc.enable()


# module -> function that reseeds its generator, given the module and a seed of 32 bits. Numba reseeds itself after a
# fork, mpmath uses `random`, scipy and pandas use numpy's generator; JAX has no generator without a key.
_RESEEDERS: Final[Mapping[str, Callable[[Any, int], object]]] = {
    "random": lambda module, _: module.seed(),
    "numpy.random": lambda module, seed: module.seed(seed),
    "sympy.core.random": lambda module, _: module.seed(),
    "torch": lambda module, seed: module.default_generator.manual_seed(seed),  # the CPU's; runs see no other device
    "tensorflow": lambda module, seed: module.random.set_seed(seed),
    "cupy": lambda module, _: module.random.reset_states(),
    "paddle": lambda module, seed: module.seed(seed),
}


def _reseed() -> None:
    """Reseed the generators of imported modules, so that forks draw different random numbers."""
    for name, reseed in _RESEEDERS.items():
        module = sys.modules.get(name)
        if module is not None:
            try:
                reseed(module, int.from_bytes(os.urandom(4), "little"))
            except Exception as e:  # a library's generator may raise anything
                message = f"the random numbers of {name} can't be made different in each run ({type(e).__name__}: {e})"
                raise RuntimeError(f"{message}; remove {name} from libraries, or use another version of it") from e


class _PrivateMmap(mmap.mmap):
    """A `mmap.mmap` whose anonymous memory is private: seccomp refuses shared memory, and no process could share it."""

    def __new__(
        cls,
        fileno: int,
        length: int,
        flags: int = mmap.MAP_SHARED,
        prot: int = mmap.PROT_READ | mmap.PROT_WRITE,
        access: int = mmap.ACCESS_DEFAULT,
        offset: int = 0,
        **more: Any,  # noqa: ANN401 - arguments of newer Pythons
    ) -> Self:
        if fileno == -1 and access != mmap.ACCESS_COPY:
            prot = mmap.PROT_READ if access == mmap.ACCESS_READ else prot
            flags, access = flags & ~mmap.MAP_SHARED | mmap.MAP_PRIVATE, mmap.ACCESS_DEFAULT
        return super().__new__(cls, fileno, length, flags, prot, access, offset, **more)


_PrivateMmap.__name__ = _PrivateMmap.__qualname__ = "mmap"
_PrivateMmap.__module__ = "mmap"


def _avoid_shared_memory() -> None:
    """Make anonymous `mmap` private, and replace multiprocessing's locks with threading's locks.

    multiprocessing's locks, which its ThreadPool uses, are files in /dev/shm. Nothing is lost: this process can't start
    a process that would share memory or locks with it.
    """
    mmap.mmap = _PrivateMmap  # type: ignore[misc]
    for name in _LOCK_TYPES:
        setattr(multiprocessing.context.BaseContext, name, staticmethod(getattr(threading, name)))
        setattr(multiprocessing, name, getattr(threading, name))


def _real_path(path: str | bytes | os.PathLike[str], *, strict: object = False) -> str | bytes:
    """Stand in for `os.path.realpath`. Resolve no links, because seccomp refuses to read links."""
    if strict is True:  # other values, in newer Pythons, permit missing files
        os.lstat(path)
    return os.path.abspath(path)  # noqa: PTH100


def _copy_nothing(*_: object, **__: object) -> None:
    """Do nothing; installed as the functions that copy permissions and times."""


def _serve_code(control: socket.socket) -> None:
    """Run the code that arrives: a single piece, or in a session every piece until the socket closes. Never returns."""
    namespace = code_runner.prepare_interpreter().__dict__
    requests = FrameReader(control)
    for number in itertools.count(1):
        control.settimeout(None)  # earlier code may have made it non-blocking
        request = requests.next()
        if request is None:
            break
        os.write(_CONTROL_FD, STARTED)
        name = f"<code {number}>" if request["session"] else code_runner.SOURCE_NAME
        exit_code = _run_code(request["code"], namespace, name)
        if not request["session"]:
            _run_exit_handlers()
        with contextlib.suppress(OSError):  # if the code has closed the socket, the end of the process ends the call
            os.write(_CONTROL_FD, DONE + bytes([exit_code]))
        if not request["session"]:
            os._exit(exit_code)
    os._exit(0)


def _run_code(code: str, namespace: dict[str, object], name: str) -> int:
    """Run one piece of code, and return the exit code that a script would have."""
    try:
        code_runner.run_code(code, namespace, name)
    except SystemExit as e:  # handled as the interpreter does
        if e.code is None or isinstance(e.code, int):
            return (e.code or 0) & 0xFF
        with contextlib.suppress(Exception):  # the code may have broken stderr
            print(e.code, file=sys.stderr)
        return _EXCEPTION_EXIT_CODE
    except BaseException as e:  # the code may raise anything, KeyboardInterrupt included
        with contextlib.suppress(BaseException):  # the code may have replaced the hook or closed the streams
            sys.excepthook(type(e), e, e.__traceback__)
        return _EXCEPTION_EXIT_CODE
    finally:
        _flush()
    return 0


def _run_exit_handlers() -> None:
    """Join threads and run exit handlers as the interpreter does at its exit, without its costly module teardown."""
    with contextlib.suppress(BaseException):  # handlers that the code registered may raise anything
        threading._shutdown()  # type: ignore[attr-defined] # waits for the code's threads
    with contextlib.suppress(BaseException):  # these handlers too
        atexit._run_exitfuncs()
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the code may have closed or replaced the streams
            stream.flush()


def _report_failure(layer: str | None, reason: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_CONTROL_FD, FAILED + json.dumps({"layer": layer, "reason": reason}).encode())
    os._exit(1)


# fmt: off
_STANDARD_MODULES: Final = (
    "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "gc", "hashlib", "heapq", "inspect",
    "io", "itertools", "json", "keyword", "linecache", "locale", "math", "numbers", "operator", "pprint", "queue",
    "random", "re", "secrets", "shutil", "statistics", "string", "struct", "tempfile", "textwrap", "threading",
    "time", "timeit", "traceback", "types", "typing", "unicodedata", "uuid", "warnings", "zlib",
)
# fmt: on
_SUBMODULES: Final = {
    # an import of matplotlib reads a folder in the user's home, which confined code may not read
    "matplotlib": ["matplotlib.pyplot", "matplotlib.backends.backend_agg"],
    "numpy": ["numpy.linalg", "numpy.random", "numpy.fft", "numpy.polynomial", "numpy.ma"],
    "sympy": ["sympy.ntheory.modular", "sympy.solvers.diophantine", "sympy.parsing.sympy_parser"],
}
# the first use of a library loads modules and fills caches, which takes half of the time of a short sympy program
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
_NOT_PRELOADED: Final = {
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


class PreloadError(Exception):
    """A library can't be imported; the message names it."""


def preload(libraries: Iterable[str]) -> None:
    """Import the libraries and common standard modules, and warm up numpy and sympy if they are among the libraries.

    Raises:
        PreloadError: A library can't be imported.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _STANDARD_MODULES:
            importlib.import_module(name)
        for library in libraries:
            try:
                importlib.import_module(library)
            except Exception as e:  # a library's own code may raise anything
                raise PreloadError(
                    f"libraries contains {library!r}, which can't be imported ({type(e).__name__}: {e!s:.300}); "
                    "expected names as in import statements, such as yaml, not PyYAML. Correct the name, or remove it "
                    "from the list"
                ) from e
            for name in _SUBMODULES.get(library, ()):
                with contextlib.suppress(ImportError):  # other versions have other submodules
                    importlib.import_module(name)
            with contextlib.suppress(Exception):  # a failed warm-up only costs time
                exec(_WARM_UP.get(library, ""), {})  # noqa: S102 - the constant above


def preload_everything(libraries: Iterable[str]) -> None:
    """Import the modules of the standard library and of the libraries: a changed root prevents later imports.

    Modules that can't be imported are skipped. Tests, scripts and a few modules that code does not need are left out.
    """
    with warnings.catch_warnings(), Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null):
        warnings.simplefilter("ignore")
        for name in [*sorted(set(sys.stdlib_module_names) - _NOT_PRELOADED), *libraries]:
            for module in (name, *_submodules(name)):
                with contextlib.suppress(BaseException):  # a module that fails here would fail in a child too
                    importlib.import_module(module)


def _submodules(package: str) -> list[str]:
    """Import a package, and list the modules in it at any depth, without tests and scripts."""
    with contextlib.suppress(BaseException):  # a module that fails here would fail in a child too
        importlib.import_module(package)
    folders = getattr(sys.modules.get(package), "__path__", [])
    found = []
    for module in pkgutil.iter_modules(folders, f"{package}."):
        if module.name.rpartition(".")[2].strip("_") in {"test", "tests", "testing", "main", "conftest", "benchmarks"}:
            continue
        found.append(module.name)
        found += _submodules(module.name) if module.ispkg else []
    return found


_MAX_TESTS: Final = 8
_PROBE_TIMEOUT_S: Final = 30.0
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
    """Test the layers with a probe that runs in a confined child.

    Args:
        confinement: The layers to test.
        folder: Directory for the child; it is deleted afterwards.

    Returns:
        The first layer that fails, and the reason; None if nothing fails. The name "reading" instead of a layer means
        that the code can't read Python's own files.

    Raises:
        RuntimeError, TimeoutError: The probe did not run to its end.
    """
    try:
        workspace = confinement.make_workspace(folder, 0)
    except LayerError as e:
        return e.layer, str(e)
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as output, ours, theirs:
        child = os.fork()
        if child == 0:
            become_child(confinement, workspace, (output.fileno(), output.fileno(), theirs.fileno()))
        theirs.close()
        ours.settimeout(_PROBE_TIMEOUT_S)
        try:
            broken = _run_probe(confinement, workspace.user, ours, child, output.fileno())
            if broken is None and not scratch.delete(folder):
                broken = "user", "root may not delete other users' files here (no CAP_DAC_OVERRIDE)"
            return broken
        finally:
            if workspace.ruleset is not None:
                workspace.ruleset.close()
            scratch.delete(folder)


def _run_probe(
    confinement: Confinement, user: int | None, control: socket.socket, child: int, output: int
) -> tuple[str, str] | None:
    first_message = control.recv(65536)
    may_signal = may_list_files = True
    if first_message == READY:
        try:
            os.kill(child, 0)
        except PermissionError:
            may_signal = False
        try:
            with file_access_as(user):
                os.listdir(f"/proc/{child}/fd")  # noqa: PTH208 - the supervisor lists it in the same way
        except OSError:
            may_list_files = False
        readable = [] if confinement.changes_root else confinement.sample_files()
        # the probe can't find out these facts itself
        facts = f"enforced = {list(confinement.enforced)!r}\nreadable = {readable!r}\n"
        control.sendall(frame({"code": facts + _PROBE, "session": False}))
        if control.recv(1) != STARTED:
            first_message = b""
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if first_message.startswith(FAILED):
        failure = json.loads(first_message[len(FAILED) :])
        if failure["layer"] is not None:
            return failure["layer"], failure["reason"]
        raise RuntimeError(f"the self-test of the sandbox failed: {failure['reason']}")
    printed = os.pread(output, 65536, 0).decode(errors="replace")
    if exit_code != 0:
        raise RuntimeError(f"the self-test of the sandbox ended with exit code {exit_code}: {printed[-2000:]}")
    broken: dict[str, str] = json.loads(printed.splitlines()[-1])
    if not may_signal:
        broken["user"] = "root may not signal other users' processes here (no CAP_KILL)"
    if not may_list_files and "programs" in confinement.enforced:
        broken["programs"] = "the open files of a process can't be seen here, so deleted files could not be counted"
    return next(iter(broken.items()), None)


_MAX_MESSAGE: Final = 65536
_POLL_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


class ForkServer:
    """Server that forks children into slots. It also signals and limits the children, and reports when they end."""

    def __init__(self, commands: socket.socket, confinement: Confinement, root: str) -> None:
        self._commands = commands
        self._confinement = confinement
        self._root = root
        self._workspaces: dict[int, Workspace] = {}
        self._children: dict[int, int] = {}  # pid -> slot
        self._supervisor = os.getppid()

    def serve(self, facts: Mapping[str, Any]) -> None:
        """Send `facts` and execute commands until the supervisor ends or closes the socket; then kill the children."""
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
            if self._commands.fileno() in ready and not self._handle_command():
                break
        for pid in self._children:
            _kill_group(pid)

    def _handle_command(self) -> bool:
        """Execute one command; return False when the supervisor has closed the socket."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._commands, _MAX_MESSAGE, 3)
        except ConnectionError:
            return False
        if not message:
            return False
        try:
            command = json.loads(message)
            if command["do"] == "fork":
                self._fork(command["slot"], descriptors)
            else:
                self._signal_or_limit(command)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, slot: int, descriptors: list[int]) -> None:
        try:
            folder = os.path.join(self._root, str(slot))  # noqa: PTH118
            self._workspaces[slot] = self._confinement.make_workspace(folder, slot, self._workspaces.get(slot))
            pid = os.fork()
        except (OSError, LayerError) as e:
            self._send({"is": "failed", "slot": slot, "reason": f"{type(e).__name__}: {e}"})
            return
        if pid == 0:
            become_child(self._confinement, self._workspaces[slot], (descriptors[0], descriptors[1], descriptors[2]))
        self._children[pid] = slot
        self._send({"is": "forked", "slot": slot, "pid": pid, "user": self._workspaces[slot].user})

    def _signal_or_limit(self, command: Mapping[str, Any]) -> None:
        for pid, slot in self._children.items():
            if slot == command["slot"]:  # not reaped yet, so the kernel has not reused its pid
                with contextlib.suppress(OSError, ValueError):
                    if command["do"] == "signal":
                        os.kill(pid, command["signal"])
                    elif sys.platform == "linux":
                        hard = resource.prlimit(pid, resource.RLIMIT_NPROC)[1]
                        resource.prlimit(pid, resource.RLIMIT_NPROC, (command["threads"], hard))

    def _reap(self) -> None:
        while (ended := _reap_child()) is not None:
            pid, exit_code = ended
            slot = self._children.pop(pid, None)
            self._kill_orphans()
            if slot is not None:
                self._workspaces[slot].retire()
                self._send({"is": "ended", "slot": slot, "exit_code": exit_code})

    def _kill_orphans(self) -> None:
        """Kill the orphaned processes of all runs, which this process has adopted as a subreaper."""
        with contextlib.suppress(OSError):
            listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for pid in set(map(int, listed)) - self._children.keys():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._commands.send(json.dumps(message).encode())


def _reap_child() -> tuple[int, int] | None:
    """Kill the process group of an ended child, then reap the child.

    Return the child's pid and exit code; None if no child has ended.
    """
    found = None
    try:
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            _kill_group(found.si_pid)  # before reaping, while the kernel can't reuse the group's id
        pid, status = os.waitpid(found.si_pid if found is not None else -1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Run the fork server process; its arguments are the command socket's descriptor and the settings as JSON."""
    started = time.monotonic()
    commands = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _lower_priority()
    # a child replaces descriptors 0 to 3, so descriptors opened later must have higher numbers
    while os.open(os.devnull, os.O_RDONLY) <= _CONTROL_FD:
        pass
    limits, programs = ChildLimits(**settings["limits"]), settings["programs"]
    confinement = Confinement(settings["libraries"], limits, settings["disabled"], programs=programs)
    confinement.open_folders()
    sys.meta_path.append(LibraryFinder(confinement.library_folders()))
    # code could import this package from `sys.modules`, despite the kernel's confinement
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__.partition(".")[0]]:
        del sys.modules[name]
    try:
        preload(settings["preload"])
    except PreloadError as e:
        commands.send(json.dumps({"is": "broken", "reason": str(e)}).encode())
        return
    _test_layers(confinement, settings)
    gc.disable()
    gc.collect()
    gc.freeze()
    start_s = time.monotonic() - started
    facts = {"is": "up", "enforced": confinement.enforced, "missing": confinement.missing, "start_s": start_s}
    ForkServer(commands, confinement, settings["root"]).serve(facts)


def _lower_priority() -> None:
    """Make this process and code yield to other processes, such as the trainer's event loop, while CPUs are busy.

    Linux first divides the CPU among autogroups, one for each session, unless a container has a CPU cgroup of its own.
    Therefore the nice value is set for the autogroup of a new session, too; see sched(7).
    """
    os.setsid()
    with contextlib.suppress(OSError):  # a filter of this machine refuses it
        os.nice(_NICE_INCREMENT)
    for _ in range(_AUTOGROUP_ATTEMPTS):
        try:
            _lower_autogroup()
        except BlockingIOError:  # without CAP_SYS_ADMIN, the machine allows one such write in 100 ms
            time.sleep(0.1 + os.getpid() % 10 / 100)  # processes that start together retry at different times
        except OSError:  # no Linux, or no autogroups
            return
        else:
            return


def _lower_autogroup() -> None:
    Path("/proc/self/autogroup").write_text(str(_NICE_INCREMENT))


def _test_layers(confinement: Confinement, settings: Mapping[str, Any]) -> None:
    """Test the layers in real children, until no layer fails; mark each failing layer as missing.

    If the code can't read Python's files, first let the code read files as root. If that does not help, mark the layer
    "user" as missing.

    Raises:
        RuntimeError, TimeoutError: A probe did not run to its end, or layers failed in all of `_MAX_TESTS` tests.
    """
    layer, reason = "", ""
    for attempt in range(_MAX_TESTS):
        if confinement.changes_root:
            preload_everything(settings["preload"])
        broken = find_broken_layer(confinement, os.path.join(settings["root"], f"self-test-{attempt}"))  # noqa: PTH118
        if broken is None:
            return
        layer, reason = broken
        if layer != "reading":
            confinement.mark_missing(layer, reason)
        elif not confinement.grant_root_reads():
            confinement.mark_missing("user", reason)
    raise RuntimeError(f"the self-test of the sandbox failed {_MAX_TESTS} times, the last time at {layer}: {reason}")
