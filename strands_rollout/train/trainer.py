"""A training run, from its options to its summary; start at `run_training`.

`Trainer.run` is the loop: play rollouts, update the weights, load the new weights into the engine. With --async, the
next step's rollouts are played during the update.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx
import torch
from rich.console import Console

from strands_rollout import __version__
from strands_rollout.client.transport import create_client, parse_base_url, redacted
from strands_rollout.dump.terminal import make_console, show_next
from strands_rollout.errors import ConfigError, EngineError, EngineUnavailableError, TrajectoryError
from strands_rollout.files.json_files import write_json
from strands_rollout.integrations.table import check_wandb
from strands_rollout.play.engine import SHIPPED_MODEL_EXECUTOR, served_engine, shipped_model_note, start_executor
from strands_rollout.play.options import TrainOptions, merge_changes
from strands_rollout.play.player import Player, open_player
from strands_rollout.play.rows import Row, load_rows, shipped_rows
from strands_rollout.samples import Sample, run_metric
from strands_rollout.settings import CODE_TOOL_PATH, REWARD_KEY, RolloutSettings, settings_from_args
from strands_rollout.slime_plugin.inputs import read_checked_config
from strands_rollout.slime_plugin.metrics import write_step_dump
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.train.policy import Policy, TokenStats
from strands_rollout.train.rollouts import (
    AbortFlag,
    LogprobGap,
    RolloutCollector,
    StepBatch,
    TrainingMethod,
    check_gap,
    error_summary,
    held_out_metrics,
)
from strands_rollout.train.run_folder import (
    NO_MATPLOTLIB_NOTE,
    POLICY_FILE,
    RunState,
    StepLog,
    StepRecord,
    TrainFolder,
    TrainingProgress,
    WandbLog,
    can_draw,
    draw_run,
    read_steps,
    with_final_evaluation,
)

_ENGINE_TIMEOUT_S: Final = 120.0
_MAX_SHOWN: Final = 5
Rollouts: TypeAlias = tuple[list[list[Sample]], int]
"""The result of `RolloutCollector.collect`."""
EXIT_OK: Final = 0
EXIT_INTERRUPTED: Final = 130
_SUMMARY_FACTS: Final = (
    "accuracy_start",
    "accuracy_end",
    "held_out_reward_start",
    "held_out_reward_end",
    "held_out_parts_start",
    "held_out_parts_end",
    "logprob_gap_max_step0",
    "logprob_gap_mean_step0",
    "samples",
)
_RECORDED_PACKAGES: Final = ("strands-agents", "torch", "transformers", "numpy")


def run_training(options: TrainOptions, method: TrainingMethod) -> int:
    """Train, or resume an interrupted run; then print the results and draw the curves.

    The last line on stdout is the summary as JSON.

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
        remedy = f"the same command with --out {options.out} resumes from the last checkpoint, if one exists"
        log.print(f"interrupted; {remedy}", markup=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    if not options.json_only:
        _print_held_out(summary)
    print(json.dumps(summary), flush=True)
    _draw_curves(options, summary, log)
    if not options.json_only:
        show_next("view", summary["samples"])
    return EXIT_OK


def _print_held_out(summary: Mapping[str, Any]) -> None:
    start, end = summary["accuracy_start"], summary["accuracy_end"]
    if start is None or end is None:
        return
    print(f"accuracy on held-out problems: {start:.1%}, after {summary['steps']} steps {end:.1%}")
    print(f"mean reward: {summary['held_out_reward_start']:.3g}, in the end {summary['held_out_reward_end']:.3g}")
    before, after = (summary[f"held_out_parts_{when}"] or {} for when in ("start", "end"))
    for name in after:
        print(f"{name}: {f'{before[name]:.3g}' if name in before else 'none'}, in the end {after[name]:.3g}")


async def _run(options: TrainOptions, method: TrainingMethod, log: Console) -> dict[str, Any]:
    started = time.monotonic()
    settings, folder = await _read_settings(options, method, log), TrainFolder(options.out)
    rows, held_out = (_load_rows(path, options, settings) for path in (options.data, options.held_out))
    policy = Policy(options.model_dir, options.update)
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.locked())
        folder.claim(options, provenance())
        state = _restore_checkpoint(folder, policy, options.steps)
        if CODE_TOOL_PATH in settings.tools:
            log.print(f"code runs with isolation {await start_executor(settings.executor)!r}", highlight=False)
        base_url = await stack.enter_async_context(served_engine(options.base_url, options.model_dir.resolve()))
        log.print(f"engine at {redacted(parse_base_url(base_url))}, run in {options.out}", highlight=False)
        sync = await stack.enter_async_context(WeightSync(base_url))
        abort_flag = AbortFlag()
        player = await stack.enter_async_context(
            open_player(
                base_url,
                options.model_dir,
                {**settings.model_dump(exclude_unset=True), "should_abort": abort_flag},
                audited=False,
                generate=method.generate,
                workers=options.workers,
            )
        )
        player.args.n_samples_per_prompt = options.samples_per_prompt
        collector = RolloutCollector(
            player, rows, options, sync.abort_all, abort_flag, trains_aborted=method.trains_aborted
        )
        collector.next_position, collector.waiting = state.next_position, list(state.waiting)
        steps = stack.enter_context(StepLog(folder.steps, first_step=state.step))
        progress = TrainingProgress(log, total=options.steps, done=state.step, groups=options.prompts)
        stack.enter_context(progress)
        wandb = stack.enter_context(WandbLog(options.out, options.to_json())) if options.wandb else None

        def on_step(record: StepRecord) -> None:
            progress.show_step(record)
            if wandb:
                wandb.append(record)

        trainer = Trainer(
            options,
            method,
            policy,
            player,
            collector,
            sync,
            folder,
            held_out,
            progress.show_phase,
            first_step=state.step,
            facts={**state.facts, "samples": settings.dump_dir},
        )
        await trainer.run(steps, on_step)
        summary = _summary(options, trainer.facts, steps.records, seconds=time.monotonic() - started)
        if wandb:
            wandb.log_summary(summary)
        write_json(folder.summary, summary)
    return summary


