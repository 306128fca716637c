"""Convert the turns of a chat endpoint to a token sequence and its mask: render the chat template once, then encode.

A text pipeline can do no more than this. Like such a pipeline, this module escapes nothing: text that spells a control
token becomes that token. It handles messages in OpenAI's form, templates and tokenizers, but no agents.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from experiments.chat_policy import ChatMessage, ChatTurn
from strands_rollout.template.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Transcript:
    """Training data made from the text of an episode.

    Attributes:
        tokens: All tokens up to the end of the last turn with tokens; a turn that was cut gets no end-of-turn token.
        spans: Positions [start, end) of each turn's tokens, end token included; turns without tokens are left out.
        final_text: The last turn as text, without its end token.
        unmatched_sampled: Number of sampled tokens that are not trained; None if the endpoint does not report what was
            sampled.
        unmatched_trained: Number of trained tokens that were not sampled; None in the same case.
        reread_turns: Number of turns that were sampled after a prompt whose tokens differ from those before the turn in
            `tokens`.
        foreign_prompts: Number of turns for which the engine counts more or fewer prompt tokens than our own rendering
            has, because it renders differently.
    """

    tokens: list[int]
    spans: list[tuple[int, int]]
    final_text: str
    unmatched_sampled: int | None
    unmatched_trained: int | None
    reread_turns: int
    foreign_prompts: int

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first turn."""
        return self.spans[0][0] if self.spans else len(self.tokens)

    @property
    def loss_mask(self) -> list[int]:
        """For each token after the prompt, 1 if it belongs to a turn, else 0."""
        mask = [0] * len(self.tokens)
        for start, end in self.spans:
            mask[start:end] = [1] * (end - start)
        return mask[self.prompt_length :]


class ChatRenderer:
    """A tokenizer and its chat template, as an engine's chat endpoint uses them.

    Args:
        tokenizer: A Hugging Face fast tokenizer with a chat template.
        template_kwargs: Arguments of the template at each rendering.

    Attributes:
        template: The chat template, with facts such as its end-of-turn token.

    Raises:
        TemplateError: The tokenizer or its template can't be used.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        self.template = ChatTemplate(tokenizer, **template_kwargs)
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs

    def prompt_ids(self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of a conversation, followed by the generation prompt."""
        ids, _ = self._encoded(self._rendered(messages, tools, prompts=True))
        return ids

    def transcript(self, turns: Sequence[ChatTurn]) -> Transcript:
        """Return the tokens of the whole conversation, which has at least one turn, and the positions of its turns."""
        messages, places = conversation_of(turns)
        text = self._rendered(messages, turns[0].tools, prompts=False)
        ids, starts = self._encoded(text)
        prompts = [self._rendered(messages[:place], turns[0].tools, prompts=True) for place in places]
        spans = [self._span(text, ids, starts, prompt) for prompt in prompts]
        if turns[-1].finish_reason == "length":
            start, end = spans[-1]
            spans[-1] = (start, max(start, end - 1))
        matches = _matches(turns, [self._words(ids[start:end]) for start, end in spans])
        trained = sum(end - start for start, end in spans)
        start, end = spans[-1]
        ends_whole = end > start and ids[end - 1] in self.template.end_ids
        filled = [span for span in spans if span[1] > span[0]]
        return Transcript(
            tokens=ids[: filled[-1][1] if filled else start],
            spans=filled,
            final_text=str(self._tokenizer.decode(ids[start : end - ends_whole], skip_special_tokens=False)),
            unmatched_sampled=None if matches is None else sum(len(turn.sampled or ()) for turn in turns) - matches,
            unmatched_trained=None if matches is None else trained - matches,
            foreign_prompts=sum(turn.prompt_tokens != len(turn.prompt_ids) for turn in turns),
            reread_turns=sum(turn.prompt_ids != ids[:start] for turn, (start, _) in zip(turns, spans, strict=True)),
        )

    def _span(self, text: str, ids: Sequence[int], starts: Sequence[int], prompt: str) -> tuple[int, int]:
        """Return the positions of the turn after a prompt: from the prompt's end to the template's next end of turn.

        A token that begins in the prompt belongs to the prompt. If the template later renders something else in place
        of the generation prompt (such as an empty reasoning block), the turn begins at the first token that differs.
        """
        if text.startswith(prompt):
            first = next((at for at, start in enumerate(starts) if start >= len(prompt)), len(ids))
        else:
            prompted, _ = self._encoded(prompt)
            pairs = enumerate(zip(ids, prompted, strict=False))
            first = next((at for at, (one, other) in pairs if one != other), min(len(ids), len(prompted)))
        end = next((at for at in range(first, len(ids)) if ids[at] in self.template.end_ids), len(ids) - 1)
        return first, max(first, end + 1)

    def _words(self, ids: Sequence[int]) -> list[str]:
        return [str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in ids]

    def _rendered(self, messages: Sequence[ChatMessage], tools: Sequence[ChatMessage], *, prompts: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [_readable(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=prompts,
                **self._kwargs,
            )
        )

    def _encoded(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids, and for each id the index of the character in which it begins."""
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoding["input_ids"]), [start for start, _ in encoding["offset_mapping"]]


def conversation_of(turns: Sequence[ChatTurn]) -> tuple[list[ChatMessage], list[int]]:
    """Return the messages of the whole conversation, and the index of each answer in them.

    The messages are those of the first prompt, then each answer and the messages that follow it. Answers are as the
    engine returned them: with their reasoning, which later requests lack.
    """
    messages, places = list(turns[0].messages), []
    for turn, following in zip_longest(turns, turns[1:]):
        places.append(len(messages))
        messages.append(turn.answer)
        if following is not None:
            answers = [at for at, message in enumerate(following.messages) if message["role"] == "assistant"]
            messages += following.messages[max(answers, default=-1) + 1 :]
    return messages, places


def _matches(turns: Sequence[ChatTurn], trained: Sequence[Sequence[str]]) -> int | None:
    """Return how many sampled tokens are trained, matched in order within each turn; None if `sampled` is unknown."""
    matches = 0
    for turn, words in zip(turns, trained, strict=True):
        if turn.sampled is None:
            return None
        blocks = SequenceMatcher(None, turn.sampled, words, autojunk=False).get_matching_blocks()
        matches += sum(block.size for block in blocks)
    return matches


def _readable(message: ChatMessage) -> ChatMessage:
    """Return a message in the form that engines pass to a template: content as a string, arguments as objects."""
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(part["text"] for part in content)
    readable = {**message, "content": content or ""}
    if message.get("tool_calls"):
        readable["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return readable


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
