"""The command `strands-rollout train`: its arguments and its exit code."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from strands_rollout.errors import ConfigError

_SHIPPED = "the shipped one"


def train(
    context: typer.Context,
    steps: Annotated[int, typer.Option(help="Batches of rollouts to train on.", min=1)] = 30,
    seed: Annotated[
        int, typer.Option(help="Decides the order of prompts, and all sampling on an engine that heeds seeds.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder, resumed where it was interrupted; default: a new one in train_runs/."),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="An SGLang that serves the model and can read --out; default: the embedded engine is started."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The policy's folder.", exists=True, file_okay=False, show_default=_SHIPPED)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="JSONL to train on.", exists=True, dir_okay=False, show_default=_SHIPPED),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help="JSONL to measure accuracy on.", exists=True, dir_okay=False, show_default=_SHIPPED),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="slime's --custom-config-path YAML: the agent, under strands_rollout:.", exists=True, dir_okay=False
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts of a step.", min=1)] = 32,
    samples_per_prompt: Annotated[int, typer.Option(help="Episodes of each prompt.", min=2)] = 8,
    extra_prompts: Annotated[
        int,
        typer.Option(
            help="Prompts begun beyond those of a step: when enough are over, the others are aborted and resumed "
            "in the next step, as slime's partial rollouts.",
            min=0,
        ),
    ] = 0,
    is_async: Annotated[
        bool, typer.Option("--async", help="Play the next step's rollouts while this step is trained on.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature, above 0.")] = 1.0,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of a whole response, tool results included.", min=1)
    ] = 512,
    learning_rate: Annotated[float, typer.Option(help="AdamW's, where it decays at the first step.", min=0)] = 2e-4,
    lr_decay: Annotated[str, typer.Option(help="constant, or linear, to 0 after the last step.")] = "constant",
    updates: Annotated[int, typer.Option(help="Optimizer steps per step.", min=1)] = 4,
    clip_low: Annotated[float, typer.Option(help="slime's --eps-clip.", min=0)] = 0.2,
    clip_high: Annotated[float, typer.Option(help="slime's --eps-clip-high.", min=0)] = 0.28,
    loss_mean: Annotated[
        str, typer.Option(help="sample: mean of samples' means, as slime; token: mean over all trained tokens.")
    ] = "sample",
    tis_clip: Annotated[
        float | None,
        typer.Option(
            help="Truncated importance sampling with this bound; default: none, the rollout's logprobs count."
        ),
    ] = None,
    kl: Annotated[float, typer.Option(help="Weight of the KL divergence to the first weights.", min=0)] = 0.0,
    entropy: Annotated[float, typer.Option(help="Weight of an entropy bonus.", min=0)] = 0.0,
    eval_every: Annotated[int, typer.Option(help="Steps between measurements on the held-out rows.", min=1)] = 10,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 10,
    concurrency: Annotated[int, typer.Option(help="Episodes at once.", min=1)] = 64,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch; default: its own choice.", min=1)] = None,
    gap_limit: Annotated[
        float,
        typer.Option(help="Largest difference of logprobs, the trainer's against the rollout's, at the first step."),
    ] = 1e-3,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Go on where that, or slime's contract, does not hold.")
    ] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="Log to wandb too, as the environment says.")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON on stdout.")] = False,
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
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from strands_rollout.evaluation.rows import shipped_rows
    from strands_rollout.train.batch import TrainingMethod
    from strands_rollout.train.options import (
        SHIPPED_POLICY,
        Decay,
        LossMean,
        TrainOptions,
        UpdateSettings,
    )

    if temperature <= 0:
        raise typer.BadParameter(f"got --temperature {temperature}; expected more than 0: a greedy group has no spread")
    if is_async and extra_prompts:
        raise typer.BadParameter("--async plays whole steps ahead; leave out --extra-prompts with it")
    method = context.find_object(TrainingMethod) or TrainingMethod()  # an experiment's command line gives its own
    options = TrainOptions(
        out=out or Path("train_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}-{os.getpid()}",
        steps=steps,
        seed=seed,
        model_dir=model or SHIPPED_POLICY,
        data=data or shipped_rows().with_name("train.jsonl"),
        held_out=held_out or shipped_rows(),
        rollout=method.rollout,
        ablation=method.ablation,
        base_url=base_url,
        config=config,
        prompts=prompts,
        samples_per_prompt=samples_per_prompt,
        extra_prompts=extra_prompts,
        concurrency=concurrency,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        update=UpdateSettings(
            learning_rate=learning_rate,
            decay=cast("Decay", _one_of("--lr-decay", lr_decay, get_args(Decay))),
            updates=updates,
            clip_low=clip_low,
            clip_high=clip_high,
            mean=cast("LossMean", _one_of("--loss-mean", loss_mean, get_args(LossMean))),
            tis_clip=tis_clip,
            kl=kl,
            entropy=entropy,
            temperature=temperature,
        ),
        is_async=is_async,
        eval_every=eval_every,
        gap_limit=gap_limit,
        checks=not unchecked,
        save_every=save_every,
        threads=threads,
        wandb=wandb,
        json_only=json_only,
    )
    from strands_rollout.train.run import run_training

    raise typer.Exit(run_training(options, method))


def _one_of(option: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise typer.BadParameter(f"got {option} {given!r}; expected one of {', '.join(known)}")
    return given
