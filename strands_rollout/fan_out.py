"""One episode, several samples: the main agent's, one for each further agent, one for each rewritten history.

Knows slime's rules for samples that share a rollout; how a sample is filled is `sample`'s business.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from strands_rollout.agent_models import MadeModel
from strands_rollout.conversation import Segment
from strands_rollout.episode_record import FAN_OUT_KEY, METADATA_KEY, agent_record
from strands_rollout.sample import write_trajectory
from strands_rollout.sample_beginning import reset_sample
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.stop_reason import StopReason

logger = logging.getLogger(__name__)

_GROUP_NORMALISED: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_warned: set[str] = set()


def may_fan_out(args: Any, *, evaluation: bool) -> bool:  # noqa: ANN401 - slime's Namespace
    """Whether slime can take a list of samples here; where the settings ask for one in vain, a warning says why, once.

    Read in slime 0.3: where it collects partial rollouts, in its fully-async rollout and with --group-rm it takes each
    element of a group for one sample.
    """
    if evaluation:
        return False
    obstacle = _obstacle(args)
    if obstacle is not None:
        _warn_once(f"fan_out is on and {obstacle}: only the main agent's sample is returned")
        return False
    estimator = getattr(args, "advantage_estimator", None)
    if estimator in _GROUP_NORMALISED and not getattr(args, "custom_reward_post_process_path", None):
        _warn_once(
            "fan_out is on and slime's own reward normalisation takes all samples of a step as one group; set "
            "--custom-reward-post-process-path strands_rollout.normalize_rewards"
        )
    return True


def _obstacle(args: Any) -> str | None:  # noqa: ANN401
    if getattr(args, "partial_rollout", False):
        return "slime can't collect partial rollouts of several samples (--partial-rollout)"
    if "fully_async" in (getattr(args, "rollout_function_path", None) or ""):
        return "slime's fully-async rollout takes one sample per episode"
    if getattr(args, "group_rm", False):
        return "slime's --group-rm takes one sample per episode"
    return None


def _warn_once(words: str) -> None:
    if words not in _warned:
        _warned.add(words)
        logger.warning("%s", words)


@dataclass(frozen=True, slots=True)
class Spoken:
    """Tokens of an episode beside those of its main sample.

    Attributes:
        kind: "segment" for what an agent had read before its history was rewritten, "aside" for what its conversation
            manager asked, "agent" for a further agent.
        model: Who has sampled them.
        segment: With at least one sampled token.
        is_cut: Whether more was to be said.
    """

    kind: str
    model: SGLangModel
    segment: Segment
    is_cut: bool = False


def spoken_beside(main: SGLangModel, others: Sequence[MadeModel], succeeded: Collection[str]) -> list[Spoken]:
    """All trajectories of an episode but the main agent's last one.

    Args:
        main: The main agent's model.
        others: The models that its tools made.
        succeeded: Ids of its tool calls that ended well.
    """
    found = [Spoken("aside" if one.is_aside else "segment", main, one) for one in main.conversation.beside_last()]
    for made in others:
        segments = [*made.model.conversation.beside_last(), made.model.conversation.last_segment()]
        # a tool in a thread may still be running one
        copies = [replace(segment, trajectory=segment.trajectory.snapshot()) for segment in segments]
        # an agent may end with a call, as of a structured output; one whose own tool call was cut or failed did not
        is_open = made.call not in succeeded
        found += [
            Spoken("agent", made.model, copy, is_cut=is_open and copy.stop_reason == "tool_use")
            for copy in copies
            if copy.trajectory.turns
        ]
    return found


def siblings(
    args: Any,  # noqa: ANN401
    sample: Any,  # noqa: ANN401 - slime's Sample or ours
    spoken: Sequence[Spoken],
    *,
    max_staleness: int | None = None,
) -> list[tuple[str, Any]]:
    """A sample for each further trajectory of an episode, with its kind; none where it failed or comes back.

    Args:
        args: slime's args.
        sample: Written, of the main agent.
        spoken: The further trajectories.
        max_staleness: As for `write_episode`.

    Raises:
        EngineResponseError: The engine's replay data does not fit its tokens.
    """
    status = type(sample).Status
    if sample.status not in (status.COMPLETED, status.TRUNCATED):
        return []
    return [(one.kind, _sibling(args, sample, one, max_staleness)) for one in spoken]


def as_fan_out(main: Any, others: Sequence[tuple[str, Any]]) -> list[Any]:  # noqa: ANN401
    """The samples of one episode, the main agent's first, marked as one rollout: they share group and reward."""
    marked = [("main", main), *others]
    rollout_id = main.index if main.rollout_id is None else main.rollout_id
    for part, (kind, sample) in enumerate(marked):
        sample.rollout_id = rollout_id
        sample.metadata[METADATA_KEY][FAN_OUT_KEY] = {"part": part, "of": len(marked), "kind": kind}
    return [sample for _, sample in marked]


def _sibling(args: Any, sample: Any, spoken: Spoken, max_staleness: int | None) -> Any:  # noqa: ANN401
    sibling = copy.copy(sample)
    vars(sibling).pop("trace", None)  # slime's; the requests are counted with the main agent
    reset_sample(sibling)
    segment = spoken.segment
    stale_tokens = write_trajectory(args, sibling, spoken.model, segment.trajectory, max_staleness)
    ended = segment.trajectory.turns[-1].finish_reason == "stop" and not spoken.is_cut
    sibling.status = type(sample).Status.COMPLETED if ended else type(sample).Status.TRUNCATED
    reason = StopReason.COMPLETED if ended else StopReason.TURN_LENGTH
    record = {**agent_record(spoken.model, segment, reason), "stale_tokens": stale_tokens}
    if spoken.kind != "agent":
        del record["generate_s"]  # counted with the main agent
    sibling.metadata[METADATA_KEY] = record
    return sibling
