"""How far a reader has to walk to follow one tool turn, and one whole episode, through `generate`.

The ceilings are those of `scripts/house.py`: whoever shortens the walk lowers them there.
"""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest
import walk

from strands_rollout.agent.loop import HAS_MIDDLEWARE

HOUSE = Path(__file__).parents[2] / "scripts" / "house.py"


@pytest.fixture(scope="module")
def walks(shipped_tokenizer: Any) -> tuple[walk.Walk, walk.Walk]:
    turn, episode = asyncio.run(walk.walks(shipped_tokenizer))
    print(turn)  # shown where a test fails, or with -s
    return turn, episode


def ceilings() -> dict[str, float]:
    return {name: limit.most for name, limit in runpy.run_path(str(HOUSE), run_name="house")["LIMITS"].items()}


@pytest.mark.skipif(not HAS_MIDDLEWARE, reason="another loop runs the cycles of this Strands")
def test_a_tool_turn_and_an_episode_enter_no_more_than_they_did(walks: tuple[walk.Walk, walk.Walk]) -> None:
    most = ceilings()
    assert {name: found for name, found in walk.figures(*walks).items() if found > most[name]} == {}


def test_the_walk_goes_from_an_engines_answer_through_parser_and_tool_to_the_next_request(
    walks: tuple[walk.Walk, walk.Walk],
) -> None:
    turn, episode = walks
    names = [code.co_name for code in turn.entered]
    assert names.index("read_turn") < names.index("execute_python_code") < names.index("turn_ids")
    assert set(turn.entered) < set(episode.entered)
    assert (turn.switches, turn.files) > (turn.files, 1)
