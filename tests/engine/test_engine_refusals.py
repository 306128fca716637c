"""What is refused, with which status and body; SGLang's own words where a client may read them."""

from __future__ import annotations

import pytest
from engine_api import IDS


async def _refused(api, body) -> object:
    answer = await api.post("/generate", body)
    assert answer.status == 400, answer
    return answer.body["error"]


@pytest.mark.parametrize("count", [512, 600])
async def test_a_prompt_as_long_as_the_context_is_refused_naming_it(api, count):
    message = f"The input ({count} tokens) is longer than the model's context length (512 tokens)."
    assert await _refused(api, {"input_ids": [5] * count}) == {"message": message}


async def test_a_request_for_more_than_the_context_is_refused_naming_it(api):
    error = await _refused(api, {"input_ids": [5] * 500, "sampling_params": {"max_new_tokens": 13}})
    assert error["message"] == (
        "Requested token count exceeds the model's maximum context length of 512 tokens. You requested a total of 513 "
        "tokens: 500 tokens from the input messages and 13 tokens for the completion. Please reduce the number of "
        "tokens in the input messages or the completion to fit within the limit."
    )


async def test_a_prompt_just_under_the_context_is_refused_as_sglang_does(api):
    error = await _refused(api, {"input_ids": [5] * 506, "sampling_params": {"max_new_tokens": 1}})
    assert error["message"].startswith("Input length (506 tokens) exceeds the maximum allowed length (506 tokens).")
    answer = await api.post("/generate", {"input_ids": [5] * 505, "sampling_params": {"max_new_tokens": 1}})
    assert answer.status == 200


@pytest.mark.parametrize("token", [369, 10**9, -1])
async def test_an_id_outside_the_vocabulary_is_refused_and_named(embedded, token):
    error = await _refused(embedded, {"input_ids": [5, token, 6]})
    assert error["message"] == f"input_ids contains out-of-vocabulary token id {token}; valid range is [0, 369)."


async def test_an_empty_input_is_refused(api):
    assert (await _refused(api, {"input_ids": []}))["message"] == "input_ids cannot be empty."


@pytest.mark.parametrize("body", [{"text": ""}, {"input_ids": [[], [1]]}])
async def test_an_empty_input_in_another_form_is_refused_too(embedded, body):
    assert (await _refused(embedded, body))["message"] == "input_ids cannot be empty."


async def test_a_missing_input_is_refused(api):
    assert (await _refused(api, {}))["message"] == "Either text, input_ids or input_embeds should be provided."


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2."),
        ({"min_new_tokens": 5, "max_new_tokens": 3}, "min_new_tokens must be in [0, max_new_tokens(3)], got 5."),
        ({"min_new_tokens": -1}, "min_new_tokens must be in [0, max_new_tokens], got -1."),
        ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2], got 3."),
        ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2], got -3."),
        ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 0."),
        ({"sampling_seed": 2**63}, "sampling_seed must be in [-2**63, 2**63 - 1], got 9223372036854775808."),
        ({"stop": ["x"] * 33}, "at most 32 stop strings are allowed, got 33"),
    ],
)
async def test_a_sampling_value_out_of_range_is_refused(api, params, message):
    assert (await _refused(api, {"input_ids": IDS, "sampling_params": params}))["message"] == message


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"foo": 1}, "unknown field `foo`, expected one of `max_new_tokens`, `stop`, "),
        ({"temperature": "hot"}, 'invalid type: string "hot", expected f64'),
        ({"max_new_tokens": 1.5}, "invalid type: floating point `1.5`, expected i64"),
        ({"max_new_tokens": True}, "invalid type: boolean `true`, expected i64"),
        ({"ignore_eos": 1}, "invalid type: integer `1`, expected a boolean"),
        ({"stop": [1]}, "invalid type: integer `1`, expected a string"),
        ({"stop_token_ids": ["a"]}, 'invalid type: string "a", expected i64'),
    ],
)
async def test_an_unknown_name_or_type_in_sampling_is_refused_by_a_plain_string(api, params, message):
    error = await _refused(api, {"input_ids": IDS, "sampling_params": params})
    assert isinstance(error, str)
    assert error.startswith(message)


