"""The command `strands-rollout rescore`: its arguments and its exit code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from strands_rollout.commands.reward_options import Config, GroupRm, RewardKey, RewardPath


def rescore(
    dump: Annotated[
        Path, typer.Argument(help="A dump, slime's debug file, results of eval, or a folder of them.", exists=True)
    ],
    reward: RewardPath = None,
    config: Config = None,
    reward_key: RewardKey = None,
    group_rm: GroupRm = False,
    out: Annotated[
        Path | None, typer.Option(help="A new dump (.jsonl, .jsonl.gz) of all samples, with the new rewards.")
    ] = None,
    show: Annotated[int, typer.Option(help="Changed samples to list.", min=0)] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead: a line for each sample, and the totals.")
    ] = False,
) -> None:
    """Score saved samples again with another reward, and show what changes.

    Aborted samples keep what they have. Exits with 1 if a sample could not be scored.
    """
    from strands_rollout.inspection.rescore_run import RescoreOptions, run_rescore
    from strands_rollout.inspection.reward_call import load_reward

    if group_rm and reward is None:
        raise typer.BadParameter("got --group-rm without --reward; expected the reward that takes groups")
    keys = [*([reward_key] if reward_key else []), "score", "acc"]
    called = load_reward(reward, config, keys, takes_groups=group_rm)
    change = asyncio.run(run_rescore(RescoreOptions(dump, called, out, show, as_json)))
    raise typer.Exit(1 if change.failed else 0)
