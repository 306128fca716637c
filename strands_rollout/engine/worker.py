"""The thread that computes: it owns the scheduler and runs what others ask of it between two steps.

Knows threads only. Everyone else reaches the scheduler through `call` and `post`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands_rollout.engine.generation import Generation
    from strands_rollout.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineCrashedError(Exception):
    """The worker has died of a bug or was stopped; nothing can be generated any more."""

    def __init__(self) -> None:
        super().__init__("the engine's worker is dead; the server's log says why, and only a restart helps")


class Worker:
    """Runs a scheduler in a thread of its own, from `start` to `stop`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._actions: deque[Callable[[Scheduler], object]] = deque()
        self._wake = threading.Condition()
        self._running = False
        self._futures: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)

    def start(self) -> None:
        """Start computing."""
        self._running = True
        self._thread.start()

    def stop(self) -> None:
        """Abort what is in flight and end the thread."""
        with self._wake:
            self._running = False
            self._wake.notify()
        self._thread.join()

    def is_alive(self) -> bool:
        """Whether generations make progress: false once the model has crashed or after `stop`."""
        return self._running

    def submit(self, generation: Generation) -> None:
        """Queue a generation; if the worker is dead, it is marked as crashed at once."""
        with self._wake:
            if self._running:
                self._actions.append(lambda scheduler: scheduler.submit(generation))
                self._wake.notify()
                return
        _crash(generation)

    def post(self, action: Callable[[Scheduler], object]) -> None:
        """Let `action` run on the scheduler soon; a dead worker drops it."""
        with self._wake:
            if self._running:
                self._actions.append(action)
                self._wake.notify()

    def call(self, action: Callable[[Scheduler], T]) -> Future[T]:
        """Like `post`, with the action's result."""
        return self.call_back(lambda scheduler, resolve: resolve(action(scheduler)))

    def call_back(self, action: Callable[[Scheduler, Callable[[T], None]], None]) -> Future[T]:
        """Like `call`, for an action that passes its result on later.

        Returns:
            The result's future; it fails with EngineCrashedError if the worker is or becomes dead before.
        """
        future: Future[T] = Future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        self.post(lambda scheduler: action(scheduler, partial(_resolve, future)))
        if not self._running:
            _fail(future)
        return future

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_actions()
                self._scheduler.settle()
                if self._scheduler.has_work():
                    self._scheduler.step()
                    self._scheduler.settle()
        except Exception:  # a bug in one step must fail the requests in flight, not leave their clients waiting
            logger.exception("engine worker crashed; every request fails from now on")
            self._fail_everything()
        else:
            self._run_actions()
            self._scheduler.end_all()
        for future in list(self._futures):
            _fail(future)

    def _run_actions(self) -> None:
        while self._actions:
            self._actions.popleft()(self._scheduler)

    def _fail_everything(self) -> None:
        with self._wake:
            self._running = False
        while self._actions:
            with suppress(Exception):  # the scheduler is broken, but generations submitted just now must be found below
                self._actions.popleft()(self._scheduler)
        for generation in self._scheduler.in_flight():
            _crash(generation)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while self._running and not self._actions and not self._scheduler.has_work():
                self._wake.wait()
            return self._running


def _crash(generation: Generation) -> None:
    generation.crashed = True
    generation.notify()


def _resolve(future: Future[T], result: T) -> None:
    # False where whoever waited for it has gone.
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _fail(future: Future[Any]) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(EngineCrashedError())
