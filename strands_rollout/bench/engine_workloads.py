"""What engines are asked for when they are compared: sets of requests that are sent at once, and what a set took.

Knows SGLang's `/generate` and `/flush_cache`; nothing of which engines there are, or of how often a set is repeated.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Final, Literal

import httpx

from strands_rollout.bench.engine_cpu import cpu_s, engine_processes
from strands_rollout.errors import EngineResponseError, EngineUnavailableError

Kind = Literal["decode", "prefill", "samples"]
Cache = Literal["distinct", "flushed", "again", "shared"]

# Every vocabulary worth serving has these ids.
_IDS: Final = 1000
# SGLang refuses to flush for a moment after its last answer.
_FLUSH_TRIES: Final = 100
_FLUSH_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are sent at once; a rate counts new tokens, with "prefill" the prompts' tokens.

    Attributes:
        cache: "distinct": prompts never seen, a cache that holds others; "flushed": prompts never seen, the cache just
            emptied; "again": each prompt was answered a moment ago; "shared": all requests have one prompt, never seen.
        prompt_tokens: Of each request.
        new_tokens: Of each request, exactly: the end of sequence is ignored.
    """

    kind: Kind
    cache: Cache
    requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def counted_tokens(self) -> int:
        """The tokens that the rate counts."""
        return self.requests * (self.prompt_tokens if self.kind == "prefill" else self.new_tokens)


@dataclass(frozen=True, slots=True)
class Took:
    """What one pass of a workload took.

    Attributes:
        wall_s: From the first request to the last answer.
        engine_cpu_s: What the engine's processes spent meanwhile (user and system); None where that can't be seen.
        cached_tokens: Prompt tokens that the engine found in its cache, over all requests.
    """

    wall_s: float
    engine_cpu_s: float | None
    cached_tokens: int


async def run_workload(http: httpx.AsyncClient, work: Workload, seed: int) -> Took:
    """Send a workload and wait for the last answer.

    Args:
        http: A client of the engine.
        work: What to send.
        seed: Of the prompts; equal seeds give equal prompts.

    Raises:
        EngineUnavailableError: The engine does not answer, or refuses.
        EngineResponseError: An answer has not the tokens that were asked for.
    """
    bodies = _bodies(work, seed)
    if work.cache != "distinct":
        await flush(http)
    if work.cache == "again":
        await _answers(http, bodies)
    processes = engine_processes(http.base_url)
    cpu_before, started = cpu_s(processes), time.perf_counter()
    answers = await _answers(http, bodies)
    wall_s, cpu_after = time.perf_counter() - started, cpu_s(processes)
    return Took(
        wall_s=wall_s,
        engine_cpu_s=None if cpu_before is None or cpu_after is None else cpu_after - cpu_before,
        cached_tokens=sum(_cached_tokens(answer, work) for answer in answers),
    )


async def flush(http: httpx.AsyncClient) -> None:
    """Empty the engine's prefix cache.

    Raises:
        EngineUnavailableError: It refuses for seconds, as it does while others use it.
    """
    for _ in range(_FLUSH_TRIES):
        if (await _posted(http, "/flush_cache", b"{}")).status_code == httpx.codes.OK:
            return
        await asyncio.sleep(_FLUSH_PAUSE_S)
    raise EngineUnavailableError(f"{http.base_url} refuses to empty its cache; is anybody else using this engine?")


def _bodies(work: Workload, seed: int) -> list[bytes]:
    numbers = random.Random(seed)  # noqa: S311 - prompts, not secrets
    prompts = [numbers.choices(range(_IDS), k=work.prompt_tokens) for _ in range(work.requests)]
    if work.cache == "shared":
        prompts = prompts[:1] * work.requests
    params = {"max_new_tokens": work.new_tokens, "ignore_eos": True, "temperature": 1.0}
    common = {"sampling_params": params, "return_logprob": True}
    return [json.dumps({"input_ids": prompt, **common}).encode() for prompt in prompts]


async def _answers(http: httpx.AsyncClient, bodies: list[bytes]) -> list[httpx.Response]:
    return await asyncio.gather(*(_posted(http, "/generate", body) for body in bodies))


async def _posted(http: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
    try:
        return await http.post(path, content=body, headers={"Content-Type": "application/json"})
    except httpx.TransportError as e:
        raise EngineUnavailableError(f"no answer from {http.base_url}{path}: {e!r}; check that it is up") from e


def _cached_tokens(answer: httpx.Response, work: Workload) -> int:
    if answer.status_code != httpx.codes.OK:
        raise EngineUnavailableError(f"{answer.url} answered {answer.status_code} {answer.text[:200]}; expected 200")
    meta = answer.json()["meta_info"]
    if meta["completion_tokens"] != work.new_tokens:
        raise EngineResponseError(
            f"{answer.url} generated {meta['completion_tokens']} tokens; expected {work.new_tokens}, as ignore_eos asks"
        )
    return int(meta["cached_tokens"])
