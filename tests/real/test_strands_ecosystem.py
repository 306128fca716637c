"""Strands' ecosystem in episodes: hooks, agents as tools, tools of strands-agents-tools and of an MCP server.

What needs strands-agents-tools or starts MCP servers runs on the real SGLang alone.
"""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from many_tools.hooks import COUNTED, NOT_ALLOWED, Storekeeper
from many_tools_engine import Play, tool_results

from strands_rollout import Sample

_MODEL = ["before model", "after model"]


def dying(test: Any) -> Any:
    """Strands leaves a coroutine of its own behind where it stops a client whose server is gone."""
    for kind in ("RuntimeWarning", "pytest.PytestUnraisableExceptionWarning"):
        test = pytest.mark.filterwarnings(f"ignore:.*MCPClient.stop:{kind}")(test)
    return pytest.mark.usefixtures("_leftovers")(test)


@pytest.fixture
def _leftovers() -> Iterator[None]:
    """Let go of them here, and not in the midst of another test."""
    yield
    gc.collect()


async def test_a_hook_sees_model_and_tool_calls_in_order_and_rewrites_a_result(play: Play) -> None:
    played = await play("How many screws?")
    assert Storekeeper.latest.seen == [*_MODEL, "before stock", "after stock", *_MODEL]
    assert played.context(0) == tool_results(COUNTED)


async def test_a_hook_cancels_a_call(play: Play) -> None:
    played = await play("Throw the bolts away.")
    assert played.context(0) == tool_results(NOT_ALLOWED)
    assert played.sample.status is Sample.Status.COMPLETED


async def test_a_hook_that_rewrites_a_call_does_not_rewrite_what_was_sampled(play: Play) -> None:
    played = await play("How many pins?")
    assert '"item": "pins"' in played.sample.response
    assert played.context(0) == tool_results("75")


async def test_a_sub_agent_with_a_tool_is_a_sample_of_its_own(play: Play) -> None:
    main, expert = (await play("Ask an expert for the weight of all bolts.")).samples
    assert [main.status, expert.status] == [Sample.Status.COMPLETED] * 2
    assert main.rollout_id == expert.rollout_id
    assert main.reward == expert.reward
    assert "120 bolts weigh 1440 grams." in expert.response
    assert expert.tokens != main.tokens


async def test_sub_agents_that_run_at_once_are_answered_in_order(play: Play) -> None:
    played = await play("Ask two experts for the weights of a nut and a screw.")
    assert [sample.status for sample in played.samples] == [Sample.Status.COMPLETED] * 3
    nut, screw = sorted(sample.response for sample in played.samples[1:])
    assert ("nut" in nut, "screw" in screw) == (True, True)
    assert played.context(0).index("nut weighs") < played.context(0).index("screw weighs")


async def test_without_fan_out_a_sub_agents_words_reach_the_main_agent_alone(play: Play) -> None:
    played = await play("Ask an expert for the weight of all bolts.", fan_out=False)
    assert len(played.samples) == 1
    assert len(played.conversations) == 2
    assert "120 bolts weigh 1440 grams." in played.context(0)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:calculator is deprecated:DeprecationWarning")
async def test_the_calculator_of_strands_agents_tools_calculates(on_sglang: Play) -> None:
    played = await on_sglang("What is 1234 * 5678?")
    assert played.context(0) == tool_results("Result: 7006652")
    assert (played.sample.status, played.facts["tool_errors"]) == (Sample.Status.COMPLETED, 0)
    assert played.sample.reward["pred"] == "7006652"


@pytest.mark.real
async def test_a_tool_of_an_mcp_server_is_called(on_sglang: Play) -> None:
    played = await on_sglang("Add 2 and 40.")
    assert played.context(0) == tool_results("42")
    assert (played.sample.status, played.facts["tool_errors"]) == (Sample.Status.COMPLETED, 0)


@pytest.mark.real
async def test_an_mcp_tool_that_raises_is_an_error_result(on_sglang: Play) -> None:
    played = await on_sglang("Divide 1 by 0.")
    assert "Error executing tool divide" in played.context(0)
    assert (played.sample.status, played.facts["tool_errors"]) == (Sample.Status.COMPLETED, 1)


@pytest.mark.real
async def test_bytes_from_an_mcp_server_are_an_empty_result(on_sglang: Play) -> None:
    played = await on_sglang("Fetch the key.")
    assert played.context(0) == tool_results("")
    assert played.sample.status is Sample.Status.COMPLETED


@pytest.mark.real
async def test_an_image_that_the_policy_can_not_read_is_a_text_and_a_warning(
    on_sglang: Play, caplog: pytest.LogCaptureFixture
) -> None:
    played = await on_sglang("Draw a dot.", by_heart=False)  # what it says of the text is open
    assert "[an image that can't be read]" in played.context(0)
    assert played.sample.status is not Sample.Status.FAILED
    assert "this model reads text only" in caplog.text


@dying
@pytest.mark.real
async def test_an_mcp_server_that_dies_is_an_outage_and_the_next_episode_has_another(on_sglang: Play) -> None:
    played = await on_sglang("Stop the server.", by_heart=False)
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "sandbox_error")
    assert set(played.sample.loss_mask) == {0}
    assert (await on_sglang("Add 2 and 40.")).facts["tool_errors"] == 0


@dying
@pytest.mark.real
async def test_episodes_that_share_a_dying_mcp_server_all_end(on_sglang: Play) -> None:
    questions = ["Add 2 and 40.", "Stop the server.", "Divide 1 by 0.", "Add 2 and 40."] * 2
    played = await asyncio.gather(*(on_sglang(question, by_heart=False) for question in questions))
    ends = [(one.sample.status, one.facts["stop_reason"]) for one in played]
    assert set(ends) <= {(Sample.Status.COMPLETED, "completed"), (Sample.Status.FAILED, "sandbox_error")}
    assert ends[1] == ends[5] == (Sample.Status.FAILED, "sandbox_error")
    assert (await on_sglang("Add 2 and 40.")).facts["tool_errors"] == 0
