"""The client benchmark: the cost of an episode for its client, compared with the minimum and with other clients.

A scripted engine in a process of its own answers immediately; each measurement runs in a fresh process. Variants take
turns within a round, and each round starts with another variant.
"""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, Final

import orjson

import strands_rollout
from benchmarks.images import save_image_processor
from benchmarks.measuring import client_and_engine_core, usable_cores
from benchmarks.peer import PEER, MissingPeerError, peer_python, peer_versions
from benchmarks.script import save_scripts, write_scripts
from benchmarks.variants import (
    IMAGE_TOKENS,
    NEEDS,
    VARIANTS,
    WITH_IMAGES,
    WORKERS,
    Collector,
    Job,
    JobKind,
    Step,
)
from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

OnStep = Callable[[str, int, int], None]
"""Function that receives the next measurement's label, the number of finished measurements, and their total."""
Figures = dict[str, Any]
MEASURES: Final = ("cpu", "turns", "lag", "code", "memory", "profile")
_REPEATED_KINDS: Final[tuple[JobKind, ...]] = ("cpu", "turns")
REPOSITORY: Final = Path(__file__).resolve().parents[1]
SHIPPED_TOKENIZER_DIR: Final = Path(strands_rollout.__file__).parent / "engine" / "checkpoint"
_MIN_EPISODES: Final = 64
_TOOL_TURNS: Final = 640
# A streamed turn costs as much as twenty others. So the streaming variant, "openai", plays only these numbers of
# turns, unless it is the only variant or none of these numbers is measured.
_STREAMED_TURNS: Final = (5, 20)
_STREAMED_TOOL_TURNS: Final = 80
_MIN_STREAMED_EPISODES: Final = 2
# Measurements of these variants with more turns than this take minutes, so they run in one round only, with few
# episodes.
_MAX_REPEATED_TURNS: Final = {"openai": 0, PEER: 40}
_FEW_EPISODES: Final = {PEER: 8}
_DETAIL_TURNS: Final = 5
_PROFILE_TURNS: Final = 20
_WARM_UP_TURNS: Final = 1
_WARM_UP_SEED: Final = 1
_WORKER_TIMEOUT_S: Final = 1800.0
_ENGINE_TIMEOUT_S: Final = 10.0
_OUTPUT_TAIL_BYTES: Final = 3000
_PACKAGES: Final = (
    "strands-rollout",
    "strands-agents",
    "openai",
    "httpx",
    "httpx-aiohttp",
    "aiohttp",
    "orjson",
    "tokenizers",
    "transformers",
)


