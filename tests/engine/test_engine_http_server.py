"""Requests that only the embedded engine refuses: they would kill SGLang, are unsupported, or come from other sites.

Also extreme sampling values, which the engine accepts.
"""

import io
import json

import aiohttp
import pytest
from engine_api import IDS

EXTREME = {"temperature": [1e308, 10**18, 1e-7], "repetition_penalty": [5e-324, 1e-60], "top_k": [2**64 - 1, 10**18]}


def _params(**params: object) -> tuple[str, object]:
    return "/generate", {"input_ids": IDS, "sampling_params": params}


BAD = {
    "n of a million": _params(n=10**6),
    "n of a batch": ("/generate", {"input_ids": [IDS] * 20, "sampling_params": {"n": 100}}),
    "max_new_tokens": _params(max_new_tokens=10**18),
    "repetition_penalty": _params(repetition_penalty=1e308),
    "a million stop strings": _params(stop=["x"] * 10**6),
    "a long prompt": ("/generate", {"input_ids": [1] * 10**6}),
    "a long text": ("/generate", {"text": "a b" * 10**6}),
    "ids beyond 64 bits": ("/generate", {"input_ids": [2**64 - 1]}),
    "NaN": ("/generate", b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}'),
    "a lone surrogate": ("/generate", b'{"text": "\\ud800"}'),
    "deep nesting": ("/generate", b'{"input_ids": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
    "a body beyond the limit": ("/generate", b" " * (65 << 20)),
    "no texts": ("/generate", {"text": []}),
    "an unknown pause": ("/pause_generation", {"mode": "x" * 10**6}),
    "an abort of a number": ("/abort_request", {"rid": 10**18}),
    "weights in a number": ("/update_weights_from_disk", {"model_path": 10**18}),
    "weights at a long path": ("/update_weights_from_disk", {"model_path": "/x" * 50_000}),
    "weights in a device": ("/update_weights_from_disk", {"model_path": "/dev/zero"}),
}


NOT_SUPPORTED = " is not supported by the embedded engine"
REFUSED = [
    ({"input_ids": [5, 1200, 6]}, "out-of-vocabulary token id 1200; valid range is [0, 1200)."),
    ({"input_ids": [5, -1, 6]}, "out-of-vocabulary token id -1; valid range is [0, 1200)."),
    ({"text": ""}, "input_ids cannot be empty."),
    ({"input_ids": IDS, "top_logprobs_num": 2}, "top_logprobs_num" + NOT_SUPPORTED),
    ({"input_ids": IDS, "sampling_params": {"regex": "a+"}}, "sampling parameter regex" + NOT_SUPPORTED),
    ({"input_ids": IDS, "sampling_params": [{}, {}]}, "must hold one dict for each of 1 inputs"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED)
async def test_generate_error_names_unsupported_fields(embedded, body, words):
    answer = await embedded.post("/generate", body)
    assert answer.status == 400
    assert words in str(answer.body)


async def test_generate_refuses_a_stream_of_several_inputs(embedded):
    body = {"input_ids": [IDS, IDS], "stream": True}
    events = [event async for event in embedded.events("/generate", body)]
    assert "not supported" in events[0]
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize(("path", "body"), BAD.values(), ids=BAD.keys())
async def test_http_server_survives_a_bad_request(embedded, path, body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await embedded.post_bytes(path, io.BytesIO(raw), "application/json")
    assert answer.status in (400, 413), answer
    assert len(str(answer.body)) < 3000  # the error does not echo the whole request
    assert len((await embedded.generate(max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in EXTREME.items() for value in values])
async def test_generate_accepts_extreme_sampling_values(embedded, name, value):
    fields = {name: value, "max_new_tokens": 5, "ignore_eos": True, "return_logprob": True}
    assert len((await embedded.generate(**fields))["output_ids"]) == 5


HEADERS = [
    ({}, "127.0.0.1", 200),
    *(({"Host": host}, "127.0.0.1", 200) for host in ("LocalHost:8000", "[::1]:30000")),
    *(({"Host": host}, "127.0.0.1", 403) for host in ("127.0.0.1.evil.example", "127.0.0.1@evil.example", "10.0.0.7")),
    ({"Host": "localhost", "Origin": "http://localhost"}, "127.0.0.1", 200),
    ({"Host": "localhost", "Origin": "http://localhost:3000"}, "127.0.0.1", 403),
    ({"Sec-Fetch-Site": "cross-site"}, "127.0.0.1", 403),
    # a server that listens on the network answers to any host name, but not to other sites
    ({"Host": "engine.cluster.local:30000"}, "0.0.0.0", 200),  # noqa: S104 - what is tested, as below
    ({"Host": "10.0.0.7", "Origin": "http://10.0.0.7"}, "0.0.0.0", 200),  # noqa: S104
    ({"Host": "evil.example", "Origin": "http://evil.example"}, "0.0.0.0", 403),  # noqa: S104
    ({"Host": "10.0.0.7", "Origin": "http://evil.example"}, "0.0.0.0", 403),  # noqa: S104
]


@pytest.mark.parametrize(("headers", "host", "status"), HEADERS)
async def test_http_server_checks_host_and_origin(start, tiny_dir, headers, host, status):
    api = await start(tiny_dir, host=host)
    url = api.base_url.replace(host, "127.0.0.1") + "/flush_cache"
    async with aiohttp.ClientSession() as session, session.post(url, headers=headers) as got:
        assert got.status == status
