"""Metrics of a step: slime's logging hooks `log_rollout` and `log_eval`, and the functions that compute the metrics.

This module names the metrics. They go to a log line, wandb and TensorBoard; wandb and slime's logging may be absent.
The hooks also log a table of transcripts to wandb, and write the step's first samples to a file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from strands_rollout.agent.limits import StopReason
from strands_rollout.code_tool.sandbox.code_runner import shorten
from strands_rollout.dump import TokenTexts, write_dump
from strands_rollout.log_once import log_once
from strands_rollout.samples import FinishedSample, SlimeArgs, finished_samples, finite_number, parts_of, run_metric
from strands_rollout.secret_mask import find_secrets, mask_values
from strands_rollout.settings import settings_from_args
from strands_rollout.slime_plugin import evaluations, workers
from strands_rollout.slime_plugin.drift import DriftMeter, EpisodeDrift, measure_some, totals_of
from strands_rollout.slime_plugin.reward_groups import known_staleness, raise_on_failed_groups
from strands_rollout.slime_plugin.sample_writer import TRUNCATED_REASONS
from strands_rollout.slime_plugin.slime_adapter import tokenizer_of

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
LogToWandb = Callable[[Mapping[str, Any]], object]
Samples = Sequence[FinishedSample]
PER_SAMPLE: Final = (
    "turns",
    "tool_iterations",
    "tool_calls",
    "parse_failures",
    "tool_errors",
    "tool_timeouts",
    "unknown_tools",
    "tool_s",
    "generate_s",
    "duration_s",
    "sampled_tokens",
    "stale_tokens",
    "dropped_sampled_tokens",
    "aborts",
    "resumes",
    "engine_aborts",
)
"""Facts that are one number per sample; each is logged as a distribution of the same name."""
STATUSES: Final = ("completed", "truncated", "failed", "aborted")
TRUNCATING: Final = tuple(str(reason) for reason in StopReason if reason in TRUNCATED_REASONS)
# the packages of slime's metrics and logging: in the newest slime, and in releases up to 0.3.1
_SLIME_PACKAGES: Final = ("slime.observability", "slime.utils")
_FIRST_STEPS: Final[dict[str, int]] = {}  # the first step in this process, by metric prefix
_MAX_SHARE_TOO_OLD: Final = 0.1
_NOT_LOGGED: Final = "%s is set, but has no effect on this package's metrics: %s"


def log_rollout(
    rollout_id: int,
    args: SlimeArgs,
    samples: Iterable[Any],  # of slime's or any other class; a fan-out's samples may be in a list of their own
    rollout_extra_metrics: Mapping[str, Any] | None,  # noqa: ARG001 - slime's signature; slime logs them
    rollout_time: float,  # noqa: ARG001 - slime's signature; slime logs it
) -> bool:
    """Log a training rollout under `rollout/agent/`; slime's `--custom-rollout-log-function-path`.

    With the setting `dump_dir`, also write the rollout's first samples to a file (see `write_step_dump`). A rollout
    that slime replays from a file (`--load-debug-rollout-data`) is neither logged nor written.

    Returns:
        False, so that slime logs its own metrics as well.

    Raises:
        FailedGroupsError: No sample of the step can be trained, and too many groups have failed in a row or an episode
            worker keeps dying; see `raise_on_failed_groups`.
    """
    run_metric("settings", functools.partial(_check_staleness_setting, args))
    run_metric("rollout", lambda: _log_step(rollout_id, args, {"rollout/agent": samples}, "rollout/step"))
    raise_on_failed_groups(args, samples)
    return False


def log_eval(
    rollout_id: int,
    args: SlimeArgs,
    data: MutableMapping[str, dict[str, Any]],
    extra_metrics: Mapping[str, Any] | None,  # noqa: ARG001 - slime's signature; slime logs them
) -> bool:
    """Log an evaluation under `eval/<dataset>/agent/`; slime's `--custom-eval-rollout-log-function-path`.

    With the setting `dump_dir`, also write the first samples of each data set to a file (see `write_step_dump`).

    A sample that failed, was aborted or was not graded is not a wrong answer. For example, a sample is not graded if a
    judge was unavailable or the row has no label. All these samples are removed from `data`, from which slime computes
    its own metrics next. A data set that has only such samples is removed too, and logged as an error. With slime's
    `--log-passrate`, the pass rates are logged here, and slime's own are turned off.

    Args:
        rollout_id: slime's number of the step.
        args: slime's args.
        data: The results of slime's evaluation by data set: `rewards` and, if there are any, `samples`. Changed in
            place.
        extra_metrics: Ignored.

    Returns:
        False, so that slime logs its own metrics as well. Nothing is raised.
    """
    with contextlib.ExitStack() as stack:
        write = run_metric("wandb", lambda: stack.enter_context(evaluations.wandb_run_of_training()))
        run_metric("eval", lambda: _log_step(rollout_id, args, _samples_by_prefix(data), "eval/step", write))
        rates = run_metric("missing", functools.partial(_prepare_for_slime, args, data))
        run_metric("evaluation", lambda: _log_evaluation(rollout_id, args, data, rates or {}, write))
    return False


def _log_evaluation(
    rollout_id: int, args: SlimeArgs, data: Mapping[str, Any], rates: Metrics, write: LogToWandb | None
) -> None:
    # `write` logs to the wandb run of a training, where slime itself does not log the means
    numbers = rates | (evaluations.mean_metrics(data) if write is not None else {})
    if not numbers:
        return
    step = numbers["eval/step"] = _step_of(rollout_id, args, "eval/step")
    logger.info("pass rates eval/step=%s %s", step, " ".join(f"{name}={value:.4g}" for name, value in rates.items()))
    run_metric("wandb", lambda: _log_to_wandb(args, numbers, {}, write))
    run_metric("tensorboard", lambda: _log_to_tensorboard(args, numbers, "eval/step"))


def _samples_by_prefix(data: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"eval/{name}/agent": result.get("samples") for name, result in data.items()}


def _prepare_for_slime(args: SlimeArgs, data: MutableMapping[str, dict[str, Any]]) -> Metrics:
    """Remove samples without a graded answer, and replace rewards by numbers where slime's own metrics need this.

    Returns:
        The pass rates of all data sets under slime's names, if slime's `--log-passrate` is set; otherwise {}.
    """
    has_pass_rates, rates = evaluations.take_over_pass_rates(args), dict[str, float]()
    for name in list(data):
        kept = _drop_missing(data, name)
        if has_pass_rates and name in data:
            rewards = data[name].get("rewards") or ()
            positions = range(len(rewards)) if kept is None else kept
            size = evaluations.samples_per_problem(args, name)
            found = evaluations.pass_rates(zip(positions, rewards, strict=True), size)
            rates |= {f"eval/{name}-{rate}": value for rate, value in found.items()}
    if getattr(args, "reward_key", None):
        return rates
    # slime reads each reward again and rounds it; without `--reward-key`, it would round a dict, which ends the run
    for result in data.values():
        for sample, reward in zip(result.get("samples") or (), result.get("rewards") or (), strict=False):
            if isinstance(sample.reward, Mapping):
                sample.reward = reward
    return rates


def _drop_missing(data: MutableMapping[str, dict[str, Any]], name: str) -> list[int] | None:
    """Remove samples without a graded answer; log their number. If no sample is left, the data set is removed.

    Returns:
        The positions of the remaining samples; None if nothing was removed, or if the whole data set was.
    """
    result = data[name]
    samples = finished_samples(result.get("samples"))
    missing = [sample.is_missing for sample in samples]
    if not any(missing) or len(samples) != len(result.get("rewards") or ()):
        return None
    lost = next(sample for sample in reversed(samples) if sample.is_missing)
    last = lost.facts.error or lost.reward_details.get("error")
    level = logging.ERROR if all(missing) else logging.WARNING
    message = "event=evaluation_incomplete data_set=%s samples=%d missing=%d last_error=%s"
    logger.log(level, message, name, len(samples), sum(missing), last)
    if all(missing):
        del data[name]  # slime would divide by zero
        return None
    kept = [position for position, is_missing in enumerate(missing) if not is_missing]
    for key in ("rewards", "truncated", "samples"):
        if isinstance(result.get(key), list):
            result[key] = [result[key][position] for position in kept]
    return kept


def _check_staleness_setting(args: SlimeArgs) -> None:
    limit = settings_from_args(args).max_sample_staleness
    if limit is not None and not getattr(args, "custom_reward_post_process_path", None):
        flag = "--custom-reward-post-process-path strands_rollout.normalize_rewards"
        message = "max_sample_staleness is %s and has no effect without slime's %s"
        log_once(logger, logging.WARNING, message, limit, flag)


def _step_of(rollout_id: int, args: SlimeArgs, step_key: str) -> int:
    """Return the step to log under: slime's or, in a job that only evaluates a checkpoint, the checkpoint's."""
    if step_key.startswith("eval") and (step := evaluations.checkpoint_step()) is not None:
        return step
    compute_step = _slime_function("metric_utils", "compute_rollout_step")
    step = None if compute_step is None else run_metric("step", lambda: int(compute_step(args, rollout_id)))
    return rollout_id if step is None else step


def _log_step(
    rollout_id: int,
    args: SlimeArgs,
    samples_by_prefix: Mapping[str, Any],
    step_key: str,
    write: LogToWandb | None = None,
) -> None:
    if getattr(args, "load_debug_rollout_data", None):
        return  # slime logs nothing for a rollout that it replays from a file
    step = _step_of(rollout_id, args, step_key)
    reward_key = getattr(args, "reward_key", None)
    if step_key.startswith("eval"):
        reward_key = getattr(args, "eval_reward_key", None) or reward_key
    numbers: Metrics = {}
    tables: dict[str, Table] = {}
    secrets = find_secrets(os.environ, getattr(args, "strands_rollout", None))
    for prefix, raw_samples in samples_by_prefix.items():
        samples = run_metric("samples", functools.partial(finished_samples, raw_samples)) or []
        groups = {name: functools.partial(group, samples) for name, group in GROUPS.items()}
        groups["drift"] = functools.partial(_measure_drift, args, samples, prefix, rollout_id)
        if prefix.startswith("eval/"):
            groups["answers"] = functools.partial(answer_metrics, samples)
        else:
            groups["staleness"] = functools.partial(staleness_metrics, args, samples)
        for name, group in groups.items():
            numbers |= {f"{prefix}/{metric}": value for metric, value in (run_metric(name, group) or {}).items()}
        table = functools.partial(transcript_rows, samples, step=step, reward_key=reward_key, secrets=secrets)
        if rows := run_metric("transcripts", table):
            tables[f"{prefix}/transcripts"] = Table(COLUMNS, rows)
        name = prefix.removesuffix("/agent").replace("/", "-")
        run_metric("dump", functools.partial(write_step_dump, args, name, rollout_id, raw_samples))
    pairs = " ".join(f"{name}={value:.4g}" for name, value in numbers.items())
    logger.info("agent metrics rollout_id=%s %s=%s %s", rollout_id, step_key, step, pairs)
    if numbers:
        numbers[step_key] = step
        run_metric("wandb", lambda: _log_to_wandb(args, numbers, tables, write))
        run_metric("tensorboard", lambda: _log_to_tensorboard(args, numbers, step_key))


def _measure_drift(args: SlimeArgs, samples: Sequence[FinishedSample], prefix: str, rollout_id: int) -> Metrics:
    """Return the metrics of drift; in the first step or with `mismatch_check: every_step`, also of mismatch."""
    first = next((sample for sample in samples if sample.turn_bounds), None)
    if first is None:
        return {}
    settings = settings_from_args(args)
    is_first_step = _FIRST_STEPS.setdefault(prefix, rollout_id) == rollout_id
    meter = DriftMeter(
        tokenizer_of(args, first.sample),
        tool_parser=settings.tool_parser,
        checks_context=is_first_step or settings.mismatch_check == "every_step",
    )
    drifts = measure_some(samples, meter)
    if meter.template_fault is not None:
        log_once(logger, logging.WARNING, "context is not compared with the chat template: %s", meter.template_fault)
    for drift in drifts:
        if drift.mismatches:  # every mismatch is logged, since a correct run has none
            logger.warning(
                "context is not what the chat template renders sample_index=%s token=%d tokens=%d: run "
                "`strands-rollout drift` on a dump of the sample for details",
                drift.index,
                drift.mismatches[0].position,
                drift.mismatched_tokens,
            )
    return drift_metrics(drifts)


def _log_to_wandb(
    args: SlimeArgs, numbers: Metrics, tables: Mapping[str, Table], write: LogToWandb | None = None
) -> None:
    """Log numbers and tables in one call; as in slime's calls, the step is one of the numbers, not wandb's own step."""
    if write is None and not getattr(args, "use_wandb", False):
        return
    import wandb

    if write is None and wandb.run is None:
        log_once(logger, logging.WARNING, _NOT_LOGGED, "--use-wandb", "this process has no wandb run")
        return
    wandb_tables = {
        name: wandb.Table(columns=list(table.columns), data=list(table.rows)) for name, table in tables.items()
    }
    (write or wandb.log)({**numbers, **wandb_tables})


def _log_to_tensorboard(args: SlimeArgs, numbers: Metrics, step_key: str) -> None:
    """Log the numbers through slime's own logging, which owns TensorBoard's writer."""
    if not getattr(args, "use_tensorboard", False):
        return
    log = _slime_function("logging_utils", "log")
    if log is None:
        places = " or ".join(f"{package}.logging_utils" for package in _SLIME_PACKAGES)
        why = f"slime has loaded no {places} with a function log"
        log_once(logger, logging.WARNING, _NOT_LOGGED, "--use-tensorboard", why)
        return
    # wandb already has the numbers, together with the tables
    without_wandb = Namespace(**{**vars(args), "use_wandb": False})
    log(without_wandb, numbers, step_key)


def _slime_function(module: str, name: str) -> Callable[..., Any] | None:
    candidates = (getattr(sys.modules.get(f"{package}.{module}"), name, None) for package in _SLIME_PACKAGES)
    return next((function for function in candidates if function is not None), None)


def distribution(name: str, values: Iterable[float | None]) -> Metrics:
    """Return mean, 50th, 90th and 99th percentile (interpolated) and maximum of the values that are not None.

    Each metric is named `<name>/<statistic>`. If there are no such values, return {}.
    """
    present = [value for value in values if value is not None]
    if not present:
        return {}
    p50, p90, p99 = np.quantile(present, [0.5, 0.9, 0.99]).tolist()
    statistics = {"mean": float(np.mean(present)), "p50": p50, "p90": p90, "p99": p99, "max": float(max(present))}
    return {f"{name}/{statistic}": value for statistic, value in statistics.items()}


def shares(name: str, values: Iterable[str | None], known: Iterable[str] = ()) -> Metrics:
    """Return the share of each value among the values that are not None.

    `known` values that are absent have the share 0.0. If there are no values, return {}.
    """
    counts = Counter(value for value in values if value is not None)
    total = counts.total()
    return {f"{name}/{value}": counts[value] / total for value in dict.fromkeys([*known, *counts])} if total else {}


def per_sample_metrics(samples: Samples) -> Metrics:
    """Return the distribution of each fact in `PER_SAMPLE`, and the number of samples."""
    metrics: Metrics = {"samples": float(len(samples))} if samples else {}
    for name in PER_SAMPLE:
        metrics |= distribution(name, [getattr(sample.facts, name) for sample in samples])
    return metrics


def ending_metrics(samples: Samples) -> Metrics:
    """Return the shares of stop reasons, of statuses, of the causes of truncation and of samples removed from training.

    Also return the number of samples without a label, or whose reward failed.
    """
    reasons, statuses = [sample.facts.stop_reason for sample in samples], [sample.status for sample in samples]
    cut = [reason for reason, status in zip(reasons, statuses, strict=True) if status == "truncated"]
    removals = [sample.is_removed for sample in samples if sample.status is not None]
    return {
        **shares("stop_reason", reasons, map(str, StopReason)),
        **shares("truncation", cut, TRUNCATING),
        **shares("status", statuses, STATUSES),
        **_mean("removed", [is_removed for is_removed in removals if is_removed is not None]),
        **({"ungraded": float(sum(sample.is_ungraded for sample in samples))} if samples else {}),
    }


def _mean(name: str, values: Sequence[float]) -> Metrics:
    return {name: sum(values) / len(values)} if values else {}


def budget_metrics(samples: Samples) -> Metrics:
    """Return the distribution of each budget's used share (0 to 1), over the samples with a limit for that budget."""
    metrics: Metrics = {}
    budgets = [sample.facts.budgets or {} for sample in samples]
    for name in _all_keys(budgets):
        metrics |= distribution(f"budget/{name}", [finite_number(shares_used.get(name)) for shares_used in budgets])
    return metrics


