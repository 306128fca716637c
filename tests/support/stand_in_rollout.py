"""Does with our samples what slime's synchronous rollout does with its own, without slime.

One step: more groups are begun than are needed; when enough are finished the flag goes up, the engine's requests are
aborted until it is idle, and whatever is still running is waited for and kept for the next step. Written for slime 0.3
(slime/rollout/sglang_rollout.py). Knows `generate` by its contract only.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
from rollout_record import RolloutRecord
from stand_in_buffer import Buffer, Group

from strands_rollout import Sample

_DONE = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much a step takes.

    Attributes:
        groups: That it needs.
        begun: Groups that it begins.
        concurrency: Calls of `generate` at one time.
        abort_every_s: How often the engine is told to abort until it is idle; slime: 3.
    """

    groups: int
    begun: int
    concurrency: int = 64
    abort_every_s: float = 0.05


class StandInRollout:
    """The rollout; its `is_aborted` belongs into the settings as `should_abort`.

    Args:
        args: As slime's.
        params: slime's sampling parameters.
        buffer: Where groups come from, and where unfinished ones go.
        record: Sees every call.
        size: Of each step.
        mask_offpolicy: As slime's --mask-offpolicy-in-partial-rollout.
    """

    def __init__(
        self,
        args: Any,
        params: dict[str, Any],
        buffer: Buffer,
        record: RolloutRecord,
        size: StepSize,
        *,
        mask_offpolicy: bool = False,
    ) -> None:
        self._args, self._params, self._buffer, self._record = args, params, buffer, record
        self._size, self._mask_offpolicy = size, mask_offpolicy
        self._semaphore = asyncio.Semaphore(size.concurrency)

    def is_aborted(self) -> bool:
        """The flag."""
        return self._record.flag_at_s is not None

    async def step(self) -> list[Group]:
        """One step: the groups that it needed, finished; fewer where the buffer ran dry."""
        self._record.flag_at_s = None
        pending = {asyncio.create_task(run_group(self, group)) for group in self._buffer.get(self._size.begun)}
        data: list[Group] = []
        while pending and len(data) < self._size.groups:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if len(data) < self._size.groups:
                    data.append(task.result())
                else:  # slime drops such groups; here they'd be missed
                    self._buffer.add(task.result())
        self._record.flag_at_s = time.monotonic()
        await abort_until_idle(self._args, every_s=self._size.abort_every_s)
        for group in await asyncio.gather(*pending):
            self._buffer.add(group)
        return data

    async def run_sample(self, sample: Any) -> Any:
        """One sample of a group, unless it is finished already."""
        if self._mask_offpolicy and sample.response_length > 0:
            if any(sample.loss_mask):  # else it is the filler of a sample without a sampled token
                self._record.masked[sample.index] = len(sample.tokens)
            sample.loss_mask = [0] * sample.response_length
        if sample.status in _DONE:
            return sample
        async with self._semaphore:
            if self.is_aborted():
                sample.status = Sample.Status.ABORTED
                return sample
            sample = await self._record.generate(self._args, sample, dict(self._params))
        if sample.status is not Sample.Status.ABORTED:
            await self._record.reward(self._args, sample)
        return sample


async def run_group(rollout: StandInRollout, group: Group) -> Group:
    """All samples of a group; as it came if the flag is up."""
    if rollout.is_aborted():
        return group
    for sample in group:
        if sample.session_id is None:
            sample.session_id = f"session-{sample.index}"
    return list(await asyncio.gather(*(rollout.run_sample(sample) for sample in group)))


async def abort_until_idle(args: Any, *, every_s: float) -> None:
    """Tell all workers behind the router to abort everything, until they run nothing."""
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{router}/workers") as answer:
            workers = [worker["url"] for worker in (await answer.json())["workers"]]
        await asyncio.gather(*(_abort_worker(http, url, every_s) for url in workers))


async def _abort_worker(http: aiohttp.ClientSession, url: str, every_s: float) -> None:
    while True:
        async with http.post(f"{url}/abort_request", json={"abort_all": True}):
            pass
        async with http.get(f"{url}/v1/loads?include=core") as answer:
            loads = (await answer.json())["loads"]
        if not sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads):
            return
        await asyncio.sleep(every_s)


async def update_weights(worker_url: str, version: str, *, mode: str = "abort", for_s: float = 0.0) -> None:
    """What slime does to an engine between two training steps: pause, new weights, continue."""
    async with aiohttp.ClientSession() as http:
        for path, body in (
            ("pause_generation", {"mode": mode}),
            ("update_weights_from_tensor", {"weight_version": version}),
            ("continue_generation", {}),
        ):
            if path == "continue_generation":
                await asyncio.sleep(for_s)
            async with http.post(f"{worker_url}/{path}", json=body) as answer:
                assert answer.status == 200
