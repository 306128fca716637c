"""Samples of one prompt on one engine, and what the engine prefilled for each of their turns.

Ours and strands-sglang's models run the same Strands agent, each used as its documentation says. All of it is greedy:
the shipped model answers the question after one call of its tool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strands import Agent
from strands.types.exceptions import MaxTokensReachedException
from strands_sglang import SGLangClient as PeerClient
from strands_sglang import SGLangModel as PeerModel

from strands_rollout import SGLangModel, ToolLimiter, execute_python_code
from strands_rollout.settings import SYSTEM_PROMPT

PARAMS = {"temperature": 0.0, "max_new_tokens": 256, "skip_special_tokens": False}
_MOST_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class TurnPrefill:
    """What an engine says of one request.

    Attributes:
        prompt_tokens: Tokens that it was sent.
        cached_tokens: Of these, tokens that it had in its prefix cache.
        new_tokens: Of these, tokens that neither the request before had nor its answer; all, of a first request.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int

    @property
    def prefilled(self) -> int:
        return self.prompt_tokens - self.cached_tokens


Episode = list[TurnPrefill]
Play = Callable[[str, Any, str], Awaitable[Episode]]


class _CountingClient(PeerClient):
    """The peer's client, with its answers' statistics kept: the peer itself drops them."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url=base_url)
        self.told: list[tuple[int, int, int]] = []

    async def generate(self, input_ids: list[int], **kwargs: Any) -> dict[str, Any]:
        answer = await super().generate(input_ids, **kwargs)
        meta = answer["meta_info"]
        self.told.append((meta["prompt_tokens"], meta["cached_tokens"], len(answer["output_ids"])))
        return answer


async def ours(url: str, tokenizer: Any, question: str) -> Episode:
    model = SGLangModel(tokenizer=tokenizer, base_url=url, sampling_params=PARAMS)
    await _run(model, question)
    turns = model.trajectory.turns
    return _episode([(turn.prompt_tokens, turn.cached_tokens, turn.end - turn.start) for turn in turns])


async def strands_sglang(url: str, tokenizer: Any, question: str) -> Episode:
    client = _CountingClient(url)
    try:
        await _run(PeerModel(client=client, tokenizer=tokenizer, sampling_params=PARAMS), question)
    finally:
        await client.close()
    return _episode(client.told)


async def _run(model: Any, question: str) -> None:
    agent = Agent(
        model=model,
        tools=[execute_python_code],
        system_prompt=SYSTEM_PROMPT,
        hooks=[ToolLimiter(max_iterations=_MOST_ITERATIONS)],
        callback_handler=None,
    )
    # a turn that the length cut ends the peer's episode with this; what was prefilled until then counts all the same
    with contextlib.suppress(MaxTokensReachedException):
        await agent.invoke_async(question)


def _episode(told: Sequence[tuple[int, int, int]]) -> Episode:
    known, found = 0, []
    for prompt, cached, sampled in told:
        found.append(TurnPrefill(prompt, cached, prompt - known))
        known = prompt + sampled
    return found
