"""Other engines' sampling parameters, translated to SGLang's names."""

from typing import Any

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.integrations.conversion import TORCHRL, VLLM

SAME = {"skip_special_tokens": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
# SkyRL's default settings (skyrl/backends/skyrl_train/inference_servers/engine_utils.py)
SKYRL = {**SAME, "min_tokens": 1, "include_stop_str_in_output": True, "max_tokens": 1024, "logprobs": 1, "stop": None}


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        (VLLM, SKYRL, {**SAME, "min_new_tokens": 1, "no_stop_trim": True, "max_new_tokens": 1024}),
        (VLLM, {"top_k": 0}, {"top_k": -1}),
        (VLLM, {"seed": 3, "stop_token_ids": [7]}, {"sampling_seed": 3, "stop_token_ids": [7]}),
        (VLLM, {"logit_bias": {7: -1.0}}, {"logit_bias": {"7": -1.0}}),
        (TORCHRL, {"max_tokens": 8, "stop_sequences": ["x"]}, {"max_new_tokens": 8, "stop": ["x"]}),
        (TORCHRL, {"do_sample": False}, {"temperature": 0.0}),
        (TORCHRL, {"num_return_sequences": 1, "num_beams": 1, "early_stopping": False, "logprobs": True}, {}),
    ],
)
def test_to_sglang_maps_equivalents_and_drops_defaults(names, given, expected) -> None:
    assert names.to_sglang(given) == expected


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        (VLLM, {"n": 2}, "vLLM's n=.* no equivalent"),
        (VLLM, {"n": True}, "vLLM's n=True.* no equivalent"),
        (VLLM, {"logprobs": 5}, "vLLM's logprobs=.* no equivalent"),
        (VLLM, {"max_token": 5}, "vLLM has no sampling parameter 'max_token'; did you mean 'max_tokens'"),
        (TORCHRL, {"num_beams": 4}, "no equivalent"),
        (TORCHRL, {"max_tokens": 8, "max_new_tokens": 9}, "but another name sets .*; remove one of them"),
        (TORCHRL, {"do_sample": False, "temperature": 0.5}, "but another name sets .*; remove one of them"),
    ],
)
def test_to_sglang_refuses_unknown_or_conflicting_params(names: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        names.to_sglang(given)