def code_metrics(samples: Samples) -> Metrics:
    """Return the metrics of the code tool: seconds as distributions over the samples, counts as totals."""
    metrics: Metrics = {}
    counts = [sample.facts.code or {} for sample in samples]
    for name in _all_keys(counts):
        values = [value for count in counts if (value := finite_number(count.get(name))) is not None]
        if name.endswith("_s"):
            metrics |= distribution(f"code/{name}", values)
        elif values:
            metrics[f"code/{name}"] = sum(values)
    if {"code/calls", "code/timeouts", "code/killed"} <= metrics.keys():
        metrics["code/finished"] = metrics["code/calls"] - metrics["code/timeouts"] - metrics["code/killed"]
    return metrics


def gateway_metrics(samples: Samples) -> Metrics:
    """Return the distributions of requests, repeats, forks and refusals, for samples whose episode used the gateway."""
    facts = [gateway for sample in samples if (gateway := sample.facts.gateway) is not None]
    counts = {name: [gateway.get(name) for gateway in facts] for name in ("requests", "repeats", "forks")}
    refused = [sum(gateway["refused"].values()) for gateway in facts if isinstance(gateway.get("refused"), Mapping)]
    named = (counts | {"refused": refused}).items()
    return {name: value for key, values in named for name, value in distribution(f"gateway/{key}", values).items()}


