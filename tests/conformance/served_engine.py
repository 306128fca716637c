"""An engine under test, embedded or SGLang, and the facts that it reports."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from engine_api import Api, in_flight, wait_for_load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

_START_S = 300.0
# SGLang checks for disconnected clients every 4 s; so many concurrent generations are slow enough to last longer
WITNESSES = 16
# keys of SGLang's /generate responses (0.5.23), and its finish reason of an aborted request
META_KEYS = {
    "id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "reasoning_tokens",
    "completion_tokens", "cached_tokens", "weight_versions", "cached_tokens_details", "dp_rank", "e2e_latency",
    "response_sent_to_client_ts",
}  # fmt: skip
LOGPROB_KEYS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
# the keys for a request that was aborted before it ran, or after it was put back into the queue
QUEUED_META_KEYS = {
    "id", "finish_reason", "weight_version", "e2e_latency", "weight_versions", "completion_tokens",
    "response_sent_to_client_ts",
}  # fmt: skip
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that a server reports."""

    is_embedded: bool
    model_path: str
    context_length: int
    prompt_limit: int  # prompts must be shorter
    max_running: int  # parallel generations
    heeds_seeds: bool  # whether a sampling_seed repeats tokens


class ServedEngine(Api):
    def __init__(self, base_url: str, session: aiohttp.ClientSession, facts: EngineFacts) -> None:
        super().__init__(base_url, session)
        self.facts = facts

    @property
    def long(self) -> dict[str, Any]:
        """Parameters of a generation that lasts longer than the test needs."""
        return {"max_new_tokens": self.facts.context_length - 100, "ignore_eos": True}

    @property
    def hop_s(self) -> float:
        """Time until a request has most likely arrived, in seconds; no test fails if it takes longer."""
        return 0.03 if self.facts.is_embedded else 0.15

    async def settle(self) -> None:
        """End pauses and generations of earlier tests."""
        await self.post("/continue_generation", {})
        await self.until_idle()

    async def flush(self) -> None:
        """Empty the cache; SGLang refuses until it has cleaned up after its last answers."""
        async with asyncio.timeout(_START_S):
            while (await self.post("/flush_cache")).status != 200:  # noqa: ASYNC110 - the state polled is the server's
                await asyncio.sleep(0.02)

    async def until_idle(self) -> None:
        """Wait until the reported load is zero: servers report it late, which would mislead the next test."""
        await wait_for_load(self, 0)


@cache
def facts_of(base_url: str) -> EngineFacts:
    server, load = _json(base_url, "/server_info"), _json(base_url, "/v1/loads")["loads"][0]
    [card] = _json(base_url, "/v1/models")["data"]
    is_embedded = "version" not in server
    return EngineFacts(
        is_embedded=is_embedded,
        model_path=server["model_path"],
        context_length=card["max_model_len"],
        prompt_limit=server["max_req_input_len"],
        max_running=load["max_running_requests"],
        heeds_seeds=is_embedded or server["enable_deterministic_inference"],
    )


@asynccontextmanager
async def witnesses(engine: ServedEngine) -> AsyncIterator[None]:
    """Run long generations during the block, and check at its end that all still run.

    An equally long request of the block that has ended was therefore ended early.
    """
    rids = [f"witness{n or ''}" for n in range(WITNESSES)]  # the first rid is the prefix of all of them
    async with in_flight(engine, *rids, **engine.long) as tasks:
        await wait_for_load(engine, WITNESSES)
        yield
        await wait_for_load(engine, WITNESSES, falling=True)
        await engine.generate(max_new_tokens=1)  # refreshes the load, which falls to zero if all were aborted
        await wait_for_load(engine, WITNESSES, falling=True)
        # unfinished tasks don't prove that the witnesses still run: the load falls before their answers arrive
        await engine.post("/abort_request", {"rid": "witness"})
        reasons = [answer["meta_info"]["finish_reason"] for answer in await asyncio.gather(*tasks)]
        assert reasons == [ABORTED] * WITNESSES, reasons


def _json(base_url: str, path: str) -> Any:
    with urllib.request.urlopen(base_url + path, timeout=_START_S) as answer:  # noqa: S310 - http
        return json.load(answer)
