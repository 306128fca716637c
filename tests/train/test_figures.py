"""The invariant: what it compares, and what it says when it does not hold."""

from __future__ import annotations

import math

import pytest
from sequences import sequence

from strands_rollout.errors import TrajectoryError
from strands_rollout.train.figures import LogprobGap, check_gap

TOKENS = [7, 8, 9, 10, 11]


def test_only_trained_tokens_with_a_known_logprob_are_compared() -> None:
    one = sequence(TOKENS, [1, 0, 1, 1], sampled_log_probs=[-1.0, 0.0, None, -2.0])
    gap = LogprobGap.of([one], [[-1.25, -9.0, -2.0]])
    assert gap == LogprobGap(largest=0.25, mean=0.125, k3=(math.expm1(-0.25) + 0.25) / 2, tokens=2)


def test_a_larger_gap_is_refused_with_the_tokens_that_differ() -> None:
    one = sequence(TOKENS, [1, 0, 1], sampled_log_probs=[-1.0, 0.0, -2.0])
    trainer = [[-1.0, -3.5]]
    check_gap([one], [[-1.0005, -2.0]], 1e-3, str)
    with pytest.raises(TrajectoryError) as caught:
        check_gap([one], trainer, 1e-3, lambda ids: " ".join(f"t{one}" for one in ids))
    words = str(caught.value)
    assert "by up to 1.5 (mean 0.75), 1 of 2 trained tokens by more than 0.001" in words
    assert "sequence 0, token 4 of 5: 't11' after 't7 t8 t9 t10': rollout -2.0000, trainer -3.5000" in words
    assert "--gap-limit" in words
    with pytest.raises(TrajectoryError, match="no token whose logprob under these weights is known"):
        check_gap([sequence(TOKENS, [1, 1])], [[-1.0, -1.0]], 1e-3, str)
