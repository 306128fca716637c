"""How a sample comes to `generate`: to be gone on with, or to start from nothing.

Knows the response-side fields of slime's Sample and what an aborted one keeps; nothing of how they are filled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.episode_record import METADATA_KEY, METADATA_VERSION, RESUME_KEY
from strands_rollout.errors import ResumeError
from strands_rollout.resume_state import ResumeState, load_resume_state

logger = logging.getLogger(__name__)

# response-side fields of slime 0.3's Sample and what a new sample has there; those that a Sample lacks are skipped
_FRESH: Final[dict[str, Any]] = {
    "tokens": list,
    "response": str,
    "response_length": int,
    "loss_mask": lambda: None,
    "rollout_log_probs": lambda: None,
    "reward": lambda: None,
    "weight_versions": list,
    "rollout_top_p_token_ids": lambda: None,
    "rollout_top_p_token_offsets": lambda: None,
    "rollout_routed_experts": lambda: None,
    "teacher_log_probs": lambda: None,
    "multimodal_train_inputs": lambda: None,
    "remove_sample": bool,
    "non_generation_time": float,
}


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a sample comes to `generate`.

    Attributes:
        resume: What to go on with; None to start from nothing.
        aborts: How often the sample has come back ABORTED.
        resumes: How often it was gone on with, this time included.
    """

    resume: ResumeState | None = None
    aborts: int = 0
    resumes: int = 0


def begin_sample(sample: Any, *, may_resume: bool) -> Beginning:  # noqa: ANN401 - slime's Sample or ours
    """Make a sample ready: an ABORTED one keeps its tokens if it can be gone on with, any other starts from nothing."""
    facts = _own_facts(sample)
    aborted = sample.status is type(sample).Status.ABORTED
    aborts = _count(facts, "aborts") + aborted
    resume = _resume_state(sample, facts) if aborted and may_resume and _has_sampled(sample) else None
    resumes = _count(facts, "resumes") + (resume is not None)
    if resume is None:
        reset_sample(sample)
        return Beginning(aborts=aborts, resumes=resumes)
    # slime masks what older weights sampled, where it is told to; masked tokens have no logprobs
    sample.rollout_log_probs = [
        logprob if mask else 0.0 for mask, logprob in zip(sample.loss_mask, sample.rollout_log_probs, strict=True)
    ]
    sample.status, sample.reward, sample.remove_sample = type(sample).Status.PENDING, None, False
    sample.metadata = {key: value for key, value in sample.metadata.items() if key != METADATA_KEY}
    return Beginning(resume, aborts, resumes)


def _own_facts(sample: Any) -> Mapping[str, Any]:  # noqa: ANN401
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    facts = metadata.get(METADATA_KEY)
    return facts if isinstance(facts, Mapping) else {}


def _count(facts: Mapping[str, Any], name: str) -> int:
    count = facts.get(name, 0)
    return count if isinstance(count, int) else 0


def _has_sampled(sample: Any) -> bool:  # noqa: ANN401
    """Whether there is anything to go on with: a sample without a sampled token holds a filler as response."""
    return bool(sample.response_length) and not sample.remove_sample


def _resume_state(sample: Any, facts: Mapping[str, Any]) -> ResumeState | None:  # noqa: ANN401
    # facts of another version may mean other things by the same names
    saved = facts.get(RESUME_KEY) if facts.get("version") == METADATA_VERSION else {"version": "unknown"}
    try:
        return load_resume_state(saved, sample.tokens, sample.loss_mask, sample.rollout_log_probs)
    except ResumeError as e:
        logger.warning("aborted sample starts afresh index=%s reason=%s", sample.index, e)
        return None


def reset_sample(sample: Any) -> None:  # noqa: ANN401 - slime's Sample or ours
    """Forget an earlier attempt: a sample that comes back FAILED or ABORTED starts from nothing."""
    for name, fresh in _FRESH.items():
        if hasattr(sample, name):
            setattr(sample, name, fresh())
    for name in ("spec_info", "prefix_cache_info"):
        if hasattr(sample, name):
            setattr(sample, name, type(getattr(sample, name))())
    sample.status = type(sample).Status.PENDING
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    sample.metadata = {key: value for key, value in metadata.items() if key != METADATA_KEY}