def weight_metrics(samples: Samples) -> Metrics:
    """Return the distributions of each sample's number of weight versions, and of its newest minus its oldest version.

    A sample counts for the difference only if its versions are integers of one version numbering.
    """
    return {
        **distribution("weight_versions", [len(sample.weight_versions) or None for sample in samples]),
        **distribution("weight_version_spread", [sample.weight_version_spread for sample in samples]),
    }


def staleness_metrics(args: SlimeArgs, samples: Samples) -> Metrics:
    """Return the share of samples that are older than `max_sample_staleness` allows.

    Return {} if that setting is null or there are no samples.

    A share of more than a tenth is logged as a warning, since the engines have generated these samples for nothing.
    """
    limit = settings_from_args(args).max_sample_staleness
    if limit is None or not samples:
        return {}
    share = float(np.mean([versions > limit for versions in known_staleness([each.sample for each in samples])]))
    if share > _MAX_SHARE_TOO_OLD:
        logger.warning(
            "event=samples_too_old share=%.2f samples=%d max_sample_staleness=%d: samples wait too long for training; "
            "train on more GPUs, lower --sglang-server-concurrency, or raise the setting. With "
            "--rollout-function-path strands_rollout.generate_rollout_fully_async, fewer groups wait",
            share,
            len(samples),
            limit,
        )
    return {"too_old": share}


