"""Commands about a setup or finished samples: `doctor`, `check-template`, `drift`, `replay`, `rescore`, `validate`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strands_rollout.cli import options
from strands_rollout.cli.options import Given, check_engine, made, takes
from strands_rollout.diagnostics.diagnosis import Question

if TYPE_CHECKING:
    from strands_rollout.diagnostics.diagnosis import Diagnosis


@takes(Question)
def doctor(
    given: Given,
    *,
    flags: Annotated[
        Path | None,
        typer.Option(help="Only check the flags that this script, or the command on stdin (-), gives slime."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
    as_json: options.JsonLine = False,
) -> None:
    """Look at this machine before a training run.

    Shows what would fail, what may, and what to do about it, in a few seconds. Exits with 1 if something would fail.
    """
    if flags is not None:
        from strands_rollout.diagnostics.flag_check import report_flags

        places = {name: given[name] for name in ("slime_dir", "megatron_dir")}
        raise typer.Exit(0 if report_flags(flags, as_json=as_json, **places) else 1)
    from strands_rollout.diagnostics import diagnosis
    from strands_rollout.diagnostics.doctor import examine
    from strands_rollout.dump.terminal import PlainConsole

    question = made(Question, given, env=dict(os.environ), repository=diagnosis.find_repository())
    with PlainConsole(stderr=True).status("looking at this machine ..."):
        found = examine(question)
    _show(found, as_json=as_json, strict=strict)


def _show(found: Diagnosis, *, as_json: bool, strict: bool = False) -> None:
    """Print it and exit."""
    from strands_rollout.dump.terminal import PlainConsole

    if as_json:
        typer.echo(found.to_json(strict=strict))
    else:
        found.show(PlainConsole())
    raise typer.Exit(0 if found.ok(strict=strict) else 1)


def check_template(
    tokenizer: Annotated[str, typer.Argument(help="A folder with a tokenizer, or a model's id on the hub.")],
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A template to look at in place of the tokenizer's own.", exists=True, dir_okay=False),
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="The format in which the template's calls must be read; auto: whichever fits.")
    ] = "auto",
    as_json: options.JsonLine = False,
) -> None:
    """Look at a chat template: does it only append?

    Shows where it appends, where it rewrites, who reads its calls, and what ends a turn. Exits with 1 if a rule is
    broken; then it shows the tokens around the first difference.
    """
    from strands_rollout.diagnostics import template_check
    from strands_rollout.diagnostics.diagnosis import Diagnosis

    source = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    loaded = template_check.read_tokenizer(tokenizer)
    found = template_check.check_template(tokenizer, loaded, chat_template=source, tool_parser=tool_parser)
    _show(Diagnosis(found), as_json=as_json)


def drift(
    dump: options.Dump,
    tokenizer: options.DumpTokenizer = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="The run's YAML, for its tool_parser and enable_thinking; default: what the template writes.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    changes: options.Changes = None,
    show: Annotated[int, typer.Option(help="Episodes to list, those that lose most first.", min=0)] = 10,
    as_json: options.JsonLines = False,
) -> None:
    """Count tokens that change if episodes are encoded again.

    That is what text in place of tokens would have cost. Also compares the context, which the policy read, with what
    the chat template makes of it: nothing may differ there. Exits with 1 if something does, or if the dump has no
    tokens; with 2 if they are not of this tokenizer.
    """
    from strands_rollout.diagnostics.replay import run_drift
    from strands_rollout.settings import read_config_file

    settings = read_config_file(config, changes) if config or changes else None
    raise typer.Exit(0 if run_drift(dump, tokenizer, settings=settings, show=show, as_json=as_json) else 1)


def replay(
    dump: options.Dump,
    sample: Annotated[int, typer.Option(help="Which of the dump's samples, from 0.", min=0)] = 0,
    base_url: options.BaseUrl = None,
    model: options.Model = None,
    tokenizer: options.DumpTokenizer = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; default: as recorded with a seed, else 0; with --seed 1.", min=0.0),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The episode's sampling seed, for an engine whose tokens depend on it; default: recorded."),
    ] = None,
    as_json: options.JsonLine = False,
) -> None:
    """Sample a saved episode again and say where it departs.

    Each turn is sampled on the tokens that it had read. No tool is run: its recorded results are part of those tokens.
    Where the engine returns logprobs of its input, those of the recorded tokens are compared too. Exits with 1 if a
    turn departs.
    """
    check_engine(base_url, model)
    from strands_rollout.diagnostics.replay import run_replay

    same = run_replay(
        dump,
        sample=sample,
        base_url=base_url,
        model_dir=model,
        tokenizer_dir=tokenizer,
        temperature=temperature,
        seed=seed,
        as_json=as_json,
    )
    raise typer.Exit(0 if asyncio.run(same) else 1)


def rescore(
    dump: options.Dump,
    reward: options.RewardPath = None,
    config: options.Config = None,
    changes: options.Changes = None,
    reward_key: options.RewardKey = None,
    group_rm: options.GroupRm = False,
    out: Annotated[
        Path | None, typer.Option(help="A new dump (.jsonl, .jsonl.gz) of all samples, with the new rewards.")
    ] = None,
    show: Annotated[int, typer.Option(help="Changed samples to list.", min=0)] = 50,
    as_json: options.JsonLines = False,
) -> None:
    """Score saved samples again with another reward.

    Shows what changes. Aborted samples keep what they have. Exits with 1 if a sample could not be scored.
    """
    from strands_rollout.diagnostics.rewards import load_reward, run_rescore

    if group_rm and reward is None:
        raise typer.BadParameter("got --group-rm without --reward; expected the reward that takes groups")
    keys = [*([reward_key] if reward_key else []), "score", "acc"]
    called = load_reward(reward, config, keys, changes=changes, takes_groups=group_rm)
    ok = asyncio.run(run_rescore(dump, called, out=out, show=show, as_json=as_json))
    raise typer.Exit(0 if ok else 1)


def validate(
    data: Annotated[Path, typer.Argument(help="JSONL with prompt and label.", exists=True, dir_okay=False)],
    config: options.Config = None,
    changes: options.Changes = None,
    reward: options.RewardPath = None,
    reward_key: options.RewardKey = None,
    label_key: Annotated[str, typer.Option(help="Where a row has its label.")] = "label",
    prompt_key: Annotated[str, typer.Option(help="Where a row has its prompt.")] = "prompt",
    answer: Annotated[
        list[str] | None,
        typer.Option(
            help="How a policy may write an answer, with {label} in it; may be given more than once, and each must be "
            "right. Default: \\boxed{{label}} and Answer: {label}."
        ),
    ] = None,
    as_json: options.JsonLine = False,
) -> None:
    """Ask the reward for each row's own gold answer.

    Prints the line, the label and the reason of each row whose answer does not score 1: it teaches nothing. Exits with
    1 if there is one.
    """
    from strands_rollout.diagnostics.rewards import PLACE, SAYINGS, load_reward, run_validate

    sayings = answer or SAYINGS
    if any(PLACE not in saying for saying in sayings):
        raise typer.BadParameter(f"got --answer {answer}; expected {PLACE} in each, where the label goes")
    called = load_reward(reward, config, [reward_key] if reward_key else ["acc", "score"], changes=changes)
    keys = {"prompt_key": prompt_key, "label_key": label_key}
    ok = asyncio.run(run_validate(data, called, **keys, sayings=sayings, as_json=as_json))
    raise typer.Exit(0 if ok else 1)
