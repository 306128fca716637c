"""The client's requests, the answers of engines that it accepts and refuses, and its cache of the server's info."""

import asyncio
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply

from strands_rollout.client.client import ServerInfo, SGLangClient
from strands_rollout.client.generate_api import FinishReason
from strands_rollout.errors import ConfigError, EngineResponseError, TrajectoryError

PARAMS = {"temperature": 1.0, "max_new_tokens": 8}


async def ask(reply: Reply, *, return_logprob: bool = True, vocab_size: int | None = 100) -> Any:
    async with FakeSGLang([reply]) as fake, SGLangClient(fake.base_url, vocab_size=vocab_size) as client:
        return await client.generate([1, 2, 3], PARAMS, return_logprob=return_logprob)


async def test_generate_request_body() -> None:
    async with FakeSGLang(lambda _r, _n: Reply.tokens([7])) as fake, SGLangClient(fake.base_url + "/") as client:
        first = await client.generate([1, 2], PARAMS, extra={"custom": {"a": 1}}, headers={"X-SMG-Routing-Key": "s"})
        second = await client.generate([1, 2], PARAMS, rid="mine", return_logprob=False)
    body = fake.requests[0].body
    assert body.pop("rid") == first.rid
    assert body == {"input_ids": [1, 2], "sampling_params": PARAMS, "return_logprob": True, "custom": {"a": 1}}
    assert fake.requests[0].headers["X-SMG-Routing-Key"] == "s"
    assert fake.requests[0].headers["Content-Type"] == "application/json"
    assert second.rid == fake.requests[1].rid == "mine"
    assert first.rid != second.rid
    assert fake.requests[1].body["return_logprob"] is False


async def test_generate_returns_ids_logprobs_reason_and_counts() -> None:
    reply = Reply.tokens([5, 9], logprobs=[-0.25, -1], text="hi", cached_tokens=2, weight_version="v7")
    generation = await ask(reply)
    assert (generation.output_ids, generation.logprobs) == ([5, 9], [-0.25, -1.0])
    assert all(type(p) is float for p in generation.logprobs)
    assert generation.finish_reason == FinishReason("stop", matched=9)
    assert (generation.prompt_tokens, generation.cached_tokens, generation.completion_tokens) == (3, 2, 2)
    assert (generation.weight_version, generation.text, generation.attempts) == ("v7", "hi", 1)
    assert generation.latency_s > 0
    assert generation.meta_info["e2e_latency"] == 0.001


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply.tokens([5, 6], "length"), FinishReason("length", length=2)),
        (Reply.tokens([5, 6], matched="</s>"), FinishReason("stop", matched="</s>")),
        (Reply.abort([5, 6]), FinishReason("abort", message="Aborted")),
    ],
    ids=["length", "stop string", "abort with partial tokens"],
)
async def test_generate_finish_reasons_and_optional_logprobs(reply, reason) -> None:
    generation, without = await ask(reply), await ask(reply, return_logprob=False)
    assert generation.finish_reason == without.finish_reason == reason
    assert (generation.output_ids, generation.logprobs) == ([5, 6], [-0.5, -0.5])
    assert (without.output_ids, without.logprobs) == ([5, 6], [])


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 100], "input id 100 (int) at position 1: expected an int >= 0 below the vocabulary's size 100"),
        ([-1], "input id -1 (int) at position 0"),
        ([1, True], "input id True (bool) at position 1"),
        ([1, 2**70], "input id 1180591620717411303424 (int) at position 1"),
        ([], "the prompt has no input ids"),
    ],
)
async def test_generate_never_sends_id_outside_vocabulary(ids: list[Any], words: str) -> None:
    async with FakeSGLang([]) as fake, SGLangClient(fake.base_url, vocab_size=100) as client:
        with pytest.raises(TrajectoryError) as error:
            await client.generate(ids, PARAMS)
    assert words in str(error.value)
    assert fake.requests == []


