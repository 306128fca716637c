"""The whole benchmark: scripts written, engine started, variants measured in turn, figures summed up.

Each measurement is a fresh process. Variants take turns within a round, and begin in another order each round.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from strands_rollout.bench.answer_script import save_scripts
from strands_rollout.bench.bench_facts import run_facts
from strands_rollout.bench.bench_options import BenchOptions
from strands_rollout.bench.bench_plan import Step, planned_steps
from strands_rollout.bench.bench_processes import run_job, scripted_engine
from strands_rollout.bench.bench_summary import Measurement, all_ratios, medians
from strands_rollout.bench.job import Job
from strands_rollout.bench.processor_cores import client_and_engine_core
from strands_rollout.bench.script_writer import write_scripts
from strands_rollout.slime_seam import load_tokenizer

OnStep = Callable[[str, int, int], None]
"""Told what is measured next, how many measurements are done, and how many there are."""
_WARM_UP_TURNS: Final = 1
_WARM_UP_SEED: Final = 1


def run_benchmark(options: BenchOptions, on_step: OnStep) -> dict[str, Any]:
    """Measure it all.

    Returns:
        Facts, medians, ratios and each single measurement, as JSON.

    Raises:
        RolloutError: The tokenizer can't be used, or a measurement failed.
    """
    tokenizer = load_tokenizer(str(options.tokenizer_dir))
    facts = run_facts(options.tokenizer_dir, len(tokenizer))
    plan = list(planned_steps(options))
    measurements = []
    with TemporaryDirectory() as folder, ExitStack() as open_until:
        engines = _Engines(options, tokenizer, Path(folder), open_until)
        for number, step in enumerate(plan):
            on_step(step.label, number, len(plan))
            measurements.append(engines.measure(step))
    on_step("done", len(plan), len(plan))
    return {
        **facts,
        "collector": options.collector,
        "medians": medians(measurements),
        "ratios": all_ratios(measurements),
        "measurements": [one.to_dict() for one in measurements],
    }


class _Engines:
    """The scripts' files, and the engines that answer from them, started when they are first needed."""

    def __init__(self, options: BenchOptions, tokenizer: Any, folder: Path, open_until: ExitStack) -> None:  # noqa: ANN401
        self._options, self._tokenizer, self._folder, self._open_until = options, tokenizer, folder, open_until
        self._ports: dict[tuple[int, bool], int] = {}

    def measure(self, step: Step) -> Measurement:
        """Run a step in a process of its own."""
        client_core, _ = client_and_engine_core()
        job = Job(
            variant=step.variant,
            kind=step.kind,
            scripts=str(self._scripts(step.turns)),
            warm_up_scripts=str(self._scripts(_WARM_UP_TURNS, _WARM_UP_SEED)),
            tokenizer=str(self._options.tokenizer_dir),
            port=self._port(step.turns, any_input=step.runs_code),
            concurrency=step.concurrency,
            episodes=step.episodes,
            # the sandbox's processes would share the core
            core=None if step.runs_code else client_core,
            runs_code=step.runs_code,
            collector=self._options.collector,
        )
        return Measurement(step, run_job(job))

    def _port(self, turns: int, *, any_input: bool) -> int:
        if (turns, any_input) not in self._ports:
            files = [self._scripts(turns), self._scripts(_WARM_UP_TURNS, _WARM_UP_SEED)]
            _, core = client_and_engine_core()
            engine = scripted_engine(files, core=None if any_input else core, any_input=any_input)
            self._ports[turns, any_input] = self._open_until.enter_context(engine)
        return self._ports[turns, any_input]

    def _scripts(self, turns: int, seed: int = 0) -> Path:
        path = self._folder / f"scripts_{turns}_{seed}.json"
        if not path.exists():
            save_scripts(write_scripts(self._tokenizer, turns, seed=seed), path)
        return path
