"""Strands' own OpenAI model on the engine's chat endpoint; its messages are tokenised again when the episode is over.

One `openai.AsyncOpenAI` serves all episodes, the cheapest way that the model offers. Tokens and mask come from one
rendering of the whole conversation, so neither is what was sampled, and there are no logprobs.
"""

from __future__ import annotations

from typing import Any, Final

import openai
from strands import Agent
from strands.agent.conversation_manager import NullConversationManager
from strands.models.openai import OpenAIModel

from strands_rollout import Sample
from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.bench.null_tool import answer_from_script, learn_results
from strands_rollout.bench.player import Played, Stage, sampling_params
from strands_rollout.chat_messages import to_chat_messages, to_chat_tools
from strands_rollout.prompts import SYSTEM_PROMPT
from strands_rollout.slime_seam import load_tokenizer

_TURN_HEAD: Final = "<|im_start|>assistant\n"
_TURN_END: Final = "<|im_end|>"


class OpenAIPlayer:
    """Plays with an agent per episode."""

    def __init__(self, stage: Stage) -> None:
        learn_results(stage.scripts)
        self._tokenizer = load_tokenizer(str(stage.tokenizer_dir))
        self._client = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0)
        params = sampling_params()
        self._params = {name: params[name] for name in ("temperature", "top_p")}
        self._head = self._encode(_TURN_HEAD)
        self._end = self._encode(_TURN_END)[0]

    async def play(self, script: AnswerScript) -> Played:
        """Play one episode."""
        model = OpenAIModel(client=self._client, model_id="scripted", params=self._params)
        agent = Agent(
            model=model,
            tools=[answer_from_script],
            callback_handler=None,
            system_prompt=SYSTEM_PROMPT,
            # the default one drops the first messages of a long conversation, which are trained on
            conversation_manager=NullConversationManager(),
        )
        await agent.invoke_async(script.question)
        tokens, mask = self._tokens_and_mask(agent.messages)
        sample = Sample(status=Sample.Status.COMPLETED, tokens=tokens, loss_mask=mask, response_length=len(mask))
        sample.response = self._tokenizer.decode(tokens[-len(mask) :], skip_special_tokens=False)
        agent.cleanup()
        return Played(tokens, mask, None, sample)

    def _tokens_and_mask(self, messages: Any) -> tuple[list[int], list[int]]:  # noqa: ANN401 - Strands' messages
        """The conversation's tokens, and for those after the prompt whether an assistant's turn holds them."""
        chat = [{"role": "system", "content": SYSTEM_PROMPT}, *to_chat_messages(messages)]
        tools = to_chat_tools([answer_from_script.tool_spec])
        text = self._tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
        tokens = self._encode(str(text).rstrip("\n"))
        mask = [0] * len(tokens)
        starts = self._turn_starts(tokens)
        for start in starts:
            end = tokens.index(self._end, start) + 1
            mask[start:end] = [1] * (end - start)
        return tokens, mask[starts[0] :]

    def _turn_starts(self, tokens: list[int]) -> list[int]:
        """Positions after each head of an assistant's turn."""
        head = self._head
        begins = (at for at, token in enumerate(tokens) if token == head[0])
        return [at + len(head) for at in begins if tokens[at : at + len(head)] == head]

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    async def close(self) -> None:
        """Release connections."""
        await self._client.close()
