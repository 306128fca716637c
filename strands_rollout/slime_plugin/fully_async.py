"""slime's fully asynchronous rollout, changed to start only as many groups as `max_sample_staleness` allows.

slime's worker plays a limited number of groups at once: `--sglang-server-concurrency` times the number of engines.
Finished groups wait for the trainer. In the newest slime, no group starts while that many groups wait. In 0.3.0
and 0.3.1, up to 1,000 groups wait; a step takes all of them and drops the groups that it does not need
(slime/rollout/fully_async_rollout.py, `AsyncRolloutWorker`). Here, one limit holds for the groups in play and the
waiting groups together, and a step takes only the groups that it trains.
"""

from __future__ import annotations

import importlib
import logging
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.log_once import log_once
from strands_rollout.samples import SlimeArgs
from strands_rollout.settings import settings_from_args

logger = logging.getLogger(__name__)

_MODULE: Final = "slime.rollout.fully_async_rollout"


def generate_rollout_fully_async(
    args: SlimeArgs,
    rollout_id: int,
    data_source: object,  # slime's
    evaluation: bool = False,  # noqa: FBT001, FBT002 - slime's signature
) -> object:
    """Collect the groups of a step from slime's worker; slime's `--rollout-function-path`.

    slime's worker is used unchanged if the setting `max_sample_staleness` is null, or the installed slime's worker has
    an unexpected structure.

    Raises:
        ConfigError: slime is absent or has no such rollout (before 0.3.0), or a setting is invalid.
        ValueError: slime asks for an evaluation, which its worker can't do.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as e:
        if not _MODULE.startswith(str(e.name)):
            raise  # slime is installed, but a package that it needs is not
        raise ConfigError(f"slime lacks {_MODULE}; expected slime 0.3.0 or newer ({e})") from e
    if not evaluation:
        _start_worker(module, args, data_source)
    return module.generate_rollout_fully_async(args, rollout_id, data_source, evaluation=evaluation)


def _start_worker(module: Any, args: SlimeArgs, data_source: object) -> None:  # noqa: ANN401 - slime's module
    """Start a worker whose groups are limited by `max_sample_staleness`, unless a worker runs already.

    If this function can't start one, or that setting is null, slime starts its own worker.
    """
    limit = settings_from_args(args).max_sample_staleness
    if limit is None:
        return
    worker_class = getattr(module, "AsyncRolloutWorker", None)
    known = all(hasattr(module, name) for name in ("_global_worker", "_worker_lock"))
    if not known or not all(hasattr(worker_class, name) for name in ("_make_done_cb", "get_completed_groups")):
        message = (
            "max_sample_staleness does not limit the started groups: this slime's %s has an unknown structure; "
            "expected slime 0.3.0, 0.3.1 or its commit 624b824a"
        )
        log_once(logger, logging.WARNING, message, _MODULE)
        return
    with module._worker_lock:
        worker = module._global_worker
        if worker is not None and worker.worker_thread is not None and worker.worker_thread.is_alive():
            return
        job: Any = args
        slots = job.sglang_server_concurrency * _engines(job)
        interval = getattr(job, "update_weights_interval", None) or 1
        groups = max_started_groups(limit, prompts=job.rollout_batch_size, update_interval=interval)
        episodes = groups * job.n_samples_per_prompt
        message = "event=fully_async_started groups=%d episodes=%d slots=%d max_sample_staleness=%d"
        logger.info(message, groups, episodes, slots, limit)
        if episodes < slots:
            logger.warning(
                "max_sample_staleness %d allows %d groups of %d episodes at once; the engines could play %d. "
                "Raise the setting, or lower --sglang-server-concurrency",
                limit,
                groups,
                job.n_samples_per_prompt,
                slots,
            )
        module._global_worker = _bounded_worker(worker_class, args, data_source, slots=slots, groups=groups)
        module._global_worker.start()


def max_started_groups(limit: int, *, prompts: int, update_interval: int = 1) -> int:
    """Return how many groups may be in play or wait for the trainer at once, so that few samples get too old.

    A step takes the first `prompts` groups that have finished, so the last of the started groups is taken after
    `limit` - 1 versions. One version is a reserve for samples that wait for the slowest sample of their group. With a
    limit of 0 or 1, the groups of one version are started all the same, because fewer would leave the trainer without
    samples.

    Args:
        limit: Maximum staleness, in weight versions.
        prompts: Number of groups in a step.
        update_interval: Number of steps between weight updates.
    """
    return max(limit - 1, 1) * update_interval * prompts


def _bounded_worker(
    worker_class: Any,  # noqa: ANN401 - slime's AsyncRolloutWorker
    args: SlimeArgs,
    data_source: Any,  # noqa: ANN401 - slime's
    *,
    slots: int,
    groups: int,
) -> Any:  # noqa: ANN401
    """Return slime's worker, changed to start no group while `groups` groups are in play or wait for the trainer."""

    class BoundedWorker(worker_class):  # type: ignore[misc]
        """slime's worker as its own data source, which limits the groups taken from slime's data source."""

        def __init__(self) -> None:
            super().__init__(args, self, concurrency=min(slots, groups))
            self.in_play = 0
            # in 0.3.0 and 0.3.1, a full queue would block the worker's event loop
            self.max_started = min(groups, self.output_queue.maxsize or groups)

        def get_samples(self, count: int) -> Any:  # noqa: ANN401 - slime's groups
            if self.in_play + self.output_queue.qsize() >= self.max_started:
                return []
            found = data_source.get_samples(count)
            self.in_play += len(found)
            return found

        def add_samples(self, returned: Any) -> None:  # noqa: ANN401 - slime's groups
            data_source.add_samples(returned)

        def _make_done_cb(self, gid: int) -> Callable[[Any], None]:
            on_done = super()._make_done_cb(gid)

            def on_end(task: Any) -> None:  # noqa: ANN401 - slime's task
                try:
                    on_done(task)
                finally:
                    self.in_play -= 1

            return on_end

        def get_completed_groups(self, limit: int = 1) -> list[Any]:
            """Return at most `limit` groups.

            slime 0.3.0 and 0.3.1 pass no `limit`, and drop groups that a step does not need; so the default is 1.
            """
            found = list[Any]()
            with suppress(queue.Empty):
                while len(found) < limit:
                    found.append(self.output_queue.get_nowait())
            return found

    return BoundedWorker()


def _engines(args: Any) -> int:  # noqa: ANN401 - slime's args, whose fields SlimeArgs does not declare
    """Return the number of engines as slime counts them (slime/utils/http_utils.py)."""
    count = getattr(importlib.import_module("slime.utils.http_utils"), "get_rollout_num_engines", None)
    if count is not None:
        return int(count(args))
    return max(1, int(args.rollout_num_gpus // args.rollout_num_gpus_per_engine))  # slime 0.3.0
