"""Metrics of a step: slime's `log_rollout` and `log_eval`, what is counted, and where it goes.

Metrics are named here. They go to a log line, wandb and TensorBoard; wandb and slime's logging may both be absent.
"""

from __future__ import annotations

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
from strands_rollout.samples import FinishedSample, SlimeArgs, finished_samples, finite, parts_of, run_metric
from strands_rollout.secret_mask import find_secrets, mask_values
from strands_rollout.settings import settings_from_args
from strands_rollout.slime_plugin import workers
from strands_rollout.slime_plugin.drift import DriftMeter, EpisodeDrift, measure_some, totals_of
from strands_rollout.slime_plugin.reward_groups import raise_on_failed_groups
from strands_rollout.slime_plugin.sample_writer import TRUNCATED_REASONS
from strands_rollout.slime_plugin.slime_adapter import tokenizer_of

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
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
"""Facts that are one number a sample; a metric's name is the fact's."""
STATUSES: Final = ("completed", "truncated", "failed", "aborted")
TRUNCATING: Final = tuple(str(reason) for reason in StopReason if reason in TRUNCATED_REASONS)
# where the newest slime has its modules of metrics and logging, and where its releases up to 0.3.1 have them
_SLIMES_PACKAGES: Final = ("slime.observability", "slime.utils")
_first_steps: Final[dict[str, int]] = {}  # by the prefix of metrics, the first step that had them in this process
_LOST: Final = "%s is set, but this package's metrics are not logged there: %s"


def log_rollout(
    rollout_id: int,
    args: SlimeArgs,
    samples: Iterable[Any],  # slime's, ours or foreign ones; a fan-out's may be in lists of their own
    rollout_extra_metrics: Mapping[str, Any] | None,  # noqa: ARG001 - slime's signature; slime logs them
    rollout_time: float,  # noqa: ARG001 - slime's signature; slime logs it
) -> bool:
    """Log a training rollout under `rollout/agent/`; slime's `--custom-rollout-log-function-path`.

    Returns:
        False: slime logs its own metrics as well.

    Raises:
        FailedGroupsError: The run is to be ended, and `generate` could not end it; see `FailedGroups`.
    """
    run_metric("settings", functools.partial(_check_staleness, args))
    run_metric("rollout", lambda: _log(rollout_id, args, {"rollout/agent": samples}, "rollout/step"))
    raise_on_failed_groups(args, samples)
    return False


def log_eval(
    rollout_id: int,
    args: SlimeArgs,
    data: MutableMapping[str, dict[str, Any]],
    extra_metrics: Mapping[str, Any] | None,  # noqa: ARG001 - slime's signature; slime logs them
) -> bool:
    """Log an evaluation under `eval/<dataset>/agent/`; slime's `--custom-eval-rollout-log-function-path`.

    A sample that failed, or was not graded, by a fault of the infrastructure is no wrong answer. It is taken out of
    `data`, from which slime computes its own numbers next, and so is a data set of such samples alone, which is logged
    as an error.

    Args:
        rollout_id: slime's.
        args: slime's.
        data: By data set, what slime's evaluation returns: `rewards`, and its `samples` where there are any. Changed.
        extra_metrics: Not read.

    Returns:
        False: slime logs its own metrics as well. Nothing is raised.
    """
    run_metric("eval", lambda: _log(rollout_id, args, _by_data_set(data), "eval/step"))
    run_metric("missing", functools.partial(_prepare, args, data))
    return False


def _by_data_set(data: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"eval/{name}/agent": result.get("samples") for name, result in data.items()}


def _prepare(args: SlimeArgs, data: MutableMapping[str, dict[str, Any]]) -> None:
    """Leave in an evaluation's results what slime's own metrics are to be computed from."""
    for name in list(data):
        _drop_missing(args, data, name)
    if getattr(args, "reward_key", None):
        return
    # slime reads each reward again, by `--reward-key`, and rounds it: a dict that is read by another key ends the run
    for result in data.values():
        for sample, reward in zip(result.get("samples") or (), result.get("rewards") or (), strict=False):
            if isinstance(sample.reward, Mapping):
                sample.reward = reward


