"""Compare the cost of the same episodes between the packages of several checkouts.

Each checkout has a process, and the processes play short rounds in turn: A B, B A, A B. Compared rounds are seconds
apart, so that other load on the machine affects all of them. After every few rounds, new processes start: the
memory layout alone makes a process 2% to 4% faster or slower than another.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copy
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.client import BenchProcessError, OnStep, scripted_engine
from benchmarks.measuring import client_and_engine_core, quartiles
from benchmarks.report import markdown
from benchmarks.script import TOOLS, Script, save_scripts, write_scripts
from benchmarks.variants import sampling_params
from strands_rollout.errors import ConfigError
from strands_rollout.settings import SYSTEM_PROMPT
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

Figures = dict[str, float]
"""Figures by name; names contain the units."""
Play = Callable[[Mapping[str, Any]], Figures]
"""Function that makes a process play the round that its argument describes, such as {"measure": "cpu", "turns": 5,
"episodes": 64, "concurrency": 64}."""
AGENTS: Final = ("plain", "hook", "factory", "gateway")
MEASURES: Final = ("cpu", "memory")
_PLAYER: Final = Path(__file__).with_name("checkout_player.py")
_TURNS_PER_ROUND: Final = 640
_ROUNDS_PER_PROCESS: Final = 3
_MIN_EPISODES: Final = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of checkouts.

    Attributes:
        checkouts: Folders that contain `strands_rollout`; ratios are to the first.
        turns: Tool turns of an episode; each number is compared separately.
        concurrency: Episodes at once.
        rounds: Rounds of each checkout at each number of turns.
        episodes: Episodes of a round; None for as many as take about a second. A round of "memory" has `concurrency`
            episodes instead.
        agent: "plain", "hook" (a hook that receives every event), "factory" (an agent factory) or "gateway" (an
            agent program that uses the gateway).
        settings: Rollout settings for all checkouts; they take precedence over the benchmark's own.
        tokenizer_dir: Folder of the policy's tokenizer.
        measure: "cpu", or "memory" of episodes that all run at once.
    """

    checkouts: Sequence[Path]
    turns: Sequence[int]
    concurrency: int
    rounds: int
    episodes: int | None
    agent: str
    settings: Mapping[str, Any]
    tokenizer_dir: Path
    measure: str = "cpu"

    def __post_init__(self) -> None:
        for checkout in self.checkouts:
            if not (checkout / "strands_rollout").is_dir():
                raise ConfigError(f"got the checkout {checkout}; expected a folder that contains strands_rollout")

    def round_request(self, turns: int) -> dict[str, Any]:
        """Return the request for a round of episodes with this number of turns."""
        episodes = self.episodes or max(_MIN_EPISODES, _TURNS_PER_ROUND // turns)
        if self.measure == "memory":  # all measured episodes run at once
            episodes = self.concurrency
        return {"measure": self.measure, "turns": turns, "episodes": episodes, "concurrency": self.concurrency}


def compare(comparison: Comparison, on_step: OnStep) -> list[dict[str, Any]]:
    """Play all rounds and compare the checkouts.

    Returns:
        A row for each number of turns and checkout; see `_comparison_row`.

    Raises:
        BenchProcessError: A process failed.
    """
    tokenizer = load_tokenizer(str(comparison.tokenizer_dir))
    scripts = [script for turns in comparison.turns for script in write_scripts(tokenizer, turns)]
    total = len(comparison.turns) * comparison.rounds
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_scripts(scripts, folder / "scripts.json")
        _, engine_core = client_and_engine_core()
        with scripted_engine([folder / "scripts.json"], core=engine_core) as port:
            job = _write_job(folder, comparison, scripts, port)
            for turns in comparison.turns:
                rounds: list[list[Figures]] = []
                while len(rounds) < comparison.rounds:
                    with ExitStack() as stack:
                        players = [stack.enter_context(_player(checkout, job)) for checkout in comparison.checkouts]
                        for play in players:  # the first round loads and compiles
                            play({**comparison.round_request(turns), "measure": "cpu"})
                        for number in range(len(rounds), min(len(rounds) + _ROUNDS_PER_PROCESS, comparison.rounds)):
                            done = len(rows) // len(players) * comparison.rounds + number
                            on_step(f"{turns} tool turns", done, total)
                            request = comparison.round_request(turns)
                            rounds.append(_play_in_turn(players, request, is_reversed=number % 2 == 1))
                rows += [
                    {"checkout": str(checkout), "turns": turns, **_comparison_row(rounds, at)}
                    for at, checkout in enumerate(comparison.checkouts)
                ]
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    names = [name.removesuffix("_quartiles") for name in rows[0] if name.endswith("_quartiles")]
    heads = [head for name in names for head in (name, "ratio to the first", "quartiles", "ratio of minima")]
    lines = []
    for row in rows:
        cells = [str(row["checkout"]), str(row["turns"])]
        for name in names:
            low, high = row[f"{name}_quartiles"]
            cells += [f"{row[name]:.2f}", f"{row[f'{name}_ratio']:.3f}x", f"{low:.3f} to {high:.3f}"]
            cells.append(f"{row[f'{name}_least_ratio']:.3f}x")
        lines.append(cells)
    return markdown(["checkout", "tool turns", *heads], lines)


def _comparison_row(rounds: Sequence[Sequence[Figures]], at: int) -> dict[str, Any]:
    """Return the medians of a checkout's figures over the rounds, and of their ratios to the first checkout's figures.

    Also return the quartiles of the rounds' ratios, and the ratio of both checkouts' smallest figures over all rounds.
    """
    found: dict[str, Any] = {}
    for name in rounds[0][at]:
        own, first = ([one[column][name] for one in rounds] for column in (at, 0))
        ratios = [a / b for a, b in zip(own, first, strict=True)]
        found[name] = median(own)
        found[f"{name}_ratio"] = median(ratios)
        found[f"{name}_quartiles"] = quartiles(ratios)
        found[f"{name}_least_ratio"] = min(own) / min(first)
    return found


def _play_in_turn(players: Sequence[Play], request: Mapping[str, Any], *, is_reversed: bool) -> list[Figures]:
    """Play a round, in reverse order if `is_reversed`; return the figures in the order of `players`."""
    order = list(range(len(players)))
    figures = {at: players[at](request) for at in (reversed(order) if is_reversed else order)}
    return [figures[at] for at in order]


def _write_job(folder: Path, comparison: Comparison, scripts: Sequence[Script], port: int) -> Path:
    """Write the processes' job to a file and return its path.

    The job contains the values of the package's constants, because their names differ between versions.
    """
    core, _ = client_and_engine_core()
    job = {
        "scripts": [asdict(script) for script in scripts],
        "tool": TOOLS[0]["function"],
        "system_prompt": SYSTEM_PROMPT,
        "sampling_params": sampling_params(),
        "agent": comparison.agent,
        "settings": dict(comparison.settings),
        "tokenizer": str(comparison.tokenizer_dir),
        "port": port,
        "core": core,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    copy(_PLAYER, folder)  # the other files of its folder would shadow installed packages of the same name
    return path


@contextmanager
def _player(checkout: Path, job: Path) -> Iterator[Play]:
    """Start a process on a checkout's package and yield its `Play`; the process ends when the block does."""
    path = os.pathsep.join([str(checkout), str(job.parent)])
    command = [sys.executable, "-c", f"import asyncio, {_PLAYER.stem} as player; asyncio.run(player.main())"]
    environment = {**os.environ, "PYTHONPATH": path, "CHECKOUT_PLAYER_JOB": str(job)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=job.parent
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def play(request: Mapping[str, Any]) -> Figures:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
            if not line:
                raise BenchProcessError(f"the process on {checkout} ended; see its output above")
            figures: Figures = json.loads(line)
            return figures

        yield play
