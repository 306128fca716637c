"""Targets of attacks: processes, servers and other runs."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

from attack_targets import Stage, Target, shallow_paths
from host_view import Process, descendants

from strands_rollout.code_tool import ExecutionResult

_FIXED = ("TracerPid", "Cpus_allowed")


class OtherProcess(Target):
    """Another process of the same user, with a secret in its arguments, environment and memory."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", "read line", self.secret],
            env={"SECRET": self.secret},
            stdin=subprocess.PIPE,
            process_group=0,
        )
        self._view = Process(self._process.pid)
        while self.secret not in self._view.text("environ"):  # before `exec`, it is a copy of this process
            pass
        self._before = self._state()
        start = int(self._view.text("stat").rpartition(")")[2].split()[47])
        self.facts |= {"pid": self._process.pid, "address": start, "length": len(self.secret) + 8}

    def _state(self) -> tuple[object, ...]:
        pid = self._process.pid
        return (
            [self._view.status(field) for field in _FIXED],
            *(self._view.text(file) for file in ("environ", "limits", "oom_score_adj")),
            os.getpriority(os.PRIO_PROCESS, pid),
        )

    def check_damage(self) -> bool:
        if self._process.poll() is not None or self._view.status("State")[:1] in "Tt":
            return True
        return self._state() != self._before

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Owner(Target):
    """This process, which owns the executor, and the executor's helpers.

    Attacks send SIGURG to this process, which only records it, and SIGUSR1 to a helper, which it kills.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        family = descendants(os.getpid())
        self._helpers = family & {Process(pid).number("PPid") for pid in family}  # only helpers have children
        self._signalled = False
        self._handler = signal.signal(signal.SIGURG, self._on_signal)
        self.facts |= {
            "pid": os.getpid(),
            "signal": signal.SIGURG,
            "signal_to_parent": signal.SIGUSR1 if stage.has_helpers else signal.SIGURG,
        }

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = True

    def check_damage(self) -> bool:
        return self._signalled or not all(process.is_alive() for process in map(Process, self._helpers))

    def close(self) -> None:
        signal.signal(signal.SIGURG, self._handler)


class Server(Target):
    """Server that records whether a client connected or sent a datagram; its unix sockets are world-writable."""

    def __init__(self, stage: Stage, family: str, kind: str = "stream") -> None:
        super().__init__(stage)
        self._was_reached = False
        unix = family in ("path", "abstract")
        kind_number = socket.SOCK_DGRAM if kind == "dgram" else socket.SOCK_STREAM
        self._socket = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, kind_number)
        path = str(stage.folder / self.name)
        address = {"path": path, "abstract": f"\0{self.name}"}.get(family, ("127.0.0.1", 0))
        self._socket.bind(address)
        if family == "path":
            Path(path).chmod(0o777)
        if kind == "stream":
            self._socket.listen()
        self._socket.setblocking(False)
        self._kind = kind
        self.facts |= {"address": self._socket.getsockname() if not unix else address}

    def check_damage(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            if self._kind == "stream":
                self._socket.accept()[0].close()
            else:
                self._socket.recv(100)
            self._was_reached = True
        return self._was_reached

    def close(self) -> None:
        self._socket.close()
        if isinstance(self.facts["address"], str) and self.facts["address"].startswith("/"):
            Path(self.facts["address"]).unlink()


_PARALLEL_CODE = """
import os, time, ctypes
secret = {secret!r}
ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)
os.makedirs("work")
with open("work/{name}.txt", "w") as file:
    file.write(secret)
print("working", flush=True)
for _ in range(300):
    if os.path.exists("work/stop"):
        break
    time.sleep(0.02)
print(open("work/{name}.txt").read(), os.listdir("work").count("foreign"))
"""


class ParallelRun(Target):
    """Run in parallel to the attack: it must be undisturbed, and its secret must stay unknown.

    The attacker knows the run's process and scratch directory, as far as the host finds them.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._expected = f"working\n{self.secret} 0\n"
        self._run: Future[ExecutionResult] = stage.start(
            _PARALLEL_CODE.format(secret=self.secret, name=self.name), timeout_s=120
        )
        self._file = self._wait_for_file(stage.scratch_root)
        pid = next((p for p in descendants(os.getpid()) if Process(p).text("comm").strip() == self.name), 0)
        self.name = f"{self.name[:-2]}-2"
        self.facts |= {"name": self.name, "pid": pid, "path": str(self._file), "folder": str(self._file.parent)}

    def _wait_for_file(self, root: Path) -> Path:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for path in shallow_paths(root):
                if path.name == f"{self.name}.txt" and path.read_text() == self.secret:
                    return path
            assert not self._run.done(), self._run.result()
            time.sleep(0.01)
        raise TimeoutError(f"the parallel run did not start: no {self.name}.txt below {root}")

    def finish(self) -> None:
        if self._file.parent.exists():
            (self._file.parent / "stop").touch()
        while not self._run.done():
            time.sleep(0.02)

    def check_damage(self) -> bool:
        return self._run.done() and self._run.result().stdout != self._expected

    def close(self) -> None:
        if not self._run.done():
            self.finish()


class EarlierRuns(Target):
    """Finished runs: the attack must find neither their code nor their output nor their files."""

    _CODES = (
        "answer = {secret!r}\nprint(answer * 3)",
        "answer = {secret!r}\n# {long}",
        "print({secret!r} * 10_000)",
        "raise ValueError({secret!r})",
        "import os\nfor folder in ('.', os.environ['HOME'], os.environ.get('TMPDIR', '.')):\n"
        "    open(os.path.join(folder, 'answer.txt'), 'w').write({secret!r})",
    )

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        for code in self._CODES:
            result = stage.start(code.format(secret=self.secret, long=self.secret * 10_000)).result()
            assert result.infra_error is None, result


class LaterRun(Target):
    """Three runs after the attack: they must find no change by the attack, in memory or in files."""

    _INSPECTION_CODE = """
import builtins, glob, importlib, json, os, random, sys, warnings
import numpy, sympy
places = [builtins, json, os, random, sys, warnings, numpy, sympy, sympy.Symbol, sympy.core.add, type(sys)]
print([getattr(place, "poison", None) for place in places], dict(os.environ), sys.path, sys.argv, print.__name__)
print(repr(sympy.sympify("x")), json.dumps([1]), sys.modules.get("poison"), warnings.filters[:3])
print(numpy.get_printoptions())
for folder in (".", os.environ["HOME"]):
    for path in glob.glob(folder + "/**", recursive=True) + glob.glob(folder + "/.*"):
        print(path)
"""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._stage = stage
        self._printed = ""

    def finish(self) -> None:
        for _ in range(3):  # the first runs may use processes forked before the attack
            result = self._stage.start(self._INSPECTION_CODE).result()
            assert result.exit_code == 0, result
            self._printed += result.stdout

    def check_damage(self) -> bool:
        return self.name in self._printed
