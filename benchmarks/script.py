"""Scripts of the client benchmark: the scripted engine's answers, turn by turn, with every token of the episode.

Turns are realistic, and rendered as the tokenizer's chat template renders the same messages. The same seed writes the
same scripts.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from strands_rollout.code_tool.tool import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA
from strands_rollout.errors import TemplateError
from strands_rollout.settings import SYSTEM_PROMPT

_TURN_TOKENS: Final = 290
_RESULT_TOKENS: Final = 50
_END_OF_TURN: Final = "<|im_end|>"
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {"name": CODE_TOOL_NAME, "description": CODE_TOOL_DESCRIPTION, "parameters": CODE_TOOL_SCHEMA},
    }
]
_INSTRUCTION: Final = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "\\boxed{$Answer} where $Answer is the answer to the problem.\n\n"
)
_THOUGHTS: Final = (
    "Let me look at the residues of the squares modulo {a} first.",
    "Hmm, wait, for k = {b} the term is {a}k + {b}, so the sum does not vanish.",
    "The recurrence gives a_{b} = {a}, which agrees with what I found before.",
    "So I should check whether {a} divides {b} * (n + 1), and count the pairs that are left.",
    "If x is odd, then x^2 - {a} is even; that leaves {b} cases to go through by hand.",
    "By symmetry the contribution of (m, n) equals that of (n, m), hence a factor of 2 and {a} terms less.",
    "Let me verify that with a short computation, since I may have lost the case n = {b}.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn, and the context that the policy reads after it.

    Attributes:
        text: The sampled text with its end of turn.
        ids: Tokens of the text.
        logprobs: One logprob per token.
        content: The text without call and end of turn, in pieces of one token.
        arguments: The call's arguments as JSON, in pieces of one token; empty for the last turn.
        code: The code of the call; "" for the last turn.
        result: The tool's result; "" for the last turn.
        context_ids: Tokens between this turn and the next; empty for the last turn.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    content: list[str]
    arguments: list[str]
    code: str
    result: str
    context_ids: list[int]

    def as_message(self) -> dict[str, Any]:
        """Return the turn as a chat message with its call, as templates read it."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.code:
            function = {"name": CODE_TOOL_NAME, "arguments": {"code": self.code}}
            message["tool_calls"] = [{"type": "function", "id": "call", "function": function}]
        return message


@dataclass(frozen=True, slots=True)
class Script:
    """The script of an episode; its last turn calls no tool."""

    question: str
    prompt_ids: list[int]
    turns: list[Turn]

    @property
    def tool_turns(self) -> int:
        return len(self.turns) - 1

    def tokens(self) -> list[int]:
        return [*self.prompt_ids, *(token for turn in self.turns for token in (*turn.ids, *turn.context_ids))]

    def loss_mask(self) -> list[int]:
        """Return for each token after the prompt 1 if it was sampled, else 0."""
        return [bit for turn in self.turns for bit in [1] * len(turn.ids) + [0] * len(turn.context_ids)]

    def logprobs(self) -> list[float]:
        """Return the logprobs of the sampled tokens, in order."""
        return [logprob for turn in self.turns for logprob in turn.logprobs]

    def input_lengths(self) -> list[int]:
        """Return the number of tokens of each turn's request."""
        growth = (len(turn.ids) + len(turn.context_ids) for turn in self.turns[:-1])
        return list(accumulate(growth, initial=len(self.prompt_ids)))

    def input_ids(self, number: int) -> list[int]:
        """Return the tokens of a turn's request."""
        return self.tokens()[: self.input_lengths()[number]]


def save_scripts(scripts: Sequence[Script], path: Path) -> None:
    path.write_bytes(orjson.dumps([asdict(script) for script in scripts]))


def load_scripts(path: Path) -> list[Script]:
    return [
        Script(found["question"], found["prompt_ids"], [Turn(**turn) for turn in found["turns"]])
        for found in orjson.loads(path.read_bytes())
    ]


