"""Partial rollouts: prepare a sample for an episode, and load the state of an episode that an abort left unfinished."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.errors import ResumeError
from strands_rollout.record.saved import SavedEpisode, load_episode
from strands_rollout.samples import (
    METADATA_KEY,
    METADATA_VERSION,
    EpisodeFacts,
    SampleLike,
    facts_of,
    statuses_of,
)
from strands_rollout.slime_plugin.conditions import changed_conditions

logger = logging.getLogger(__name__)
# conditions that may differ in a resumed sample; the rest of its episode is played with the new values
_CHANGEABLE_CONDITIONS: Final = frozenset({"max_new_tokens", "min_new_tokens", "executor"})
# response fields that are None in a new Sample of slime 0.3; fields missing in a Sample are skipped
_NONE_FIELDS: Final = (
    "loss_mask",
    "rollout_log_probs",
    "reward",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
    "teacher_log_probs",
    "multimodal_train_inputs",
)
_NEW_FIELDS: Final[dict[str, Callable[[], object]]] = {
    **dict.fromkeys(_NONE_FIELDS, lambda: None),
    "tokens": list,
    "response": str,
    "response_length": int,
    "weight_versions": list,
    "remove_sample": bool,
    "non_generation_time": float,
}


@dataclass(slots=True)
class EpisodeStart:
    """The state that an episode starts from, and the counts of earlier attempts at its sample."""

    resume: SavedEpisode | None = None  # None to start from scratch
    aborts: int = 0  # times that the sample came back ABORTED
    resumes: int = 0  # times that the episode was resumed, this time included
    question: str | None = None  # the environment's question, which replaced the row's prompt
    dropped_tokens: int = 0  # sampled tokens of earlier attempts that no sample holds


def prepare_sample(sample: SampleLike, conditions: Mapping[str, str] | None, *, may_resume: bool) -> EpisodeStart:
    """Prepare a sample for an episode, and return the state to start from.

    An ABORTED sample keeps its tokens if it can be resumed: `may_resume` is set, the sample has a sampled token, its
    saved state can be loaded, and no condition outside `_CHANGEABLE_CONDITIONS` has changed. Any other sample is reset
    and starts from scratch. `conditions` are the conditions of the new episode; they may be None if the sample is not
    ABORTED or `may_resume` is False.
    """
    facts = facts_of(sample)
    was_aborted = sample.status is statuses_of(sample).ABORTED
    aborts = (facts.aborts or 0) + was_aborted
    # a sample without a sampled token holds a filler as response
    has_sampled = bool(sample.response_length) and not sample.remove_sample
    resume = _load_resume_state(sample, facts, conditions or {}) if was_aborted and may_resume and has_sampled else None
    resumes = (facts.resumes or 0) + (resume is not None)
    dropped = facts.dropped_sampled_tokens or 0
    if resume is None:
        dropped += (facts.sampled_tokens or 0) if was_aborted else 0
        reset_sample(sample)
        return EpisodeStart(aborts=aborts, resumes=resumes, dropped_tokens=dropped)
    # since the abort, slime may have masked tokens of older weights; masked tokens must have the logprob 0.0
    sample.rollout_log_probs = [
        logprob if mask else 0.0 for mask, logprob in zip(sample.loss_mask, sample.rollout_log_probs, strict=True)
    ]
    sample.status, sample.reward, sample.remove_sample = statuses_of(sample).PENDING, None, False
    sample.metadata = {key: value for key, value in sample.metadata.items() if key != METADATA_KEY}
    return EpisodeStart(resume, aborts, resumes, facts.question, dropped)


def _load_resume_state(sample: SampleLike, facts: EpisodeFacts, conditions: Mapping[str, str]) -> SavedEpisode | None:
    """Return the saved episode of an aborted sample; None, with a warning, if it can't be continued."""
    # in facts of another version the same name may mean something else
    saved: Any = facts.resume if facts.version == METADATA_VERSION else {"version": "unknown"}
    try:
        state = load_episode(saved, sample.tokens, sample.loss_mask, sample.rollout_log_probs)
    except ResumeError as e:
        reason = str(e)
    else:
        # states saved by older versions have no conditions, and count as unchanged
        changed = changed_conditions(saved.get("conditions") or conditions, conditions)
        changed = [name for name in changed if name not in _CHANGEABLE_CONDITIONS]
        if not changed:
            return state
        reason = f"it was begun with other values of {', '.join(changed)}"
    logger.warning("aborted sample starts from scratch index=%s reason=%s", sample.index, reason)
    return None


def reset_sample(sample: SampleLike) -> None:
    """Make a sample PENDING; remove the tokens, response, reward, counts and facts that an earlier attempt has left."""
    for name, new_value in _NEW_FIELDS.items():
        if hasattr(sample, name):
            setattr(sample, name, new_value())
    for name in ("spec_info", "prefix_cache_info"):
        if hasattr(sample, name):
            setattr(sample, name, type(getattr(sample, name))())
    sample.status = statuses_of(sample).PENDING
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    sample.metadata = {key: value for key, value in metadata.items() if key != METADATA_KEY}
