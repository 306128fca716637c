"""What a policy may do in a turn, on both engines: call nothing, many tools, wrongly, without end, or fill a form."""

import asyncio
import math

import pytest
from many_tools.direct import describe
from many_tools.episodes import ENDLESS_TOKENS, EPISODES, STORE
from many_tools_engine import CHECKPOINT, Play, tool_results
from strands.types.exceptions import StructuredOutputException

from strands_rollout import Sample


async def test_an_answer_without_a_call_is_one_turn(play: Play) -> None:
    played = await play("Say hello.")
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.COMPLETED, "completed")
    assert (played.facts["turns"], played.facts["tool_calls"]) == (1, 0)


@pytest.mark.parametrize(
    ("settings", "tokens", "reason"),
    [({}, ENDLESS_TOKENS, "response_length"), ({"max_turn_tokens": 40}, 40, "turn_length")],
)
async def test_a_turn_without_an_end_is_cut_at_its_budget(
    play: Play, settings: dict[str, int], tokens: int, reason: str
) -> None:
    played = await play("Count for ever.", **settings)
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.TRUNCATED, reason)
    assert played.sample.loss_mask == [1] * tokens


async def test_a_call_in_the_reasoning_is_a_draft(play: Play) -> None:
    played = await play("How many bolts?")
    assert (played.facts["tool_calls"], played.facts["tool_errors"]) == (1, 0)
    assert played.context(0) == tool_results("120")


async def test_a_malformed_call_is_answered_and_put_right(play: Play) -> None:
    played = await play("How many nuts?")
    assert played.sample.status is Sample.Status.COMPLETED
    assert (played.facts["parse_failures"], played.facts["tool_calls"], played.facts["turns"]) == (1, 1, 3)
    assert "could not be parsed and was not run: not valid JSON" in played.context(0)
    assert played.context(1) == tool_results("75")


async def test_a_call_of_no_tool_is_answered_with_an_error(play: Play) -> None:
    played = await play("How many washers?")
    assert played.sample.status is Sample.Status.COMPLETED
    assert played.context(0) == tool_results("Unknown tool: count_washers")


async def test_parallel_calls_are_answered_in_their_order(play: Play) -> None:
    played = await play("How many bolts and nuts?")  # the first call ends last
    assert (played.facts["tool_iterations"], played.facts["tool_calls"]) == (1, 2)
    assert played.context(0) == tool_results("120", "75")


async def test_one_of_three_parallel_calls_may_fail(play: Play) -> None:
    played = await play("How many bolts, tubes and screws?")
    assert (played.facts["tool_calls"], played.facts["tool_errors"]) == (3, 1)
    assert played.context(0) == tool_results("120", "Error: LookupError - there are no tubes", "9")
    assert played.sample.status is Sample.Status.COMPLETED


async def test_an_invalid_form_is_answered_with_its_faults_and_filled_again(play: Play) -> None:
    played = await play("Have the nuts packed.")
    assert "Validation failed for Box." in played.context(0, conversation=1)
    assert "Field 'count': Input should be a valid integer" in played.context(0, conversation=1)
    assert played.context(0) == tool_results('{"item":"nuts","count":75}')
    assert [sample.status for sample in played.samples] == [Sample.Status.COMPLETED] * 2


async def test_an_answer_in_words_is_asked_for_as_a_form(play: Play) -> None:
    played = await play("Have the screws packed.")
    assert played.context(0, conversation=1) == "You must format the previous response as structured output."
    assert played.context(0) == tool_results('{"item":"screws","count":9}')
    assert [sample.status for sample in played.samples] == [Sample.Status.COMPLETED] * 2


async def test_structured_output_of_the_model_asks_once(many_tools_engine: str) -> None:
    box = await describe("bolts", many_tools_engine, CHECKPOINT)
    assert (box.item, box.count) == ("bolts", 120)
    with pytest.raises(StructuredOutputException, match="got a call with .*'count': 'none'"):
        await describe("tubes", many_tools_engine, CHECKPOINT)


async def test_at_temperature_one_the_policy_would_nearly_always_say_the_same(play: Play) -> None:
    local = [episode.question for episode in EPISODES if episode.tools == STORE]
    greedy = await asyncio.gather(*(play(question) for question in local))
    # the logprobs of greedy turns are those of temperature one, too
    samples = [sample for played in greedy for sample in played.samples]
    assert [sample.index for sample in samples if sum(sample.rollout_log_probs or []) < math.log(0.7)] == []


async def test_whatever_is_sampled_at_temperature_one_is_a_valid_sample(play: Play) -> None:
    local = [episode.question for episode in EPISODES if episode.tools == STORE]
    played = await asyncio.gather(*(play(question, temperature=1.0, by_heart=False) for question in local))
    assert all(one.violations == [] for one in played)
