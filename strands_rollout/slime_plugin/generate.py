"""START HERE. slime's entry point `generate`: one sample in, the same sample filled from one agent episode out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strands_rollout import errors
from strands_rollout.samples import SampleLike, SlimeArgs
from strands_rollout.slime_plugin import slime_adapter
from strands_rollout.slime_plugin.episode import play_sample
from strands_rollout.slime_plugin.reward_groups import failed_groups_of, note_episode


async def generate(
    args: SlimeArgs,
    sample: SampleLike,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,  # noqa: FBT001, FBT002 - slime's signature
) -> Any:  # noqa: ANN401 - a sample, or a list of them
    """Run one agent episode for a sample; slime's `--custom-generate-function-path`.

    Args:
        args: slime's args; see docs/settings.md for what is read.
        sample: slime's `Sample`, or ours where slime is absent.
        sampling_params: slime's; not changed. `max_new_tokens` is the budget of the whole response, tool results
            included.
        evaluation: Whether this is an evaluation rollout, which has its own context limit.

    Returns:
        The same sample: tokens, loss_mask, rollout_log_probs, response and status are set and valid whatever happened.
        With the setting `fan_out` a list of it and its siblings, unless it was aborted or slime can't take a list.

    Raises:
        asyncio.CancelledError: The caller was cancelled.
        ConfigError: `sample` is no Sample, so that no outcome can be written to it.
        FailedGroupsError: So many groups of training samples have failed in a row that the run is to be ended.
            Nothing else is raised: slime's run would die of it.
    """
    if not hasattr(type(sample), "Status") or not hasattr(sample, "response_length"):
        raise errors.ConfigError(
            f"generate got {sample!r:.200} of type {type(sample).__name__} as sample; expected slime's Sample, or "
            "strands_rollout.Sample where slime is absent"
        )
    if evaluation:
        return await play_sample(args, sample, sampling_params, evaluation=True)
    with failed_groups_of(args).episode() as number:
        given = await play_sample(args, sample, sampling_params, evaluation=False)
    if not slime_adapter.is_aborting(args, sample):
        note_episode(args, number, sample)
    return given
