"""Chooses the next token of every running generation at once.

Knows logits and sampling parameters, row by row. A row's choice depends on its own logits and its own random number
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from strands_rollout.engine.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class SamplingRows:
    """The sampling parameters of `rows` generations as columns."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._temperature = np.ones((rows, 1), np.float32)
        self._top_p = np.ones(rows)
        self._min_p = np.zeros(rows)
        self._top_k = np.full(rows, vocab_size)
        self._vocab_size = vocab_size

    def set(self, row: int, params: SamplingParams) -> None:
        """Let `row` sample by `params`."""
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._top_k[row] = min(params.top_k, self._vocab_size)

    def move(self, source: int, target: int) -> None:
        """Let `target` sample as `source` does."""
        for column in (self._temperature, self._top_p, self._min_p, self._top_k):
            column[target] = column[source]

    def sample(self, rows: slice, logits: Floats, uniforms: Doubles) -> tuple[Ints, Floats]:
        """Choose one token for each of `rows`.

        Args:
            rows: Which rows the n logits belong to, in order.
            logits: [n, vocab_size]; overwritten.
            uniforms: [n] random numbers in [0, 1); greedy rows ignore theirs.

        Returns:
            [n] token ids and [n] their log-probabilities under softmax(logits / temperature), before top-k, top-p and
            min-p, as SGLang reports them.
        """
        logits /= self._temperature[rows]
        logits -= logits.max(axis=1, keepdims=True)
        weights = np.exp(logits)
        log_totals = np.log(weights.sum(axis=1))
        greedy = self._top_k[rows] == 1
        if greedy.all():
            tokens: Ints = logits.argmax(axis=1)
        else:
            tokens = self._draw(rows, weights, uniforms)
            tokens[greedy] = logits[greedy].argmax(axis=1)
        return tokens, logits[np.arange(len(tokens)), tokens] - log_totals

    def _draw(self, rows: slice, weights: Floats, uniforms: Doubles) -> Ints:
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        narrowed = ((top_k < self._vocab_size) | (top_p < 1) | (min_p > 0)) & (top_k > 1)
        if narrowed.any():
            weights[narrowed] = _narrow(weights[narrowed], top_k[narrowed], top_p[narrowed], min_p[narrowed])
        edges = np.cumsum(weights, axis=1, dtype=np.float64)
        totals = edges[:, -1]
        # Strictly below the total, so that the token found always has weight.
        targets = np.minimum(uniforms * totals, np.nextafter(totals, 0))
        drawn: Ints = np.count_nonzero(edges <= targets[:, None], axis=1)
        return drawn


def _narrow(weights: Floats, top_k: Ints, top_p: Doubles, min_p: Doubles) -> Floats:
    """Zero the weights outside top-k, top-p and min-p; each of the three looks at the whole distribution, as in SGLang.

    Args:
        weights: [n, vocab_size]; overwritten.
        top_k: [n], like the two that follow.
        top_p: A token stays while the probability of those before it is at most this.
        min_p: A token stays if its probability is at least this share of the greatest.

    Returns:
        `weights`.
    """
    order = np.argsort(-weights, axis=1)
    ranked = np.take_along_axis(weights, order, axis=1).astype(np.float64)
    ranked /= ranked.sum(axis=1, keepdims=True)
    before = np.cumsum(ranked, axis=1) - ranked
    dropped = np.arange(weights.shape[1]) >= top_k[:, None]
    dropped |= before > top_p[:, None]
    dropped |= ranked < ranked[:, :1] * min_p[:, None]
    row, rank = np.nonzero(dropped)
    weights[row, order[row, rank]] = 0
    return weights
