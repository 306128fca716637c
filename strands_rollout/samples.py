"""slime's `Sample`: a stand-in where slime is not installed, and what a finished sample says of its episode.

Metadata is not trusted: facts may be absent, foreign or of another version. What can't be read is reported once and
left out.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final, Literal, ParamSpec, Protocol, TypeVar, get_args, get_origin, get_type_hints

from strands_rollout.log_once import log_once

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class SlimeArgs(Protocol):
    """slime's arguments, an argparse Namespace: read with `getattr`, since releases and jobs have different ones."""


class SampleLike(Protocol):
    """slime's `Sample` of any release, or ours: the fields that this package reads and writes.

    Any stands for what may be None before an episode or has a type of slime's own. Fields that only some releases have
    are read with `getattr`. The class has the enum `Status`: see `statuses_of`.
    """

    status: Any
    index: Any
    group_index: Any
    prompt: Any
    label: Any
    tokens: list[int]
    response: str
    response_length: int
    loss_mask: Any
    rollout_log_probs: Any
    reward: Any
    remove_sample: Any
    metadata: dict[str, Any]
    multimodal_inputs: dict[str, Any] | None
    multimodal_train_inputs: dict[str, Any] | None
    rollout_routed_experts: Any
    rollout_top_p_token_ids: Any
    rollout_top_p_token_offsets: Any
    non_generation_time: float

    def get_reward_value(self, args: Any) -> object:  # noqa: ANN401 - slime's
        """The reward, of a dict that under slime's reward key."""


def statuses_of(sample: object) -> Any:  # noqa: ANN401 - slime's enum or ours
    """The enum of a sample's statuses."""
    return type(sample).Status  # type: ignore[attr-defined]


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
        """Append response tokens with their mask and logprobs, and their text to the response; as slime's own method.

        `log_probs` has one per token where they are `trainable`, that is, the policy's. With `update_terminal_info`,
        SGLang's `meta_info` is counted, and sets weight version and status.

        Raises:
            ValueError: Trainable tokens lack logprobs, others have some, lengths disagree, or earlier tokens have none.
        """
        new = list(tokens or [])
        _check_appended(self, new, log_probs, trainable=trainable)
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
            _count_request(self, args, meta_info)

    def to_dict(self) -> dict[str, Any]:
        """All attributes; status and counters as plain values, the others as they are."""
        counters = {name: dict(vars(getattr(self, name))) for name in ("spec_info", "prefix_cache_info")}
        return {**vars(self), **counters, "status": self.status.value}

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

    def get_reward_value(self, args: Any) -> object:  # noqa: ANN401 - slime's signature
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


def _check_appended(sample: Sample, new: list[int], log_probs: Sequence[float] | None, *, trainable: bool) -> None:
    if new and trainable != (log_probs is not None):
        raise ValueError(
            f"got log_probs={log_probs!r:.80} with trainable={trainable}; expected them for trainable tokens only"
        )
    if log_probs is not None and len(log_probs) != len(new):
        raise ValueError(f"got {len(log_probs)} log_probs for {len(new)} tokens; expected one each")
    if new and trainable and sample.rollout_log_probs is None and sample.response_length:
        raise ValueError(
            f"got trainable tokens after {sample.response_length} response tokens without rollout_log_probs; "
            "expected one for each of those"
        )


def _count_request(sample: Sample, args: object, meta_info: Mapping[str, Any]) -> None:
    if getattr(args, "sglang_speculative_algorithm", None):
        sample.spec_info.add(meta_info)
    sample.prefix_cache_info.add(meta_info)
    if "weight_version" in meta_info:
        sample.weight_versions.append(meta_info["weight_version"])
    ended = {"length": sample.Status.TRUNCATED, "abort": sample.Status.ABORTED, "stop": sample.Status.COMPLETED}
    sample.status = ended.get(meta_info["finish_reason"]["type"], sample.status)


