"""Partial rollouts: makes a sample ready for `generate`, which an abort may have left unfinished."""

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
RESUME_VERSION: Final = 1
# of these, those of the step in which a sample is resumed hold: its budgets, and where code runs
_MAY_CHANGE: Final = frozenset({"max_new_tokens", "min_new_tokens", "executor"})


# response-side fields of slime 0.3's Sample and what a new sample has there; those that a Sample lacks are skipped
_NONE_AT_FIRST: Final = (
    "loss_mask",
    "rollout_log_probs",
    "reward",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
    "teacher_log_probs",
    "multimodal_train_inputs",
)
_FRESH: Final[dict[str, Callable[[], object]]] = {
    **dict.fromkeys(_NONE_AT_FIRST, lambda: None),
    "tokens": list,
    "response": str,
    "response_length": int,
    "weight_versions": list,
    "remove_sample": bool,
    "non_generation_time": float,
}


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """How an episode begins: from what it is resumed, and the attempts before it."""

    resume: SavedEpisode | None = None  # None to start afresh
    aborts: int = 0  # how often the sample has come back ABORTED
    resumes: int = 0  # how often it was resumed, this time included
    question: str | None = None  # what an environment had asked in place of the row
    dropped_tokens: int = 0  # tokens that earlier attempts sampled and that are in no sample


def prepare_sample(sample: SampleLike, conditions: Mapping[str, str] | None, *, may_resume: bool) -> EpisodeStart:
    """Make a sample ready: an ABORTED one keeps its tokens if it can be resumed, any other starts afresh.

    None is resumed that was begun under other conditions.
    """
    facts = facts_of(sample)
    aborted = sample.status is statuses_of(sample).ABORTED
    aborts = (facts.aborts or 0) + aborted
    # a sample without a sampled token holds a filler as response
    has_sampled = bool(sample.response_length) and not sample.remove_sample
    resume = _resume_state(sample, facts, conditions or {}) if aborted and may_resume and has_sampled else None
    resumes = (facts.resumes or 0) + (resume is not None)
    dropped = facts.dropped_sampled_tokens or 0
    if resume is None:
        dropped += (facts.sampled_tokens or 0) if aborted else 0
        reset_sample(sample)
        return EpisodeStart(aborts=aborts, resumes=resumes, dropped_tokens=dropped)
    # slime may have masked what older weights sampled; masked tokens have no logprobs
    sample.rollout_log_probs = [
        logprob if mask else 0.0 for mask, logprob in zip(sample.loss_mask, sample.rollout_log_probs, strict=True)
    ]
    sample.status, sample.reward, sample.remove_sample = statuses_of(sample).PENDING, None, False
    sample.metadata = {key: value for key, value in sample.metadata.items() if key != METADATA_KEY}
    return EpisodeStart(resume, aborts, resumes, facts.question, dropped)


def _resume_state(sample: SampleLike, facts: EpisodeFacts, conditions: Mapping[str, str]) -> SavedEpisode | None:
    # facts of another version may mean other things by the same names
    saved: Any = facts.resume if facts.version == METADATA_VERSION else {"version": "unknown"}
    try:
        state = load_episode(saved, sample.tokens, sample.loss_mask, sample.rollout_log_probs)
    except ResumeError as e:
        why = str(e)
    else:
        # those of a state that an older version has saved are not known
        changed = changed_conditions(saved.get("conditions") or conditions, conditions)
        changed = [name for name in changed if name not in _MAY_CHANGE]
        if not changed:
            return state
        why = f"it was begun with other values of {', '.join(changed)}"
    logger.warning("aborted sample starts afresh index=%s reason=%s", sample.index, why)
    return None


def reset_sample(sample: SampleLike) -> None:
    """Forget an earlier attempt: a sample that comes back FAILED or ABORTED starts from nothing."""
    for name, fresh in _FRESH.items():
        if hasattr(sample, name):
            setattr(sample, name, fresh())
    for name in ("spec_info", "prefix_cache_info"):
        if hasattr(sample, name):
            setattr(sample, name, type(getattr(sample, name))())
    sample.status = statuses_of(sample).PENDING
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    sample.metadata = {key: value for key, value in metadata.items() if key != METADATA_KEY}
