"""What only the embedded engine refuses, because it would kill SGLang or because it is not offered."""

from __future__ import annotations

import pytest
from engine_api import IDS


async def _refused(api, body) -> object:
    answer = await api.post("/generate", body)
    assert answer.status == 400, answer
    return answer.body["error"]


@pytest.mark.parametrize("token", [369, 10**9, -1])
async def test_an_id_outside_the_vocabulary_is_refused_and_named(embedded, token):
    error = await _refused(embedded, {"input_ids": [5, token, 6]})
    assert error["message"] == f"input_ids contains out-of-vocabulary token id {token}; valid range is [0, 369)."


@pytest.mark.parametrize("body", [{"text": ""}, {"input_ids": [[], [1]]}])
async def test_an_empty_input_in_another_form_is_refused_too(embedded, body):
    assert (await _refused(embedded, body))["message"] == "input_ids cannot be empty."


@pytest.mark.parametrize(
    "fields", [{"top_logprobs_num": 2}, {"logprob_start_len": 0}, {"return_hidden_states": True}, {"lora_path": "x"}]
)
async def test_what_would_change_the_answer_and_is_not_supported_is_refused(embedded, fields):
    error = await _refused(embedded, {"input_ids": IDS, **fields})
    assert "is not supported by the embedded engine" in error["message"]


@pytest.mark.parametrize("params", [{"regex": "a+"}, {"logit_bias": {"5": 1}}, {"stop_regex": "a"}])
async def test_sampling_that_is_not_supported_is_refused(embedded, params):
    error = await _refused(embedded, {"input_ids": IDS, "sampling_params": params})
    assert error["message"] == f"sampling parameter {next(iter(params))} is not supported by the embedded engine"


@pytest.mark.parametrize("params", [{}, {"n": 1}, {"n": 2}])
async def test_several_sampling_params_for_one_prompt_are_refused(embedded, params):
    answer = await embedded.post("/generate", {"input_ids": IDS, "sampling_params": [params, params]})
    assert answer.status == 400
    assert "sampling_params must hold one dict for each of 1 inputs" in answer.body["message"]


async def test_several_inputs_in_one_stream_are_refused(embedded):
    body = {"input_ids": [IDS, IDS], "stream": True}
    events = [event async for event in embedded.events("/generate", body)]
    assert "not supported" in events[0]
    assert events[-1] == "[DONE]"


async def test_the_engine_lives_on_after_refusals(embedded):
    for body in ({"input_ids": [10**9]}, {"text": ""}, {"input_ids": [5] * 600}, "x"):
        await embedded.post("/generate", body)
    assert len((await embedded.generate(max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2
