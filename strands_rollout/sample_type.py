"""A stand-in for slime's `Sample`, for use where slime is not installed.

Field names, defaults and the conventions of `append_response_tokens` are those of slime 0.3 (slime/utils/types.py), so that
code written for one works with the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


@dataclass
class PrefixCacheInfo:
    """Sums over an episode's requests: tokens read from the engine's prefix cache, and tokens read in all."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached share of the prompt tokens, 0.0 when there were none."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


@dataclass
class Sample:
    """One episode as slime's trainer reads it; see slime's own class for the meaning of each field."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        """What became of the episode."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def append_response_tokens(
        self,
        args: object = None,  # noqa: ARG002 - slime decodes replay data with it
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Append response tokens with their mask and logprobs.

        Raises:
            ValueError: Trainable tokens come without logprobs, others with them, or the lengths disagree.
        """
        if tokens and trainable != (log_probs is not None):
            raise ValueError(f"got log_probs={log_probs!r:.80} with trainable={trainable}; expected them for trainable tokens only")
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ValueError(f"got {len(log_probs)} log_probs for {len(tokens)} tokens; expected one each")
        self.tokens += tokens
        self.response_length += len(tokens)
        self.loss_mask = (self.loss_mask or []) + [int(trainable)] * len(tokens)
        self.rollout_log_probs = (self.rollout_log_probs or []) + list(log_probs or [0.0] * len(tokens))
        if meta_info is not None:
            self.prefix_cache_info.cached_tokens += meta_info.get("cached_tokens", 0)
            self.prefix_cache_info.total_prompt_tokens += meta_info.get("prompt_tokens", 0)
            if "weight_version" in meta_info:
                self.weight_versions.append(meta_info["weight_version"])

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["status"] = self.status.value
        values["prefix_cache_info"] = {
            "cached_tokens": self.prefix_cache_info.cached_tokens,
            "total_prompt_tokens": self.prefix_cache_info.total_prompt_tokens,
        }
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of `to_dict`; fields that this class does not know are ignored."""
        known = {item.name for item in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["status"] = cls.Status(values.get("status", "pending"))
        values["prefix_cache_info"] = PrefixCacheInfo(**values.get("prefix_cache_info", {}))
        return cls(**values)

    def get_reward_value(self, args: Any) -> Any:  # noqa: ANN401 - slime's signature
        """The reward, or its `args.reward_key` entry."""
        return self.reward[args.reward_key] if getattr(args, "reward_key", None) else self.reward  # type: ignore[index]

    @property
    def effective_response_length(self) -> int:
        """Trained response tokens."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length