def _load_rows(path: Path, options: TrainOptions, settings: RolloutSettings) -> list[Row]:
    if path.parent == shipped_rows().parent:  # shipped rows have the default keys, whatever the options say
        return load_rows(path)
    needs_label = settings.needs_labels
    return load_rows(path, prompt_key=options.input_key, label_key=options.label_key, needs_label=needs_label)


def _restore_checkpoint(folder: TrainFolder, policy: Policy, steps: int) -> RunState:
    """Load the newest checkpoint into the policy, and return the run's state, at step 0 if there is no checkpoint."""
    newest = folder.newest_checkpoint()
    if newest is None:
        return RunState(0, 0)
    policy.restore(newest / POLICY_FILE)
    state = RunState.read(newest)
    if state.step > steps:
        raise ConfigError(f"{folder.path} has {state.step} steps already; expected --steps {state.step} or more")
    return state


def provenance() -> dict[str, Any]:
    """Return the commit of this checkout and the package versions that determine a run's numbers.

    The commit ends in "-dirty" if the checkout has changes, and is None outside of a checkout.
    """
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # fails in another project's checkout
        commit = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "commit": commit,
        "versions": {"strands-rollout": __version__} | {name: version(name) for name in _RECORDED_PACKAGES},
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603


async def _read_settings(options: TrainOptions, method: TrainingMethod, log: Console) -> RolloutSettings:
    settings = await read_checked_config(options.config, merge_changes(options.changes, options.reward))
    if options.config is None and "executor" not in settings.model_fields_set:
        settings = settings.model_copy(update={"executor": SHIPPED_MODEL_EXECUTOR})
    if settings.fan_out and options.extra_prompts:
        raise ConfigError(
            "got the setting fan_out and --extra-prompts; expected only one of them: --extra-prompts makes partial "
            "rollouts, which don't support fan-out, here or in slime"
        )
    method.check(options, settings)
    if text := shipped_model_note(settings, options.config, options.base_url, options.model_dir):
        log.print(text, markup=False, soft_wrap=True)
    dump_dir = settings.dump_dir or str(TrainFolder(options.out).samples)
    return settings.model_copy(update={"dump_dir": dump_dir})


def _summary(
    options: TrainOptions, facts: dict[str, Any], records: Sequence[StepRecord], *, seconds: float
) -> dict[str, Any]:
    """Return the summary of the run; `seconds` count from its start, or from the last time it was resumed."""
    last = records[-1] if records else {}
    return {
        **{name: facts.get(name) for name in _SUMMARY_FACTS},
        "steps": len(records),
        "episodes": sum(int(record.get("episodes") or 0) for record in records),
        "reward_end": last.get("reward"),
        "rollout": options.rollout,
        "ablation": options.ablation,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "out": str(options.out),
    }