METADATA_KEY: Final = "strands_rollout"
"""Where a sample's metadata holds the facts of its episode."""
METADATA_VERSION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """The facts of an episode, by the names that they have in `sample.metadata["strands_rollout"]`.

    `slime_plugin.sample_writer` writes them when the episode has ended; `add_facts` adds the few that are known only
    later. Read them with `facts_of`. None means unknown: a failed sample, one of a sub-agent, one of another generate
    function or an old dump has fewer of them.

    Seconds are wall-clock time; positions count all tokens of the sample, prompt included; turns count from 0. The
    facts of a resumed episode include those before it was aborted.
    """

    version: int | None = None
    """Version of these facts."""
    stop_reason: str | None = None
    """Why the episode ended: a value of `StopReason`."""
    error: str | None = None
    """The error that ended it, at most 2,000 characters; null where there was none."""
    final_text: str | None = None
    """The last turn as sampled, or the answer that a program returned: the text that is graded."""
    final_in_reasoning: bool | None = None
    """True if the prompt had opened the reasoning that `final_text` begins in."""
    final_is_cut: bool | None = None
    """True if the last turn ended at a limit, in the middle."""
    template_kwargs: Mapping[str, Any] | None = None
    """Arguments with which the chat template was rendered."""
    turns: int | None = None
    """Number of turns, each one answer of the policy."""
    parse_failures: int | None = None
    """Number of malformed tool calls."""
    transient_texts: int | None = None
    """Number of messages that the policy read with a text that the agent's history lacks."""
    generate_s: float | None = None
    """Seconds at the engine."""
    turn_s: list[float] | None = None
    """Seconds at the engine, by turn."""
    requests: list[Any] | None = None
    """`[turn, start, seconds]` of each accepted answer of the engine, its start in seconds since the episode began."""
    tool_parser: str | None = None
    """Name of the parser that read the tool calls; null for one that was handed over as an object."""
    sampled_tokens: int | None = None
    """Number of tokens that the policy sampled."""
    spans: list[Any] | None = None
    """`[turn, start, end, weight_version]` of each stretch of sampled tokens, by position."""
    weight_versions: list[Any] | None = None
    """Distinct weight versions in the order of their first token."""
    version_numberings: list[Any] | None = None
    """Ids of the runs that numbered its weight versions, the last one last."""
    tool_iterations: int | None = None
    """Number of turns whose tool calls were run."""
    tool_calls: int | None = None
    """Number of tool calls that were run."""
    user_turns: int | None = None
    """Number of the user's messages after the first."""
    tool_errors: int | None = None
    """Number of tool calls that failed."""
    tool_timeouts: int | None = None
    """Number of tool calls that ran out of time."""
    unknown_tools: int | None = None
    """Number of calls of tools that the agent does not have."""
    tool_s: float | None = None
    """Seconds in tools; tools that ran at once count each."""
    calls: list[Any] | None = None
    """Each tool call: `id`, `tool`, `status`, start `at_s` and length `s` in seconds, and the `sandbox`'s report."""
    code: Mapping[str, Any] | None = None
    """Counts and seconds of the code tool, by name."""
    duration_s: float | None = None
    """Seconds of the whole episode."""
    segments: int | None = None
    """Number of trajectories of the main agent: 1, and 1 more for each time its history was rewritten."""
    stale_tokens: int | None = None
    """Number of sampled tokens that are masked, since their weights were too old."""
    ended_by: str | None = None
    """The reason why a sibling's history was continued by another one; empty where it ended by itself."""
    dropped_sampled_tokens: int | None = None
    """Number of sampled tokens that are in no sample."""
    budgets: Mapping[str, Any] | None = None
    """Used shares of the limits, from 0 to 1, by name; null where there is no limit."""
    aborts: int | None = None
    """Number of times that the sample came back ABORTED."""
    resumes: int | None = None
    """Number of times that it was resumed."""
    engine_aborts: int | None = None
    """Number of requests that the engine aborted and that were continued in place."""
    resume: Mapping[str, Any] | None = None
    """The state from which an aborted episode is resumed."""
    sampling_params: Mapping[str, Any] | None = None
    """slime's sampling parameters."""
    environment_score: object | None = None
    """The score of the environment or of the program that played: a number, or a mapping with `score`."""
    gateway: Mapping[str, Any] | None = None
    """Counts of the endpoint that a program asked, and how its process ended."""
    question: str | None = None
    """The question that the environment asked in place of the row's."""
    evaluated: Mapping[str, Any] | None = None
    """The messages, tools and state that evaluators read."""
    evaluation: bool | None = None
    """True for a sample of an evaluation."""
    fan_out: Mapping[str, Any] | None = None
    """`part` (the main agent's is 0), `of` (number of samples) and `kind` of a sample of a fan-out."""
    episode_number: int | None = None
    """Number of the episode in its job, until its reward is known."""
    reward_ahead: Mapping[str, Any] | None = None
    """The reward that an episode worker has computed, until slime asks for it."""
    score_s: float | None = None
    """Seconds in the reward function, where an episode worker has called it."""
    queue_s: float | None = None
    """Seconds waiting for an episode worker."""
    reward: Mapping[str, Any] | None = None
    """The result of `reward_func`, where slime is given only its number."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> EpisodeFacts:
        """Facts from metadata, which is not trusted: a value of another type, or an infinite number, is unknown."""
        known = {
            name: value
            for name, kind in _kinds_of_facts().items()
            if name in given and (value := _read(given[name], kind)) is not None
        }
        return cls(**known)

    def to_metadata(self) -> dict[str, Any]:
        """The known facts by name, and null for the error of an episode that had none and a parser without a name."""
        values = {name: getattr(self, name) for name in _kinds_of_facts()}
        is_null = {"error": self.stop_reason is not None, "tool_parser": self.template_kwargs is not None}
        return {name: value for name, value in values.items() if value is not None or is_null.get(name)}


@functools.cache
def _kinds_of_facts() -> dict[str, type]:
    """Classes of the facts by name, from their annotations `KIND | None`."""
    kinds = {name: get_args(hint)[0] for name, hint in get_type_hints(EpisodeFacts).items()}
    return {name: get_origin(kind) or kind for name, kind in kinds.items()}


def _read(value: object, kind: type) -> Any:  # noqa: ANN401 - of that kind
    if kind is bool or kind not in (int, float):
        return value if isinstance(value, kind) else None
    number = finite(value)
    if number is None or kind is float or isinstance(value, int):
        return None if number is None else value
    return int(number) if number.is_integer() else None


def facts_of(sample: object) -> EpisodeFacts:
    """The facts of the sample's episode; none are known of a foreign sample."""
    return EpisodeFacts.read(recorded_facts(getattr(sample, "metadata", None)))


