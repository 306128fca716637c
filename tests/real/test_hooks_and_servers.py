"""Hooks and an MCP server in episodes on the real SGLang.

All episodes are greedy: the shipped model begins with a call of the code tool.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from episode_stage import EpisodeStage
from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent, HookProvider, HookRegistry

from strands_rollout import Sample

pytestmark = pytest.mark.real
SERVER = Path(__file__).with_name("code_server.py")


class Cancelling(HookProvider):
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeToolCallEvent, lambda event: setattr(event, "cancel_tool", "Not allowed."))


class OtherCode(HookProvider):
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeToolCallEvent, self._change)

    def _change(self, event: BeforeToolCallEvent) -> None:
        event.tool_use = {**event.tool_use, "input": {"code": "print(12345 * 9)"}}


class OtherResult(HookProvider):
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(AfterToolCallEvent, self._change)

    def _change(self, event: AfterToolCallEvent) -> None:
        event.result = {**event.result, "content": [{"text": "1000, at least"}]}


def result_of(stage: EpisodeStage, sample: Sample) -> str:
    first, second = stage.recorder.episodes[str(sample.session_id)][:2]
    return stage.decode(second.input_ids[len(first.input_ids) + len(first.output_ids or []) :])


@pytest.mark.parametrize(
    ("hook", "tool_result"), [(Cancelling, "Not allowed."), (OtherCode, "111105"), (OtherResult, "1000, at least")]
)
async def test_hooks_cancel_and_rewrite_calls_and_results(stage, hook, tool_result) -> None:
    sampled, _ = stage.recorder.episodes[str((await stage.play_one()).session_id)][:2]
    sample = await stage.play_one(hooks=[f"{__name__}.{hook.__name__}"])
    assert f"<tool_response>\n{tool_result}\n</tool_response>" in result_of(stage, sample)
    assert stage.recorder.episodes[str(sample.session_id)][0].output_ids == sampled.output_ids


async def test_mcp_server_tool_is_called(stage: EpisodeStage) -> None:
    sample = await stage.play_one(tools=[{"command": f"{sys.executable} {SERVER}"}])
    assert "34, and not what" in result_of(stage, sample)
