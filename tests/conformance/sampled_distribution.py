"""Distribution that sampling parameters make of a model's logits, and a test that tokens were drawn from it.

The formulas are from SGLang 0.5.23: penalties by the tokens generated so far, then the temperature, then top-k,
top-p and min-p, each computed from the whole distribution. Logprobs are taken before the last three.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mpmath
import numpy as np
from reference_qwen3 import Doubles, log_softmax

_BINS = 25
# tolerance for a float32 engine's probabilities where they decide whether a token is possible
_BORDER = 1e-4


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters by SGLang's names."""

    params: dict[str, Any]
    stop_ids: Sequence[int] = field(default=())

    @property
    def temperature(self) -> float:
        """Divisor of the logits; 1 for greedy requests."""
        return self.params.get("temperature", 1.0) or 1.0

    def logprobs(self, logits: Doubles, output_ids: list[int]) -> Doubles:
        """Return [tokens, vocabulary] log-probabilities as an engine must report them.

        Args:
            logits: [tokens, vocabulary] of the bare model.
            output_ids: Generated ids, which determine the penalties at each position.
        """
        penalized = logits.copy()
        for position in range(len(output_ids)):
            self._penalize(penalized[position], output_ids[:position])
        return log_softmax(penalized / self.temperature)

    def _penalize(self, row: Doubles, so_far: list[int]) -> None:
        counts = np.bincount(so_far, minlength=len(row)) if so_far else np.zeros(len(row))
        row -= self.params.get("frequency_penalty", 0) * counts
        row -= self.params.get("presence_penalty", 0) * (counts > 0)
        factor = self.params.get("repetition_penalty", 1)
        row[:] = np.where(counts > 0, np.where(row > 0, row / factor, row * factor), row)
        if len(so_far) < self.params.get("min_new_tokens", 0):
            row[list(self.stop_ids)] = -np.inf

    def places(self, logprobs: Doubles, output_ids: list[int], rng: np.random.Generator) -> Doubles:
        """Return a number in [0, 1) for each token; they are uniform if the tokens were drawn from their distributions.

        Each distribution divides [0, 1) into an interval for each token, as long as its probability, the most likely
        token first. The number of a token is a random point of its interval.
        """
        places = []
        for row, token in zip(logprobs, output_ids, strict=True):
            order, shares = self._shares(row)
            rank = int(np.flatnonzero(order == token)[0])
            places.append(shares[:rank].sum() + rng.random() * shares[rank])
        return np.array(places)

    def _shares(self, row: Doubles) -> tuple[np.ndarray, Doubles]:
        """Return all tokens from the most to the least likely, and their probabilities after top-k, top-p and min-p."""
        order = np.argsort(-row, kind="stable")
        shares = np.exp(row[order])
        before = np.cumsum(shares) - shares
        kept = np.arange(len(row)) < self._top_k(len(row))
        kept &= before <= self.params.get("top_p", 1.0)
        kept &= shares >= shares[0] * self.params.get("min_p", 0.0)
        shares = np.where(kept, shares, 0)
        return order, shares / shares.sum()

    def is_possible(self, row: Doubles, token: int) -> bool:
        """Return whether a token survives top-k, top-p and min-p, within float32's precision."""
        more_likely = np.exp(row[row > row[token] + _BORDER])
        share_of_best = np.exp(row[token] - row.max())
        return bool(
            len(more_likely) < self._top_k(len(row))
            and more_likely.sum() <= self.params.get("top_p", 1.0) + _BORDER
            and share_of_best >= self.params.get("min_p", 0.0) - _BORDER
        )

    def _top_k(self, vocab_size: int) -> int:
        if self.params.get("temperature") == 0:
            return 1
        top_k = self.params.get("top_k", -1)
        return vocab_size if top_k == -1 else top_k


def chance_of_being_uniform(places: Iterable[float]) -> float:
    """Return the p-value of Pearson's chi-square test that numbers are uniform in [0, 1)."""
    observed = np.histogram(np.clip(list(places), 0, 1), bins=_BINS, range=(0, 1))[0]
    expected = observed.sum() / _BINS
    chi_square = ((observed - expected) ** 2 / expected).sum()
    return float(mpmath.gammainc((_BINS - 1) / 2, chi_square / 2, mpmath.inf, regularized=True))
