"""`Engine`: a loaded model with an asyncio interface to generate, pause and load new weights.

An `Engine` belongs to one event loop. The thread of its `EngineWorker` owns the scheduler and computes steps; between
two steps, this thread runs the actions that were posted to the worker.
"""

import asyncio
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from strands_rollout.engine import EngineSettings
from strands_rollout.engine.generation import GenerationOutput, InFlightGeneration, TextCodec, read_text_codec
from strands_rollout.engine.qwen3 import ModelConfig, ModelWeights, Qwen3, load_weights, read_model_config
from strands_rollout.engine.requests import EngineRequest, RequestLimits, RequestRefusedError
from strands_rollout.engine.scheduler import PauseMode, Scheduler
from strands_rollout.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineCrashedError(Exception):
    """The worker crashed or was stopped: the engine can't generate any more."""

    def __init__(self) -> None:
        super().__init__("the engine's worker is dead; restart the engine, and see the server's log for the reason")


class EngineWorker:
    """The thread that runs a scheduler, from `start` to `stop`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._actions: deque[Callable[[Scheduler], object]] = deque()
        self._wake = threading.Condition()
        self._running = False
        self._futures: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._running = True
        self._thread.start()

    def stop(self) -> None:
        """Abort all generations and end the thread."""
        with self._wake:
            self._running = False
            self._wake.notify()
        self._thread.join()

    def is_alive(self) -> bool:
        """Return whether the thread runs: False before `start`, after `stop` and after a crash."""
        return self._running

    def submit(self, generation: InFlightGeneration) -> None:
        """Queue a generation; if the worker is dead, mark the generation as crashed."""
        if not self.post(lambda scheduler: scheduler.submit(generation)):
            _mark_crashed(generation)

    def post(self, action: Callable[[Scheduler], object]) -> bool:
        """Queue `action` for the scheduler to run before its next step; return False if the worker is dead."""
        with self._wake:
            if self._running:
                self._actions.append(action)
                self._wake.notify()
            return self._running

    async def call(self, action: Callable[[Scheduler], T]) -> T:
        """Run `action` on the scheduler, and return its result.

        Raises:
            EngineCrashedError: The worker is dead, or dies before the action has run.
        """
        return await self.call_with_callback(lambda scheduler, resolve: resolve(action(scheduler)))

    async def call_with_callback(self, action: Callable[[Scheduler, Callable[[T | ConfigError], None]], None]) -> T:
        """Run `action` on the scheduler with a callback, and return the result that `action` passes to the callback.

        Raises:
            ConfigError: The action passed this error to the callback.
            EngineCrashedError: The worker is dead, or dies before the callback.
        """
        future: Future[T] = Future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        if not self.post(lambda scheduler: action(scheduler, partial(_resolve, future))) or not self._running:
            _resolve(future, EngineCrashedError())
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_actions()
                self._scheduler.run_idle_actions()
                if self._scheduler.has_work():
                    self._scheduler.step()
                    self._scheduler.run_idle_actions()
        except Exception:  # after a bug in a step, fail all requests, so that no client waits forever
            logger.exception("the engine's worker crashed; all requests fail from now on")
            with self._wake:
                self._running = False
            while self._actions:
                # the scheduler is broken, but `in_flight` below must include generations that were just submitted
                with suppress(Exception):
                    self._actions.popleft()(self._scheduler)
            for generation in self._scheduler.in_flight():
                _mark_crashed(generation)
        else:
            self._run_actions()
            self._scheduler.abort_all()
        for future in list(self._futures):
            _resolve(future, EngineCrashedError())

    def _run_actions(self) -> None:
        while self._actions:
            self._actions.popleft()(self._scheduler)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while self._running and not self._actions and not self._scheduler.has_work():
                self._wake.wait()
            return self._running


def _mark_crashed(generation: InFlightGeneration) -> None:
    generation.crashed = True
    generation.notify()


def _resolve(future: Future[T], result: T | Exception) -> None:
    # skip a future that has a result, or whose waiter was cancelled
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class Engine:
    """A model that serves generations.

    Attributes:
        model_path: Folder of the weights of the last successful update; at first the model's folder.
        weight_version: Version set by the last successful update or renaming; "default" at first. If an update can't
            empty the cache, the new weights are used, but `weight_version` stays, as in SGLang. Finished generations
            report the version that sampled their last token.
        is_paused: True between `pause` and `resume`; new generations wait until `resume`.
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
        bytes_per_token = 2 * 4 * config.layers * config.kv_heads * config.head_dim  # keys and values, fp32
        seeds = np.random.default_rng(settings.random_seed)
        self._scheduler = Scheduler(
            Qwen3(config, weights, context_length),
            context_length=context_length,
            max_running=settings.max_running_requests,
            prefill_chunk=settings.prefill_chunk_tokens,
            cache_tokens=settings.prefix_cache_mb * 1_000_000 // bytes_per_token,
            seeds=lambda: int(seeds.integers(2**63)),
            decode=codec.decode,
        )
        self.worker = EngineWorker(self._scheduler)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of running and queued generations, without those held back by a pause or an update."""
        return self._scheduler.counts()

    async def generate(self, request: EngineRequest) -> GenerationOutput:
        """Run one generation to its end; abort it if the caller is cancelled. For errors, see `stream`."""
        async for output in self.stream(request):
            last = output
        return last

    async def stream(self, request: EngineRequest) -> AsyncGenerator[GenerationOutput]:
        """Run one generation; yield its output at the end and, for a streaming request, whenever it has grown.

        Raises:
            RequestRefusedError: A request with this rid is in flight.
            EngineCrashedError: The engine is dead.
        """
        if request.rid in self._in_flight:
            raise RequestRefusedError(f"Duplicate request ID detected: {request.rid}")
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        generation = InFlightGeneration(request, lambda: loop.is_closed() or loop.call_soon_threadsafe(changed.set))
        self._in_flight.add(request.rid)
        self.worker.submit(generation)
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
                self.worker.post(lambda scheduler: scheduler.cancel(generation))

    def abort(self, rid: str | None) -> None:
        """Abort the generations whose rid begins with `rid`; None aborts all generations.

        If no generation in flight has exactly this `rid`, nothing is aborted. See `Scheduler.abort`. Generations held
        back by a pause or an update keep waiting.
        """
        if rid is None or rid in self._in_flight:
            self.worker.post(lambda scheduler: scheduler.abort(rid))

    async def pause(self, mode: PauseMode) -> None:
        """Stop computing; see `Scheduler.pause`."""
        self.is_paused = True
        await self.worker.call(lambda scheduler: scheduler.pause(mode))

    async def resume(self) -> None:
        """Continue after `pause`."""
        self.is_paused = False
        await self.worker.call(Scheduler.resume)

    async def update_weights(self, folder: Path, version: str | None, *, flush: bool) -> bool:
        """Load the weights in `folder`, which must have the same shapes; if `flush`, empty the prefix cache.

        If `version` is None, the old version stays.

        The update waits until all running and queued generations have ended. Meanwhile, new generations are held back.
        If the engine is paused, the update does not wait.

        Returns:
            False if the cache could not be emptied, because generations are paused in place. The new weights are used
            nevertheless, but `weight_version` and `model_path` are not changed.

        Raises:
            ConfigError: The new weights can't be used; the old weights stay.
            EngineCrashedError: The worker is dead, or dies before the update.
        """

        def load(scheduler: Scheduler) -> bool | ConfigError:
            try:
                weights = _load_same_shape(folder, self.config)
            except ConfigError as e:
                return e
            except Exception as e:  # a broken folder may raise anything, which must not end the worker
                reason = f"{type(e).__name__}: {e!s:.200}"
                return ConfigError(f"can't load the model in {str(folder)!r:.500}: {reason}")
            scheduler.replace_weights(weights, version)
            return scheduler.flush() if flush else True

        def when_idle(scheduler: Scheduler, resolve: Callable[[bool | ConfigError], None]) -> None:
            scheduler.when_idle_or_paused(lambda idle: resolve(load(idle)))

        flushed = await self.worker.call_with_callback(when_idle)
        if flushed:
            self.model_path = self.served_model_name = str(folder)
            self.weight_version = self.weight_version if version is None else version
        return flushed

    async def rename_weights(self, version: str) -> None:
        """Report the weights as `version` from the next token on."""
        await self.worker.call(lambda scheduler: scheduler.rename_weights(version))
        self.weight_version = version


def load_engine(settings: EngineSettings) -> Engine:
    """Load the model of `settings`.

    Raises:
        ConfigError: The folder has no model or tokenizer that this engine can load, or the model's context is shorter
            than `settings.context_length`.
    """
    folder, length = settings.model_dir, settings.context_length
    config = read_model_config(folder)
    if length and length > config.context_length:
        longest = config.context_length
        raise ConfigError(
            f"got context_length {length}; expected at most {longest}, the context length of the model in {folder}"
        )
    codec = read_text_codec(folder)
    if codec.eos_token_id is not None:
        config = dataclasses.replace(config, eos_token_ids=config.eos_token_ids | {codec.eos_token_id})
    return Engine(settings, config, codec, load_weights(folder, config))


def _load_same_shape(folder: Path, running: ModelConfig) -> ModelWeights:
    config = read_model_config(folder)
    if config.weight_shape_fields() != running.weight_shape_fields():
        raise ConfigError(
            f"the model in {folder} has other sizes than the running model: {config.weight_shape_fields()}; expected "
            f"{running.weight_shape_fields()} (vocabulary, hidden, intermediate, layers, heads, kv heads, head dim)"
        )
    return load_weights(folder, config)