@pytest.mark.parametrize(
    ("params", "extra", "words"),
    [
        (PARAMS, {"logprob_start_len": 0}, "can't use its prefix cache for input logprobs"),
        (PARAMS, {"stream": True}, "this client reads no streams"),
        (PARAMS, {"rid": "x"}, "use the argument rid of generate"),
        ({"temperature": object()}, None, "sampling_params or extra can't be written as JSON"),
    ],
)
async def test_generate_rejects_forbidden_fields(params: Any, extra: Any, words: str) -> None:
    async with FakeSGLang([]) as fake, SGLangClient(fake.base_url) as client:
        with pytest.raises(ConfigError, match=words):
            await client.generate([1], params, extra=extra)
    assert fake.requests == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply.tokens([5, 6], logprobs=[-0.5]), "got 1 logprobs for 2 output ids; expected one for each"),
        (Reply.tokens([5, 6], logprob_ids=[5, 7]), "output id 6 at position 1 comes with the logprob of token 7"),
        (Reply.tokens([5, 6], logprobs=[-0.5, None]), "the logprob of output id 6 at position 1 is None"),
        (Reply.tokens([5], logprobs=[0.1]), "is 0.1; expected a finite number of at most 0"),
        (Reply.tokens([5], output_token_logprobs=[5]), "expected a list of [logprob, token id, text]"),
        (Reply.tokens([5, 6], completion_tokens=3), "got 2 output ids; expected 3, the answer's"),
        (Reply.tokens([5], id="another"), "got the answer to request 'another'; expected the answer to 'r'"),
        (Reply.tokens([5], prompt_tokens=2), "the engine read 2 prompt tokens; expected 3"),
        (Reply.abort([5], prompt_tokens=2), "--allow-auto-truncate"),
        (Reply.tokens([5] * 51, "length"), "got 51 output ids; expected at most max_new_tokens=8"),
        (Reply.tokens([5, 100]), "output id 100 at position 1 is outside the vocabulary of 100 tokens"),
        (Reply.tokens([5], finish_reason="stop"), "finish_reason is 'stop'; expected an object whose type is"),
        (Reply.raw(b'{"text": "hi"}'), "expected a JSON object with meta_info, got {'text': 'hi'}"),
        (Reply.raw(b"[]"), "check that the URL points to an SGLang server"),
        (Reply.raw(b'{"output_ids": ["5"], "meta_info": {"finish_reason": {"type": "stop"}}}'), "output_ids is ['5']"),
    ],
)
async def test_generate_rejects_contradictory_answer_without_retry(reply: Reply, words: str) -> None:
    async with FakeSGLang(lambda _r, _n: reply) as fake, SGLangClient(fake.base_url, vocab_size=100) as client:
        with pytest.raises(EngineResponseError) as error:
            await client.generate([1, 2, 3], PARAMS, rid="r")
    assert words in str(error.value)
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    "reply",
    [
        Reply.abort(),
        Reply.abort([5], prompt_tokens=None, cached_tokens=None),  # aborted after it was put back into the queue
        Reply.abort(prompt_tokens=1),  # aborted for an error, before its first token
        Reply.tokens([5], id=None, prompt_tokens=None),
        Reply.tokens([5] * 8, "length"),
    ],
)
async def test_generate_accepts_sparse_and_aborted_answers(reply: Reply) -> None:
    async with FakeSGLang([Reply.status(503), reply]) as fake, SGLangClient(fake.base_url, backoff_base_s=0) as client:
        generation = await client.generate([1, 2, 3], PARAMS, rid="r")
    assert (generation.output_ids, generation.rid, generation.attempts) == (list(reply.ids), "r-2", 2)


async def test_server_info_merges_endpoints_and_is_cached() -> None:
    async with FakeSGLang([], context_length=4096, weight_version="v3") as fake, SGLangClient(fake.base_url) as client:
        info = await client.server_info()
        again = await client.server_info()
        assert await client.health()
    assert (info.context_length, info.model_path, info.weight_version) == (4096, "/models/fake", "v3")
    assert info is again
    assert fake.info_requests == ["/server_info", "/model_info"]


async def test_server_info_is_fetched_once_for_concurrent_calls() -> None:
    async with FakeSGLang([], router=True) as fake, SGLangClient(fake.base_url) as client:
        first = asyncio.create_task(client.server_info())
        others = [asyncio.create_task(client.server_info()) for _ in range(20)]
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(*others)
        asked = len(fake.info_requests)
        assert await client.server_info() == ServerInfo()
    assert (len(fake.info_requests), len(set(fake.info_requests))) == (asked, asked)
    assert "/get_server_info" in fake.info_requests


async def test_server_info_is_refetched_after_connections_close() -> None:
    async with FakeSGLang([Reply.tokens([5])], context_length=100) as first:
        client = SGLangClient(first.base_url)
        assert (await client.server_info()).context_length == 100
        await client.generate([1], PARAMS)
        assert (await client.server_info()).context_length == 100
    assert first.info_requests == ["/server_info", "/model_info"]
    async with FakeSGLang([], context_length=200, port=int(first.base_url.rpartition(":")[2])) as second, client:
        assert (await client.server_info()).context_length == 200
        assert (await client.server_info()).context_length == 200
    assert second.info_requests == ["/server_info", "/model_info"]


BUSY = [Reply.status(503), Reply.status(429), Reply.status(500), Reply.status(404, {"error": "no_available_workers"})]


@pytest.mark.parametrize("busy", BUSY, ids=repr)
async def test_server_info_of_busy_server_is_the_last_known(busy: Reply) -> None:
    async with FakeSGLang([], context_length=100) as first:
        client = SGLangClient(first.base_url)
        assert (await client.server_info()).context_length == 100
    async with FakeSGLang([], context_length=200, port=int(first.base_url.rpartition(":")[2])) as second, client:
        second.outage = busy
        infos = await asyncio.gather(*(client.server_info() for _ in range(5)))
        assert [info.context_length for info in infos] == [100] * 5
        second.outage = None
        assert (await client.server_info()).context_length == 200


@pytest.mark.parametrize("busy", BUSY, ids=repr)
async def test_server_info_of_busy_server_without_last_known_raises(busy: Reply) -> None:
    async with FakeSGLang([], context_length=100) as fake, SGLangClient(fake.base_url) as client:
        fake.outage = busy
        with pytest.raises(EngineResponseError, match=f"got HTTP {busy.code} from .*busy or failing"):
            await client.server_info()
        fake.outage = None
        assert (await client.server_info()).context_length == 100


@pytest.mark.parametrize("header", ["a\nb", "\N{EURO SIGN}"])
async def test_generate_rejects_header_that_cannot_be_sent(header: str) -> None:
    async with FakeSGLang([]) as fake, SGLangClient(fake.base_url) as client:
        with pytest.raises(ConfigError, match=f"the request can't be sent to {fake.base_url}: "):
            await client.generate([1], PARAMS, headers={"X-SMG-Routing-Key": header})
