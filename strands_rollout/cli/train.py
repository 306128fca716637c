"""The command `strands-rollout train`; its options are those of `train.options`."""

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, get_args

import typer

from strands_rollout.cli.options import Given, made, takes
from strands_rollout.errors import ConfigError
from strands_rollout.train.options import SHIPPED_POLICY, Decay, LossMean, TrainOptions, UpdateSettings


@takes(TrainOptions, UpdateSettings)
def train(
    given: Given,
    *,
    context: typer.Context,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Go on where the logprobs, or slime's contract, do not hold.")
    ] = False,
) -> None:
    """Train a small model by GRPO on this CPU, through `generate` and `reward_func` as slime calls them.

    Each step plays groups of episodes, normalises their rewards by group, updates the policy and gives the engine the
    new weights from disk under a new version. At the first step the trainer's logprobs of the sampled tokens must equal
    the rollout's; if they don't, the run stops and shows the tokens. The run's folder holds options.json, steps.jsonl,
    summary.json, curves.png, checkpoints, and the policy as a model folder in weights/. The last line on stdout is the
    summary as JSON. Exits with 1 if a check fails or the engine does, with 2 for bad options, with
    130 after Ctrl-C.
    """
    if find_spec("torch") is None:
        raise ConfigError("training needs torch, which is not installed; pip install 'strands-rollout[train]'")
    from strands_rollout.train.batch import TrainingMethod

    _complete(given)
    method = context.find_object(TrainingMethod) or TrainingMethod()  # an experiment's command line gives its own
    options = made(
        TrainOptions,
        given,
        rollout=method.rollout,
        ablation=method.ablation,
        checks=not unchecked,
        update=made(UpdateSettings, given),
    )
    from strands_rollout.train.run import run_training

    raise typer.Exit(run_training(options, method))


def _complete(given: Given) -> None:
    """Refuse what an option's bounds can't say, and fill in what depends on other options, or on the package."""
    from strands_rollout.evaluation.rows import shipped_rows

    if given["temperature"] <= 0:
        raise typer.BadParameter(
            f"got --temperature {given['temperature']}; expected more than 0: a greedy group has no spread"
        )
    if given["is_async"] and given["extra_prompts"]:
        raise typer.BadParameter("--async plays whole steps ahead; leave out --extra-prompts with it")
    for option, value, known in (
        ("--lr-decay", given["decay"], get_args(Decay)),
        ("--loss-mean", given["mean"], get_args(LossMean)),
    ):
        if value not in known:
            raise typer.BadParameter(f"got {option} {value!r}; expected one of {', '.join(known)}")
    given["out"] = (
        given["out"] or Path("train_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{given['seed']}-{os.getpid()}"
    )
    given["model_dir"] = given["model_dir"] or SHIPPED_POLICY
    given["data"] = given["data"] or shipped_rows().with_name("train.jsonl")
    given["held_out"] = given["held_out"] or shipped_rows()
