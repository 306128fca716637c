"""The token audit sees each break of token-in/token-out, from what crossed the wire alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strands_rollout.token_audit import tito_violations
from strands_rollout.wire_recorder import Exchange

PROMPT, FIRST, RESULT, SECOND = [1, 2, 3], [10, 11], [20, 21], [12]


def exchanges(second_input: list[int] | None = None) -> list[Exchange]:
    return [
        Exchange(PROMPT, FIRST, [-0.5, -0.25]),
        Exchange(second_input or [*PROMPT, *FIRST, *RESULT], SECOND, [-1.0]),
    ]


def sample(**changes: Any) -> Any:
    fields = {
        "tokens": [*PROMPT, *FIRST, *RESULT, *SECOND],
        "response_length": 5,
        "loss_mask": [1, 1, 0, 0, 1],
        "rollout_log_probs": [-0.5, -0.25, 0.0, 0.0, -1.0],
    }
    return SimpleNamespace(**{**fields, **changes})


def test_an_exact_episode_has_no_violation() -> None:
    assert tito_violations(exchanges(), sample()) == []


def test_a_request_that_was_sent_again_unchanged_is_exact() -> None:
    first, second = exchanges()
    failed = Exchange(second.input_ids, None, [])
    assert tito_violations([first, failed, second], sample()) == []


def test_a_retry_with_other_tokens_is_seen() -> None:
    first, second = exchanges()
    failed = Exchange([*second.input_ids, 99], None, [])
    assert "request 2 repeats a failed one" in tito_violations([first, failed, second], sample())[0]


@pytest.mark.parametrize(
    "second_input",
    [
        pytest.param([*PROMPT, 10, 99, *RESULT], id="a sampled token was encoded anew"),
        pytest.param([*PROMPT, 10], id="a sampled token was dropped"),
        pytest.param([7, *PROMPT, *FIRST, *RESULT], id="the prompt was rendered anew"),
    ],
)
def test_a_request_that_does_not_extend_the_last_one_is_seen(second_input: list[int]) -> None:
    found = tito_violations(exchanges(second_input), sample(tokens=[*second_input, *SECOND]))
    assert "request 1 does not extend the last one and its output" in found[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [*PROMPT, *FIRST, *RESULT, 13]}, "tokens are not the last request and its output"),
        ({"tokens": [*PROMPT, *FIRST, *RESULT, *SECOND, 30]}, "tokens are not the last request and its output"),
        ({"response_length": 4}, "the sample's prompt has 4 tokens"),
        ({"loss_mask": [1, 1, 1, 0, 1]}, "loss_mask is not what the engine sampled"),
        ({"loss_mask": [1, 0, 0, 0, 1]}, "loss_mask is not what the engine sampled"),
        ({"rollout_log_probs": [-0.5, -0.3, 0.0, 0.0, -1.0]}, "rollout_log_probs is not what the engine sampled"),
    ],
)
def test_a_sample_that_differs_from_the_wire_is_seen(changes: dict[str, Any], words: str) -> None:
    assert words in tito_violations(exchanges(), sample(**changes))[0]


def test_a_sample_that_trains_nothing_claims_nothing() -> None:
    excluded = sample(tokens=[*PROMPT, 9], response_length=1, loss_mask=[0], rollout_log_probs=[0.0])
    assert tito_violations(exchanges(), excluded) == []


def test_trained_tokens_that_no_engine_sampled_are_seen() -> None:
    assert "the engine sampled none" in tito_violations([Exchange(PROMPT, None, [])], sample())[0]