def answer_metrics(samples: Samples) -> Metrics:
    """Return the number of samples without a graded answer, and the mean `acc` of the graded samples that have one."""
    answers = [finite_number(sample.reward_details.get("acc")) for sample in samples if not sample.is_missing]
    missing = {"missing": float(sum(sample.is_missing for sample in samples))} if samples else {}
    return missing | _mean("accuracy", [answer for answer in answers if answer is not None])


def part_metrics(samples: Samples) -> Metrics:
    """Return the distribution of each part of the rewards, by its key `parts/NAME`."""
    parts = parts_of(sample.reward_details for sample in samples if not sample.is_missing)
    return {key: number for name, values in parts.items() for key, number in distribution(name, values).items()}


def slowest_metrics(samples: Samples) -> Metrics:
    """Return the seconds that the slowest sample took in all, and in generation, tools, reward and other work.

    Only samples whose facts have `duration_s` are compared; of a fan-out, only the main agent's sample has it. The
    seconds of tools that ran concurrently are added up, so the parts may sum to more than the total; then `other_s` is
    0.
    """
    durations = [(sample.facts.duration_s, sample) for sample in samples]
    timed = [(seconds + (sample.score_s or 0.0), sample) for seconds, sample in durations if seconds is not None]
    if not timed:
        return {}
    total_s, slowest = max(timed, key=lambda entry: entry[0])
    facts, score_s = slowest.facts, slowest.score_s or 0.0
    parts = {"generate_s": facts.generate_s or 0.0, "tool_s": facts.tool_s or 0.0, "score_s": score_s}
    other_s = max(0.0, total_s - sum(parts.values()))
    return {f"slowest/{name}": value for name, value in {"total_s": total_s, **parts, "other_s": other_s}.items()}


