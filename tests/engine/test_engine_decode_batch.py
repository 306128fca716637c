"""`SamplingRows` and `Penalties`: tokens follow the parameters, logprobs cover the whole distribution."""

import numpy as np
import pytest

from strands_rollout.engine.generation import Penalties, SamplingRows
from strands_rollout.engine.requests import SamplingParams, read_sampling_params

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03], np.float32))
DRAWS = 20_000


def _samples(logits=LOGITS, draws: int = DRAWS, **raw) -> tuple[np.ndarray, np.ndarray]:
    rows = SamplingRows(draws, len(logits))
    params = read_sampling_params(raw)
    for row in range(draws):
        rows.set(row, params)
    uniforms = np.random.default_rng(0).random(draws)
    return rows.sample(slice(0, draws), np.tile(logits, (draws, 1)), uniforms)


@pytest.mark.parametrize(
    ("raw", "shares"),
    [
        ({}, [0.5, 0.25, 0.15, 0.07, 0.03]),
        ({"temperature": 0.5}, [0.25, 0.0625, 0.0225, 0.0049, 0.0009]),
        ({"top_k": 2}, [0.5, 0.25, 0, 0, 0]),
        ({"top_p": 0.8}, [0.5, 0.25, 0.15, 0, 0]),
        ({"min_p": 0.2}, [0.5, 0.25, 0.15, 0, 0]),
        ({"temperature": 0.5, "top_k": 2, "top_p": 0.9, "min_p": 0.1}, [0.25, 0.0625, 0, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
    ],
)
def test_sampling_rows_follow_params_with_full_logprobs(raw, shares):
    tokens, logprobs = _samples(**raw)
    seen = np.bincount(tokens, minlength=len(LOGITS)) / len(tokens)
    assert list(seen) == pytest.approx([share / sum(shares) for share in shares], abs=0.015)
    assert all(share > 0 or found == 0 for share, found in zip(shares, seen, strict=True))
    scaled = LOGITS.astype(np.float64) / (raw.get("temperature") or 1)  # greedy uses temperature 1
    assert logprobs == pytest.approx((scaled - np.log(np.exp(scaled).sum()))[tokens], abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_sampling_rows_never_choose_a_token_without_weight(uniform):
    rows = SamplingRows(1, 4)
    rows.set(0, SamplingParams(top_k=2))
    logits = np.array([[-50.0, 2.0, 1.0, -50.0]], np.float32)
    tokens, _ = rows.sample(slice(0, 1), logits, np.array([uniform]))
    assert int(tokens[0]) in (1, 2)


def test_penalties_count_generated_tokens_only():
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    penalties = Penalties(params, 4, [])
    for token in (1, 1, 2):
        penalties.observe(token)
    logits = np.array([1.0, 4.0, -1.0, 1.0], np.float32)
    penalties.apply(logits)
    assert logits.tolist() == [1.0, (4 - 1.0 - 0.25) / 2, (-1 - 0.5 - 0.25) * 2, 1.0]


def test_penalties_min_new_tokens_delays_the_end():
    penalties, may_end = Penalties(SamplingParams(min_new_tokens=2), 4, [3]), []
    for _ in range(4):
        logits = np.zeros(4, np.float32)
        penalties.apply(logits)
        may_end.append(bool(np.isfinite(logits[3])))
        penalties.observe(0)
    assert may_end == [False, False, True, True]


@pytest.mark.parametrize("raw", [{"top_k": 3}, {"top_p": 0.55}])
def test_sampling_rows_break_ties_within_top_k_and_top_p(raw):
    tokens, _ = _samples(np.zeros(5, np.float32), draws=2000, **raw)
    assert set(tokens.tolist()) == {0, 1, 2}