def recorded_facts(metadata: object) -> Mapping[str, Any]:
    """The facts as they stand in a sample's metadata, other programs' keys included; empty where there are none."""
    facts = metadata.get(METADATA_KEY) if isinstance(metadata, Mapping) else None
    return facts if isinstance(facts, Mapping) else {}


def add_facts(sample: SampleLike, added: EpisodeFacts) -> None:
    """Add to a sample facts that are known only after its episode has been written."""
    sample.metadata[METADATA_KEY] = {**recorded_facts(sample.metadata), **added.to_metadata()}


def take_fact(sample: object, name: Literal["episode_number", "reward_ahead"]) -> Any:  # noqa: ANN401 - of either kind
    """Remove a fact that one call leaves for a later one, and return it; None where there is none."""
    facts = recorded_facts(getattr(sample, "metadata", None))
    return facts.pop(name, None) if isinstance(facts, dict) else None


PART_PREFIX: Final = "parts/"
"""Before the names of a reward's further numbers, in its dict."""
REWARD_FAILED: Final = "error"
NO_JUDGE: Final = "no_judge"
"""The method of a reward whose judge failed: an outage."""
FAILED_METHODS: Final = frozenset({REWARD_FAILED, NO_JUDGE})
"""The methods of rewards that say nothing of the answer: the sample is not trained."""
UNGRADED_METHODS: Final = FAILED_METHODS | {"no_label"}
"""The methods of rewards that don't tell a right answer from a wrong one: an evaluation does not count the sample."""
_LARGEST_FLOAT32: Final = 3.4028234663852886e38  # the trainer's tensors are float32: more would be infinite there
_ROLLOUT_IDS: Final = ("rollout_id", "group_id")  # the second is slime 0.3.0's name for it


