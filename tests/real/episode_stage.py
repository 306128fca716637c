"""Whole episodes on an engine: `generate` as slime calls it, every sample checked against its contract and the wire."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from harness import args_for

from strands_rollout import Sample, generate
from strands_rollout.evaluation.evaluate import slime_sampling_params
from strands_rollout.evaluation.rows import read_rows, shipped_rows
from strands_rollout.evaluation.token_audit import WireRecorder, recording, tito_violations
from strands_rollout.slime_plugin.reward import reward_func
from strands_rollout.slime_plugin.sample_contract import contract_violations

GREEDY = slime_sampling_params(0.0, 768)
SAMPLED = slime_sampling_params(1.0, 768)
# one turn of so many tokens, which takes SGLang some seconds on a CPU: none has ended before all have begun
LONG_TURN = {**GREEDY, "max_new_tokens": 500, "ignore_eos": True}
_EXECUTOR = {"name": "local", "isolation": "rlimits"}
# against hangs alone: a loaded machine takes its time
PATIENCE_S = 300.0


class AbortFlag:
    """The flag that a rollout raises to have its episodes back.

    Attributes:
        raised_s: When it was raised, by the clock of the event loop; None while it is down.
    """

    def __init__(self) -> None:
        self.raised_s: float | None = None

    def __call__(self) -> bool:
        return self.raised_s is not None

    def raise_it(self) -> None:
        self.raised_s = asyncio.get_running_loop().time()

    def since_s(self) -> float:
        """Seconds since it was raised."""
        assert self.raised_s is not None
        return asyncio.get_running_loop().time() - self.raised_s


@dataclass(frozen=True, slots=True)
class EpisodeStage:
    """An engine behind a recorder, and the rollout on it.

    Attributes:
        engine_url: Of the engine itself, for those who steer it.
        recorder: What crossed the wire.
        tokenizer: The served model's.
        args_more: Further args of slime's.
    """

    engine_url: str
    recorder: WireRecorder
    tokenizer: Any
    args_more: dict[str, Any] = field(default_factory=dict)

    async def play(
        self, samples: Sequence[Sample], params: Mapping[str, Any] = GREEDY, *, at_once: int = 64, **settings: Any
    ) -> list[Sample]:
        """The samples after `generate` and, where they are finished, the reward; all of them are valid."""
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
        """The sample of one row."""
        (done,) = await self.play([new_samples(row + 1)[row]], params, **settings)
        return done

    def violations(self, samples: Sequence[Sample]) -> list[str]:
        """What is wrong with samples, in words: slime's contract, and token-in/token-out on the wire."""
        found: list[str] = []
        for sample in samples:
            words = contract_violations(sample, decode=self.decode, reward_key="score", may_abort=True)
            words += tito_violations(self.recorder.episodes.get(str(sample.session_id), []), sample)
            found += [f"sample {sample.index}: {line}" for line in words]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    async def post(self, path: str, **body: Any) -> int:
        """The status that the engine answers."""
        async with aiohttp.ClientSession() as session, session.post(f"{self.engine_url}{path}", json=body) as answer:
            await answer.read()
            return answer.status

    async def control(self, path: str, **body: Any) -> None:
        assert await self.post(path, **body) == 200

    async def told_load(self) -> dict[str, Any]:
        """What the engine tells of its load, among it `num_used_tokens` of all running requests."""
        return await _told_load(self.engine_url)

    async def until_sampling(self, *, requests: int = 1, tokens: int = 10) -> None:
        """Wait until so many requests run, and have sampled about so many tokens together since then."""
        began: int | None = None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                load = await self.told_load()
                running, used = load["num_running_reqs"], load["num_used_tokens"]
                if began is not None and used >= began + tokens:
                    return
                if running >= requests:
                    # an idle engine tells for up to a second what ran last
                    began = used if began is None else min(began, used)
                await asyncio.sleep(0.02)

    async def until_queued(self, count: int) -> None:
        """Wait until so many requests wait for a place at the engine."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.told_load())["num_waiting_reqs"] < count:  # noqa: ASYNC110 - the state is the server's
                await asyncio.sleep(0.02)

    async def until_idle(self) -> None:
        """Wait until no request runs or waits at the engine."""
        began = time.time()
        async with asyncio.timeout(PATIENCE_S):
            # an idle engine tells for up to a second what it was before
            while (load := await self.told_load())["timestamp"] <= began or _busy(load):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)

    async def most_tokens_until_idle(self) -> int:
        """The most tokens that the engine's running requests had before there were none."""
        most = 0
        async with asyncio.timeout(PATIENCE_S):
            while (load := await self.told_load())["num_running_reqs"]:
                most = max(most, load["num_used_tokens"])
                await asyncio.sleep(0.02)
        return most

    async def until_done(self, path: str, **body: Any) -> None:
        """Ask for what the engine refuses while requests run, until it does it: some may have been left behind."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.post(path, **body) != 200:  # noqa: ASYNC110 - the state polled is the server's
                await asyncio.sleep(0.1)


def _busy(load: Mapping[str, Any]) -> bool:
    return bool(load["num_running_reqs"] or load["num_waiting_reqs"])


async def load_of(engine_url: str) -> tuple[int, int]:
    """How many requests run at an engine, and how many wait there."""
    load = await _told_load(engine_url)
    return load["num_running_reqs"], load["num_waiting_reqs"]


async def tokens_at(engine_url: str) -> int:
    """How many tokens the running requests have at an engine."""
    return int((await _told_load(engine_url))["num_used_tokens"])


async def _told_load(engine_url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{engine_url}/v1/loads") as answer:
        return dict((await answer.json())["loads"][0])


async def until_true(holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what becomes true is a list of someone else's
            await asyncio.sleep(0.02)


@asynccontextmanager
async def episodes_on(engine_url: str, tokenizer: Any, **args: Any) -> AsyncIterator[EpisodeStage]:
    """A stage on an engine; `args` are slime's."""
    async with recording(engine_url) as recorder:
        yield EpisodeStage(engine_url, recorder, tokenizer, args)


def new_samples(count: int) -> list[Sample]:
    """One sample for each of the first shipped problems."""
    rows = enumerate(read_rows(shipped_rows(), count))
    return [
        Sample(prompt=r.prompt, label=r.label, index=n, group_index=n, session_id=uuid.uuid4().hex) for n, r in rows
    ]


def facts_of(sample: Sample) -> dict[str, Any]:
    """What the sample says of its episode."""
    return dict(sample.metadata["strands_rollout"])


def tokens_of(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.tokens for sample in samples]