def write_scripts(tokenizer: Any, tool_turns: int, *, count: int = 4, seed: int = 0) -> list[Script]:
    """Return new scripts of episodes with the same number of turns and different texts.

    Args:
        tokenizer: A Hugging Face tokenizer whose template is append-only within the answer to a question, like Qwen3's.
        tool_turns: Number of turns with a tool call before the last turn.
        count: Number of scripts.
        seed: Seed of the texts.

    Raises:
        TemplateError: The template renders a turn differently than it was sampled.
    """
    return [_Writer(tokenizer, random.Random(f"{seed}/{tool_turns}/{n}")).script(tool_turns) for n in range(count)]


class _Writer:
    """Writer of one script."""

    def __init__(self, tokenizer: Any, chance: random.Random) -> None:
        self._tokenizer, self._chance = tokenizer, chance

    def script(self, tool_turns: int) -> Script:
        a, b = self._chance.randrange(1000, 9999), self._chance.randrange(1000, 9999)
        question = (
            f"{_INSTRUCTION}Let $S$ be the set of positive integers $n \\le {a}$ such that $n^2 + {b}n + 1$ is "
            "divisible by 7 but not by 49. Find the remainder when the sum of the elements of $S$ is divided by 1000."
        )
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        before = self._render(messages)
        prompt_ids = self._encode(before)
        turns: list[Turn] = []
        for number in range(tool_turns + 1):
            is_last = number == tool_turns
            content = self._thinking() + ("The sum is 144.\n\nAnswer: \\boxed{144}" if is_last else "")
            code, result = ("", "") if is_last else self._call()
            text = content + (_hermes_call(code) if code else "") + _END_OF_TURN
            turn = self._turn(text, content, code, result, [])
            if not is_last:
                messages += [turn.as_message(), {"role": "tool", "tool_call_id": "call", "content": result}]
                after = self._render(messages)
                if not after.startswith(before + text):
                    raise TemplateError(
                        "the chat template renders a turn differently than it was sampled; expected a template that "
                        "keeps reasoning and writes calls in the Hermes format, like Qwen3's"
                    )
                turn = self._turn(text, content, code, result, self._encode(after[len(before + text) :]))
                before = after
            turns.append(turn)
        return Script(question, prompt_ids, turns)

    def _turn(self, text: str, content: str, code: str, result: str, context_ids: list[int]) -> Turn:
        ids = self._encode(text)
        arguments = self._pieces(json.dumps({"code": code})) if code else []
        return Turn(text, ids, self._logprobs(len(ids)), self._pieces(content), arguments, code, result, context_ids)

    def _thinking(self) -> str:
        """Return reasoning of such a length that a turn with a call has about `_TURN_TOKENS`."""
        thoughts: list[str] = []
        remaining = _TURN_TOKENS - 85
        while remaining > 0:
            values = {"a": self._chance.randrange(11, 997), "b": self._chance.randrange(11, 997)}
            thoughts.append(self._chance.choice(_THOUGHTS).format(**values))
            remaining -= len(self._encode(thoughts[-1]))
        return f"<think>\n{' '.join(thoughts)}\n</think>\n\n"

    def _call(self) -> tuple[str, str]:
        """Return code, and the output that it would print; random numbers make calls differ."""
        a, b, modulus = (self._chance.randrange(low, low * 9) for low in (101, 11, 1009))
        values: list[int] = []
        while len(self._encode(str(values))) < _RESULT_TOKENS:
            values.append((len(values) ** 2 * a + b) % modulus)
        term = f"(k ** 2 * {a} + {b}) % {modulus}"
        code = f"values = []\nfor k in range({len(values)}):\n    values.append({term})\nprint(values)"
        return code, str(values)

    def _logprobs(self, count: int) -> list[float]:
        """Return logprobs like an engine's: float32, most of them near 0."""
        drawn = [-(self._chance.random() ** 6) * 4.0 - 1e-6 for _ in range(count)]
        return [float(value) for value in np.array(drawn, dtype=np.float32)]

    def _render(self, messages: Sequence[dict[str, Any]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        )

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def _pieces(self, text: str) -> list[str]:
        offsets = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return [text[start:end] for start, end in offsets]


def _hermes_call(code: str) -> str:
    arguments = json.dumps({"code": code})
    return f'<tool_call>\n{{"name": "{CODE_TOOL_NAME}", "arguments": {arguments}}}\n</tool_call>'
