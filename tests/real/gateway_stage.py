"""A real router in front of real workers, episodes through it, and their outcomes after a fault."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from episode_stage import SAMPLED, episodes_on, facts_of, until
from real_server import SCRIPTS, RealServer, start_gateway, start_sglang
from worker_front import WorkerFront

from strands_rollout import Sample

_PINS = (SCRIPTS / "real_engines" / "gateway.txt").read_text().split()
# each router with its installed version
NAMES = {pin.partition("==")[0]: pin.replace("==", " ") for pin in _PINS if "==" in pin}
SETTINGS = {"executor": {"name": "local", "isolation": "rlimits"}}
# as in slime/ray/rollout.py, _start_router: a dead worker stays in the list until slime removes it
AS_SLIME_STARTS_IT = ("--disable-circuit-breaker", "--disable-health-check")
# turns that last long enough to be interrupted
LINGERING = {**SAMPLED, "max_new_tokens": 1500, "min_new_tokens": 600}
OWN_VERSION = "own-worker"


class OwnWorker:
    """A real SGLang that a test may kill; started on demand, always on the same port.

    It has the weights of the shared server, but reports another weight version, which identifies the worker that
    sampled a token.
    """

    def __init__(self) -> None:
        self._server: RealServer | None = None
        self._port = 0

    async def running(self) -> str:
        if self._server is None:
            self._server = await asyncio.to_thread(start_sglang, port=self._port)
            self._port = int(self._server.base_url.rpartition(":")[2])
            await post(f"{self._server.base_url}/update_weight_version", new_version=OWN_VERSION)
        return self._server.base_url

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running router."""

    router: str
    base_url: str

    async def workers(self) -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.base_url}/workers") as answer:
            return list((await answer.json())["workers"])

    async def add(self, url: str) -> None:
        """Register a worker like slime/backends/sglang_utils/sglang_engine.py, and wait until it is healthy."""
        await post(f"{self.base_url}/workers", url=url, worker_type="regular")
        await until(lambda: self._serves(url))

    async def remove(self, url: str) -> None:
        (worker,) = [worker for worker in await self.workers() if worker["url"] == url]
        async with (
            aiohttp.ClientSession() as session,
            session.delete(f"{self.base_url}/workers/{worker['id']}") as answer,
        ):
            assert answer.ok, await answer.text()
        await until(lambda: self._lacks(url))

    async def _serves(self, url: str) -> bool:
        return any(worker["url"] == url and worker["is_healthy"] for worker in await self.workers())

    async def _lacks(self, url: str) -> bool:
        return all(worker["url"] != url for worker in await self.workers())


@asynccontextmanager
async def gateway_before(*workers: str, router: str = "smg", flags: Sequence[str] = ()) -> AsyncIterator[Gateway]:
    """Run a router in front of workers, with slime's flags unless others are given."""
    server = await asyncio.to_thread(start_gateway, *workers, router=router, flags=tuple(flags or AS_SLIME_STARTS_IT))
    try:
        yield Gateway(router, server.base_url)
    finally:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def two_workers(first, second, tokenizer, *, router="smg", flags=()):
    """Yield a stage through a router on two workers, the router, and the proxies in front of the workers."""
    async with (
        WorkerFront(first) as one,
        WorkerFront(second) as other,
        gateway_before(one.base_url, other.base_url, router=router, flags=flags) as gateway,
        episodes_on(gateway.base_url, tokenizer) as stage,
    ):
        yield stage, gateway, [one, other]


@dataclass(frozen=True, slots=True)
class Ends:
    """Episodes by outcome."""

    exact: list[Sample]  # finished; `EpisodeStage.play` has checked every token
    masked: list[Sample]  # valid samples that are not trained and have an error
    lost: list[Sample]  # all others

    @property
    def counts(self) -> dict[str, int]:
        counts = {"exact": len(self.exact), "masked": len(self.masked), "lost": len(self.lost)}
        return {"episodes": sum(counts.values()), **counts}

    @property
    def reasons(self) -> set[str]:
        return {str(facts_of(sample)["error"]) for sample in self.masked}


def ends_of(samples: Sequence[Sample]) -> Ends:
    """Sort samples that `EpisodeStage.play` has checked by outcome."""
    ends = Ends([], [], [])
    for sample in samples:
        finished = sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        if finished and not sample.remove_sample and any(sample.loss_mask or []):
            ends.exact.append(sample)
        elif sample.remove_sample and not any(sample.loss_mask or []) and facts_of(sample)["error"]:
            ends.masked.append(sample)
        else:
            ends.lost.append(sample)
    return ends


def versions_of(sample: Sample) -> set[str]:
    """Return the weight versions of a sample's tokens, which name the workers that sampled them."""
    return {str(version) for _, _, _, version in facts_of(sample)["spans"]}


async def post(url: str, /, **body: Any) -> None:
    """POST JSON and require success."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.ok, f"{url}: {answer.status} {await answer.text()}"
