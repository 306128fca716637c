"""Turns episodes into token ids and a loss mask, laid out exactly as a rollout meets them.

Knows the chat format's control tokens and the package's prompts. Must not know how episodes are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from shipped_model.episodes import Episode
from strands_rollout.prompts import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA, SYSTEM_PROMPT

CODE_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": CODE_TOOL_NAME, "description": CODE_TOOL_DESCRIPTION, "parameters": CODE_TOOL_SCHEMA},
}
END_OF_TURN: Final = "<|im_end|>"
EMPTY_REASONING: Final = "<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class TokenizedEpisode:
    """An episode as the model reads it.

    Attributes:
        token_ids: Prompt, turns and tool answers.
        is_learned: As long as `token_ids`; True where the token is one that the assistant should say.
    """

    token_ids: tuple[int, ...]
    is_learned: tuple[bool, ...]


def prompt_text(tokenizer: PreTrainedTokenizerBase, question: str, *, enable_thinking: bool = True) -> str:
    """What the model reads before its first token."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    text: str = tokenizer.apply_chat_template(
        messages, tools=[CODE_TOOL], tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
    )
    return text


def tool_answer_text(answer: str, *, enable_thinking: bool = True) -> str:
    """What the model reads between its end-of-turn token and its next first token."""
    opening = "" if enable_thinking else EMPTY_REASONING
    return f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response>{END_OF_TURN}\n<|im_start|>assistant\n{opening}"


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of text in which control tokens count as such."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def episode_pieces(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> list[tuple[str, bool]]:
    """The episode's text, cut where a rollout cuts it, and whether the assistant should learn to say each piece."""
    pieces = [(prompt_text(tokenizer, episode.question, enable_thinking=episode.enable_thinking), False)]
    for turn in episode.turns:
        pieces.append((turn.text + END_OF_TURN, turn.is_learned))
        if turn.tool_answer is not None:
            pieces.append((tool_answer_text(turn.tool_answer, enable_thinking=episode.enable_thinking), False))
    return pieces


def tokenize_episode(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> TokenizedEpisode:
    """Each piece is encoded by itself, as in a rollout: prompt, what is said, what comes back, what is said ..."""
    token_ids: list[int] = []
    is_learned: list[bool] = []
    for text, learned in episode_pieces(tokenizer, episode):
        ids = encode(tokenizer, text)
        token_ids += ids
        is_learned += [learned] * len(ids)
    return TokenizedEpisode(tuple(token_ids), tuple(is_learned))
