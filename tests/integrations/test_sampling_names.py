"""Other engines' sampling parameters in SGLang's words."""

from __future__ import annotations

from typing import Any

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.integrations.sampling_names import TORCHRL, VLLM

SKYRL_DEFAULT = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 1024,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}
"""What SkyRL makes of its default settings (skyrl/backends/skyrl_train/inference_servers/engine_utils.py)."""


def test_skyrls_default_parameters_are_sglangs() -> None:
    assert VLLM.to_sglang(SKYRL_DEFAULT) == {
        "min_new_tokens": 1,
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "max_new_tokens": 1024,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"top_k": 0}, {"top_k": -1}),
        ({"seed": 3, "stop_token_ids": [7]}, {"sampling_seed": 3, "stop_token_ids": [7]}),
        ({"logit_bias": {7: -1.0}}, {"logit_bias": {"7": -1.0}}),
        ({"n": 1, "detokenize": False, "logprobs": 0, "extra_args": {}}, {}),
        ({"structured_outputs": None, "bad_words": None, "max_tokens": None}, {}),
        ({"max_generate_length": 512}, {"max_new_tokens": 512}),
    ],
)
def test_what_asks_for_the_same_is_mapped_and_what_asks_for_nothing_is_dropped(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert VLLM.to_sglang(given) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("logprobs", 5),
        ("prompt_logprobs", 1),
        ("allowed_token_ids", [1]),
        ("bad_words", ["no"]),
        ("structured_outputs", {"regex": "a"}),
        ("thinking_token_budget", 100),
        ("best_of", 4),
    ],
)
def test_what_has_no_equal_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"vLLM's {name}=.* no equal"):
        VLLM.to_sglang({name: value})


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="'max_token', which vLLM does not have; did you mean 'max_tokens'"):
        VLLM.to_sglang({"max_token": 5})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_new_tokens": 8, "temperature": 0.5, "top_k": 4}, {"max_new_tokens": 8, "temperature": 0.5, "top_k": 4}),
        ({"max_tokens": 8, "stop_sequences": ["x"]}, {"max_new_tokens": 8, "stop": ["x"]}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
        ({"num_return_sequences": 1, "num_beams": 1, "early_stopping": False, "logprobs": True}, {}),
        ({"max_tokens": 8, "max_new_tokens": 8}, {"max_new_tokens": 8}),
    ],
)
def test_torchrls_keywords_are_mapped(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert TORCHRL.to_sglang(given) == expected


@pytest.mark.parametrize("given", [{"num_return_sequences": 4}, {"num_beams": 2}, {"early_stopping": True}])
def test_torchrls_keywords_without_an_equal_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no equal"):
        TORCHRL.to_sglang(given)


@pytest.mark.parametrize("given", [{"max_tokens": 8, "max_new_tokens": 9}, {"temperature": 1.0, "do_sample": False}])
def test_two_names_that_ask_for_different_things_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected one of them"):
        TORCHRL.to_sglang(given)