def _draw_curves(options: TrainOptions, summary: dict[str, Any], log: Console) -> None:
    if not can_draw():
        log.print(NO_MATPLOTLIB_NOTE, markup=False)
        return
    folder = TrainFolder(options.out)
    steps = read_steps(folder.steps)
    size = f"{options.prompts} x {options.samples_per_prompt} episodes"
    title = f"{options.out}: {len(steps)} steps of {size}, rollout {options.rollout}, seed {options.seed}"
    draw_run(with_final_evaluation(steps, summary), folder.curves, title=title)
    log.print(f"curves: {folder.curves}", markup=False, soft_wrap=True)


class WeightSync:
    """Client of one engine, which loads new weights and aborts the engine's requests. An async context manager."""

    def __init__(self, base_url: str) -> None:
        self._http = create_client(base_url)

    async def __aenter__(self) -> WeightSync:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def load(self, folder: Path, version: int | str) -> None:
        """Load the weights of a model folder, and empty the engine's prefix cache.

        Args:
            folder: An absolute path that the engine can read.
            version: The weight version that the engine reports from now on.

        Raises:
            EngineError: The engine refused the weights.
            EngineUnavailableError: The engine did not answer.
        """
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        # SGLang answers with status 400 and the reason if it could not load the weights
        answer = await self._post("/update_weights_from_disk", body, accepted=(200, 400))
        if not answer.get("success"):
            raise EngineError(f"the engine did not load the weights from {folder}: {answer.get('message')!r:.500}")

    async def abort_all(self) -> None:
        """Abort every running and queued request; each returns its tokens so far.

        Raises:
            EngineError: The engine refused the abort.
            EngineUnavailableError: The engine did not answer.
        """
        await self._post("/abort_request", {"abort_all": True})

    async def _post(self, path: str, body: dict[str, Any], *, accepted: Sequence[int] = (200,)) -> dict[str, Any]:
        try:
            response = await self._http.post(path, json=body, timeout=_ENGINE_TIMEOUT_S)
        except httpx.HTTPError as e:
            raise EngineUnavailableError(f"the engine did not answer {path}: {type(e).__name__} {e}") from e
        if response.status_code not in accepted:
            raise EngineError(f"the engine answered {path} with {response.status_code}: {response.text[:500]!r}")
        try:
            answer = response.json()
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}