async def test_null_sampling_values_mean_their_defaults(api):
    params = {"temperature": None, "top_p": None, "top_k": None, "stop": None, "custom_params": None}
    answer = await api.post("/generate", {"input_ids": IDS, "sampling_params": {**params, "max_new_tokens": 1}})
    assert answer.status == 200


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": ["a"]},
        {"input_ids": [1.5]},
        {"input_ids": [True]},
        {"input_ids": 5},
        {"input_ids": [[1], 2]},
        {"text": 5},
        {"text": ["a", 5]},
        {"input_ids": IDS, "sampling_params": "x"},
        {"input_ids": IDS, "stream": "yes"},
        {"input_ids": IDS, "rid": 7},
        {"input_ids": IDS, "logprob_start_len": True},
        [1],
    ],
)
async def test_a_field_of_the_wrong_type_is_refused(api, body):
    assert (await api.post("/generate", body)).status == 400


@pytest.mark.parametrize("body", [{"input_ids": ["a"]}, {"input_ids": IDS, "sampling_params": [{}, {}]}, [1]])
async def test_the_schemas_refusals_have_their_own_form(embedded, body):
    answer = await embedded.post("/generate", body)
    assert (answer.status, answer.body["object"], answer.body["code"]) == (400, "error", 400)
    assert answer.body["message"].startswith("1 validation error:")


async def test_a_body_that_is_not_json_is_refused(api):
    assert (await api.post_bytes("/generate", b"{nope", "application/json")).status == 400
    assert (await api.post_bytes("/generate", b'{"input_ids": [1]}', "text/plain")).status == 400


@pytest.mark.parametrize(
    "fields", [{"top_logprobs_num": 2}, {"logprob_start_len": 0}, {"return_hidden_states": True}, {"lora_path": "x"}]
)
async def test_what_would_change_the_answer_and_is_not_supported_is_refused(embedded, fields):
    error = await _refused(embedded, {"input_ids": IDS, **fields})
    assert "is not supported by the embedded engine" in error["message"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "a+"}, "sampling parameter regex is not supported by the embedded engine"),
        ({"n": 0}, "n must be the same positive integer for every input, got 0."),
    ],
)
async def test_sampling_that_is_not_supported_is_refused(embedded, params, message):
    assert (await _refused(embedded, {"input_ids": IDS, "sampling_params": params}))["message"] == message


async def test_several_inputs_in_one_stream_are_refused(embedded):
    body = {"input_ids": [IDS, IDS], "stream": True}
    events = [event async for event in embedded.events("/generate", body)]
    assert "not supported" in events[0]
    assert events[-1] == "[DONE]"


async def test_a_refused_stream_says_so_in_an_event(api):
    events = [event async for event in api.events("/generate", {"input_ids": [5] * 600, "stream": True})]
    assert "longer than the model's context length (512 tokens)" in events[0]
    assert events[1:] == ["[DONE]"]


async def test_unknown_paths_and_methods_get_fastapis_answers(api):
    assert (await api.get("/nope")).body == {"detail": "Not Found"}
    answer = await api.get("/generate")
    assert (answer.status, answer.body) == (405, {"detail": "Method Not Allowed"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"rid": 5}),
        ("/pause_generation", {"mode": "x"}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", []),
        ("/update_weight_version", {}),
    ],
)
async def test_control_requests_of_the_wrong_shape_are_refused(api, path, body):
    assert (await api.post(path, body)).status == 400


async def test_the_engine_lives_on_after_refusals(embedded):
    for body in ({"input_ids": [10**9]}, {"text": ""}, {"input_ids": [5] * 600}, "x"):
        await embedded.post("/generate", body)
    assert len((await embedded.generate(max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2