def _drop_missing(args: SlimeArgs, data: MutableMapping[str, dict[str, Any]], name: str) -> None:
    """Take what has no graded answer out of a data set; for slime's pass rate all samples of its problem."""
    result = data[name]
    samples = finished_samples(result.get("samples"))
    missing = [sample.is_missing for sample in samples]
    if not any(missing) or len(samples) != len(result.get("rewards") or ()):
        return
    lost = next(sample for sample in reversed(samples) if sample.is_missing)
    last = lost.facts.error or lost.graded.get("error")
    level = logging.ERROR if all(missing) else logging.WARNING
    words = "event=evaluation_incomplete data_set=%s samples=%d missing=%d last_error=%s"
    logger.log(level, words, name, len(samples), sum(missing), last)
    size = getattr(args, "n_samples_per_eval_prompt", None) or 1 if getattr(args, "log_passrate", False) else 1
    left_out = [any(missing[at - at % size : at - at % size + size]) for at in range(len(missing))]
    if all(left_out):
        del data[name]  # slime would divide by 0
        return
    for key in ("rewards", "truncated", "samples"):
        if isinstance(result.get(key), list):
            result[key] = [value for value, is_out in zip(result[key], left_out, strict=True) if not is_out]


def _check_staleness(args: SlimeArgs) -> None:
    limit = settings_from_args(args).max_sample_staleness
    if limit is not None and not getattr(args, "custom_reward_post_process_path", None):
        flag = "--custom-reward-post-process-path strands_rollout.normalize_rewards"
        words = "max_sample_staleness is %s and has no effect without slime's %s"
        log_once(logger, logging.WARNING, words, limit, flag)


def _log(rollout_id: int, args: SlimeArgs, samples_by_prefix: Mapping[str, Any], step_key: str) -> None:
    if getattr(args, "load_debug_rollout_data", None):
        return  # slime logs nothing of a rollout that it replays from a file
    compute_step = _slimes("metric_utils", "compute_rollout_step")
    step = None if compute_step is None else run_metric("step", lambda: int(compute_step(args, rollout_id)))
    step = rollout_id if step is None else step
    reward_key = getattr(args, "reward_key", None)
    if step_key.startswith("eval"):
        reward_key = getattr(args, "eval_reward_key", None) or reward_key
    numbers: Metrics = {}
    tables: dict[str, Table] = {}
    secrets = find_secrets(os.environ, getattr(args, "strands_rollout", None))
    for prefix, given in samples_by_prefix.items():
        samples = run_metric("samples", functools.partial(finished_samples, given)) or []
        groups = {name: functools.partial(group, samples) for name, group in GROUPS.items()}
        groups["drift"] = functools.partial(_drift, args, samples, prefix, rollout_id)
        if prefix.startswith("eval/"):
            groups["answers"] = functools.partial(answer_metrics, samples)
        for name, group in groups.items():
            numbers |= {f"{prefix}/{metric}": value for metric, value in (run_metric(name, group) or {}).items()}
        table = functools.partial(transcript_rows, samples, step=step, reward_key=reward_key, secrets=secrets)
        if rows := run_metric("transcripts", table):
            tables[f"{prefix}/transcripts"] = Table(COLUMNS, rows)
        name = prefix.removesuffix("/agent").replace("/", "-")
        run_metric("dump", functools.partial(write_step_dump, args, name, rollout_id, given))
    pairs = " ".join(f"{name}={value:.4g}" for name, value in numbers.items())
    logger.info("agent metrics rollout_id=%s %s=%s %s", rollout_id, step_key, step, pairs)
    if numbers:
        numbers[step_key] = step
        run_metric("wandb", lambda: _log_to_wandb(args, numbers, tables))
        run_metric("tensorboard", lambda: _log_to_tensorboard(args, numbers, step_key))


