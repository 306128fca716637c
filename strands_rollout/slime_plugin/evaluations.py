"""Metrics that slime can't log: pass rates when samples are missing, and scores in a training job's wandb run.

slime computes pass@k from blocks of `--n-samples-per-eval-prompt` rewards (`compute_pass_rate` in
slime/observability/metric_utils.py). With missing rewards, or with a data set's own number of samples per prompt, slime
raises an error or mixes the rewards of several problems. Therefore `metrics.log_eval` computes pass@k, under slime's
names. A job that only evaluates a checkpoint can log to the wandb run of the checkpoint's training.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from strands_rollout.samples import SlimeArgs, finite_number, run_metric

STEP_VARIABLE: Final = "STRANDS_ROLLOUT_EVAL_STEP"
"""Environment variable with the checkpoint's step, in a job that only evaluates a checkpoint; for instance,
`eval_aime.sh --watch` sets it."""
_SHARED_VARIABLE: Final = "STRANDS_ROLLOUT_EVAL_SHARED"  # "1" if the wandb run belongs to a training run
_LOG_PASSRATE_ATTR: Final = "strands_rollout_log_passrate"  # attribute of args: the original `log_passrate`


def checkpoint_step() -> int | None:
    """Return the step of the checkpoint if this job only evaluates a checkpoint.

    Return None if `STEP_VARIABLE` is not set to a number, as in training.
    """
    given = os.environ.get(STEP_VARIABLE) or ""
    return int(given) if given.isdecimal() else None


def take_over_pass_rates(args: SlimeArgs) -> bool:
    """Return whether the job was given slime's `--log-passrate`, and turn the flag off in `args`.

    While the flag is off, slime's own evaluation metrics have no pass rates. Later calls with the same `args` return
    the same value, although the flag is then off.
    """
    values = vars(args)
    wanted = bool(values.setdefault(_LOG_PASSRATE_ATTR, bool(values.get("log_passrate"))))
    if wanted:
        values["log_passrate"] = False
    return wanted


def samples_per_problem(args: SlimeArgs, name: str) -> int:
    """Return the number of samples that slime draws for each problem of a data set.

    It is the data set's own number, else `n_samples_per_eval_prompt` of args, else 1.
    """
    for data_set in getattr(args, "eval_datasets", None) or ():
        if getattr(data_set, "name", None) == name:
            count = getattr(data_set, "n_samples_per_eval_prompt", None)
            if isinstance(count, int) and count > 0:
                return count
    count = getattr(args, "n_samples_per_eval_prompt", None)
    return count if isinstance(count, int) and count > 0 else 1


def pass_rates(rewards: Iterable[tuple[int, Any]], size: int) -> dict[str, float]:
    """Return pass@k, averaged over the problems as in slime, for each power of two k up to `size`.

    If `size` is 1, return {}. If samples of a problem are missing, its pass@k is computed from the remaining samples,
    for each k up to their number. If no problem has k samples, that k is left out.

    Args:
        rewards: For each sample, its position among all samples of the data set, and its reward; the reward 1 means a
            correct answer.
        size: Samples per problem.
    """
    if size == 1:
        return {}
    counts: dict[int, list[int]] = {}
    for position, reward in rewards:
        count = counts.setdefault(position // size, [0, 0])
        count[0] += bool(reward == 1)  # slime's comparison; a reward may also be a bool or a NumPy number
        count[1] += 1
    rates = {}
    for k in (2**power for power in range(size.bit_length())):
        passed = [
            1 - math.comb(total - right, k) / math.comb(total, k) for right, total in counts.values() if total >= k
        ]
        if passed:
            rates[f"pass@{k}"] = math.fsum(passed) / len(passed)
    return rates


def mean_metrics(data: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean reward and the share of truncated samples of each data set, under slime's names.

    Values other than finite numbers and bools are left out.
    """
    numbers = {}
    for name, result in data.items():
        columns = {f"eval/{name}": "rewards", f"eval/{name}-truncated_ratio": "truncated"}
        for key, column in columns.items():
            plain = [int(value) if isinstance(value, bool) else value for value in result.get(column) or ()]
            found = [number for value in plain if (number := finite_number(value)) is not None]
            if found:
                numbers[key] = math.fsum(found) / len(found)
    return numbers


@contextmanager
def wandb_run_of_training() -> Iterator[Callable[[Mapping[str, Any]], object] | None]:
    """Yield a function that logs a checkpoint's scores to the wandb run `WANDB_RUN_ID`.

    Yield None in a job that trains, or without the environment variable `WANDB_RUN_ID`.

    If the environment variable named by `_SHARED_VARIABLE` is "1", the run is the training's own, and the training may
    still write to it. This job then joins the run as slime's secondary processes do (`init_wandb_secondary` in
    slime/observability/wandb_utils.py), and does not mark the run as finished at the end. An offline run is never
    joined in this way. In any run, wandb plots the numbers against the step in `eval/step`.
    """
    if checkpoint_step() is None or not os.environ.get("WANDB_RUN_ID"):
        yield None
        return
    import wandb

    if os.environ.get("WANDB_MODE") == "offline":
        settings = wandb.Settings(mode="offline")
    elif os.environ.get(_SHARED_VARIABLE) == "1":
        settings = wandb.Settings(mode="shared", x_primary=False, x_update_finish_state=False)
    else:
        settings = wandb.Settings()
    run = wandb.init(
        id=os.environ["WANDB_RUN_ID"], project=os.environ.get("WANDB_PROJECT"), resume="allow", settings=settings
    )
    run.define_metric("eval/step")
    run.define_metric("eval/*", step_metric="eval/step")
    try:
        yield lambda values: run.log(dict(values))
    finally:
        run_metric("wandb", run.finish)