def rollout_id_field(sample: object) -> str | None:
    """The field that the siblings of a fan-out share; None where a Sample has none, as slime's before 0.3.0."""
    return next((name for name in _ROLLOUT_IDS if hasattr(sample, name)), None)


def rollout_id_of(sample: object) -> int | None:
    """What the siblings of a fan-out share."""
    name = rollout_id_field(sample)
    return None if name is None else getattr(sample, name)


def question_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The last user message of a prompt."""
    if isinstance(prompt, str):
        return prompt
    texts = [str(message.get("content", "")) for message in prompt if message.get("role") == "user"]
    return texts[-1] if texts else ""


def usable_number(value: object) -> float | None:
    """A number that a trainer can compute with, as a float; None for text, and for what is not finite in float32.

    Takes whatever converts to a float: bool, Decimal, Fraction, scalars of NumPy and torch.
    """
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # a foreign number's conversion may raise anything
        return None
    return number if abs(number) <= _LARGEST_FLOAT32 else None


def fan_out_part(sample: object) -> int | None:
    """Which of its fan-out's siblings the sample is, the main agent being 0; None for a sample of no fan-out."""
    part = (facts_of(sample).fan_out or {}).get("part")
    return part if isinstance(part, int) else None


def reward_details(sample: object) -> Mapping[str, Any]:
    """The dict of the sample's reward function; empty where it gave nothing but a number."""
    reward = getattr(sample, "reward", None)
    return reward if isinstance(reward, Mapping) else facts_of(sample).reward or {}


