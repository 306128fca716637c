"""`record_wire`, the recording proxy, and `tito_violations` of samples against the recorded traffic."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sglang import ROUTING_HEADER, FakeSGLang, Reply
from processes import wait_until

from strands_rollout.client.client import SGLangClient
from strands_rollout.play.audit import Exchange, WireRecorder, record_wire, tito_violations

PARAMS = {"max_new_tokens": 4}


@dataclass(frozen=True)
class Line:
    """A client, the recording proxy and a scripted engine."""

    client: SGLangClient
    recorder: WireRecorder
    fake: FakeSGLang


@asynccontextmanager
async def line(script: Sequence[Reply], **server: Any) -> AsyncIterator[Line]:
    async with (
        FakeSGLang(script, **server) as fake,
        record_wire(fake.base_url) as recorder,
        SGLangClient(recorder.url, backoff_base_s=0.001) as client,
    ):
        yield Line(client, recorder, fake)


async def test_record_wire_records_by_routing_key() -> None:
    async with line([Reply.tokens([5, 6], logprobs=[-0.5, -0.25]), Reply.tokens([7])]) as wire:
        first = await wire.client.generate([1, 2], PARAMS, headers={ROUTING_HEADER: "a"})
        second = await wire.client.generate([3], PARAMS, headers={ROUTING_HEADER: "b"})
        assert wire.recorder.episodes == {
            "a": [Exchange([1, 2], [5, 6], [-0.5, -0.25])],
            "b": [Exchange([3], [7], [-0.5])],
        }
    assert (first.output_ids, second.output_ids) == ([5, 6], [7])
    assert [request.input_ids for request in wire.fake.requests] == [[1, 2], [3]]


async def test_record_wire_passes_on_cut_connection() -> None:
    async with line([Reply.cut(), Reply.reset(), Reply.status(503), Reply.tokens([7])]) as wire:
        generation = await wire.client.generate([1], PARAMS)
        assert generation.attempts == 4
        failed = Exchange([1], None, [])
        assert wire.recorder.episodes == {"": [failed, failed, failed, Exchange([1], [7], [-0.5])]}


async def test_record_wire_cancels_request_of_gone_client() -> None:
    async with line([Reply.hang()], router=True) as wire:
        task = asyncio.create_task(wire.client.generate([1], PARAMS, rid="gone"))
        await wire.fake.arrived()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: wire.fake.disconnects)
        assert wire.fake.disconnects == ["gone"]


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


def test_tito_violations_finds_changed_retry() -> None:
    first, second = exchanges()
    unchanged = Exchange(second.input_ids, None, [])
    assert tito_violations([first, second], sample()) == tito_violations([first, unchanged, second], sample()) == []
    failed = Exchange([*second.input_ids, 99], None, [])
    assert (
        "request 2 changes the failed request that it repeats" in tito_violations([first, failed, second], sample())[0]
    )


@pytest.mark.parametrize(
    "second_input",
    [
        pytest.param([*PROMPT, 10, 99, *RESULT], id="a sampled token was encoded again"),
        pytest.param([*PROMPT, 10], id="a sampled token was dropped"),
        pytest.param([7, *PROMPT, *FIRST, *RESULT], id="the prompt was rendered again"),
    ],
)
def test_tito_violations_finds_request_that_does_not_extend(second_input: list[int]) -> None:
    found = tito_violations(exchanges(second_input), sample(tokens=[*second_input, *SECOND]))
    assert "request 1 does not extend the previous request and its output" in found[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [*PROMPT, *FIRST, *RESULT, 13]}, "tokens are not the last request and its output"),
        ({"response_length": 4}, "the sample's prompt has 4 tokens"),
        ({"loss_mask": [1, 1, 1, 0, 1]}, "loss_mask is not what the engine sampled"),
        ({"rollout_log_probs": [-0.5, -0.3, 0.0, 0.0, -1.0]}, "rollout_log_probs is not what the engine sampled"),
    ],
)
def test_tito_violations_finds_changed_sample(changes: dict[str, Any], words: str) -> None:
    assert words in tito_violations(exchanges(), sample(**changes))[0]


def test_tito_violations_finds_partly_read_request() -> None:
    first, second = exchanges()
    cut = replace(second, read_tokens=4)
    assert tito_violations([first, cut], sample()) == ["the engine read 4 tokens; the request had 7"]


def test_tito_violations_ignores_untrained_sample() -> None:
    excluded = sample(tokens=[*PROMPT, 9], response_length=1, loss_mask=[0], rollout_log_probs=[0.0])
    assert tito_violations(exchanges(), excluded) == []


def test_tito_violations_finds_trained_tokens_without_request() -> None:
    assert "the engine sampled none" in tito_violations([Exchange(PROMPT, None, [])], sample())[0]
