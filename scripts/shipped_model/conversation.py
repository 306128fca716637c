"""Turns episodes into token ids and a loss mask, laid out by the package's own incremental rendering.

Knows the package's prompts and `ChatTemplate`. Must not know how episodes are made, or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from shipped_model.episodes import Episode
from strands_rollout.chat_template import ChatTemplate
from strands_rollout.prompts import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA, SYSTEM_PROMPT

CODE_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": CODE_TOOL_NAME, "description": CODE_TOOL_DESCRIPTION, "parameters": CODE_TOOL_SCHEMA},
}
END_OF_TURN: Final = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class TokenizedEpisode:
    """An episode as the model reads it.

    Attributes:
        token_ids: Prompt, turns and tool answers.
        is_learned: As long as `token_ids`; True where the token is one that the assistant should say.
    """

    token_ids: tuple[int, ...]
    is_learned: tuple[bool, ...]


def prompt_messages(question: str) -> list[dict[str, Any]]:
    """The conversation before the assistant's first turn."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def prompt_ids(template: ChatTemplate, question: str) -> list[int]:
    """What the model reads before its first token."""
    return template.prompt_ids(prompt_messages(question), [CODE_TOOL])


def tool_answer_ids(template: ChatTemplate, answers: Sequence[str]) -> list[int]:
    """What the model reads between its end-of-turn token and the first token of its next turn."""
    messages = [{"role": "tool", "name": CODE_TOOL_NAME, "content": answer} for answer in answers]
    return template.turn_ids(messages, [CODE_TOOL], last_id=template.end_of_turn_id)


class EpisodeTokenizer:
    """Tokenizes episodes as a rollout does: prompt, what is said, what comes back, what is said ...

    Args:
        tokenizer: The trained tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._templates = {
            True: ChatTemplate(tokenizer),
            False: ChatTemplate(tokenizer, enable_thinking=False),
        }

    def tokenize(self, episode: Episode) -> TokenizedEpisode:
        """Token ids and mask of one episode, up to its last end-of-turn token."""
        template = self._templates[episode.enable_thinking]
        pieces = [(prompt_ids(template, episode.question), False)]
        for turn in episode.turns:
            pieces.append((template.encoder.encode_trusted(turn.text + END_OF_TURN), turn.is_learned))
            if turn.tool_answer is not None:
                pieces.append((tool_answer_ids(template, [turn.tool_answer]), False))
        return TokenizedEpisode(
            token_ids=tuple(token_id for ids, _ in pieces for token_id in ids),
            is_learned=tuple(learned for ids, learned in pieces for _ in ids),
        )


def whole_text(renderer: PreTrainedTokenizerBase, episode: Episode) -> str:
    """The episode rendered at once, for the tokenizer to learn from."""
    messages = prompt_messages(episode.question)
    for turn in episode.turns:
        messages.append({"role": "assistant", "content": turn.text})
        if turn.tool_answer is not None:
            messages.append({"role": "tool", "content": turn.tool_answer})
    text: str = renderer.apply_chat_template(messages, tools=[CODE_TOOL], tokenize=False)
    return text
