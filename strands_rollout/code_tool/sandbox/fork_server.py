"""The fork server: a process that has imported everything, and does nothing but fork children and reap them.

It never sees code or output, so that no child inherits another run's. Its one command socket comes from the supervisor,
which sends JSON messages, one per packet:

- `{"do": "fork", "place": 3}` with three descriptors: stdout, stderr, control
- `{"do": "signal", "place": 3, "signal": 9}`
- `{"do": "limit", "place": 3, "threads": 200}`: the soft RLIMIT_NPROC

and receives `{"is": "up", ...}` once, `{"is": "forked", "place": 3, "pid": 4711, "user": null}`, `{"is": "ended",
"place": 3, "exit_code": -9}`, and `{"is": "failed", "place": 3, "reason": ...}`. It ends when the supervisor does.

Before it is up it tries the layers of confinement in a real child: none is promised that does not hold.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from strands_rollout.code_tool.sandbox import scratch
from strands_rollout.code_tool.sandbox.child import FAILED, READY, STARTED, become_child
from strands_rollout.code_tool.sandbox.confinement import Confinement, LayerError, LibraryFinder, Place
from strands_rollout.code_tool.sandbox.kernel import ChildLimits, prctl
from strands_rollout.code_tool.sandbox.protocol import frame

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
    *("antigravity", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "this", "tkinter", "turtle"),
    *("turtledemo", "venv"),
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
            broken = _verdict(confinement, ours, child, output.fileno())
            if broken is None and not scratch.delete(folder):
                broken = "user", "root may not delete other users' files here (no CAP_DAC_OVERRIDE)"
            return broken
        finally:
            if place.ruleset is not None:
                place.ruleset.close()
            scratch.delete(folder)


def _verdict(confinement: Confinement, control: socket.socket, child: int, output: int) -> tuple[str, str] | None:
    greeting = control.recv(65536)
    may_signal = True
    if greeting == READY:
        try:
            os.kill(child, 0)
        except PermissionError:
            may_signal = False
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
        self._places: dict[int, Place] = {}
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
            if index is not None:
                self._kill_orphans()
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
    confinement = Confinement(settings["libraries"], ChildLimits(**settings["limits"]), settings["disabled"])
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
