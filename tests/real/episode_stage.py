"""Whole episodes on an engine through `generate`, every sample checked against slime's contract and the wire."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from harness import args_for

from strands_rollout import Sample, generate
from strands_rollout.play.audit import WireRecorder, record_wire, tito_violations
from strands_rollout.play.options import slime_sampling_params
from strands_rollout.play.rows import shipped_rows, take_rows
from strands_rollout.slime_plugin.reward import reward_func
from strands_rollout.slime_plugin.sample_contract import contract_violations

GREEDY = slime_sampling_params(0.0, 768)
SAMPLED = slime_sampling_params(1.0, 768)
# one turn that takes SGLang some seconds on a CPU, so that no turn ends before all have begun
LONG_TURN = {**GREEDY, "max_new_tokens": 500, "ignore_eos": True}
_EXECUTOR = {"name": "local", "isolation": "rlimits"}
# only a guard against hangs
PATIENCE_S = 300.0
_LOOK_S = 0.02
_OF_LOADS = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "timestamp")


@dataclass(frozen=True, slots=True)
class EpisodeStage:
    """An engine behind a recording proxy, and episodes on it."""

    engine_url: str  # URL of the engine itself, for control requests
    recorder: WireRecorder  # proxy that records requests and answers
    tokenizer: Any  # tokenizer of the served model
    args_more: dict[str, Any] = field(default_factory=dict)  # attributes of slime's args besides those of `args_for`

    async def play(self, samples, params=GREEDY, *, at_once=64, **settings):
        """Play samples through `generate` and, unless they are aborted, `reward_func`; check and return them."""
        args = args_for(self.recorder.url, self.tokenizer, reward_key="score", **self.args_more)
        args.strands_rollout = {"executor": _EXECUTOR, **settings}
        places = asyncio.Semaphore(at_once)

        async def finished(sample: Sample) -> Sample:
            async with places:
                done = await generate(args, sample, params)
            if done.status is not Sample.Status.ABORTED:
                done.reward = await reward_func(args, done)
            return done

        done = list(await asyncio.gather(*map(finished, samples)))
        assert self.violations(done) == []
        return done

    async def play_one(self, params: Mapping[str, Any] = GREEDY, *, row: int = 0, **settings: Any) -> Sample:
        """Play one row and return its sample."""
        (done,) = await self.play([new_samples(row + 1)[row]], params, **settings)
        return done

    def violations(self, samples: Sequence[Sample]) -> list[str]:
        """Return messages for violations of slime's contract and of token-in/token-out on the wire."""
        found: list[str] = []
        for sample in samples:
            words = contract_violations(sample, decode=self.decode, reward_key="score", may_abort=True)
            words += tito_violations(self.recorder.episodes.get(str(sample.session_id), []), sample)
            found += [f"sample {sample.index}: {line}" for line in words]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    async def post(self, path: str, **body: Any) -> int:
        """POST JSON to the engine and return the status."""
        async with aiohttp.ClientSession() as session, session.post(f"{self.engine_url}{path}", json=body) as answer:
            await answer.read()
            return answer.status

    async def control(self, path: str, **body: Any) -> None:
        assert await self.post(path, **body) == 200

    async def until_sampling(self, *, requests: int = 1, tokens: int = 10) -> None:
        """Wait until at least `requests` requests run, and have sampled about `tokens` tokens in total since then."""
        await until_sampling(requests, self.engine_url, tokens=tokens)

    async def most_tokens_until_idle(self) -> int:
        """Wait until the engine is idle, and return the most tokens that its running requests used at a time."""
        most = 0
        async with asyncio.timeout(PATIENCE_S):
            while (load := await load_of(self.engine_url))["num_running_reqs"]:
                most = max(most, load["num_used_tokens"])
                await asyncio.sleep(_LOOK_S)
        return most

    async def until_done(self, path: str, **body: Any) -> None:
        """Repeat a request that the engine refuses while others run, until it succeeds."""

        async def done() -> bool:
            return await self.post(path, **body) == 200

        await until(done)


async def load_of(engine_url: str) -> dict[str, Any]:
    """Return an engine's load, such as `num_used_tokens` of all running requests."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine_url}/v1/loads") as answer:
        return dict((await answer.json())["loads"][0])


async def loads_of(engine_urls: Sequence[str]) -> dict[str, list[Any]]:
    """Return the loads of several engines as lists by name."""
    loads = await asyncio.gather(*map(load_of, engine_urls))
    return {name: [load[name] for load in loads] for name in _OF_LOADS}


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> float:
    """Wait until `holds` is true, and return the seconds that it took."""
    clock = asyncio.get_running_loop().time
    started = clock()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return clock() - started
            await asyncio.sleep(_LOOK_S)


async def until_running(total: int, *engine_urls: str) -> None:
    """Wait until at least `total` requests run, summed over the engines."""

    async def enough() -> bool:
        return sum((await loads_of(engine_urls))["num_running_reqs"]) >= total

    await until(enough)


async def until_sampling(total: int, *engine_urls: str, tokens: int) -> None:
    """Wait until at least `total` requests run, and have sampled about `tokens` tokens since then, over all engines."""
    await until_running(total, *engine_urls)

    async def used() -> int:
        return sum((await loads_of(engine_urls))["num_used_tokens"])

    began = await used()

    async def sampled() -> bool:
        nonlocal began
        now = await used()
        began = min(began, now)  # for up to a second, an idle engine reports its last load
        return now >= began + tokens

    await until(sampled)


async def until_idle(*engine_urls: str) -> float:
    """Wait until no request runs or waits at any engine, and return the seconds that it took."""
    began = time.time()

    async def idle() -> bool:
        loads = await loads_of(engine_urls)
        # for up to a second, an idle engine reports its last load
        is_fresh = min(loads["timestamp"]) > began
        return is_fresh and not any(loads["num_running_reqs"] + loads["num_waiting_reqs"])

    return await until(idle)


@asynccontextmanager
async def episodes_on(engine_url: str, tokenizer: Any, **args: Any) -> AsyncIterator[EpisodeStage]:
    async with record_wire(engine_url) as recorder:
        yield EpisodeStage(engine_url, recorder, tokenizer, args)


def new_samples(count: int) -> list[Sample]:
    rows = enumerate(take_rows(shipped_rows(), count))
    return [
        Sample(prompt=r.prompt, label=r.label, index=n, group_index=n, session_id=uuid.uuid4().hex) for n, r in rows
    ]


def facts_of(sample: Sample) -> dict[str, Any]:
    return dict(sample.metadata["strands_rollout"])


def tokens_of(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.tokens for sample in samples]
