"""What of a step is measured: some samples, always the same ones, and nothing that is none."""

from __future__ import annotations

from typing import Any

import pytest
from saved import sample_of
from spelled_tokens import bytewise, encode

from strands_rollout.finished_sample import finished_samples
from strands_rollout.retokenisation import meter
from strands_rollout.retokenisation.meter import MAX_SAMPLES, DriftMeter, EpisodeDrift, measure_some


def measured(tokenizer: Any, *turns: list[list[int]]) -> list[EpisodeDrift]:
    """Of samples of these turns, each after one token of context."""
    context = encode(tokenizer, "\n")
    samples = [sample_of([part for ids in one for part in (context, ids)]) for one in turns]
    return measure_some(finished_samples(samples), DriftMeter(tokenizer))


def test_a_samples_turns_are_counted_together_and_apart_from_each_other(shipped_tokenizer: Any) -> None:
    word, plain = bytewise(shipped_tokenizer, " number"), encode(shipped_tokenizer, " is the answer")
    both, none = measured(shipped_tokenizer, [word, plain, word], [plain])
    assert (both.sampled_tokens, both.turn_drift) == (2 * len(word) + len(plain), 2 * len(word))
    assert (none.sampled_tokens, none.turn_drift, none.is_drifted) == (len(plain), 0, False)


def test_at_most_so_many_samples_are_measured_evenly_spread_and_always_the_same(shipped_tokenizer: Any) -> None:
    one = encode(shipped_tokenizer, " a")
    # every sample has a length of its own, so that it can be told which were measured
    samples = [[one * length] for length in range(1, 2 * MAX_SAMPLES + 1)]
    lengths = [found.sampled_tokens for found in measured(shipped_tokenizer, *samples)]
    assert lengths == list(range(1, 2 * MAX_SAMPLES, 2))
    assert [found.sampled_tokens for found in measured(shipped_tokenizer, *samples)] == lengths


def test_fewer_long_samples_are_measured(shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "MAX_TOKENS", 100)
    one = encode(shipped_tokenizer, " a")
    assert [drift.sampled_tokens for drift in measured(shipped_tokenizer, *[[one * 24]] * 10)] == [24] * 4
    assert len(measured(shipped_tokenizer, *[[one * 500]] * 10)) == 1


def test_a_sample_without_a_sampled_token_is_not_measured(shipped_tokenizer: Any) -> None:
    found = measured(shipped_tokenizer, [[]], [[], encode(shipped_tokenizer, "a")])
    assert [drift.sampled_tokens for drift in found] == [1]
    assert measured(shipped_tokenizer) == []


@pytest.mark.parametrize("no_id", [-1, 2**40, "7", None])
def test_a_sample_with_what_is_no_token_id_is_left_out_and_the_others_count(shipped_tokenizer: Any, no_id: Any) -> None:
    plain = encode(shipped_tokenizer, " the answer")
    found = measured(shipped_tokenizer, [plain], [plain, [*plain, no_id]], [plain, plain])
    assert [drift.sampled_tokens for drift in found] == [len(plain), 2 * len(plain)]
