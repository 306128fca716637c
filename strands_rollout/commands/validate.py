"""The command `strands-rollout validate`: its arguments and its exit code."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from strands_rollout.commands.reward_options import Config, RewardKey, RewardPath


def validate(
    data: Annotated[Path, typer.Argument(help="JSONL with prompt and label.", exists=True, dir_okay=False)],
    config: Config = None,
    reward: RewardPath = None,
    reward_key: RewardKey = None,
    label_key: Annotated[str, typer.Option(help="Where a row has its label.")] = "label",
    prompt_key: Annotated[str, typer.Option(help="Where a row has its prompt.")] = "prompt",
    answer: Annotated[
        list[str] | None,
        typer.Option(
            help="How a gold answer is said, {label} standing for it; may be given more than once, and each must be "
            "right. Default: \\boxed{{label}} and Answer: {label}."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Ask the reward for each row's own gold answer: a label that can't score teaches nothing.

    Prints the line, the label and the reason of each row whose answer does not score 1. Exits with 1 if there is one.
    """
    from strands_rollout.dataset_rows import json_line
    from strands_rollout.inspection.gold_answers import PLACE, SAYINGS
    from strands_rollout.inspection.reward_call import load_reward
    from strands_rollout.inspection.validation import validate as validate_rows
    from strands_rollout.report import counter

    sayings = answer or SAYINGS
    if any(PLACE not in saying for saying in sayings):
        raise typer.BadParameter(f"got --answer {answer}; expected {PLACE} in each, where the label goes")
    called = load_reward(reward, config, [reward_key] if reward_key else ["acc", "score"])
    keys = {"prompt_key": prompt_key, "label_key": label_key}
    with counter("gold answers") as on_done:
        found = asyncio.run(validate_rows(data, called, **keys, sayings=sayings, on_done=on_done))
    if as_json:
        typer.echo(json_line(found.to_dict()), nl=False)
    else:
        for fault in found.faults:
            typer.echo(f"{data}:{fault.line}: label {json.dumps(fault.label, default=str)}: {fault.reason}")
        typer.echo(f"{found.rows - len(found.faults)} of {found.rows} gold answers are right")
    raise typer.Exit(1 if found.faults else 0)