def drift_metrics(drifts: Sequence[EpisodeDrift]) -> Metrics:
    """Return the metrics of drift: tokens per sample, totals by kind and, if contexts were compared, mismatches."""
    if not drifts:
        return {}
    totals = totals_of(drifts)
    return {
        **distribution("drift_tokens", [drift.turn_drift for drift in drifts]),
        **distribution("drift_share", [drift.turn_drift / drift.sampled_tokens for drift in drifts]),
        **distribution("text_drift_tokens", [drift.text_drift for drift in drifts]),
        **distribution("off_policy_tokens", [drift.off_policy for drift in drifts]),
        "drift_samples": float(totals.drifted_episodes),
        "drift_samples_share": totals.drifted_share,
        "drift_measured": float(totals.episodes),
        **{f"drift_kind/{name.replace(' ', '_')}": float(count) for name, count in totals.classes.items()},
        **_mismatch_metrics([drift.mismatched_tokens for drift in drifts if drift.mismatches is not None]),
    }


def _mismatch_metrics(tokens: Sequence[int]) -> Metrics:
    """Return the metrics of mismatch from the number of differing tokens of each compared sample."""
    if not tokens:
        return {}
    mismatched = sum(map(bool, tokens))
    return {
        **distribution("mismatch_tokens", tokens),
        "mismatch_samples": float(mismatched),
        "mismatch_samples_share": mismatched / len(tokens),
        "mismatch_measured": float(len(tokens)),
    }


