"""The engine as asyncio code uses it: a loaded model that generates, can be paused and can take new weights.

Knows no HTTP. One `Engine` belongs to one event loop; the computing happens in its worker's thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strands_rollout.engine.generate_request import RequestLimits
from strands_rollout.engine.generation import Generation
from strands_rollout.engine.model_config import read_model_config
from strands_rollout.engine.qwen3 import Qwen3
from strands_rollout.engine.request_errors import RequestRefusedError
from strands_rollout.engine.scheduler import Scheduler
from strands_rollout.engine.text import TextCodec, read_text_codec
from strands_rollout.engine.weights import load_weights
from strands_rollout.engine.worker import EngineCrashedError, Worker
from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from strands_rollout.engine.generate_request import GenerateRequest
    from strands_rollout.engine.generation import GenerationOutput
    from strands_rollout.engine.model_config import ModelConfig
    from strands_rollout.engine.scheduler import PauseMode
    from strands_rollout.engine.settings import EngineSettings
    from strands_rollout.engine.weights import ModelWeights

_BYTES_PER_MB = 1_000_000


class Engine:
    """A model that serves generations.

    Attributes:
        model_path: The folder that the current weights came from.
        served_model_name: The name under which clients know the model.
        weight_version: The version named at the last update that succeeded. After one that changed the weights but
            could not empty the cache it is still the old one, as in SGLang; generations name the one that they had.
        is_paused: Whether new generations wait for `resume`.
    """

    def __init__(self, settings: EngineSettings, config: ModelConfig, codec: TextCodec, weights: ModelWeights) -> None:
        context_length = settings.context_length or config.context_length
        self.settings = settings
        self.config = config
        self.codec = codec
        self.limits = RequestLimits(context_length=context_length, vocab_size=config.vocab_size)
        self.model_path = str(settings.model_dir)
        self.served_model_name = settings.served_model_name or self.model_path
        self.weight_version = "default"
        self.is_paused = False
        self._in_flight: set[str] = set()
        self._scheduler = Scheduler(
            Qwen3(config, weights, context_length),
            context_length=context_length,
            max_running=settings.max_running_requests,
            prefill_chunk=settings.prefill_chunk_tokens,
            cache_tokens=settings.prefix_cache_mb * _BYTES_PER_MB // config.kv_bytes_per_token(),
            seeds=_seeds(settings.random_seed),
            decode=codec.decode,
        )
        self._worker = Worker(self._scheduler)

    def start(self) -> None:
        """Start computing."""
        self._worker.start()

    def stop(self) -> None:
        """Abort what is in flight and stop computing."""
        self._worker.stop()

    def is_alive(self) -> bool:
        """Whether generations make progress."""
        return self._worker.is_alive()

    def counts(self) -> tuple[int, int]:
        """How many generations run and how many are queued; those held back by a pause or an update don't count."""
        return self._scheduler.counts()

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        """Run one generation to its end; cancelling the caller aborts it.

        Raises:
            RequestRefusedError: A request of this rid is in flight.
            EngineCrashedError: The engine is dead.
        """
        async for output in self.stream(request):
            last = output
        return last

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerationOutput]:
        """Run one generation and yield it again whenever it has grown (if it streams) and when it has ended."""
        if request.rid in self._in_flight:
            raise RequestRefusedError(f"Duplicate request ID detected: {request.rid}")
        changed = asyncio.Event()
        generation = Generation(request, partial(_set_from_thread, asyncio.get_running_loop(), changed))
        self._in_flight.add(request.rid)
        self._worker.submit(generation)
        try:
            while generation.finish is None:
                await changed.wait()
                changed.clear()
                if generation.crashed:
                    raise EngineCrashedError
                if generation.finish is None:
                    yield generation.output(self.weight_version)
            yield generation.output(self.weight_version)
        finally:
            self._in_flight.discard(request.rid)
            if generation.finish is None:
                self._worker.post(lambda scheduler: scheduler.withdraw(generation))

    def abort(self, rid: str | None) -> None:
        """End the generation of `rid` and those whose id begins with it, or all (None); unknown ids are ignored.

        See `Scheduler.abort`. What waits for the end of a pause or of an update goes on waiting.
        """
        if rid is None or rid in self._in_flight:
            self._worker.post(lambda scheduler: scheduler.abort(rid))

    async def pause(self, mode: PauseMode) -> None:
        """Stop computing; see `Scheduler.pause`."""
        self.is_paused = True
        await asyncio.wrap_future(self._worker.call(lambda scheduler: scheduler.pause(mode)))

    async def resume(self) -> None:
        """End `pause`."""
        self.is_paused = False
        await asyncio.wrap_future(self._worker.call(lambda scheduler: scheduler.resume()))

    async def flush(self) -> bool:
        """Empty the prefix cache; False, when generations are in flight."""
        return await asyncio.wrap_future(self._worker.call(lambda scheduler: scheduler.flush()))

    async def update_weights(self, folder: Path, version: str | None, *, flush: bool) -> bool:
        """Take the weights of another folder of the same shape, and if asked, empty the prefix cache.

        Unless paused, waits until what is in flight has ended, and lets new generations wait meanwhile. The old weights
        stay if anything is wrong with the new ones.

        Returns:
            False if the cache could not be emptied because generations are in flight (as when paused in place).

        Raises:
            ConfigError: The folder is no Qwen3 model, or its shape differs from the running one's.
        """

        def load(scheduler: Scheduler) -> bool | ConfigError:
            try:
                weights = _load_same_shape(folder, self.config)
            except ConfigError as e:
                return e
            scheduler.replace_weights(weights, version)
            return scheduler.flush() if flush else True

        def when_idle(scheduler: Scheduler, resolve: Callable[[bool | ConfigError], None]) -> None:
            scheduler.when_idle_or_paused(lambda idle: resolve(load(idle)))

        flushed = await asyncio.wrap_future(self._worker.call_back(when_idle))
        if isinstance(flushed, ConfigError):
            raise flushed
        if flushed:
            self.model_path = self.served_model_name = str(folder)
            self.weight_version = self.weight_version if version is None else version
        return flushed

    async def rename_weights(self, version: str) -> None:
        """Call the weights `version` from the next token on."""
        await asyncio.wrap_future(self._worker.call(lambda scheduler: scheduler.rename_weights(version)))
        self.weight_version = version


