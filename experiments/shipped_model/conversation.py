"""Convert episodes to token ids and a loss mask with the package's own incremental rendering."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from experiments.shipped_model.episode import Episode
from strands_rollout.template.chat_template import ChatTemplate

END_OF_TURN: Final = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class AgentPrompt:
    """The system prompt and tools of an agent, as in a rollout.

    Attributes:
        system_prompt: The system message.
        tools: Specifications of the tools, as chat templates read them.
    """

    system_prompt: str
    tools: tuple[dict[str, Any], ...]

    def messages(self, question: str) -> list[dict[str, Any]]:
        """Return the conversation before the assistant's first turn."""
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": question}]

    def prompt_ids(self, template: ChatTemplate, question: str) -> list[int]:
        """Return the tokens that the model reads before its first own token."""
        return template.prompt_ids(self.messages(question), self.tools)

    def tool_answer_ids(self, template: ChatTemplate, answers: Sequence[str]) -> list[int]:
        """Return the tokens between the model's end-of-turn token and the first token of its next turn."""
        messages = [{"role": "tool", "content": answer} for answer in answers]
        return template.turn_ids(messages, self.tools, last_id=template.end_of_turn_id)


@dataclass(frozen=True, slots=True)
class TokenizedEpisode:
    """An episode as the model reads it.

    Attributes:
        token_ids: Prompt, turns and tool answers.
        is_learned: For each token, True if the model is trained to sample it.
    """

    token_ids: tuple[int, ...]
    is_learned: tuple[bool, ...]


class EpisodeTokenizer:
    """Tokenizer of episodes that works piece by piece, as a rollout does: prompt, turn, tool answer, turn ...

    Args:
        tokenizer: The trained tokenizer, with its chat template.
        prompt: System prompt and tools of the agent.
        respell: Function that replaces tokens of a turn by other tokens with the same text; None replaces none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: AgentPrompt,
        respell: Callable[[Sequence[int]], list[int]] | None = None,
    ) -> None:
        self._prompt = prompt
        self._respell = respell or list
        self._templates = {
            True: ChatTemplate(tokenizer),
            False: ChatTemplate(tokenizer, enable_thinking=False),
        }

    def tokenize(self, episode: Episode) -> TokenizedEpisode:
        """Return token ids and mask of an episode, up to its last end-of-turn token."""
        template = self._templates[episode.enable_thinking]
        pieces = [(self._prompt.prompt_ids(template, episode.question), False)]
        for turn in episode.turns:
            turn_ids = template.encoder.encode_trusted(turn.text + END_OF_TURN)
            pieces.append((self._respell(turn_ids), turn.is_learned))
            if turn.tool_answer is not None:
                pieces.append((self._prompt.tool_answer_ids(template, [turn.tool_answer]), False))
        return TokenizedEpisode(
            token_ids=tuple(token_id for ids, _ in pieces for token_id in ids),
            is_learned=tuple(learned for ids, learned in pieces for _ in ids),
        )


def whole_text(renderer: PreTrainedTokenizerBase, prompt: AgentPrompt, episode: Episode) -> str:
    """Return the text of the whole episode, for training the tokenizer."""
    messages = prompt.messages(episode.question)
    for turn in episode.turns:
        messages.append({"role": "assistant", "content": turn.text})
        if turn.tool_answer is not None:
            messages.append({"role": "tool", "content": turn.tool_answer})
    text: str = renderer.apply_chat_template(messages, tools=list(prompt.tools), tokenize=False)
    return text