def _drift(args: SlimeArgs, samples: Sequence[FinishedSample], prefix: str, rollout_id: int) -> Metrics:
    """Drift, and mismatch where that is due, by the policy's tokenizer.

    It is asked for only where a sample says what was sampled.
    """
    first = next((sample for sample in samples if sample.turn_bounds), None)
    if first is None:
        return {}
    settings = settings_from_args(args)
    is_first_step = _first_steps.setdefault(prefix, rollout_id) == rollout_id
    meter = DriftMeter(
        tokenizer_of(args, first.sample),
        tool_parser=settings.tool_parser,
        checks_context=is_first_step or settings.mismatch_check == "every_step",
    )
    drifts = measure_some(samples, meter)
    if meter.template_fault is not None:
        log_once(logger, logging.WARNING, "context is not compared with the chat template: %s", meter.template_fault)
    for drift in drifts:
        if drift.mismatches:  # each time: it never happens in a run whose numbers are right
            logger.warning(
                "context is not what the chat template renders sample_index=%s token=%d tokens=%d: "
                "`strands-rollout drift` on a dump of it tells more",
                drift.index,
                drift.mismatches[0].position,
                drift.mismatched_tokens,
            )
    return drift_metrics(drifts)


def _log_to_wandb(args: SlimeArgs, numbers: Metrics, tables: Mapping[str, Table]) -> None:
    """Log numbers and tables in one call, as slime does: the step is among the numbers, wandb's own is left alone."""
    if not getattr(args, "use_wandb", False):
        return
    import wandb

    if wandb.run is None:
        log_once(logger, logging.WARNING, _LOST, "--use-wandb", "this process has no wandb run")
        return
    shown = {name: wandb.Table(columns=list(one.columns), data=list(one.rows)) for name, one in tables.items()}
    wandb.log({**numbers, **shown})


def _log_to_tensorboard(args: SlimeArgs, numbers: Metrics, step_key: str) -> None:
    """Log the numbers through slime's own logging, which holds the writer."""
    if not getattr(args, "use_tensorboard", False):
        return
    log = _slimes("logging_utils", "log")
    if log is None:
        places = " or ".join(f"{package}.logging_utils" for package in _SLIMES_PACKAGES)
        why = f"slime has loaded no {places} with a function log"
        log_once(logger, logging.WARNING, _LOST, "--use-tensorboard", why)
        return
    # wandb has had the numbers, together with the tables
    without_wandb = Namespace(**{**vars(args), "use_wandb": False})
    log(without_wandb, numbers, step_key)


def _slimes(module: str, function: str) -> Callable[..., Any] | None:
    """A function of a module that slime has loaded; None where there is none."""
    found = (getattr(sys.modules.get(f"{package}.{module}"), function, None) for package in _SLIMES_PACKAGES)
    return next((one for one in found if one is not None), None)


def distribution(name: str, values: Iterable[float | None]) -> Metrics:
    """Mean, 50th, 90th and 99th percentile (interpolated) and maximum of the values that are there; empty for none."""
    present = [value for value in values if value is not None]
    if not present:
        return {}
    p50, p90, p99 = np.quantile(present, [0.5, 0.9, 0.99]).tolist()
    statistics = {"mean": float(np.mean(present)), "p50": p50, "p90": p90, "p99": p99, "max": float(max(present))}
    return {f"{name}/{statistic}": value for statistic, value in statistics.items()}


def shares(name: str, values: Iterable[str | None], known: Iterable[str] = ()) -> Metrics:
    """The share of each value among those that are there; 0.0 for a known value that is not, empty without any."""
    counts = Counter(value for value in values if value is not None)
    total = counts.total()
    return {f"{name}/{value}": counts[value] / total for value in dict.fromkeys([*known, *counts])} if total else {}


def per_sample_metrics(samples: Samples) -> Metrics:
    """The facts that are one number, each as a distribution."""
    metrics: Metrics = {"samples": float(len(samples))} if samples else {}
    for name in PER_SAMPLE:
        metrics |= distribution(name, [getattr(sample.facts, name) for sample in samples])
    return metrics