def load_engine(settings: EngineSettings) -> Engine:
    """Load the model that `settings` names.

    Raises:
        ConfigError: The folder is missing or is no Qwen3 model, or the context is longer than the model's.
    """
    config = read_model_config(settings.model_dir)
    if settings.context_length and settings.context_length > config.context_length:
        raise ConfigError(
            f"context_length {settings.context_length} is longer than the {config.context_length} tokens of the "
            f"model in {settings.model_dir}"
        )
    codec = read_text_codec(settings.model_dir)
    if codec.eos_token_id is not None:
        config = dataclasses.replace(config, eos_token_ids=config.eos_token_ids | {codec.eos_token_id})
    return Engine(settings, config, codec, load_weights(settings.model_dir, config))


def _load_same_shape(folder: Path, running: ModelConfig) -> ModelWeights:
    config = read_model_config(folder)
    if config.weight_shape_fields() != running.weight_shape_fields():
        raise ConfigError(
            f"the model in {folder} has another shape than the running one: {config.weight_shape_fields()}, expected "
            f"{running.weight_shape_fields()} (vocabulary, hidden, intermediate, layers, heads, kv heads, head dim)"
        )
    return load_weights(folder, config)


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)


def _seeds(random_seed: int | None) -> Callable[[], int]:
    generator = np.random.default_rng(random_seed)
    return lambda: int(generator.integers(2**63))
