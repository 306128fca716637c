"""The command `strands-rollout replay`: its arguments and its exit code."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from strands_rollout.commands.engine_options import BaseUrl, Model, Tokenizer, check_engine


def replay(
    dump: Annotated[
        Path, typer.Argument(help="A dump, slime's debug file, results of eval, or a folder of them.", exists=True)
    ],
    sample: Annotated[int, typer.Option(help="Which of the dump's samples, from 0.", min=0)] = 0,
    base_url: BaseUrl = None,
    model: Model = None,
    tokenizer: Tokenizer = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; default: as recorded with a seed, else 0; with --seed 1.", min=0.0),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The episode's sampling seed, for an engine whose tokens depend on it; default: recorded."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Run a saved episode again, turn by turn, on the tokens that it had read, and say where it departs.

    No tool is run: its recorded results are part of those tokens. Where the engine tells the logprobs of its input,
    those of the recorded tokens are compared too. Exits with 1 if a turn departs.
    """
    check_engine(base_url, model)
    # transformers would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from strands_rollout.inspection.replay_run import ReplayOptions, run_replay

    options = ReplayOptions(
        dump=dump,
        sample=sample,
        base_url=base_url,
        model_dir=model,
        tokenizer_dir=tokenizer,
        temperature=temperature,
        seed=seed,
        as_json=as_json,
    )
    raise typer.Exit(0 if asyncio.run(run_replay(options)) else 1)