def ending_metrics(samples: Samples) -> Metrics:
    """Shares of stop reasons, of statuses, of what truncated those that were, and of samples kept out of training.

    Also the number of samples whose reward failed.
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
    """How much of each budget was used, 0 to 1; of the samples that have a limit."""
    metrics: Metrics = {}
    budgets = [sample.facts.budgets or {} for sample in samples]
    for name in _keys_of(budgets):
        metrics |= distribution(f"budget/{name}", [finite(one.get(name)) for one in budgets])
    return metrics


def code_metrics(samples: Samples) -> Metrics:
    """The code executor: seconds as distributions over the samples, everything else as totals by outcome."""
    metrics: Metrics = {}
    counts = [sample.facts.code or {} for sample in samples]
    for name in _keys_of(counts):
        values = [value for one in counts if (value := finite(one.get(name))) is not None]
        if name.endswith("_s"):
            metrics |= distribution(f"code/{name}", values)
        elif values:
            metrics[f"code/{name}"] = sum(values)
    if {"code/calls", "code/timeouts", "code/killed"} <= metrics.keys():
        metrics["code/finished"] = metrics["code/calls"] - metrics["code/timeouts"] - metrics["code/killed"]
    return metrics


def gateway_metrics(samples: Samples) -> Metrics:
    """The endpoint of episodes that programs played: what was asked, repeated, forked and refused."""
    asked = [gateway for sample in samples if (gateway := sample.facts.gateway) is not None]
    counts = {name: [one.get(name) for one in asked] for name in ("requests", "repeats", "forks")}
    refused = [sum(one["refused"].values()) for one in asked if isinstance(one.get("refused"), Mapping)]
    named = (counts | {"refused": refused}).items()
    return {name: value for key, values in named for name, value in distribution(f"gateway/{key}", values).items()}


def weight_metrics(samples: Samples) -> Metrics:
    """Distinct weight versions of each sample, and how far its newest is from its oldest where they are integers."""
    return {
        **distribution("weight_versions", [len(sample.weight_versions) or None for sample in samples]),
        **distribution("weight_version_spread", [sample.weight_version_spread for sample in samples]),
    }


def answer_metrics(samples: Samples) -> Metrics:
    """Of an evaluation: samples without a graded answer, and the share of right ones among the others, if they tell."""
    answers = [finite(sample.graded.get("acc")) for sample in samples if not sample.is_missing]
    missing = {"missing": float(sum(sample.is_missing for sample in samples))} if samples else {}
    return missing | _mean("accuracy", [answer for answer in answers if answer is not None])


def part_metrics(samples: Samples) -> Metrics:
    """The further numbers of the rewards, each as a distribution."""
    parts = parts_of(sample.graded for sample in samples if not sample.is_missing)
    return {key: number for name, values in parts.items() for key, number in distribution(name, values).items()}


def slowest_metrics(samples: Samples) -> Metrics:
    """Where the time of the slowest sample went, its episode and its reward, in seconds.

    Only samples that say how long their episode took are looked at; of a fan-out that is the main agent's.
    Tools that ran at once count each: then the rest is at least 0, and the parts may sum to more than the total.
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
    """What text would have cost each measured sample, of what kind, and context that is not the template's."""
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
    """Of samples whose context was compared with the template: how many tokens differ in each."""
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
    """Episode workers: how long samples waited for a place; of each worker, its load, episodes and restarts."""
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
"""Metrics that need nothing but the samples; each is computed apart, so that one that fails costs no other."""


