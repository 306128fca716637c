"""The commands `strands-rollout demo` and `eval`; their options are those of `evaluation.options`."""

import time
from pathlib import Path
from typing import Annotated, Final

import typer

from strands_rollout.cli.options import Given, check_engine, made, takes
from strands_rollout.evaluation.options import DemoOptions, EvalOptions, Sampling

_REAL: Final = {"samples": 16, "concurrency": 64, "max_new_tokens": 16384}
_EMBEDDED: Final = {"samples": 4, "concurrency": 16, "max_new_tokens": 1024}


@takes(DemoOptions)
def demo(given: Given) -> None:
    """Run math problems through `generate` and `reward_func`, check every token, and show what is trained.

    The last line on stdout is a JSON summary. Exits with 1 if a check fails or no episode completes.
    """
    check_engine(given["base_url"], given["model_dir"])
    from strands_rollout.evaluation.demo import run_demo

    raise typer.Exit(0 if run_demo(DemoOptions(**given)).ok else 1)


@takes(EvalOptions, Sampling)
def evaluate(
    given: Given,
    *,
    k: Annotated[
        str | None,
        typer.Option(help="For pass@k, as far as there are so many samples; default: 1,4,8,16.", metavar="N,N,..."),
    ] = None,
) -> None:
    """Sample problems with `generate` and `reward_func`, and report accuracy, pass@k and the majority's accuracy.

    Results are kept as they come: the same command with the same --out resumes where it was cut, and tries again what
    failed. A failed sample, or one that could not be graded, is the infrastructure's doing and counts nowhere; the
    report says how many are missing. When as many in a row as run at once, at least 8, fail alike, the run stops. The
    last line on stdout is the report as JSON. Exits with 1 if a sample is missing or a check fails, with 130 after
    Ctrl-C.
    """
    check_engine(given["base_url"], given["model_dir"])
    # what an option's bounds can't say, and an engine would refuse for each sample
    if not 0 < given["top_p"] <= 1:
        raise typer.BadParameter(f"got --top-p {given['top_p']}; expected more than 0, and at most 1")
    if given["top_k"] == 0:
        raise typer.BadParameter("got --top-k 0; expected -1 for all, or 1 and more")
    ks = None if k is None else _parse_ks(k)
    from strands_rollout.evaluation.run import run_evaluation

    defaults = _REAL if given["base_url"] is not None else _EMBEDDED
    given |= {name: given[name] or default for name, default in defaults.items()}
    given["data"] = given["data"] or []
    given["out"] = given["out"] or Path("eval_results") / time.strftime("%Y%m%d-%H%M%S")
    raise typer.Exit(run_evaluation(made(EvalOptions, given, sampling=made(Sampling, given), ks=ks)))


def _parse_ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise typer.BadParameter(f"got --k {text!r}; expected numbers from 1 with commas between, as in 1,4,8")
    return ks