class BenchProcessError(RolloutError):
    """A process of the benchmark failed."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of a run, which measures each variant at each number of tool turns and of concurrent episodes.

    If `episodes` is None, the number of episodes depends on the turns. `code_episodes` is the number of episodes that
    run at once with the real code tool.
    """

    turns: tuple[int, ...]
    concurrency: tuple[int, ...]
    episodes: int | None
    repeats: int
    variants: tuple[str, ...]
    measures: tuple[str, ...]
    tokenizer_dir: Path
    code_episodes: int = 256
    collector: Collector = "own"

    def steps(self) -> Iterator[Step]:
        """Yield all measurements of a run, round by round; measurements that run once come last."""
        for number in range(self.repeats):
            for turns, concurrency in product(self.turns, self.concurrency):
                for kind in (kind for kind in _REPEATED_KINDS if kind in self.measures):
                    yield from self._round_steps(kind, number, turns, concurrency)
        detail_turns, profile_turns = (
            usual if usual in self.turns else max(self.turns) for usual in (_DETAIL_TURNS, _PROFILE_TURNS)
        )
        if "code" in self.measures and "ours" in self.variants:
            yield Step("lag", "ours", detail_turns, self.code_episodes, self.code_episodes, runs_code=True)
        kinds: list[JobKind] = ["lag"] if "lag" in self.measures else []
        kinds += ["rss", "traced"] if "memory" in self.measures else []
        for kind in kinds:
            yield from self._round_steps(kind, 0, detail_turns, max(self.concurrency))
        if "profile" in self.measures:
            yield from self._round_steps("profile", 0, profile_turns, max(self.concurrency))

    def _round_steps(self, kind: JobKind, number: int, turns: int, concurrency: int) -> Iterator[Step]:
        """Yield a step for each variant that is measured in this round; each round starts with another variant."""
        first = number % len(self.variants)
        for variant in (*self.variants[first:], *self.variants[:first]):
            rounds = self.repeats if turns <= _MAX_REPEATED_TURNS.get(variant, turns) else 1
            if number < rounds and self._is_measured(variant, turns, kind):
                episodes = self._episodes_of(variant, turns, concurrency)
                if kind in ("turns", "rss", "traced"):  # all episodes run at once
                    episodes = min(episodes, concurrency)
                yield Step(kind, variant, turns, concurrency, episodes, number)

    def _is_measured(self, variant: str, turns: int, kind: JobKind) -> bool:
        """Return whether to measure a variant in this way; some measurements take minutes and add little."""
        if kind == "turns":
            return variant.startswith(("ours", "gateway"))
        if variant != "openai" or self.variants == (variant,):
            return True
        return kind not in ("rss", "traced") and (turns in _STREAMED_TURNS or not {*_STREAMED_TURNS} & {*self.turns})

    def _episodes_of(self, variant: str, turns: int, concurrency: int) -> int:
        if self.episodes is not None:
            return self.episodes
        if variant == "openai":
            return min(concurrency, max(_MIN_STREAMED_EPISODES, _STREAMED_TOOL_TURNS // turns))
        if variant in _FEW_EPISODES and turns > _MAX_REPEATED_TURNS[variant]:
            return min(concurrency, _FEW_EPISODES[variant])
        return max(concurrency, _MIN_EPISODES, _TOOL_TURNS // turns)


def playable_variants(requested: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the variants whose packages are installed, and a note on each other variant.

    Raises:
        ConfigError: A variant is unknown, or no variant can play.
    """
    can_play: list[str] = []
    notes: list[str] = []
    for variant in requested:
        if variant not in VARIANTS:
            raise ConfigError(f"got the variant {variant!r}; expected some of {', '.join(VARIANTS)}")
        reason = missing_reason(variant)
        if reason is None:
            can_play.append(variant)
        else:
            notes.append(f"{variant} is left out: {reason}")
    if not can_play:
        raise ConfigError("; ".join(["none of the variants can be measured here", *notes]))
    return can_play, notes


def missing_reason(variant: str) -> str | None:
    """Return why a variant can't be measured here, None if it can; install strands-sglang if the variant needs it."""
    if variant == PEER:
        try:
            peer_python()
        except MissingPeerError as e:
            return str(e)
    if variant in NEEDS and find_spec(NEEDS[variant].module) is None:
        return f"to measure it, run: pip install 'strands-rollout[{NEEDS[variant].extra}]'"
    return None


@dataclass(frozen=True, slots=True)
class Measurement:
    """A step and the figures that its worker process measured."""

    step: Step
    figures: Figures


def run_client_benchmark(options: ClientOptions, on_step: OnStep) -> dict[str, Any]:
    """Run all measurements.

    Returns:
        The facts, medians, ratios and single measurements, in JSON's types.

    Raises:
        RolloutError: The tokenizer can't be used, or a measurement failed.
    """
    tokenizer = load_tokenizer(str(options.tokenizer_dir))
    facts = run_facts(options.tokenizer_dir, len(tokenizer))
    if PEER in options.variants:
        facts["peer"] = peer_versions()
    plan = list(options.steps())
    measurements = []
    with stage(tokenizer, options.tokenizer_dir, options.collector) as measure:
        for number, step in enumerate(plan):
            on_step(step.label, number, len(plan))
            measurements.append(Measurement(step, measure(step)))
    on_step("done", len(plan), len(plan))
    return {
        **facts,
        "collector": options.collector,
        "medians": medians(measurements),
        "ratios": all_ratios(measurements),
        "measurements": [{**asdict(one.step), "figures": one.figures} for one in measurements],
    }


def run_facts(tokenizer_dir: Path, vocab_size: int) -> dict[str, Any]:
    """Return the facts that explain the figures: versions, the machine, the command line, the tokenizer."""
    client, engine = client_and_engine_core()
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(usable_cores()) or os.cpu_count(),
            "client_core": client,
            "engine_core": engine,
            "load_before": os.getloadavg()[0],
        },
        "command": f"python -m benchmarks {shlex.join(sys.argv[1:])}",
        "tokenizer": {
            "name": "shipped" if tokenizer_dir == SHIPPED_TOKENIZER_DIR else tokenizer_dir.name,
            "vocab_size": vocab_size,
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@contextmanager
def stage(tokenizer: Any, tokenizer_dir: Path, collector: Collector = "own") -> Iterator[Callable[[Step], Figures]]:
    """Yield a function that runs a step in a process of its own, with the engines and scripts that it needs.

    Raises:
        BenchProcessError: A measurement failed.
    """
    with TemporaryDirectory() as folder, ExitStack() as stack:
        yield _Stage(tokenizer, tokenizer_dir, collector, Path(folder), stack).measure


class _Stage:
    """The scripts' files, and the engines that answer from them, made on first use."""

    def __init__(
        self, tokenizer: Any, tokenizer_dir: Path, collector: Collector, folder: Path, stack: ExitStack
    ) -> None:
        self._tokenizer, self._tokenizer_dir, self._collector = tokenizer, tokenizer_dir, collector
        self._folder, self._stack = folder, stack
        self._ports: dict[tuple[int, bool], int] = {}

    def measure(self, step: Step) -> Figures:
        client_core, _ = client_and_engine_core()
        # don't pin a worker to the core if its step starts other processes, which would share the core
        has_processes = step.runs_code or step.variant in WORKERS
        job = Job(
            step=step,
            scripts=str(self._scripts(step.turns)),
            warm_up_scripts=str(self._scripts(_WARM_UP_TURNS, _WARM_UP_SEED)),
            tokenizer=str(self._checkpoint_with_images() if step.variant == WITH_IMAGES else self._tokenizer_dir),
            port=self._port(step.turns, any_input=not step.has_script_prompts),
            core=None if has_processes else client_core,
            collector=self._collector,
        )
        return run_job(job)

    def _port(self, turns: int, *, any_input: bool) -> int:
        if (turns, any_input) not in self._ports:
            files = [self._scripts(turns), self._scripts(_WARM_UP_TURNS, _WARM_UP_SEED)]
            _, core = client_and_engine_core()
            engine = scripted_engine(files, core=None if any_input else core, any_input=any_input)
            self._ports[turns, any_input] = self._stack.enter_context(engine)
        return self._ports[turns, any_input]

    def _scripts(self, turns: int, seed: int = 0) -> Path:
        path = self._folder / f"scripts_{turns}_{seed}.json"
        if not path.exists():
            save_scripts(write_scripts(self._tokenizer, turns, seed=seed), path)
        return path

    def _checkpoint_with_images(self) -> Path:
        folder = self._folder / "images"
        if not folder.exists():
            save_image_processor(self._tokenizer_dir, folder)
        return folder


@contextmanager
def scripted_engine(scripts: Sequence[Path], *, core: int | None, any_input: bool = False) -> Iterator[int]:
    """Run the scripted engine on these files of scripts until the block ends; yield its port.

    The engine exits when its stdin closes, so it never outlives this process. A terminal's Ctrl-C does not reach the
    engine. The engine is pinned to `core` (None for any). With `any_input`, only the end of a request's input must
    match a script, and a request may have images of `IMAGE_TOKENS` tokens.

    Raises:
        BenchProcessError: The engine does not start, or a measurement in the block failed; the message has the end of
            the engine's output.
    """
    options = ["--core", str(core)] if core is not None else []
    options += ["--any-input", "--image-tokens", str(IMAGE_TOKENS)] if any_input else []
    command = [sys.executable, "-m", "benchmarks.scripted_engine", *map(str, scripts), *options]
    with (
        TemporaryFile() as output,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            env=worker_environment(),
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield _read_port(process.stdout)
        except BenchProcessError as e:
            output_tail = _output_tail(output)
            raise BenchProcessError(
                f"{e}\nthe scripted engine printed:\n{output_tail}" if output_tail else f"{e}"
            ) from e
        finally:
            process.stdin.close()
            try:
                process.wait(_ENGINE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _read_port(stdout: IO[bytes]) -> int:
    port = stdout.readline().strip()
    if not port:
        raise BenchProcessError("the scripted engine did not start")
    return int(port)


def run_job(job: Job) -> Figures:
    """Run a worker and return its figures.

    Raises:
        BenchProcessError: The worker took too long, or failed; if it failed, the message has the end of its output.
    """
    python = peer_python() if job.step.variant == PEER else sys.executable
    command = [python, "-m", "benchmarks.worker", job.to_json()]
    name = f"the measurement {job.step.kind} of {job.step.variant}"
    stdin, stdin_writer = os.pipe()  # the worker exits when the writing end closes, so it never outlives this process
    try:
        done = subprocess.run(
            command,
            stdin=stdin,
            capture_output=True,
            check=False,
            timeout=_WORKER_TIMEOUT_S,
            start_new_session=True,
            env=worker_environment(),
        )
    except subprocess.TimeoutExpired as e:
        raise BenchProcessError(f"{name} took over {_WORKER_TIMEOUT_S:.0f} s; ask for fewer --episodes") from e
    finally:
        os.close(stdin_writer)
        os.close(stdin)
    if done.returncode != 0:
        output_tail = done.stderr[-_OUTPUT_TAIL_BYTES:].decode(errors="replace")
        ending = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise BenchProcessError(f"{name} failed, {ending}:\n{output_tail}")
    figures: Figures = orjson.loads(done.stdout.splitlines()[-1])
    return figures


def worker_environment() -> dict[str, str]:
    """Return this process's environment variables, with the benchmarks on PYTHONPATH."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def _output_tail(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_TAIL_BYTES))
    return output.read().decode(errors="replace")


def medians(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Return a row for each measured combination, with the median of each number over its rounds."""
    found: dict[Step, list[Figures]] = {}
    for one in measurements:
        found.setdefault(replace(one.step, round=0), []).append(one.figures)
    rows = []
    for step, rounds in found.items():
        place = {name: value for name, value in asdict(step).items() if name != "round"}
        numbers = [name for name, value in rounds[0].items() if type(value) in (int, float)]
        values = {name: median(figures[name] for figures in rounds) for name in numbers}
        rows.append({**place, "rounds": len(rounds), **values})
    return rows


def all_ratios(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return ratios of CPU time between "ours" and each other variant, and between 80 and 20 tool turns.

    The variants "ours-..." and "gateway-..." are divided by "ours"; "ours" is divided by the other variants.
    Each ratio is the median of the rounds' ratios: the measurements of a round are at most minutes apart, so other load
    on the machine affects both sides of a ratio.
    """
    cpu: dict[tuple[int, int], dict[int, dict[str, float]]] = {}  # (turns, concurrency) -> round -> variant -> ms
    for one in measurements:
        if one.step.kind in _REPEATED_KINDS:
            rounds = cpu.setdefault((one.step.turns, one.step.concurrency), {})
            rounds.setdefault(one.step.round, {})[one.step.variant] = one.figures["cpu_ms_per_trajectory"]
    variants = list(dict.fromkeys(one.step.variant for one in measurements))
    found = []
    for turns, at_once in sorted(cpu):
        for other in variants:
            here = [(ms["ours"], ms[other]) for ms in cpu[turns, at_once].values() if {"ours", other} <= ms.keys()]
            if other.startswith(("ours-", "gateway-")):
                found += _ratio(f"{other} / ours", turns, at_once, [(theirs, plain) for plain, theirs in here])
            elif other != "ours":
                found += _ratio(f"ours / {other}", turns, at_once, here)
    for at_once in sorted({at_once for _, at_once in cpu}):
        few, many = cpu.get((20, at_once), {}), cpu.get((80, at_once), {})
        for variant in variants:
            both = [
                (many[n][variant], few[n][variant]) for n in many if variant in many[n] and variant in few.get(n, {})
            ]
            found += _ratio(f"{variant}: 80 turns / 20 turns", 80, at_once, both)
    return found


def _ratio(name: str, turns: int, concurrency: int, pairs: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    values = [a / b for a, b in pairs]
    if not values:
        return []
    spread = {"value": median(values), "least": min(values), "most": max(values), "rounds": len(values)}
    return [{"ratio": name, "turns": turns, "concurrency": concurrency, **spread}]
