"""slime's fully asynchronous rollout, with no more groups in flight than `max_sample_staleness` allows.

slime's worker starts `--sglang-server-concurrency` x engines groups, and lets as many finished groups wait before it
pauses (slime/rollout/fully_async_rollout.py, `AsyncRolloutWorker`). The same number limits the episodes that generate
at once, so that more concurrent episodes mean older samples. Here only the episodes follow
`--sglang-server-concurrency`; the number of groups follows from the staleness.
"""

from __future__ import annotations

import importlib
import logging
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

    Without the setting `max_sample_staleness`, the worker has slime's own size.

    Raises:
        ConfigError: slime has no such rollout (before 0.3.0), or a setting is invalid.
        ValueError: slime asks for an evaluation, which its worker can't do.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as e:
        raise ConfigError(f"slime lacks {_MODULE}; expected slime 0.3.0 or newer: {e}") from e
    if not evaluation:
        _start_worker(module, args, data_source)
    return module.generate_rollout_fully_async(args, rollout_id, data_source, evaluation=evaluation)


def _start_worker(module: Any, args: SlimeArgs, data_source: object) -> None:  # noqa: ANN401 - slime's module
    """Start slime's worker with the number of groups that the staleness allows, unless it runs already."""
    limit = settings_from_args(args).max_sample_staleness
    if limit is None:
        return
    if not all(hasattr(module, name) for name in ("_global_worker", "_worker_lock", "AsyncRolloutWorker")):
        message = "max_sample_staleness does not limit the groups in flight: this slime's %s has another structure"
        log_once(logger, logging.WARNING, message, _MODULE)
        return
    with module._worker_lock:
        worker = module._global_worker
        if worker is not None and worker.worker_thread is not None and worker.worker_thread.is_alive():
            return
        job: Any = args
        slots = job.sglang_server_concurrency * _engines(job)
        groups = groups_in_flight(
            limit,
            prompts=job.rollout_batch_size,
            slots=slots,
            update_interval=getattr(job, "update_weights_interval", None) or 1,
        )
        episodes = groups * job.n_samples_per_prompt
        message = "event=fully_async_started groups=%d episodes=%d slots=%d max_sample_staleness=%d"
        logger.info(message, groups, episodes, slots, limit)
        if episodes < slots:
            logger.warning(
                "max_sample_staleness %d allows %d groups of %d episodes at once, which leaves slots of the %d for "
                "concurrent episodes empty; raise it, or lower --sglang-server-concurrency",
                limit,
                groups,
                job.n_samples_per_prompt,
                slots,
            )
        module._global_worker = module.AsyncRolloutWorker(args, data_source, concurrency=groups)
        module._global_worker.start()


def groups_in_flight(limit: int, *, prompts: int, slots: int, update_interval: int = 1) -> int:
    """Return the number of groups that slime's worker may play at once, so that samples don't get too old.

    slime lets as many finished groups wait as it plays at once, and those in play finish as well. A group thus waits
    for at most twice this number of groups, `prompts` of which are taken in each step. One version is left for the
    samples of a group that wait for the slowest of their group.

    Args:
        limit: Maximum staleness, in weight versions.
        prompts: Groups of a step.
        slots: Maximum episodes at once; slime's own number of groups.
        update_interval: Steps between weight updates.
    """
    waiting_steps = max(limit - 1, 0) * update_interval
    return max(1, min(slots, waiting_steps * prompts // 2))


def _engines(args: Any) -> int:  # noqa: ANN401 - slime's args, whose fields SlimeArgs does not declare
    """Return the number of engines as slime counts them (slime/utils/http_utils.py)."""
    count = getattr(importlib.import_module("slime.utils.http_utils"), "get_rollout_num_engines", None)
    if count is not None:
        return int(count(args))
    return max(1, int(args.rollout_num_gpus // args.rollout_num_gpus_per_engine))  # slime 0.3.0