def parts_of(rewards: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The values of each part of several rewards, by its key `parts/NAME`."""
    values: dict[str, list[float]] = {}
    for key, value in (entry for reward in rewards for entry in reward.items()):
        if key.startswith(PART_PREFIX) and (number := finite(value)) is not None:
            values.setdefault(key, []).append(number)
    return values


# the spans that slime 0.3 opens around a reward function (slime/rollout/sglang_rollout.py)
_SCORE_SPANS: Final = frozenset({"reward_model", "group_reward_model"})
_INTEGER: Final = re.compile(r"-?\d{1,18}")


def run_metric(name: str, compute: Callable[[], T], *, of_sample: bool = False) -> T | None:
    """Compute a metric; None where it fails, with one warning in the process's life.

    `of_sample` says that it is one sample's part of a metric, for which the other samples still count.
    """
    try:
        return compute()
    except Exception as e:  # a training run must not end for want of a metric, nor a metric for one odd sample
        lost = "metric failed for a sample and left it out" if of_sample else "metric failed and was left out"
        words = f"{lost} name=%s error=%s"
        log_once(logger, logging.WARNING, words, name, type(e).__name__, exc_info=e)
        return None


def _readable(read: Callable[P, T]) -> Callable[P, T | None]:
    """`read` with None where the sample can't be read."""

    @functools.wraps(read)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return run_metric(read.__name__, lambda: read(*args, **kwargs), of_sample=True)

    return guarded


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A read-only view of a sample; what it lacks, or can't be read, is None, never a guess."""

    sample: Any  # slime's Sample, ours, or anything else
    facts: EpisodeFacts

    @property
    @_readable
    def status(self) -> str | None:
        """The value of slime's status: "completed", "truncated" ..."""
        status = getattr(self.sample, "status", None)
        return None if status is None else str(getattr(status, "value", status))

    @property
    def is_ungraded(self) -> bool:
        """Whether its reward could not tell a right answer from a wrong one, as while a judge is away."""
        return self.graded.get("method") in UNGRADED_METHODS

    @property
    def is_missing(self) -> bool:
        """Whether it says nothing of the policy: its episode or its reward failed, by no fault of the policy's."""
        return self.status in ("failed", "aborted") or self.is_ungraded

    @property
    def graded(self) -> Mapping[str, Any]:
        """What the reward function found; empty where it gave nothing but a number."""
        return run_metric("graded", lambda: reward_details(self.sample), of_sample=True) or {}

    @property
    @_readable
    def is_removed(self) -> bool:
        """Whether the sample is kept out of training."""
        return bool(getattr(self.sample, "remove_sample", False))

    @property
    def weight_versions(self) -> list[str]:
        """Distinct weight versions that it was sampled with, as far as the engine named them, in order."""
        known = self.facts.weight_versions or []
        return list(dict.fromkeys(str(version) for version in known if version is not None))

    @property
    def weight_version_spread(self) -> int | None:
        """Newest less oldest weight version; None unless all are integers, and counted by one run."""
        versions, numberings = self.weight_versions, self.facts.version_numberings or ()
        if len(numberings) > 1 or not versions or not all(map(_INTEGER.fullmatch, versions)):
            return None
        return max(map(int, versions)) - min(map(int, versions))

    @property
    @_readable
    def response_length(self) -> float | None:
        """Tokens after the prompt."""
        return finite(getattr(self.sample, "response_length", None))

    @property
    def turn_bounds(self) -> list[tuple[int, int]] | None:
        """Where each turn that sampled any begins and ends in the tokens; None where the facts don't say."""
        bounds = self.bounds_by_turn
        return None if bounds is None else [(start, end) for start, end in bounds.values() if end > start]

    @property
    @_readable
    def bounds_by_turn(self) -> dict[int, tuple[int, int]] | None:
        """By the turn's number from 0, where it begins and ends in the tokens; None where the facts don't say."""
        spans, tokens = self.facts.spans, getattr(self.sample, "tokens", None)
        if spans is None or not isinstance(tokens, list):
            return None
        if not all(_is_span(span, len(tokens)) for span in spans):
            return None
        bounds: dict[int, tuple[int, int]] = {}
        for turn, start, end, *_ in spans:
            begin, _ = bounds.get(turn, (start, 0))
            bounds[turn] = (begin, end)
        return bounds

    @property
    @_readable
    def score_s(self) -> float | None:
        """Seconds in the reward function, by slime's trace and in an episode worker; None where nobody says."""
        trace = getattr(self.sample, "trace", None)
        events = trace.get("events") if isinstance(trace, Mapping) else None
        starts: dict[object, float] = {}
        ahead_s = self.facts.score_s
        seconds = [] if ahead_s is None else [ahead_s]
        for event in (event for event in events or [] if event.get("name") in _SCORE_SPANS):
            span_id = event.get("span_id")
            if event.get("type") == "span_start":
                starts[span_id] = event["ts"]
            elif event.get("type") == "span_end" and span_id in starts:
                seconds.append(event["ts"] - starts.pop(span_id))
        return finite(sum(seconds)) if seconds else None

    @_readable
    def reward(self, key: str | None) -> float | None:
        """The reward, or its entry `key` where it is a dict."""
        reward = getattr(self.sample, "reward", None)
        if isinstance(reward, Mapping):
            reward = reward.get(key)
        return float(reward) if isinstance(reward, bool) else finite(reward)


def finished_samples(samples: object) -> list[FinishedSample]:
    """Views of all samples of a step, in order; lists of samples (a fan-out) may be nested."""
    if samples is None:
        return []
    if isinstance(samples, list | tuple):
        return [view for sample in samples for view in finished_samples(sample)]
    facts = run_metric("facts", lambda: facts_of(samples), of_sample=True)
    return [FinishedSample(samples, facts or EpisodeFacts())]


def finite(value: object) -> float | None:
    """A finite number as a float; None for anything else, a bool included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def _is_span(span: object, token_count: int) -> bool:
    if not isinstance(span, list | tuple) or list(map(type, span[:3])) != [int] * 3:
        return False
    return bool(0 <= span[1] <= span[2] <= token_count)
