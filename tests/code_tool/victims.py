"""Other runs of the same executor: one that goes on at the same time, one that is over."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path

from attack_targets import Stage, Target, shallow_paths
from host_view import Process, descendants

from strands_rollout.sandbox import ExecutionResult

_WORK = """
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


class Neighbour(Target):
    """A run that goes on beside the attack. It must end as if it had been alone, and nothing of it may be known.

    The attacker knows its process and its scratch directory, as far as the host can tell them.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stopped = False
        self._expected = f"working\n{self.secret} 0\n"
        self._run: Future[ExecutionResult] = stage.start(_WORK.format(secret=self.secret, name=self.name))
        self._file = self._wait_for_file(stage.scratch_root)
        pid = next((p for p in descendants(os.getpid()) if Process(p).text("comm").strip() == self.name), 0)
        self._victim = self.name
        self.name = f"{self.name[:-2]}-2"
        self.facts |= {"name": self.name, "victim": self._victim, "pid": pid, "path": str(self._file)}
        self.facts |= {"folder": str(self._file.parent)}

    def _wait_for_file(self, root: Path) -> Path:
        give_up_at = time.monotonic() + 10
        while time.monotonic() < give_up_at:
            for path in shallow_paths(root):
                if path.name == f"{self.name}.txt" and path.read_text() == self.secret:
                    return path
            assert not self._run.done(), self._run.result()
            time.sleep(0.01)
        raise TimeoutError(f"no run beside the attack has begun: no {self.name}.txt below {root}")

    def finish(self) -> None:
        if self._file.parent.exists():
            (self._file.parent / "stop").touch()
        try:
            self._run.result(timeout=2)
        except TimeoutError:  # it was stopped; this one continues
            os.kill(self.facts["pid"], signal.SIGCONT)
            self._stopped = True
            self._run.result(timeout=15)

    def seen(self) -> bool:
        return self._stopped or (self._run.done() and self._run.result().stdout != self._expected)

    def close(self) -> None:
        if not self._run.done():
            self.finish()


class EarlierRuns(Target):
    """Runs that are over: neither their code nor their output nor their files may be found by a later one."""

    _CODES = (
        "answer = {secret!r}\nprint(answer * 3)",
        "answer = {secret!r}\n# {long}",
        "print({secret!r} * 10_000)",
        "raise ValueError({secret!r})",
        "import os\nfor folder in ('.', os.environ['HOME'], os.environ.get('TMPDIR', '.')):\n"
        "    open(os.path.join(folder, 'answer.txt'), 'w').write({secret!r})",
    )

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        for code in self._CODES:
            result = stage.start(code.format(secret=self.secret, long=self.secret * 10_000)).result()
            assert result.infra_error is None, result


class LaterRun(Target):
    """A run that is still to come: nothing that an earlier one changed, in memory or in files, may be found there."""

    _LOOK = """
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
        super().__init__()
        self._stage = stage
        self._printed = ""

    def finish(self) -> None:
        for _ in range(3):  # a prepared process may have been there before
            result = self._stage.start(self._LOOK).result()
            assert result.exit_code == 0, result
            self._printed += result.stdout

    def seen(self) -> bool:
        return self.name in self._printed
