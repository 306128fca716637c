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
        self._greedy = np.zeros(rows, bool)
        self._narrowed = np.zeros(rows, bool)
        self._vocab_size = vocab_size

    def set(self, row: int, params: SamplingParams) -> None:
        """Let `row` sample by `params`."""
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._top_k[row] = min(params.top_k, self._vocab_size)
        self._greedy[row] = params.top_k == 1
        self._narrowed[row] = params.top_k != 1 and (
            params.top_k < self._vocab_size or params.top_p < 1 or params.min_p > 0
        )

    def move(self, source: int, target: int) -> None:
        """Let `target` sample as `source` does."""
        for column in (self._temperature, self._top_p, self._min_p, self._top_k):
            column[target] = column[source]
        for flags in (self._greedy, self._narrowed):
            flags[target] = flags[source]

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
        greedy = self._greedy[rows]
        if greedy.all():
            tokens: Ints = logits.argmax(axis=1)
        else:
            tokens = self._draw(rows, weights, uniforms)
            tokens[greedy] = logits[greedy].argmax(axis=1)
        return tokens, logits[np.arange(len(tokens)), tokens] - log_totals

    def _draw(self, rows: slice, weights: Floats, uniforms: Doubles) -> Ints:
        narrowed = self._narrowed[rows]
        if narrowed.any():
            top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
            weights[narrowed] = _narrow(weights[narrowed], top_k[narrowed], top_p[narrowed], min_p[narrowed])
        edges = weights.astype(np.float64)
        np.add.accumulate(edges, axis=1, out=edges)
        totals = edges[:, -1]
        # Strictly below the total, so that the token found always has weight.
        targets = np.minimum(uniforms * totals, np.nextafter(totals, 0))
        drawn: Ints = (edges > targets[:, None]).argmax(axis=1)
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
    ranked = -np.sort(-weights, axis=1)
    shares = ranked.astype(np.float64)
    shares /= shares.sum(axis=1, keepdims=True)
    before = np.add.accumulate(shares, axis=1) - shares
    kept = np.arange(weights.shape[1]) < top_k[:, None]
    kept &= before <= top_p[:, None]
    kept &= shares >= shares[:, :1] * min_p[:, None]
    counts = np.count_nonzero(kept, axis=1)
    least = np.take_along_axis(ranked, counts[:, None] - 1, axis=1)
    weights[weights < least] = 0
    for row in np.flatnonzero(np.count_nonzero(weights >= least, axis=1) > counts):
        # Of the tokens that weigh as much as the last one kept, those with the lowest ids stay.
        tied = np.flatnonzero(weights[row] == least[row])
        surplus = np.count_nonzero(weights[row] >= least[row]) - counts[row]
        weights[row, tied[len(tied) - surplus :]] = 0
    return weights