def worker_metrics(samples: Samples) -> Metrics:
    """Return the seconds that samples waited for a worker, and each worker's CPU use, episodes and restarts.

    Return {} if no sample was played on a worker.
    """
    waits = distribution("queue_s", [sample.facts.queue_s for sample in samples])
    return waits | workers.pool_metrics() if waits else waits


GROUPS: Final[Mapping[str, Callable[[Samples], Metrics]]] = {
    "per_sample": per_sample_metrics,
    "ending": ending_metrics,
    "budget": budget_metrics,
    "code": code_metrics,
    "gateway": gateway_metrics,
    "weights": weight_metrics,
    "score": lambda samples: distribution("score_s", [sample.score_s for sample in samples]),
    "slowest": slowest_metrics,
    "parts": part_metrics,
    "workers": worker_metrics,
}
"""Groups of metrics whose functions take only the samples; a failure in one group does not affect the others."""


def _all_keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(key) for mapping in mappings for key in mapping))


MAX_ROWS: Final = 8
MAX_PROMPT_CHARS: Final = 2000
MAX_RESPONSE_CHARS: Final = 8000
MAX_LABEL_CHARS: Final = 500
TEXT_COLUMNS: Final = ("prompt", "response", "label")
SAMPLE_COLUMNS: Final = (
    "index",
    "group",
    "status",
    "stop reason",
    "reward",
    "turns",
    "tool calls",
    "weight versions",
    *TEXT_COLUMNS,
)
COLUMNS: Final = ("step", *SAMPLE_COLUMNS[:2], "why", *SAMPLE_COLUMNS[2:])

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def transcript_rows(
    samples: Sequence[FinishedSample], *, step: int, reward_key: str | None, secrets: Collection[str] = ()
) -> list[list[Cell]]:
    """Return at most `MAX_ROWS` rows of `COLUMNS`, in the order of the samples.

    The rows are the samples with the best, the worst and the median reward, the first failed and the first truncated
    sample, the longest, the slowest, and the sample with the most tool calls. The column "why" has the reason for each
    of these rows. Other samples, evenly spread, fill up the table. A sample that can't be written is left out.

    Args:
        samples: The samples of a step.
        step: The number for the column "step".
        reward_key: The key of the number in rewards that are dicts.
        secrets: Texts that are masked everywhere.
    """
    rewards = [None if sample.is_missing else sample.reward(reward_key) for sample in samples]
    reasons: dict[int, list[str]] = {}
    for reason, position in _choose_rows(samples, rewards):
        reasons.setdefault(position, []).append(reason)
    others = [position for position in range(len(samples)) if position not in reasons]
    remaining = min(MAX_ROWS - len(reasons), len(others))
    shown = [*reasons, *(others[number * len(others) // remaining] for number in range(remaining))]
    rows: list[list[Cell]] = []
    for position in sorted(shown):
        cells = functools.partial(sample_row, samples[position], rewards[position], secrets)
        if row := run_metric("transcripts", cells, of_sample=True):
            rows.append([step, *row[:2], ", ".join(reasons.get(position, [])), *row[2:]])
    return rows


def _choose_rows(samples: Sequence[FinishedSample], rewards: Sequence[float | None]) -> Iterator[tuple[str, int]]:
    """Yield pairs: a reason to show a sample, and the position of the sample. A sample may have several reasons."""
    graded = sorted((reward, position) for position, reward in enumerate(rewards) if reward is not None)
    if graded:
        yield "best", min(graded, key=lambda entry: (-entry[0], entry[1]))[1]
        yield "worst", graded[0][1]
        yield "median", graded[(len(graded) - 1) // 2][1]
    statuses = [sample.status for sample in samples]
    for status in ("failed", "truncated"):
        if status in statuses:
            yield status, statuses.index(status)
    amounts: dict[str, Sequence[float | None]] = {
        "longest": [sample.response_length for sample in samples],
        "slowest": [sample.facts.duration_s for sample in samples],
        "most tool calls": [sample.facts.tool_calls for sample in samples],
    }
    for reason, values in amounts.items():
        largest = max((value for value in values if value), default=None)
        if largest is not None:
            yield reason, values.index(largest)


def sample_row(sample: FinishedSample, reward: float | None, secrets: Collection[str] = ()) -> list[Cell]:
    """Return a sample as a row of `SAMPLE_COLUMNS`, with long texts cut in the middle and secrets masked."""
    raw = sample.sample
    limits = {"prompt": MAX_PROMPT_CHARS, "response": MAX_RESPONSE_CHARS, "label": MAX_LABEL_CHARS}
    return [
        _to_int(getattr(raw, "index", None)),
        _to_int(getattr(raw, "group_index", None)),
        sample.status,
        sample.facts.stop_reason,
        reward,
        sample.facts.turns,
        sample.facts.tool_calls,
        ", ".join(sample.weight_versions),
        *(bounded_text(getattr(raw, name, None), max_chars, secrets) for name, max_chars in limits.items()),
    ]


def _to_int(value: object) -> int | None:
    number = finite_number(value)
    return None if number is None else int(number)


def bounded_text(value: object, max_chars: int, secrets: Collection[str] = ()) -> str | None:
    """Return a text, or a value's JSON, with secrets masked and lone surrogates as "?"; None if the value is None.

    A text of more than `max_chars` characters is cut in the middle. Objects of types that JSON lacks are written as
    their `str`.
    """
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # keys of types that JSON lacks, or a value that contains itself
        text = repr(value)
    return shorten(mask_values(text, secrets), max_chars).encode("utf-8", "replace").decode("utf-8")


def write_step_dump(args: SlimeArgs, name: str, rollout_id: int, raw_samples: object) -> Path | None:
    """Write the step's first groups, with at most `dump_samples` samples in all, to a file in `dump_dir`.

    The file is `<name>_<rollout_id>.jsonl.gz`, with at least six digits for `rollout_id`. If the first group has more
    than `dump_samples` samples, only its first samples are written.

    An existing file of that name is replaced: it is probably from an interrupted attempt at the same step.

    Args:
        args: slime's args.
        name: The beginning of the file's name; characters other than letters, digits, `.`, `-` and `_` become `_`.
        rollout_id: slime's number of the step.
        raw_samples: The samples; lists may be nested.

    Returns:
        The file; None if the setting `dump_dir` is null or there are no samples.

    Raises:
        ConfigError: A setting is unknown or invalid, or the tokenizer can't be loaded.
        DumpError: The file can't be written.
    """
    settings = settings_from_args(args)
    samples = finished_samples(raw_samples) if settings.dump_dir is not None else []
    if settings.dump_dir is None or not samples:
        return None
    name = re.sub(r"[^\w.-]", "_", name)
    path = Path(settings.dump_dir) / f"{name}_{rollout_id:06d}.jsonl.gz"
    chosen = [sample.sample for sample in _first_groups(samples, settings.dump_samples)]
    path.unlink(missing_ok=True)
    secrets = find_secrets(os.environ, settings.model_dump(mode="json"))
    write_dump(path, chosen, TokenTexts(tokenizer_of(args, chosen[0])), secrets)
    return path


def _first_groups(samples: Sequence[FinishedSample], limit: int) -> Sequence[FinishedSample]:
    """Return as many whole groups as fit into `limit` samples; if not even the first group fits, its first samples."""
    groups = [getattr(sample.sample, "group_index", None) for sample in samples]
    whole_end = end = min(limit, len(samples))
    while 0 < whole_end < len(samples) and groups[whole_end] == groups[whole_end - 1]:
        whole_end -= 1
    return samples[: whole_end or end]
