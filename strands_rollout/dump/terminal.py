"""A transcript of one sample's tokens for people: what was prompt, what was context, what was sampled and is trained.

Knows a sample's tokens and mask, and rich. Every line carries its kind in words at the left, so that it reads the same
without colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, Final

from rich.console import Console
from rich.text import Text


class Kind(StrEnum):
    """What a stretch of tokens is."""

    PROMPT = "prompt"
    """Read by the policy before its first turn; not trained."""
    CONTEXT = "context"
    """Read between its turns: tool results and the template's own text; not trained."""
    TRAINED = "trained"
    """Sampled by the policy, and trained at the logprobs that came with it."""
    UNTRAINED = "untrained"
    """A sample that is kept out of training."""


STYLES: Final = {Kind.PROMPT: "dim", Kind.CONTEXT: "cyan", Kind.TRAINED: "bold green", Kind.UNTRAINED: "yellow"}
LEGENDS: Final = {
    Kind.PROMPT: "read before the first turn, not trained",
    Kind.CONTEXT: "read between turns (tool results, template), not trained",
    Kind.TRAINED: "sampled by the policy, trained",
    Kind.UNTRAINED: "a sample that is kept out of training",
}
_GUTTER_WIDTH: Final = max(len(kind) for kind in Kind)
# model-written control characters are shown, not obeyed by the terminal
_SHOWN_CONTROLS: Final = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens of one kind.

    Attributes:
        kind: What they are.
        token_ids: At least one.
    """

    kind: Kind
    token_ids: list[int]


def stretches(sample: Any) -> list[Stretch]:  # noqa: ANN401 - slime's Sample or ours
    """The sample's tokens, whole and in order, cut where their kind changes."""
    prompt_length = len(sample.tokens) - sample.response_length
    kinds = [Kind.PROMPT] * prompt_length + [_kind(mask, sample) for mask in sample.loss_mask]
    pairs = zip(kinds, sample.tokens, strict=True)
    return [Stretch(kind, [token for _, token in group]) for kind, group in groupby(pairs, key=lambda pair: pair[0])]


def print_transcript(
    console: Console,
    sample: Any,  # noqa: ANN401 - slime's Sample or ours
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Print a sample's text, one kind after the other, with a legend.

    Args:
        console: Where to; it decides about colours (NO_COLOR, no terminal: none).
        sample: slime's Sample or ours, with valid lengths.
        decode: Text of ids, control tokens included.
    """
    found = stretches(sample)
    for kind in dict.fromkeys(stretch.kind for stretch in found):
        count = sum(len(stretch.token_ids) for stretch in found if stretch.kind is kind)
        console.print(_line(kind, kind, f"{LEGENDS[kind]}; {count} tokens"), soft_wrap=True)
    console.print()
    for stretch in found:
        for line in _lines(stretch, decode):
            console.print(line, soft_wrap=True)


def _lines(stretch: Stretch, decode: Callable[[Sequence[int]], str]) -> Iterator[Text]:
    lines = decode(stretch.token_ids).split("\n")
    if len(lines) > 1 and not lines[-1]:
        lines.pop()  # its newline ended the line before: the next stretch starts a line of its own anyway
    for number, line in enumerate(lines):
        yield _line(stretch.kind, stretch.kind if number == 0 else "", line)


def _line(kind: Kind, label: str, text: str) -> Text:
    return Text.assemble((f"{label:>{_GUTTER_WIDTH}} | ", "dim"), (text.translate(_SHOWN_CONTROLS), STYLES[kind]))


def _kind(mask: int, sample: Any) -> Kind:  # noqa: ANN401
    if mask:
        return Kind.TRAINED
    return Kind.UNTRAINED if sample.remove_sample else Kind.CONTEXT