@dataclass(slots=True)
class Trainer:
    """The loop of a training run.

    Attributes:
        held_out: The rows to measure accuracy and reward on.
        on_phase: Called with the name of each phase that begins.
        first_step: The first step to train; 0 unless the run resumes from a checkpoint.
        facts: Values for the summary, by name, such as `accuracy_start`.
    """

    options: TrainOptions
    method: TrainingMethod
    policy: Policy
    player: Player
    collector: RolloutCollector
    sync: WeightSync
    folder: TrainFolder
    held_out: Sequence[Row]
    on_phase: Callable[[str], None]
    first_step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    _is_gap_checked: bool = False

    async def run(self, log: StepLog, on_step: Callable[[StepRecord], None]) -> None:
        """Train to the last step; log a record of each step and call `on_step` with it.

        Raises:
            RolloutError: The engine, the samples or the disk fail. A resumed run continues from the last checkpoint.
        """
        await self._load_weights(self.first_step)
        pending: asyncio.Task[Rollouts] | None = None
        evaluation = await self._measure_held_out(self.first_step)
        try:
            for step in range(self.first_step, self.options.steps):
                self.on_phase(f"rollout: {self.options.prompts} x {self.options.samples_per_prompt} episodes")
                started = time.monotonic()
                groups, resumed = await (pending or self.collector.collect())
                rollout_s, next_position = time.monotonic() - started, self.collector.next_position
                plays_ahead = self.options.is_async and step + 1 < self.options.steps
                pending = asyncio.create_task(self.collector.collect()) if plays_ahead else None
                trained = await self._train(step, groups)
                if pending is not None:
                    await asyncio.wait([pending])  # loading weights would wait for the engine's requests anyway
                started = time.monotonic()
                await self._load_weights(step + 1)
                times = {"rollout_s": rollout_s, "sync_s": time.monotonic() - started}
                record = {"step": step, "weight_version": step, "resumed": resumed}
                on_step(log.append(record | evaluation | trained | times))
                self._save(step + 1, next_position)
                evaluation = await self._measure_held_out(step + 1)
        finally:
            if pending is not None:
                pending.cancel()

    async def _train(self, step: int, groups: Sequence[Sequence[Sample]]) -> dict[str, Any]:
        self.on_phase("training")
        started = time.monotonic()
        batch = await self._batch(step, groups)
        before = await asyncio.to_thread(self.policy.measure, batch.sequences)
        gap = LogprobGap.between(batch.sequences, [stats.log_probs.tolist() for stats in before])
        if step == 0 and gap.tokens:
            self.facts |= {"logprob_gap_max_step0": gap.largest, "logprob_gap_mean_step0": gap.mean}
        if not self._is_gap_checked:
            self._check_gap(step, batch, before)
        progress = step / self.options.steps
        metrics = await asyncio.to_thread(self.policy.update, batch.sequences, before, progress=progress)
        entropy = [value for stats in before for value in stats.entropy.tolist()]
        return {
            **batch.metrics(step),
            **gap.metrics(),
            "entropy": sum(entropy) / len(entropy) if entropy else None,
            **metrics.to_record(),
            "train_s": time.monotonic() - started,
        }

    async def _batch(self, step: int, groups: Sequence[Sequence[Sample]]) -> StepBatch:
        """Prepare, dump and check the step's samples, and return their batch."""
        samples = [sample for group in groups for sample in group]
        await self.method.prepare(samples, self.player)
        write = functools.partial(write_step_dump, self.player.args, "rollout", step, groups)
        await asyncio.to_thread(run_metric, "dump", write)
        if not any(sample.loss_mask and any(sample.loss_mask) and not sample.remove_sample for sample in samples):
            raise TrajectoryError(f"no sample of step {step} has a trained token; errors: {error_summary(samples)}")
        if self.options.checks and self.method.follows_contract:
            violations = [
                f"sample {sample.index}: {violation}"
                for sample in samples
                for violation in contract_violations(sample, reward_key=REWARD_KEY)
            ]
            if violations:  # slime's trainer would refuse the samples
                shown = "; ".join(violations[:_MAX_SHOWN])
                raise TrajectoryError(f"{len(violations)} violations of slime's contract in step {step}: {shown}")
        settings = settings_from_args(self.player.args)
        return await asyncio.to_thread(
            self.method.batch,
            groups,
            self.player.tokenizer,
            tool_parser=settings.tool_parser,
            checks_context=step == self.first_step or settings.mismatch_check == "every_step",
        )

    def _check_gap(self, step: int, batch: StepBatch, before: Sequence[TokenStats]) -> None:
        if self.options.checks and self.method.is_exact:
            # the first steps of a resumed run may hold only tokens of older weights, which are not compared. At step 0,
            # all tokens are compared: a missing or wrong version from the engine must not hide a difference
            all_pairs = zip(batch.sequences, before, strict=True)
            pairs = [pair for pair in all_pairs if step == 0 or pair[0].version == str(step)]
            if pairs or step == 0:
                trainer = [stats.log_probs.tolist() for _, stats in pairs]
                check_gap([sequence for sequence, _ in pairs], trainer, self.options.gap_limit, self.player.decode)
                self._is_gap_checked = True

    async def _load_weights(self, version: int) -> None:
        await asyncio.to_thread(self.policy.write_weights, self.folder.weights)
        await self.sync.load(self.folder.weights, version)

    async def _measure_held_out(self, version: int) -> dict[str, float]:
        """Return the metrics of the held-out rows under this version of the weights; {} if no evaluation is due."""
        is_last = version == self.options.steps
        if version % self.options.eval_every and not is_last:
            return {}
        started = time.monotonic()
        self.on_phase(f"held out: {len(self.held_out)} episodes")
        samples = await self.collector.play_all(self.held_out, "held out")
        metrics = held_out_metrics(samples)
        prefix = "held_out_parts/"
        parts = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
        facts = {
            "accuracy": metrics["held_out_accuracy"],
            "held_out_reward": metrics["held_out_reward"],
            "held_out_parts": parts,
        }
        for name, value in facts.items():
            self.facts |= {f"{name}_start": value} if version == 0 else {}
            self.facts |= {f"{name}_end": value} if is_last else {}
        return {**metrics, "eval_s": time.monotonic() - started}

    def _save(self, step: int, next_position: int) -> None:
        """Save a checkpoint if one is due. A resumed run repeats the rollouts played ahead with --async."""
        if step % self.options.save_every == 0 or step == self.options.steps:
            state = RunState(step, next_position, self.collector.waiting, self.facts)
            self.folder.save_checkpoint(state, self.policy.save)
