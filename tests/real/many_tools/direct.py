"""Agents that are not run by `generate`: structured output, asked of the agent itself."""

from pathlib import Path
from typing import Any

from strands import Agent
from strands.agent.conversation_manager import NullConversationManager
from strands.types.exceptions import StructuredOutputException

from many_tools.episodes import SYSTEM_PROMPT
from many_tools.tools import Box
from strands_rollout import SGLangModel
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer


def agent_on(base_url: str, tokenizer_dir: Path, **more: Any) -> Agent:
    """An agent of its own, as the documentation shows it, that takes the likeliest tokens."""
    model = SGLangModel(
        tokenizer=load_tokenizer(str(tokenizer_dir)),
        base_url=base_url,
        sampling_params={"temperature": 0.0, "max_new_tokens": 256},
    )
    return Agent(
        model=model,
        system_prompt=SYSTEM_PROMPT,
        callback_handler=None,
        conversation_manager=NullConversationManager(),
        **more,
    )


async def direct_episodes(base_url: str, tokenizer_dir: Path) -> None:
    """Has all of them asked."""
    await describe("bolts", base_url, tokenizer_dir)
    try:
        await describe("tubes", base_url, tokenizer_dir)
    except StructuredOutputException:
        return
    raise AssertionError("an invalid box was taken for a valid one")


async def describe(item: str, base_url: str, tokenizer_dir: Path) -> Box:
    """A box by `structured_output` of the model, which asks once."""
    agent = agent_on(base_url, tokenizer_dir)
    prompt = [{"role": "user", "content": [{"text": f"Describe the box of {item}."}]}]
    events = [event async for event in agent.model.structured_output(Box, prompt, SYSTEM_PROMPT)]
    box = events[-1]["output"]
    assert isinstance(box, Box)
    return box
