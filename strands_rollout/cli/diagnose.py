"""The command `strands-rollout doctor`: its arguments and its exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    base_url: Annotated[
        list[str] | None, typer.Option(help="An SGLang server or router to ask; may be given more than once.")
    ] = None,
    max_context_length: Annotated[
        int | None, typer.Option(help="Tokens of prompt and response that the servers must take.", min=1)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the tokenizer; default: the model's, else the shipped one."),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(help="The model's name or id on the hub, such as Qwen/Qwen3-4B; default: MODEL, else Qwen3-8B."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="The YAML for slime's --custom-config-path; default: ROLLOUT_CONFIG, else configs/math_code.yaml."
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A prompt data set; may be given more than once; default: those that the scripts use."),
    ] = None,
    slime_dir: Annotated[
        Path | None, typer.Option(help="slime's checkout; default: SLIME_DIR, else the importable one.")
    ] = None,
    megatron_dir: Annotated[
        Path | None,
        typer.Option(help="Megatron-LM's; default: MEGATRON_DIR, else beside slime or importable."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="How many GPUs there must be; default: NUM_GPUS, else 8 with --training.", min=0),
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="Fail on all that a training run on this machine can't do without.")
    ] = False,
    isolation: Annotated[
        str, typer.Option(help="What the code sandbox must enforce: full, seccomp or rlimits.")
    ] = "full",
    flags: Annotated[
        Path | None,
        typer.Option(
            help="Only check the flags that this script, or the command on stdin (-), gives slime.",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Look at this machine before a training run: what would fail, what may, and what to do about it.

    Exits with 1 if something would fail. Takes a few seconds and changes nothing.
    """
    # transformers would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if flags is not None:
        from strands_rollout.flag_check.command import report_flags

        known = report_flags(flags, as_json=as_json, slime_dir=slime_dir, megatron_dir=megatron_dir)
        raise typer.Exit(0 if known else 1)
    from rich.console import Console

    from strands_rollout.doctor.diagnosis import examine
    from strands_rollout.doctor.question import Question, find_repository
    from strands_rollout.doctor.sandbox_layers import to_isolation

    question = Question(
        env=dict(os.environ),
        repository=find_repository(),
        isolation=to_isolation(isolation),
        base_urls=tuple(base_url or ()),
        tokenizer=tokenizer,
        config=config,
        data=tuple(data or ()),
        slime_dir=slime_dir,
        megatron_dir=megatron_dir,
        gpus=gpus,
        training=training,
        model_name=model_name,
        max_context_length=max_context_length,
    )
    with Console(stderr=True).status("looking at this machine ..."):
        diagnosis = examine(question)
    if as_json:
        typer.echo(diagnosis.to_json(strict=strict))
    else:
        diagnosis.show(Console())
    raise typer.Exit(0 if diagnosis.ok(strict=strict) else 1)
