"""START HERE. slime's entry point `generate`, which plays one agent episode and fills the sample from it.

The episode runs in this process (`episode.py`) or, with the setting `episode_workers`, in another process
(`workers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strands_rollout import errors
from strands_rollout.aio import admit_to_loop
from strands_rollout.exits import exits_as_errors
from strands_rollout.samples import SampleLike, SlimeArgs
from strands_rollout.slime_plugin.episode import fail_sample, play_sample
from strands_rollout.slime_plugin.inputs import run_settings
from strands_rollout.slime_plugin.reward_groups import count_episode, failed_groups_of
from strands_rollout.slime_plugin.slime_adapter import GenerateCall, is_aborting
from strands_rollout.slime_plugin.workers import play_on_worker


async def generate(
    args: SlimeArgs,
    sample: SampleLike,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,  # noqa: FBT001, FBT002 - slime's signature
) -> Any:  # noqa: ANN401 - a sample, or a list of them
    """Play one agent episode and fill the sample from it; slime's `--custom-generate-function-path`.

    Args:
        args: slime's args; docs/settings.md lists the arguments that are read.
        sample: slime's `Sample`, or `strands_rollout.Sample` where slime is absent.
        sampling_params: slime's sampling parameters, which are not changed. `max_new_tokens` is the budget of the
            whole response, tool results included.
        evaluation: True for an evaluation rollout, which may have a context limit of its own.

    Returns:
        The same sample. Its tokens, loss_mask, rollout_log_probs, response and status are valid, however the episode
        ended. Exception: if the sample became ABORTED before an episode worker was free, only the status is set. With
        the setting `fan_out`, a list of the sample and its siblings is returned, unless the sample is ABORTED or slime
        can't take a list.

    Raises:
        asyncio.CancelledError: The caller was cancelled.
        ConfigError: `sample` is not a Sample, or can't be filled, so no outcome can be written to it.
        FailedGroupsError: Too many groups of training samples failed in a row, or an episode worker keeps dying; the
            run must end. Every other failure is written to the sample, because an exception would end slime's run.
    """
    if not hasattr(type(sample), "Status") or not hasattr(sample, "response_length"):
        raise errors.ConfigError(
            f"generate got {sample!r:.200} of type {type(sample).__name__} as sample; expected slime's Sample, or "
            "strands_rollout.Sample where slime is absent"
        )
    call = GenerateCall(args, sample, sampling_params, evaluation)
    if evaluation:
        return await _play(call)
    with failed_groups_of(args).running_episode() as number:
        played = await _play(call)
    if not is_aborting(args, sample):
        count_episode(args, number, sample)
    return played


async def _play(call: GenerateCall) -> SampleLike | list[SampleLike]:
    await admit_to_loop()  # slime starts hundreds of episodes at once; begin one in each pass of the event loop
    try:
        with exits_as_errors("the episode", RuntimeError):
            settings = run_settings(call.args)
            if settings.episode_workers.is_enabled:
                return await play_on_worker(call, settings)
    except errors.FailedGroupsError:
        raise
    except Exception as e:  # a training run must survive every failure of one sample
        return fail_sample(call, e)
    return await play_sample(call, settings=settings)
