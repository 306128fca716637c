"""Refused requests: status, body, and SGLang's own messages where clients read them."""

import pytest
from engine_api import IDS


async def _refused(engine, body) -> object:
    answer = await engine.post("/generate", body)
    assert answer.status == 400, answer
    return answer.body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "Duplicate request IDs detected within the request: ['a']"),
        (
            {"input_ids": [[5], [6]], "rid": ["a"]},
            "The specified rids length mismatch with the batch_size for batch processing.",
        ),
    ],
)
async def test_generate_refuses_invalid_input(engine, body, message):
    assert await _refused(engine, body) == {"error": {"message": message}}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2."),
        ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 0."),
        ({"sampling_seed": 2**63}, "sampling_seed must be in [-2**63, 2**63 - 1], got 9223372036854775808."),
        ({"stop": ["x"] * 33}, "at most 32 stop strings are allowed, got 33"),
    ],
)
async def test_generate_refuses_sampling_value_out_of_range(engine, params, message):
    body = await _refused(engine, {"input_ids": IDS, "sampling_params": params})
    assert body == {"error": {"message": message}}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"foo": 1}, "unknown field `foo`, expected one of `max_new_tokens`, `stop`, "),
        ({"temperature": "hot"}, 'invalid type: string "hot", expected f64'),
        ({"max_new_tokens": 1.5}, "invalid type: floating point `1.5`, expected i64"),
        ({"max_new_tokens": True}, "invalid type: boolean `true`, expected i64"),
        ({"stop": [1]}, "invalid type: integer `1`, expected a string"),
        ({"stop_token_ids": ["a"]}, 'invalid type: string "a", expected i64'),
    ],
)
async def test_generate_refuses_unknown_sampling_name_or_type(engine, params, message):
    error = (await _refused(engine, {"input_ids": IDS, "sampling_params": params}))["error"]
    assert isinstance(error, str)
    assert error.startswith(message)


@pytest.mark.parametrize(
    "body",
    [{"input_ids": ["a"]}, {"text": 5}, {"input_ids": IDS, "sampling_params": "x"}, {"input_ids": IDS, "rid": 7}, [1]],
)
async def test_generate_refuses_fields_of_wrong_type(engine, body):
    _check_schema_error(await _refused(engine, body))


def _check_schema_error(body) -> None:
    assert (body["object"], body["type"], body["param"], body["code"]) == ("error", "Bad Request", None, 400)
    assert "validation error" in body["message"]


async def test_generate_refuses_body_that_is_not_json(engine):
    for body, content_type in ((b"{nope", "application/json"), (b'{"input_ids": [1]}', "text/plain")):
        answer = await engine.post_bytes("/generate", body, content_type)
        assert answer.status == 400
        _check_schema_error(answer.body)


async def test_generate_stream_reports_refusal_in_event(engine):
    context = engine.facts.context_length
    body = {"input_ids": [5] * (context + 1), "stream": True}
    events = [event async for event in engine.events("/generate", body)]
    assert f"longer than the model's context length ({context} tokens)" in events[0]
    assert events[1:] == ["[DONE]"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"rid": 5}),
        ("/pause_generation", {"mode": "x"}),
        ("/continue_generation", None),
        ("/update_weights_from_disk", {}),
        ("/update_weight_version", {}),
    ],
)
async def test_control_requests_of_wrong_shape_change_nothing(engine, path, body):
    answer = await engine.post(path, body)
    assert answer.status == 400
    _check_schema_error(answer.body)
    assert len((await engine.generate(max_new_tokens=1))["output_ids"]) == 1
