"""Does with our samples what slime's rollouts do with their own, without slime; written for slime 0.3.

The synchronous one (slime/rollout/sglang_rollout.py), one step: more groups are begun than are needed; when enough are
finished the flag goes up, the engine's requests are aborted until it is idle, and whatever is still running is waited
for and kept for the next step. The fully-async one (slime/rollout/fully_async_rollout.py): a thread with a loop of its
own keeps a pool of groups running, and hands finished ones out; nobody raises an abort flag; weight updates abort the
engine's requests, and groups with an ABORTED sample go back to the buffer. Knows `generate` by its contract only.
"""

import asyncio
import json
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import aiohttp
from rollout_record import RolloutRecord

from strands_rollout import Sample

_DONE = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
_POLL_S = 0.01  # slime: 1
_ABORT_EVERY_S = 0.05  # slime: 3
_END_S = 300.0
Group = list[Any]


KEPT_AS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "itself": lambda sample: sample,
    "pickle": lambda sample: pickle.loads(pickle.dumps(sample)),  # noqa: S301 - its own
    "json": lambda sample: Sample.from_dict(json.loads(json.dumps(sample.to_dict()))),
}


class Buffer:
    """A data source with a buffer: new groups of samples, and first those that came back; safe in several threads.

    Args:
        prompts: (prompt, label) of one group after the other.
        samples_per_group: As slime's n_samples_per_prompt.
        kept_as: How a group lies in the buffer; one of `KEPT_AS`.
    """

    def __init__(self, prompts: Iterator[tuple[str, Any]], *, samples_per_group: int, kept_as: str = "itself") -> None:
        self._prompts, self._samples_per_group, self._keep = prompts, samples_per_group, KEPT_AS[kept_as]
        self._lock = threading.Lock()
        self._kept: list[Group] = []
        self._groups = 0
        self.handed_out = {"new": 0, "again": 0}

    def get(self, count: int) -> list[Group]:
        """So many groups, those that were kept first; fewer where no prompts are left."""
        with self._lock:
            groups, self._kept = self._kept[:count], self._kept[count:]
            self.handed_out["again"] += len(groups)
            while len(groups) < count and (group := self._new_group()):
                self.handed_out["new"] += 1
                groups.append(group)
            return groups

    def add(self, group: Group) -> None:
        kept = [self._keep(sample) for sample in group]
        with self._lock:
            self._kept.append(kept)

    def _new_group(self) -> Group:
        row = next(self._prompts, None)
        if row is None:
            return []
        (prompt, label), group, size = row, self._groups, self._samples_per_group
        self._groups += 1
        indices = range(group * size, (group + 1) * size)
        return [Sample(prompt=prompt, label=label, index=index, group_index=group) for index in indices]


@dataclass(frozen=True, slots=True)
class StepSize:
    """How many groups a step needs, and how many it begins."""

    groups: int
    begun: int


class StandInRollout:
    """The rollout; its `is_aborted` belongs into the settings as `should_abort`, and `record` sees every call.

    `mask_offpolicy` is slime's --mask-offpolicy-in-partial-rollout.
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

    def is_aborted(self) -> bool:
        return self._record.flag_at_s is not None

    async def step(self) -> list[Group]:
        """One step: the groups that it needed, finished; fewer where the buffer ran dry."""
        self._record.flag_at_s = None
        pending = {asyncio.create_task(self.run_group(group)) for group in self._buffer.get(self._size.begun)}
        data: list[Group] = []
        while pending and len(data) < self._size.groups:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if len(data) < self._size.groups:
                    data.append(task.result())
                else:  # slime drops such groups; here they'd be missed
                    self._buffer.add(task.result())
        self._record.flag_at_s = time.monotonic()
        await abort_until_idle(self._args)
        for group in await asyncio.gather(*pending):
            self._buffer.add(group)
        return data

    async def run_group(self, group: Group) -> Group:
        """All samples of a group; as it came if the flag is up."""
        if self.is_aborted():
            return group
        for sample in group:
            if sample.session_id is None:
                sample.session_id = f"session-{sample.index}"
        return list(await asyncio.gather(*map(self._run_sample, group)))

    async def _run_sample(self, sample: Any) -> Any:
        """One sample of a group, unless it is finished already."""
        if self._mask_offpolicy and sample.response_length > 0:
            if any(sample.loss_mask):  # else it is the filler of a sample without a sampled token
                self._record.masked[sample.index] = len(sample.tokens)
            sample.loss_mask = [0] * sample.response_length
        if sample.status in _DONE:
            return sample
        if self.is_aborted():
            sample.status = Sample.Status.ABORTED
            return sample
        sample = await self._record.generate(self._args, sample, dict(self._params))
        if sample.status is not Sample.Status.ABORTED:
            await self._record.reward(self._args, sample)
        return sample


async def abort_until_idle(args: Any) -> None:
    """Tell the worker behind the router to abort everything, until it runs nothing."""
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{router}/workers") as answer:
            [worker] = (await answer.json())["workers"]
        while True:
            await http.post(f"{worker['url']}/abort_request", json={"abort_all": True})
            async with http.get(f"{worker['url']}/v1/loads?include=core") as answer:
                [load] = (await answer.json())["loads"]
            if not load["num_running_reqs"] + load["num_waiting_reqs"]:
                return
            await asyncio.sleep(_ABORT_EVERY_S)


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


class StandInWorker:
    """The worker; a context manager that waits for what is running at its end.

    Of its groups `pool` run at one time; in `raised` is whatever a group ended with that was no result.
    """

    def __init__(self, args: Any, params: dict[str, Any], buffer: Buffer, record: RolloutRecord, *, pool: int) -> None:
        self._args, self._params, self._buffer, self._record, self._pool = args, params, buffer, record, pool
        self._finished: queue.Queue[Group] = queue.Queue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="stand-in worker", daemon=True)
        self.raised: list[BaseException] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join(_END_S)
        assert not self._thread.is_alive(), "groups are still running"

    async def take(self, count: int, timeout_s: float) -> list[Group]:
        """So many finished groups; fewer if there are no more to come, or in that time."""
        taken: list[Group] = []
        give_up_at = time.monotonic() + timeout_s
        while len(taken) < count and time.monotonic() < give_up_at:
            try:
                taken.append(self._finished.get_nowait())
            except queue.Empty:
                if not self._thread.is_alive():
                    break
                await asyncio.sleep(_POLL_S)
        return taken

    async def _work(self) -> None:
        rollout = StandInRollout(self._args, self._params, self._buffer, self._record, StepSize(groups=0, begun=0))
        active: set[asyncio.Task[Group]] = set()
        while not self._stopping.is_set():
            while len(active) < self._pool and self._finished.qsize() < self._pool and (new := self._buffer.get(1)):
                task = asyncio.create_task(rollout.run_group(new[0]))
                task.add_done_callback(self._hand_out)
                active.add(task)
            active = {task for task in active if not task.done()}
            await asyncio.sleep(_POLL_S)
        if active:
            await asyncio.wait(active, timeout=_END_S)

    def _hand_out(self, task: asyncio.Task[Group]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.raised.append(task.exception() or asyncio.CancelledError())
            return
        group = task.result()
        if any(sample.status is Sample.Status.ABORTED for sample in group):
            self._buffer.add(group)
        else:
            self._finished.put(group)
