"""Splits problems into training, validation and held-out ones. Must not know what a problem is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Split(Generic[P]):
    """Problems with no key in common.

    Attributes:
        held_out: Asked of the finished model alone.
        validation: Asked on the way, to decide when the model is good enough.
        training: What it learns from.
    """

    held_out: tuple[P, ...]
    validation: tuple[P, ...]
    training: tuple[P, ...]


def split(stream: Iterator[P], held_out_count: int, validation_count: int, training_count: int) -> Split[P]:
    """A stream's first problems, in this order: the held-out ones depend on the stream and their own count alone."""
    held_out, validation, training = (
        tuple(islice(stream, count)) for count in (held_out_count, validation_count, training_count)
    )
    return Split(held_out, validation, training)
