"""The scripted policy: finds the question that a conversation opens with, and says what `turns.py` has for its turn.

Knows texts of requests. What it read and said is kept as transcripts: pieces of text, and whether they were sampled.
"""

from typing import Any, Final

from fake_sglang import Reply

from many_tools.turns import END, TURNS, question_of

_TURN: Final = "<|im_start|>assistant\n"


class ScriptedPolicy:
    """A script for the fake SGLang.

    Args:
        tokenizer: Of the requests.

    Attributes:
        transcripts: By question, the conversation as far as it went: pieces, and whether they were sampled.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.transcripts: dict[str, list[tuple[str, bool]]] = {}

    def __call__(self, request: dict[str, Any], _number: int) -> Reply:
        text = self._tokenizer.decode(request["input_ids"])
        question, turn = question_of(text), text.count(_TURN) - 1
        said = TURNS[question][turn]
        before = self.transcripts[question] if turn else []
        known = "".join(piece for piece, _ in before)
        assert text.startswith(known), f"two conversations began with {question!r}"
        self.transcripts[question] = [*before, (text[len(known) :], False), (said, True)]
        ids = self._tokenizer.encode(said, add_special_tokens=False)
        return Reply.tokens(ids, "stop" if said.endswith(END) else "length")
