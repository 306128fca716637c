"""Writes answer scripts with a tokenizer: realistic turns, rendered as the chat template renders the same messages.

Knows a Hugging Face tokenizer; nothing of servers or variants. The same seed writes the same scripts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from strands_rollout.bench.answer_script import AnswerScript, ScriptedTurn
from strands_rollout.errors import TemplateError
from strands_rollout.prompts import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA, SYSTEM_PROMPT

TURN_TOKENS: Final = 290
RESULT_TOKENS: Final = 50
END_OF_TURN: Final = "<|im_end|>"
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


def write_scripts(tokenizer: Any, tool_turns: int, *, count: int = 4, seed: int = 0) -> list[AnswerScript]:  # noqa: ANN401 - any Hugging Face tokenizer
    """Scripts of episodes that differ in their words and agree in their shape.

    Args:
        tokenizer: Its template must be append-only within an answer to one question, as Qwen3's is.
        tool_turns: Turns that call the tool, before the one that answers.
        count: How many scripts.
        seed: Of their words.

    Raises:
        TemplateError: The template writes a history otherwise than the turns that made it.
    """
    return [_Writer(tokenizer, random.Random(f"{seed}/{tool_turns}/{n}")).script(tool_turns) for n in range(count)]  # noqa: S311 - words


def spoken_message(turn: ScriptedTurn, call_id: str = "call") -> dict[str, Any]:
    """A turn as a chat message with its call, as templates read it."""
    words = "".join(turn.words)
    if not turn.code:
        return {"role": "assistant", "content": words}
    function = {"name": CODE_TOOL_NAME, "arguments": {"code": turn.code}}
    return {
        "role": "assistant",
        "content": words,
        "tool_calls": [{"type": "function", "id": call_id, "function": function}],
    }


class _Writer:
    """Writes one script."""

    def __init__(self, tokenizer: Any, chance: random.Random) -> None:  # noqa: ANN401
        self._tokenizer, self._chance = tokenizer, chance

    def script(self, tool_turns: int) -> AnswerScript:
        a, b = self._chance.randrange(1000, 9999), self._chance.randrange(1000, 9999)
        question = (
            f"{_INSTRUCTION}Let $S$ be the set of positive integers $n \\le {a}$ such that $n^2 + {b}n + 1$ is "
            "divisible by 7 but not by 49. Find the remainder when the sum of the elements of $S$ is divided by 1000."
        )
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        before = self._render(messages)
        prompt_ids = self._encode(before)
        turns: list[ScriptedTurn] = []
        for number in range(tool_turns + 1):
            is_last = number == tool_turns
            words = self._thinking() + ("The sum is 144.\n\nAnswer: \\boxed{144}" if is_last else "")
            code, result = ("", "") if is_last else self._call()
            text = words + (_written_call(code) if code else "") + END_OF_TURN
            turn = self._turn(text, words, code, result, [])
            if not is_last:
                messages += [spoken_message(turn), {"role": "tool", "tool_call_id": "call", "content": result}]
                after = self._render(messages)
                if not after.startswith(before + text):
                    raise TemplateError(
                        "the chat template writes a turn otherwise than it was sampled; expected one that keeps the "
                        "thinking of a question's turns and writes calls in the Hermes format, as Qwen3's does"
                    )
                turn = self._turn(text, words, code, result, self._encode(after[len(before + text) :]))
                before = after
            turns.append(turn)
        return AnswerScript(question, prompt_ids, turns)

    def _turn(self, text: str, words: str, code: str, result: str, context_ids: list[int]) -> ScriptedTurn:
        ids = self._encode(text)
        arguments = self._pieces(json.dumps({"code": code})) if code else []
        return ScriptedTurn(
            text, ids, self._logprobs(len(ids)), self._pieces(words), arguments, code, result, context_ids
        )

    def _thinking(self) -> str:
        """As much as makes about `TURN_TOKENS` with a call."""
        thoughts: list[str] = []
        room = TURN_TOKENS - 85
        while room > 0:
            values = {"a": self._chance.randrange(11, 997), "b": self._chance.randrange(11, 997)}
            thoughts.append(self._chance.choice(_THOUGHTS).format(**values))
            room -= len(self._encode(thoughts[-1]))
        return f"<think>\n{' '.join(thoughts)}\n</think>\n\n"

    def _call(self) -> tuple[str, str]:
        """Real code, and what it prints, which no other call of the script prints."""
        a, b, modulus = (self._chance.randrange(low, low * 9) for low in (101, 11, 1009))
        values: list[int] = []
        while len(self._encode(str(values))) < RESULT_TOKENS:
            values.append((len(values) ** 2 * a + b) % modulus)
        term = f"(k ** 2 * {a} + {b}) % {modulus}"
        code = f"values = []\nfor k in range({len(values)}):\n    values.append({term})\nprint(values)"
        return code, str(values)

    def _logprobs(self, count: int) -> list[float]:
        """As an engine gives them: float32, most of them near 0."""
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


def _written_call(code: str) -> str:
    arguments = json.dumps({"code": code})
    return f'<tool_call>\n{{"name": "{CODE_TOOL_NAME}", "arguments": {arguments}}}\n</tool_call>'
