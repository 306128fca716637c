"""A stand-in for slime's `Sample`, for use where slime is not installed.

Fields, their order and defaults, and what `append_response_tokens` does are those of slime 0.3 (slime/utils/types.py),
so that code written for one works with the other. Replay data (top-p ids, routed experts) is left to slime: the fields
are there, and nothing here decodes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

_COUNTERS = ("spec_info", "prefix_cache_info")


@dataclass
class Sample:
    """One episode as slime's trainer reads it; see slime's own class for the meaning of each field."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None

    class Status(Enum):
        """What became of the episode."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    @dataclass
    class SpecInfo:
        """Sums of speculative decoding over an episode's requests."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        def add(self, meta_info: Mapping[str, Any]) -> None:
            """Count one request; its completion tokens go by another name in `meta_info`."""
            _count(self, {**meta_info, "completion_token_num": meta_info.get("completion_tokens", 0)})

    spec_info: SpecInfo = field(default_factory=SpecInfo)

    @dataclass
    class PrefixCacheInfo:
        """Sums over an episode's requests: tokens read from the engine's prefix cache, and tokens read in all."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        @property
        def prefix_cache_hit_rate(self) -> float:
            """Cached share of the prompt tokens, 0.0 when there were none."""
            return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

        def add(self, meta_info: Mapping[str, Any]) -> None:
            """Count one request."""
            _count(self, {**meta_info, "total_prompt_tokens": meta_info.get("prompt_tokens", 0)})

    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def append_response_tokens(
        self,
        args: object = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append response tokens with their mask and logprobs; the engine's `meta_info` also sets the status.

        Args:
            args: slime's args; says whether the engine decodes speculatively.
            tokens: Token ids.
            log_probs: One per token where they are trainable, none otherwise.
            trainable: Whether the policy wrote them.
            meta_info: As SGLang answered it.
            text: Appended to `response`.
            update_terminal_info: Whether `meta_info` counts: cache, weight version and status.

        Raises:
            ValueError: Trainable tokens come without logprobs, others with them, the lengths disagree, or earlier
                response tokens have no logprobs.
        """
        new = list(tokens or [])
        self._check(new, log_probs, trainable=trainable)
        self.response += text or ""
        before = self.response_length
        if new:
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            if self.rollout_log_probs is None:
                self.rollout_log_probs = [0.0] * before
            self.tokens += new
            self.response_length += len(new)
            self.loss_mask += [int(trainable)] * len(new)
            self.rollout_log_probs += log_probs or [0.0] * len(new)
        if meta_info is not None and update_terminal_info and "finish_reason" in meta_info:
            self._count_request(args, meta_info)

    def _check(self, new: list[int], log_probs: Sequence[float] | None, *, trainable: bool) -> None:
        if new and trainable != (log_probs is not None):
            raise ValueError(
                f"got log_probs={log_probs!r:.80} with trainable={trainable}; expected them for trainable tokens only"
            )
        if log_probs is not None and len(log_probs) != len(new):
            raise ValueError(f"got {len(log_probs)} log_probs for {len(new)} tokens; expected one each")
        if new and trainable and self.rollout_log_probs is None and self.response_length:
            raise ValueError(
                f"got trainable tokens after {self.response_length} response tokens without rollout_log_probs; "
                "expected one for each of those"
            )

    def _count_request(self, args: object, meta_info: Mapping[str, Any]) -> None:
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        ended = {"length": self.Status.TRUNCATED, "abort": self.Status.ABORTED, "stop": self.Status.COMPLETED}
        self.status = ended.get(meta_info["finish_reason"]["type"], self.status)

    def to_dict(self) -> dict[str, Any]:
        """All attributes; status and counters as plain values, the others as they are."""
        plain = {name: dict(vars(getattr(self, name))) for name in _COUNTERS}
        return {**vars(self), **plain, "status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of `to_dict`; what is no field becomes an attribute, as in slime."""
        names = {item.name for item in fields(cls)}
        values = {key: value for key, value in data.items() if key in names}
        values["status"] = cls.Status(data["status"])
        values["spec_info"] = cls.SpecInfo(**data.get("spec_info", {}))
        values["prefix_cache_info"] = cls.PrefixCacheInfo(**data.get("prefix_cache_info", {}))
        sample = cls(**values)
        vars(sample).update({key: value for key, value in data.items() if key not in names})
        return sample

    def get_reward_value(self, args: Any) -> Any:  # noqa: ANN401 - slime's signature
        """The reward, or its `args.reward_key` entry."""
        return self.reward[args.reward_key] if getattr(args, "reward_key", None) else self.reward  # type: ignore[index]

    @property
    def effective_response_length(self) -> int:
        """Trained response tokens."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length


def _count(counters: object, amounts: Mapping[str, Any]) -> None:
    """Add to each counter the amount of its name."""
    for name, sum_so_far in vars(counters).items():
        setattr(counters, name, sum_so_far + amounts.get(name, 0))
