"""The commands `strands-rollout demo` and `eval`: their arguments and exit codes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from strands_rollout.cli.options import BaseUrl, Model, Tokenizer, check_engine


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
    from strands_rollout.evaluation.demo import DemoOptions, run_demo

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


_REAL_SAMPLES, _EMBEDDED_SAMPLES = 16, 4
_REAL_CONCURRENCY, _EMBEDDED_CONCURRENCY = 64, 16
_REAL_NEW_TOKENS, _EMBEDDED_NEW_TOKENS = 16384, 1024


def evaluate(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSONL with prompt and label; may be given more than once. Default: on the embedded engine 16 of the "
            "shipped problems.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    eval_config: Annotated[
        Path | None,
        typer.Option(
            help="slime's --eval-config YAML in place of --data; what it sets counts, the options are for the rest.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    base_url: BaseUrl = None,
    model: Model = None,
    tokenizer: Tokenizer = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="slime's --custom-config-path YAML, with settings under strands_rollout:.", exists=True, dir_okay=False
        ),
    ] = None,
    samples_per_problem: Annotated[
        int | None, typer.Option(help="Episodes of each problem; default: 16, on the embedded engine 4.", min=1)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Episodes at once; default: 64, on the embedded engine 16.", min=1)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option(help="Share of the probability that is kept, above 0.", max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens that are kept; -1 for all.", min=-1)] = -1,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a whole response, tool results included; default: 16384, on the embedded engine 1024.",
            min=1,
        ),
    ] = None,
    max_context_length: Annotated[
        int | None, typer.Option(help="Tokens of an episode, prompt included; default: the engine's limit.", min=1)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Gives each sample a sampling seed of its own, whatever else is asked.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Problems of each data set; default: all.", min=1)] = None,
    k: Annotated[
        str | None,
        typer.Option(help="For pass@k, as far as there are so many samples; default: 1,4,8,16.", metavar="N,N,..."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder; a run that was cut is resumed; default: a new one in eval_results/.",
            file_okay=False,
        ),
    ] = None,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Check each sample as the demo does; a proxy then reads every request, which costs CPU."
        ),
    ] = False,
    save_tokens: Annotated[
        bool, typer.Option("--save-tokens", help="Write whole samples, with tokens, mask and logprobs.")
    ] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON on stdout.")] = False,
) -> None:
    """Sample problems with `generate` and `reward_func`, and report accuracy, pass@k and the majority's accuracy.

    Results are kept as they come: the same command with the same --out resumes where it was cut, and tries again what
    failed. A failed sample, or one that could not be graded, is the infrastructure's doing and counts nowhere; the
    report says how many are missing. When as many in a row as run at once, at least 8, fail alike, the run stops. The
    last line on stdout is the report as JSON. Exits with 1 if a sample is missing or a check fails, with 130 after
    Ctrl-C.
    """
    check_engine(base_url, model)
    _check_sampling(top_p, top_k)
    # transformers would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from strands_rollout.evaluation.plan import EvalOptions, Sampling
    from strands_rollout.evaluation.run import run_evaluation

    is_real = base_url is not None
    samples = samples_per_problem or (_REAL_SAMPLES if is_real else _EMBEDDED_SAMPLES)
    new_tokens = max_new_tokens or (_REAL_NEW_TOKENS if is_real else _EMBEDDED_NEW_TOKENS)
    options = EvalOptions(
        data=data or [],
        eval_config=eval_config,
        base_url=base_url,
        model_dir=model,
        tokenizer_dir=tokenizer,
        config=config,
        sampling=Sampling(samples, new_tokens, temperature, top_p, top_k),
        max_context_tokens=max_context_length,
        concurrency=concurrency or (_REAL_CONCURRENCY if is_real else _EMBEDDED_CONCURRENCY),
        seed=seed,
        limit=limit,
        ks=None if k is None else _parse_ks(k),
        out=out or Path("eval_results") / time.strftime("%Y%m%d-%H%M%S"),
        audits=audit,
        keeps_tokens=save_tokens,
        json_only=json_only,
    )
    raise typer.Exit(run_evaluation(options))


def _check_sampling(top_p: float, top_k: int) -> None:
    """What an option's bounds can't say, and an engine would refuse for each sample."""
    if not 0 < top_p <= 1:
        raise typer.BadParameter(f"got --top-p {top_p}; expected more than 0, and at most 1")
    if top_k == 0:
        raise typer.BadParameter("got --top-k 0; expected -1 for all, or 1 and more")


def _parse_ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise typer.BadParameter(f"got --k {text!r}; expected numbers from 1 with commas between, as in 1,4,8")
    return ks
