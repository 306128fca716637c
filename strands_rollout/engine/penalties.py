"""Changes of one generation's logits that depend on what it generated so far.

Knows SGLang's formulas (0.5.23, srt/sampling/penaltylib): all count generated tokens only, not the prompt's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strands_rollout.engine.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]


class Penalties:
    """The penalties of one generation and the counts that they need."""

    def __init__(self, params: SamplingParams, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self._params = params
        self._stop_ids = list(stop_ids)
        self._counts = np.zeros(vocab_size, np.float32)
        self._generated = 0

    def observe(self, token: int) -> None:
        """Note that `token` was generated."""
        self._counts[token] += 1
        self._generated += 1

    def apply(self, logits: Floats) -> None:
        """Change the [vocab_size] logits of the next token in place."""
        p, seen = self._params, self._counts > 0
        logits -= np.float32(p.frequency_penalty) * self._counts
        logits[seen] -= np.float32(p.presence_penalty)
        if p.repetition_penalty != 1.0:
            values, factor = logits[seen], np.float32(p.repetition_penalty)
            logits[seen] = np.where(values < 0, values * factor, values / factor)
        if self._generated < p.min_new_tokens:
            logits[self._stop_ids] = -np.inf
