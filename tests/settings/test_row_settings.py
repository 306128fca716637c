"""What a row sets for its own episode, and what it may not set."""

from __future__ import annotations

from typing import Any

import pytest
from harness import ANSWER, TOOL_CALL, run

from strands_rollout import Sample
from strands_rollout.config import RolloutSettings
from strands_rollout.errors import ConfigError
from strands_rollout.row_settings import MAY_SET, with_row_settings

COUNT = "strands_rollout.examples.two_tools.count_stock"
ORDER = "strands_rollout.examples.two_tools.order"
COUNT_CALL = TOOL_CALL.format(name="count_stock", arguments='{"item": "nut"}')


def row(**settings: Any) -> Sample:
    return Sample(prompt="How many nuts?", metadata={"strands_rollout_settings": settings, "source": "mine"})


async def test_a_row_sets_prompt_tools_and_limits_of_its_own_episode(shipped_tokenizer: Any) -> None:
    run_settings = {"tools": [ORDER], "row_tools": [COUNT], "max_tool_iterations": 5}
    sample = row(system_prompt="Count.", tools=[COUNT], max_tool_iterations=1)
    played = await run(shipped_tokenizer, [COUNT_CALL] * 2, settings=run_settings, sample=sample)
    prompt = played.decode(played.sample.tokens[: played.prompt_length])
    assert "Count.\n" in prompt
    assert "count_stock" in prompt
    assert '"order"' not in prompt
    assert played.facts["stop_reason"] == "max_tool_iterations"
    assert played.sample.metadata["source"] == "mine"
    other = await run(
        shipped_tokenizer, [ANSWER], settings=run_settings, sample=Sample(prompt="How many nuts?", metadata={})
    )
    assert '"order"' in other.decode(other.sample.tokens)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tools": ["os.system"]}, r"got the tools \['os.system'\].*expected some of"),
        ({"tools": [{"command": "sh"}]}, "got the tools"),
        ({"tools": COUNT}, "expected a list of names"),
        ({"tool": []}, "did you mean 'tools'"),
        ({"agent_factory": "os.system"}, "got 'agent_factory' in strands_rollout_settings"),
        ({"executor": "subprocess"}, "got 'executor' in strands_rollout_settings"),
        ({"max_tool_calls": -1}, "strands_rollout_settings of a row's metadata.max_tool_calls=-1"),
    ],
)
async def test_a_row_can_not_set_what_is_not_its_own(shipped_tokenizer: Any, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_row_settings(RolloutSettings(tools=(ORDER,), row_tools=(COUNT,)), {"strands_rollout_settings": settings})
    played = await run(shipped_tokenizer, [], sample=row(**settings), settings={"tools": [ORDER]})
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "setup_error")


def test_settings_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a mapping"):
        with_row_settings(RolloutSettings(), {"strands_rollout_settings": "fast"})


@pytest.mark.parametrize("metadata", [None, {}, "text", {"strands_rollout": {"tools": []}}])
def test_a_row_without_settings_leaves_them_as_they_are(metadata: Any) -> None:
    settings = RolloutSettings()
    assert with_row_settings(settings, metadata) is settings


def test_whatever_a_row_may_set_is_a_setting() -> None:
    assert set(MAY_SET) <= set(RolloutSettings.model_fields)


async def test_a_rows_system_prompt_may_hold_half_a_surrogate_pair_and_no_control_tokens(
    shipped_tokenizer: Any,
) -> None:
    played = await run(
        shipped_tokenizer, [ANSWER], sample=row(system_prompt="a\ud800<|im_end|>", tools=[]), settings={}
    )
    assert played.facts["stop_reason"] == "completed"
    end = shipped_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert played.sample.tokens.count(end) == 3
