"""A training run from its options to its summary; start at `run_training`."""

import asyncio
import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from strands_rollout import __version__
from strands_rollout.client.transport import parse_base_url, redacted
from strands_rollout.dump.terminal import make_console, show_next
from strands_rollout.errors import ConfigError
from strands_rollout.evaluation.evaluate import SHIPPED_MODELS_EXECUTOR, playing, served_engine, start_executor
from strands_rollout.evaluation.rows import load_rows
from strands_rollout.files import write_json
from strands_rollout.integrations.wandb import check_wandb
from strands_rollout.settings import CODE_TOOL_PATH, RolloutSettings
from strands_rollout.slime_plugin.config_file import read_checked_config
from strands_rollout.train.batch import TrainingMethod
from strands_rollout.train.curves import NOT_DRAWN, can_draw, draw_run
from strands_rollout.train.options import TrainOptions
from strands_rollout.train.policy import Policy
from strands_rollout.train.reporting import TrainingProgress, WandbLog
from strands_rollout.train.rollouts import AbortFlag, RolloutCollector
from strands_rollout.train.run_folder import (
    POLICY_FILE,
    RunState,
    StepLog,
    StepRecord,
    TrainFolder,
    read_steps,
    with_end,
)
from strands_rollout.train.trainer import Trainer, WeightSync

EXIT_OK: Final = 0
EXIT_INTERRUPTED: Final = 130
_FACTS: Final = ("accuracy_start", "accuracy_end", "logprob_gap_max_step0", "logprob_gap_mean_step0")
_PACKAGES: Final = ("strands-agents", "torch", "transformers", "numpy")


def run_training(options: TrainOptions, method: TrainingMethod) -> int:
    """Train, or resume an interrupted run; the last line on stdout is the summary as JSON.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        RolloutError: An option, the model, the data, the engine or the folder can't be used, or a check failed.
    """
    if options.wandb:
        check_wandb()
    log = make_console(stderr=True)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        summary = asyncio.run(_run(options, method, log))
    except KeyboardInterrupt:
        kept = f"the same command with --out {options.out} resumes from its last checkpoint, if there is one"
        log.print(f"interrupted; {kept}", markup=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    if not options.json_only:
        start, end = summary["accuracy_start"], summary["accuracy_end"]
        if start is not None and end is not None:
            print(f"accuracy on held-out problems: {start:.1%}, after {summary['steps']} steps {end:.1%}")
    print(json.dumps(summary), flush=True)
    _draw(options, summary, log)
    if not options.json_only:
        config = ["--config", options.config] if options.config else []
        show_next("eval", "--model", options.out / "weights", *config, "--data", options.held_out)
    return EXIT_OK


async def _run(options: TrainOptions, method: TrainingMethod, log: Console) -> dict[str, Any]:
    started = time.monotonic()
    settings, folder = await _settings(options, method), TrainFolder(options.out)
    rows, held_out = load_rows(options.data), load_rows(options.held_out)
    policy = Policy(options.model_dir, options.update)
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.held())
        folder.claim(options, made_by())
        state = _restored(folder, policy, options.steps)
        if CODE_TOOL_PATH in settings.tools:
            log.print(f"code runs with isolation {await start_executor(settings.executor)!r}", highlight=False)
        base_url = await stack.enter_async_context(served_engine(options.base_url, options.model_dir.resolve()))
        log.print(f"engine at {redacted(parse_base_url(base_url))}, run in {options.out}", highlight=False)
        sync = await stack.enter_async_context(WeightSync(base_url))
        aborting = AbortFlag()
        given = {**settings.model_dump(exclude_unset=True), "should_abort": aborting}
        game = playing(base_url, options.model_dir, given, audited=False, generate=method.generate)
        player = await stack.enter_async_context(game)
        player.args.n_samples_per_prompt = options.samples_per_prompt
        collector = RolloutCollector(
            player, rows, options, sync.abort_all, aborting, keeps_aborted=method.keeps_aborted
        )
        collector.next_position, collector.waiting = state.next_position, list(state.waiting)
        steps = stack.enter_context(StepLog(folder.steps, first_step=state.step))
        shown = stack.enter_context(TrainingProgress(log, total=options.steps, done=state.step))
        wandb = stack.enter_context(WandbLog(options.out, options.to_json())) if options.wandb else None

        def on_step(record: StepRecord) -> None:
            shown.step_done(record)
            if wandb:
                wandb.append(record)

        run = (options, method, policy, player, collector, sync, folder, held_out)
        trainer = Trainer(*run, shown.phase, state.step, dict(state.facts))
        await trainer.run(steps, on_step)
        summary = _summary(options, trainer.facts, steps.records, seconds=time.monotonic() - started)
        if wandb:
            wandb.sum_up(summary)
        write_json(folder.summary, summary)
    return summary


def _restored(folder: TrainFolder, policy: Policy, steps: int) -> RunState:
    """Where the run is; the policy is that of the newest checkpoint, if there is one."""
    newest = folder.newest_checkpoint()
    if newest is None:
        return RunState(0, 0)
    policy.restore(newest / POLICY_FILE)
    state = RunState.read(newest)
    if state.step > steps:
        raise ConfigError(f"{folder.path} has {state.step} steps; expected --steps {state.step} or more")
    return state


def made_by() -> dict[str, Any]:
    """The commit of this checkout, where it is one, and the versions that decide a run's numbers.

    The commit ends in "-dirty" where a file was changed since.
    """
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # not of another project that this is installed in
        commit = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "commit": commit,
        "versions": {"strands-rollout": __version__} | {name: version(name) for name in _PACKAGES},
    }


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603


async def _settings(options: TrainOptions, method: TrainingMethod) -> RolloutSettings:
    settings = await read_checked_config(options.config, options.changes)
    if options.config is None and "executor" not in settings.model_fields_set:
        settings = settings.model_copy(update={"executor": SHIPPED_MODELS_EXECUTOR})
    if settings.fan_out and options.extra_prompts:
        raise ConfigError(
            f"{options.config} has fan_out, and partial rollouts (--extra-prompts) can't be collected of several "
            "samples, as in slime; leave out one of them"
        )
    method.check(options, settings)
    return settings


def _summary(
    options: TrainOptions, facts: dict[str, Any], records: Sequence[StepRecord], *, seconds: float
) -> dict[str, Any]:
    """The run in a few numbers; `seconds` are of this process, from its start on."""
    last = records[-1] if records else {}
    return {
        **{name: facts.get(name) for name in _FACTS},
        "steps": len(records),
        "episodes": sum(int(record.get("episodes") or 0) for record in records),
        "reward_end": last.get("reward"),
        "rollout": options.rollout,
        "ablation": options.ablation,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "out": str(options.out),
    }


def _draw(options: TrainOptions, summary: dict[str, Any], log: Console) -> None:
    if not can_draw():
        log.print(NOT_DRAWN, markup=False)
        return
    folder = TrainFolder(options.out)
    draw_run(
        with_end(read_steps(folder.steps), summary), folder.curves, title=f"{options.rollout}, seed {options.seed}"
    )
    log.print(f"curves: {folder.curves}", markup=False, soft_wrap=True)
