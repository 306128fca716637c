"""What one batch's update amounted to, added up over its optimizer steps and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class UpdateFigures:
    """Sums of an update; the means are over tokens that were learned from, in all optimizer steps."""

    steps: int = 0
    loss_sum: float = 0.0
    grad_norm_sum: float = 0.0
    tokens: int = 0
    clipped: float = 0.0
    ratio_sum: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    tis_tokens: int = 0
    tis_clipped: float = 0.0
    divergence_tokens: int = 0
    divergence_sum: float = 0.0

    def add_step(self, *, loss: float, grad_norm: float) -> None:
        """Count an optimizer step; the norm is from before it was scaled down."""
        self.steps += 1
        self.loss_sum += loss
        self.grad_norm_sum += grad_norm

    def add_tokens(self, ratio: Any, clipped: Any) -> None:  # noqa: ANN401 - tensors; torch is not imported here
        """Count tokens by their importance ratio to the behaviour policy, and by whether they were clipped."""
        self.tokens += len(ratio)
        self.clipped += float(clipped.sum())
        self.ratio_sum += float(ratio.sum())
        self.ratio_min = min(self.ratio_min, float(ratio.min()))
        self.ratio_max = max(self.ratio_max, float(ratio.max()))

    def add_tis(self, clipped: float, tokens: int) -> None:
        """Count tokens whose importance weight was truncated."""
        self.tis_clipped += clipped
        self.tis_tokens += tokens

    def add_divergence(self, total: float, tokens: int) -> None:
        """Count tokens by their divergence from the reference."""
        self.divergence_sum += total
        self.divergence_tokens += tokens

    def to_record(self) -> dict[str, float]:
        """The figures of a step's record; none of what was not counted."""
        record: dict[str, float] = {}
        if self.steps:
            record |= {"loss": self.loss_sum / self.steps, "grad_norm": self.grad_norm_sum / self.steps}
        if self.tokens:
            record |= {
                "clip_fraction": self.clipped / self.tokens,
                "ratio_mean": self.ratio_sum / self.tokens,
                "ratio_min": self.ratio_min,
                "ratio_max": self.ratio_max,
            }
        if self.tis_tokens:
            record["tis_clip_fraction"] = self.tis_clipped / self.tis_tokens
        if self.divergence_tokens:
            record["kl_reference"] = self.divergence_sum / self.divergence_tokens
        return record