def _keys_of(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """All their keys, in order of first appearance."""
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
    """At most `MAX_ROWS` rows of `COLUMNS`, in the order of the samples, with these texts masked.

    Best, worst and median reward, the first failed and truncated, the longest, the slowest and the one with most tool
    calls are shown; the column "why" says which a row is. What room is left goes to others, evenly spread.
    A row that can't be written is left out.

    Args:
        samples: A step's.
        step: slime's.
        reward_key: The entry of a reward that is a dict.
        secrets: Texts that are masked wherever they stand.
    """
    rewards = [None if sample.is_missing else sample.reward(reward_key) for sample in samples]
    reasons: dict[int, list[str]] = {}
    for reason, position in _chosen(samples, rewards):
        reasons.setdefault(position, []).append(reason)
    others = [position for position in range(len(samples)) if position not in reasons]
    room = min(MAX_ROWS - len(reasons), len(others))
    shown = [*reasons, *(others[number * len(others) // room] for number in range(room))]
    rows: list[list[Cell]] = []
    for position in sorted(shown):
        cells = functools.partial(sample_row, samples[position], rewards[position], secrets)
        if row := run_metric("transcripts", cells, of_sample=True):
            rows.append([step, *row[:2], ", ".join(reasons.get(position, [])), *row[2:]])
    return rows


def _chosen(samples: Sequence[FinishedSample], rewards: Sequence[float | None]) -> Iterator[tuple[str, int]]:
    """Reasons to show a sample, each with its position; of equals the first."""
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
    """One sample as a row of `SAMPLE_COLUMNS`, long texts cut in the middle, and these texts masked."""
    raw = sample.sample
    limits = {"prompt": MAX_PROMPT_CHARS, "response": MAX_RESPONSE_CHARS, "label": MAX_LABEL_CHARS}
    return [
        _whole(getattr(raw, "index", None)),
        _whole(getattr(raw, "group_index", None)),
        sample.status,
        sample.facts.stop_reason,
        reward,
        sample.facts.turns,
        sample.facts.tool_calls,
        ", ".join(sample.weight_versions),
        *(bounded_text(getattr(raw, name, None), most, secrets) for name, most in limits.items()),
    ]


def _whole(value: object) -> int | None:
    number = finite(value)
    return None if number is None else int(number)


def bounded_text(value: object, max_chars: int, secrets: Collection[str] = ()) -> str | None:
    """Head and tail of a text, or of JSON, with secrets masked; a lone surrogate, which no file takes, becomes "?"."""
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # JSON has no form for a value's keys, nor for a value within itself
        text = repr(value)
    return shorten(mask_values(text, secrets), max_chars).encode("utf-8", "replace").decode("utf-8")


def write_step_dump(args: SlimeArgs, name: str, rollout_id: int, given: object) -> Path | None:
    """Write the step's first samples, whole groups where they fit, to `<dump_dir>/<name>_<rollout_id>.jsonl.gz`.

    A file of that name is of a step that was cut and is done again: it is replaced.

    In `name`, what is no letter, digit, `.`, `-` or `_` becomes `_`; `given` are samples, maybe in nested lists.

    Returns:
        The file; None where none is asked for, or there is no sample.

    Raises:
        ConfigError: A setting is unknown or out of range.
        DumpError: The file can't be written.
    """
    settings = settings_from_args(args)
    samples = finished_samples(given) if settings.dump_dir is not None else []
    if settings.dump_dir is None or not samples:
        return None
    name = re.sub(r"[^\w.-]", "_", name)
    path = Path(settings.dump_dir) / f"{name}_{rollout_id:06d}.jsonl.gz"
    chosen = [one.sample for one in _first_groups(samples, settings.dump_samples)]
    path.unlink(missing_ok=True)
    secrets = find_secrets(os.environ, settings.model_dump(mode="json"))
    write_dump(path, chosen, TokenTexts(tokenizer_of(args, chosen[0])), secrets)
    return path


def _first_groups(samples: Sequence[FinishedSample], most: int) -> Sequence[FinishedSample]:
    """As many whole groups as fit, at least the beginning of one."""
    groups = [getattr(sample.sample, "group_index", None) for sample in samples]
    end = whole = min(most, len(samples))
    while 0 < whole < len(samples) and groups[whole] == groups[whole - 1]:
        whole -= 1
    return samples[: whole or end]
