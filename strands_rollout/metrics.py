"""slime's entry points `log_rollout` and `log_eval`: a step's samples in, metrics and transcripts logged.

Glue. Neither raises: a metric that fails is reported once and left out, and slime logs its own metrics in any case.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from strands_rollout.config import settings_from_args
from strands_rollout.episode_metrics import GROUPS, Metrics, drift_metrics
from strands_rollout.finished_sample import FinishedSample, finished_samples, kept
from strands_rollout.metric_log import StepMetrics, Table, log_line, log_to_tensorboard, log_to_wandb, step_of
from strands_rollout.retokenisation.meter import DriftMeter, EpisodeDrift, measure_some
from strands_rollout.secret_mask import secret_values
from strands_rollout.slime_seam import tokenizer_of
from strands_rollout.step_dump import write_step_dump
from strands_rollout.transcript_table import COLUMNS, transcript_rows

logger = logging.getLogger(__name__)


def log_rollout(
    rollout_id: int,
    args: Any,  # noqa: ANN401 - slime's Namespace
    samples: Any,  # noqa: ANN401 - slime's, ours or foreign samples, nested lists of them included
    rollout_extra_metrics: Mapping[str, Any] | None,  # noqa: ARG001 - slime's signature; slime logs them
    rollout_time: float,  # noqa: ARG001 - slime's signature; slime logs it
) -> bool:
    """Log a training rollout under `rollout/agent/`; slime's `--custom-rollout-log-function-path`.

    Returns:
        False: slime logs its own metrics as well. Nothing is raised.
    """
    kept("rollout", lambda: _log(rollout_id, args, {"rollout/agent": samples}, "rollout/step"))
    return False


def log_eval(
    rollout_id: int,
    args: Any,  # noqa: ANN401
    data: Mapping[str, Mapping[str, Any]],
    extra_metrics: Mapping[str, Any] | None,  # noqa: ARG001 - slime's signature; slime logs them
) -> bool:
    """Log an evaluation under `eval/<dataset>/agent/`; slime's `--custom-eval-rollout-log-function-path`.

    Args:
        rollout_id: slime's.
        args: slime's.
        data: By data set, what slime's evaluation returns: its `samples` are read, where there are any.
        extra_metrics: Not read.

    Returns:
        False: slime logs its own metrics as well. Nothing is raised.
    """
    kept("eval", lambda: _log(rollout_id, args, _by_dataset(data), "eval/step"))
    return False


def _by_dataset(data: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"eval/{name}/agent": result.get("samples") for name, result in data.items()}


def _log(rollout_id: int, args: Any, samples_by_prefix: Mapping[str, Any], step_key: str) -> None:  # noqa: ANN401
    if getattr(args, "load_debug_rollout_data", None):
        return  # slime logs nothing of a rollout that it replays from a file
    known_step = kept("step", lambda: step_of(args, rollout_id))
    step = rollout_id if known_step is None else known_step
    reward_key = _reward_key(args, evaluation=step_key.startswith("eval"))
    metrics = StepMetrics(rollout_id, step_key)
    secrets = secret_values(os.environ, getattr(args, "strands_rollout", None))
    for prefix, given in samples_by_prefix.items():
        samples = kept("samples", functools.partial(finished_samples, given)) or []
        metrics.numbers |= {f"{prefix}/{name}": value for name, value in _numbers(args, samples).items()}
        table = functools.partial(transcript_rows, samples, step=step, reward_key=reward_key, secrets=secrets)
        if rows := kept("transcripts", table):
            metrics.tables[f"{prefix}/transcripts"] = Table(COLUMNS, rows)
        kept("dump", functools.partial(write_step_dump, args, _dump_name(prefix), rollout_id, given))
    log_line(metrics, step)
    if metrics.numbers:
        kept("wandb", lambda: log_to_wandb(args, metrics, step))
        kept("tensorboard", lambda: log_to_tensorboard(args, metrics, step))


def _dump_name(prefix: str) -> str:
    """What `rollout/agent` and `eval/<dataset>/agent` are called as files."""
    return prefix.removesuffix("/agent").replace("/", "-")


def _numbers(args: Any, samples: Sequence[FinishedSample]) -> Metrics:  # noqa: ANN401
    metrics: Metrics = {}
    for name, group in GROUPS.items():
        metrics |= kept(name, functools.partial(group, samples)) or {}
    return metrics | (kept("drift", lambda: _drift(args, samples)) or {})


def _drift(args: Any, samples: Sequence[FinishedSample]) -> Metrics:  # noqa: ANN401
    """Drift by the policy's tokenizer, which is asked for only where a sample says what was sampled."""
    first = next((sample for sample in samples if sample.turn_bounds), None)
    if first is None:
        return {}
    meter = DriftMeter(tokenizer_of(args, first.sample), tool_parser=settings_from_args(args).tool_parser)
    drifts = measure_some(samples, meter)
    if meter.template_fault is not None:
        _say_once("context is not held against the chat template: %s", meter.template_fault)
    for drift in drifts:
        _warn_of_mismatch(drift)
    return drift_metrics(drifts)


@functools.cache
def _say_once(words: str, fault: str) -> None:
    logger.warning(words, fault)


def _warn_of_mismatch(drift: EpisodeDrift) -> None:
    """Each time: it never happens in a run whose numbers are right."""
    if drift.mismatches:
        logger.warning(
            "context is not what the chat template renders sample_index=%s token=%d tokens=%d: "
            "`strands-rollout drift` on a dump of it tells more",
            drift.index,
            drift.mismatches[0].position,
            drift.mismatched_tokens,
        )


def _reward_key(args: Any, *, evaluation: bool) -> str | None:  # noqa: ANN401
    key = getattr(args, "reward_key", None)
    return (getattr(args, "eval_reward_key", None) or key) if evaluation else key
