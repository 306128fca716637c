"""Settings that a row may set for its own episode, and settings that it may not."""

from typing import Any

import pytest
from harness import ANSWER, TOOL_CALL, run

from strands_rollout import Sample
from strands_rollout.errors import ConfigError
from strands_rollout.settings import CODE_TOOL_PATH, McpServer, RolloutSettings
from strands_rollout.slime_plugin.inputs import with_row_settings

COUNT = "strands_rollout.examples.two_tools.count_stock"
ORDER = "strands_rollout.examples.two_tools.order"
COUNT_CALL = TOOL_CALL.format(name="count_stock", arguments='{"item": "nut"}')


def row(**settings: Any) -> Sample:
    return Sample(prompt="How many nuts?", metadata={"strands_rollout_settings": settings, "source": "mine"})


async def test_row_settings_change_prompt_tools_and_limits(shipped_tokenizer: Any) -> None:
    run_settings = {"tools": [ORDER], "row_tools": [COUNT], "max_tool_iterations": 5}
    # text never makes control tokens, and half a surrogate pair becomes "?"
    sample = row(system_prompt="a\ud800<|im_end|>\nCount.", tools=[COUNT], max_tool_iterations=1)
    played = await run(shipped_tokenizer, [COUNT_CALL] * 2, settings=run_settings, sample=sample)
    prompt = played.decode(played.sample.tokens[: played.prompt_length])
    assert "Count.\n" in prompt
    end = shipped_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert played.sample.tokens[: played.prompt_length].count(end) == 2
    assert "count_stock" in prompt
    assert '"order"' not in prompt
    assert (played.facts["stop_reason"], played.sample.metadata["source"]) == ("max_tool_iterations", "mine")
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
async def test_with_row_settings_refuses_other_settings(shipped_tokenizer: Any, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_row_settings(RolloutSettings(tools=(ORDER,), row_tools=(COUNT,)), {"strands_rollout_settings": settings})
    with pytest.raises(ConfigError, match="expected a mapping"):
        with_row_settings(RolloutSettings(), {"strands_rollout_settings": "fast"})
    played = await run(shipped_tokenizer, [], sample=row(**settings), settings={"tools": [ORDER]})
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "setup_error")


def schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


CALCULATE = "strands_rollout.examples.shop.calculate"


@pytest.mark.parametrize(
    ("given", "tools", "unknown"),
    [
        ([schema("order")], [ORDER], None),
        ([{"name": "order"}, "count_stock"], [COUNT, ORDER], None),
        ([schema("order"), schema("search")], [ORDER], "search"),
        ([{"name": ["odd"]}, 7], [COUNT, CALCULATE], "7, ['odd']"),
        ("order", [COUNT, CALCULATE], "a str"),
        ([], [COUNT, CALCULATE], None),
    ],
)
def test_with_row_settings_tool_schemas_choose_tools(given, tools, unknown, caplog) -> None:
    settings = RolloutSettings(tools=(COUNT, CALCULATE), row_tools=(ORDER,))
    for _ in range(2):
        assert list(with_row_settings(settings, {"tools": given}).tools) == tools
    words = [f"got {unknown} in metadata['tools']"] if unknown else []
    assert len(caplog.messages) == len(words)
    assert all(word in message for word, message in zip(words, caplog.messages, strict=True))
    assert all("row_tools have calculate, count_stock, order" in message for message in caplog.messages)


def test_with_row_settings_tools_override_tool_schemas() -> None:
    metadata = {"tools": [schema("order")], "strands_rollout_settings": {"tools": [COUNT]}}
    settings = RolloutSettings(tools=(CALCULATE,), row_tools=(ORDER, COUNT))
    assert with_row_settings(settings, metadata).tools == (COUNT,)
    metadata["strands_rollout_settings"] = {"max_tool_calls": 1}
    assert with_row_settings(settings, metadata).tools == (ORDER,)


def test_with_row_settings_keeps_mcp_servers() -> None:
    server = McpServer(name="units", command="python -m units")
    settings = RolloutSettings(tools=(CODE_TOOL_PATH, COUNT, server))
    assert with_row_settings(settings, {"tools": [schema("execute_python_code")]}).tools == (CODE_TOOL_PATH, server)
    assert with_row_settings(settings, {"tools": [schema("convert")]}).tools == settings.tools
