"""The commands `demo`, `eval` and `train`; their options are those of `evaluation.options` and `train.options`."""

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from strands_rollout.cli.options import Given, check_engine, made, takes
from strands_rollout.errors import ConfigError
from strands_rollout.evaluation.options import SHIPPED_MODEL, DemoOptions, EvalOptions, Sampling, TryOptions
from strands_rollout.train.options import TrainOptions, UpdateSettings

_REAL: Final = {"samples": 16, "concurrency": 64, "max_new_tokens": 16384}
_EMBEDDED: Final = {"samples": 4, "concurrency": 16, "max_new_tokens": 1024}


@takes(DemoOptions)
def demo(given: Given) -> None:
    """Play math problems and show what would be trained.

    They go through `generate` and `reward_func`, as slime calls them, and every token is checked. The last line on
    stdout is a JSON summary. Exits with 1 if a check fails or no episode completes.
    """
    check_engine(given["base_url"], given["model_dir"])
    from strands_rollout.evaluation.run import run_demo

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
    """Sample the problems of data sets, and report accuracy.

    Beside it: pass@k, and the majority's accuracy. The samples are of `generate` and `reward_func`, as in training.

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
    given["out"] = given["out"] or Path("eval_results") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    raise typer.Exit(run_evaluation(made(EvalOptions, given, sampling=made(Sampling, given), ks=ks)))


def _parse_ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise typer.BadParameter(f"got --k {text!r}; expected numbers from 1 with commas between, as in 1,4,8")
    return ks


@takes(TryOptions)
def try_row(
    given: Given,
    *,
    config: Annotated[
        Path | None,
        typer.Argument(
            help="slime's --custom-config-path YAML; default: this package's settings.", exists=True, dir_okay=False
        ),
    ] = None,
) -> None:
    """Play one row, and show it as it goes.

    Shown are what is read, each turn, call and result, reward and status. Turns come from one of: --script, --you,
    --api-base with --api-model, an SGLang server (--base-url), or a model on the embedded engine (--model; default: the
    shipped one, which knows math with the code tool only). With the first three no model is needed, and the rest is
    real: template, tokens, parser, tools, reward. Exits with 1 if the episode fails, or a script does not end with it.
    """
    sources = [name for name in ("script", "you", "api_base", "base_url", "model_dir") if given[name]]
    if len(sources) > 1:
        named = ", ".join(f"--{name.removesuffix('_dir').replace('_', '-')}" for name in sources)
        raise typer.BadParameter(f"got {named}; expected one source of turns")
    if (given["api_base"] is None) != (given["api_model"] is None):
        raise typer.BadParameter("got one of --api-base and --api-model; expected both, or none")
    from strands_rollout.evaluation.try_row import run_try

    raise typer.Exit(run_try(TryOptions(config=config, **given)))


@takes(TrainOptions, UpdateSettings)
def train(
    given: Given,
    *,
    context: typer.Context,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Go on where the logprobs, or slime's contract, do not hold.")
    ] = False,
) -> None:
    """Train a small model by GRPO on this CPU.

    Each step plays groups of episodes, through `generate` and `reward_func` as slime calls them, normalises their
    rewards by group, updates the policy and gives the engine the new weights from disk under a new version. At the
    first step the trainer's logprobs of the sampled tokens must equal the rollout's; if they don't, the run stops and
    shows the tokens. The run's folder holds options.json, steps.jsonl, summary.json, curves.png, checkpoints, and the
    policy as a model folder in weights/. The last line on stdout is the summary as JSON. Exits with 1 if a check fails
    or the engine does, with 2 for bad options, with 130 after Ctrl-C.
    """
    if find_spec("torch") is None:
        cpu_build = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        raise ConfigError(
            f"training needs torch, which is not installed; {cpu_build} && pip install 'strands-rollout[train]'"
        )
    from strands_rollout.train.rollouts import TrainingMethod

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
    from strands_rollout.train.trainer import run_training

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
    given["out"] = (
        given["out"] or Path("train_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{given['seed']}-{os.getpid()}"
    )
    given["model_dir"] = given["model_dir"] or SHIPPED_MODEL
    given["data"] = given["data"] or shipped_rows().with_name("train.jsonl")
    given["held_out"] = given["held_out"] or shipped_rows()
