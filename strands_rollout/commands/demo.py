"""The command `strands-rollout demo`: its arguments and its exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from strands_rollout.commands.engine_options import BaseUrl, Model, Tokenizer, check_engine


def demo(
    base_url: BaseUrl = None,
    model: Model = None,
    tokenizer: Tokenizer = None,
    data: Annotated[
        Path | None,
        typer.Option(help="JSONL with prompt and label; default: the shipped problems.", exists=True, dir_okay=False),
    ] = None,
    samples: Annotated[int, typer.Option(help="Episodes to run.", min=1)] = 32,
    concurrency: Annotated[int, typer.Option(help="Episodes at once.", min=1)] = 16,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0.0)] = 1.0,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of a whole response, tool results included.", min=1)
    ] = 1024,
    seed: Annotated[
        int | None, typer.Option(help="Sampling seed of the first episode; the next one's is one more.")
    ] = None,
    dump: Annotated[Path, typer.Option(help="Folder of the samples that are written.", file_okay=False)] = Path(
        "demo_dump"
    ),
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON on stdout.")] = False,
) -> None:
    """Run math problems through `generate` and `reward_func`, check every token, and show what is trained.

    The last line on stdout is a JSON summary. Exits with 1 if a check fails or no episode completes.
    """
    check_engine(base_url, model)
    # transformers would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from strands_rollout.demo import DemoOptions, run_demo

    summary = run_demo(
        DemoOptions(
            base_url=base_url,
            model_dir=model,
            tokenizer_dir=tokenizer,
            data=data,
            samples=samples,
            concurrency=concurrency,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            dump_dir=dump,
            json_only=json_only,
        )
    )
    raise typer.Exit(0 if summary.ok else 1)
