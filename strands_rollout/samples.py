"""A stand-in for slime's `Sample`, for use without slime, and read-only views of finished samples and their facts.

Metadata is not trusted: facts may be missing, or written by another program or another version of this package. Facts
of a wrong type and unreadable values are left out. Each type of error in reading a value is logged once.
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
    """slime's arguments, an argparse Namespace; read with `getattr`, since releases have different arguments."""


class SampleLike(Protocol):
    """Protocol of the sample fields that this package uses, implemented by each release of slime and by `Sample`.

    Most fields are typed Any if they may be None before an episode or have a type of slime's. Fields missing in some
    releases are read with `getattr`. The class has the enum `Status`: see `statuses_of`.
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
        """Return the reward; if `args` name a reward key, the reward's value at this key."""


def statuses_of(sample: object) -> Any:  # noqa: ANN401 - slime's enum or this package's
    """Return the enum class of a sample's statuses."""
    return type(sample).Status  # type: ignore[attr-defined]


@dataclass
class Sample:
    """A stand-in for slime's `Sample`; see slime's class for the meaning of each field."""

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
        """Status of the episode."""

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
        """Counts of speculative decoding, summed over the requests whose answers the sample holds."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        def add(self, meta_info: Mapping[str, Any]) -> None:
            """Add the counts of a request."""
            _add_counts(self, {**meta_info, "completion_token_num": meta_info.get("completion_tokens", 0)})

    spec_info: SpecInfo = field(default_factory=SpecInfo)

    @dataclass
    class PrefixCacheInfo:
        """Counts of all prompt tokens and of tokens from the engine's prefix cache, summed as in `SpecInfo`."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        @property
        def prefix_cache_hit_rate(self) -> float:
            """Cached share of the prompt tokens; 0.0 if there were no prompt tokens."""
            return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

        def add(self, meta_info: Mapping[str, Any]) -> None:
            """Add the counts of a request."""
            _add_counts(self, {**meta_info, "total_prompt_tokens": meta_info.get("prompt_tokens", 0)})

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
        """Append response tokens with their loss mask, logprobs and text, as slime's method of the same name does.

        `trainable` tokens were sampled by the policy: `log_probs` then has one logprob per token. For other tokens,
        `log_probs` is None. If `update_terminal_info` is set and SGLang's `meta_info` has a finish reason, the method
        adds the request's counts and weight version, and sets the status. It adds the counts of speculative decoding
        only if `args` has `sglang_speculative_algorithm`.

        Raises:
            ValueError: Trainable tokens lack logprobs or follow response tokens without logprobs, other tokens have
                logprobs, or `tokens` and `log_probs` differ in length.
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
        """Return all attributes by name, with the status as a string and the counters as dicts."""
        counters = {name: dict(vars(getattr(self, name))) for name in ("spec_info", "prefix_cache_info")}
        return {**vars(self), **counters, "status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Build a sample from the result of `to_dict`; keys that are not fields become attributes, as in slime."""
        names = {item.name for item in fields(cls)}
        values = {key: value for key, value in data.items() if key in names}
        values["status"] = cls.Status(data["status"])
        values["spec_info"] = cls.SpecInfo(**data.get("spec_info", {}))
        values["prefix_cache_info"] = cls.PrefixCacheInfo(**data.get("prefix_cache_info", {}))
        sample = cls(**values)
        vars(sample).update({key: value for key, value in data.items() if key not in names})
        return sample

    def get_reward_value(self, args: Any) -> object:  # noqa: ANN401 - slime's signature
        """Return the reward; if `args.reward_key` is set, the reward's value at this key."""
        return self.reward[args.reward_key] if getattr(args, "reward_key", None) else self.reward  # type: ignore[index]

    @property
    def effective_response_length(self) -> int:
        """Number of trained response tokens."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length


def _add_counts(counters: object, amounts: Mapping[str, Any]) -> None:
    """Increase each counter by the amount of the same name."""
    for name, total in vars(counters).items():
        setattr(counters, name, total + amounts.get(name, 0))


def _check_appended(sample: Sample, new: list[int], log_probs: Sequence[float] | None, *, trainable: bool) -> None:
    if new and trainable != (log_probs is not None):
        raise ValueError(
            f"got log_probs={log_probs!r:.80} with trainable={trainable}; expected log_probs for trainable tokens, and "
            "None for other tokens"
        )
    if log_probs is not None and len(log_probs) != len(new):
        raise ValueError(f"got {len(log_probs)} log_probs for {len(new)} tokens; expected {len(new)}")
    if new and trainable and sample.rollout_log_probs is None and sample.response_length:
        raise ValueError(
            f"got trainable tokens after {sample.response_length} response tokens without rollout_log_probs; "
            "expected a logprob for each earlier response token"
        )


def _count_request(sample: Sample, args: object, meta_info: Mapping[str, Any]) -> None:
    if getattr(args, "sglang_speculative_algorithm", None):
        sample.spec_info.add(meta_info)
    sample.prefix_cache_info.add(meta_info)
    if "weight_version" in meta_info:
        sample.weight_versions.append(meta_info["weight_version"])
    statuses = {"length": sample.Status.TRUNCATED, "abort": sample.Status.ABORTED, "stop": sample.Status.COMPLETED}
    sample.status = statuses.get(meta_info["finish_reason"]["type"], sample.status)


METADATA_KEY: Final = "strands_rollout"
"""Key of an episode's facts in its sample's metadata."""
METADATA_VERSION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """The facts of an episode, with the same names as in `sample.metadata["strands_rollout"]`.

    `slime_plugin.sample_writer` writes them at the end of the episode; `add_facts` adds facts that are known only
    later. Read them with `facts_of`. A fact that is unknown or does not apply is None: failed samples, siblings,
    samples of another generate function, and old dumps have fewer facts.

    Seconds are wall-clock time. Positions are indices into all tokens of the sample, prompt included. Turns are
    numbered from 0. The facts of a resumed episode also cover the time before its abort.
    """

    version: int | None = None
    """Version of these facts."""
    stop_reason: str | None = None
    """Reason why the episode ended: a value of `StopReason`."""
    error: str | None = None
    """The error that ended the episode, at most 2,000 characters; null if there was none."""
    final_text: str | None = None
    """The graded text: the last turn as sampled, or the answer returned by a program."""
    final_in_reasoning: bool | None = None
    """True if `final_text` begins inside reasoning: the generation prompt opened it, such as with `<think>`."""
    final_is_cut: bool | None = None
    """True if a token limit or an abort cut off the last turn. A program's answer counts as cut only if the cut turn
    ends with it."""
    template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template."""
    turns: int | None = None
    """Number of turns in this sample."""
    parse_failures: int | None = None
    """Number of malformed tool calls in this sample."""
    transient_texts: int | None = None
    """Number of messages that the policy read with a transient text, which the agent's history lacks."""
    generate_s: float | None = None
    """Seconds of requests to the engine; in the main agent's sample, for all of its segments and side conversations."""
    turn_s: list[float] | None = None
    """Seconds of requests to the engine, for each turn of this sample."""
    requests: list[Any] | None = None
    """`[turn, start, seconds]` of each accepted answer of the engine; start in seconds since the episode began."""
    tool_parser: str | None = None
    """Name of the tool parser; null for a parser object without a name."""
    sampled_tokens: int | None = None
    """Number of tokens in this sample that the policy sampled."""
    spans: list[Any] | None = None
    """`[turn, start, end, weight_version]` of each span of sampled tokens; start and end are positions."""
    weight_versions: list[Any] | None = None
    """Distinct weight versions, in the order of their first token."""
    version_numberings: list[Any] | None = None
    """Ids of the runs that numbered the weight versions, in the order of their first token."""
    tool_iterations: int | None = None
    """Number of turns whose tool calls were run."""
    tool_calls: int | None = None
    """Number of tool calls that were run."""
    user_turns: int | None = None
    """Number of user messages after the first."""
    tool_errors: int | None = None
    """Number of tool calls that failed, timed out or named an unknown tool."""
    tool_timeouts: int | None = None
    """Number of tool calls that timed out."""
    unknown_tools: int | None = None
    """Number of calls of tools that the agent does not have."""
    tool_s: float | None = None
    """Seconds in tools, summed over concurrent calls."""
    calls: list[Any] | None = None
    """Tool calls, each with `id`, `tool`, `status`, its start `at_s` and duration `s` in seconds, and for the code tool
    its report `sandbox`."""
    code: Mapping[str, Any] | None = None
    """Counts and seconds of the code tool, by name."""
    duration_s: float | None = None
    """Seconds of the whole episode."""
    segments: int | None = None
    """Number of segments of the main agent; 1 if its history was never rewritten."""
    stale_tokens: int | None = None
    """Number of sampled tokens that are masked because their weights were too old."""
    ended_by: str | None = None
    """On a sibling: why the agent's next request did not continue this segment; empty for the agent's last segment."""
    dropped_sampled_tokens: int | None = None
    """Number of sampled tokens that are in no sample."""
    budgets: Mapping[str, Any] | None = None
    """Used share (0 to 1) of the budgets `response` and `context` and of the limits `tool_iterations` and
    `tool_calls`. A share is null if its limit is 0 or not set."""
    aborts: int | None = None
    """Number of earlier attempts that ended with the sample ABORTED."""
    resumes: int | None = None
    """Number of times that the episode was resumed after an abort, or continued from its journal."""
    engine_aborts: int | None = None
    """Number of times that the engine aborted a request and the turn was then continued or repeated."""
    resume: Mapping[str, Any] | None = None
    """State for resuming an aborted episode."""
    sampling_params: Mapping[str, Any] | None = None
    """slime's sampling parameters."""
    environment_score: object | None = None
    """The score from the environment or the agent program: a number, or a mapping with `score`."""
    gateway: Mapping[str, Any] | None = None
    """Facts about the requests sent to the gateway by an agent program or by a session of another trainer. For an agent
    command, also facts about its process."""
    environment: Mapping[str, Any] | None = None
    """If a library's environment played the episode: its termination reason, reward information and metrics."""
    question: str | None = None
    """The environment's question, if it replaced the row's."""
    evaluated: Mapping[str, Any] | None = None
    """The main agent's messages, tools and system prompt and the environment's state, for evaluators."""
    evaluation: bool | None = None
    """True for a sample of an evaluation."""
    fan_out: Mapping[str, Any] | None = None
    """With fan-out: `part` (0 for the main agent's last segment), `of` (number of samples) and the sample's `kind`
    (`main`, `segment`, `agent` or `aside`)."""
    episode_number: int | None = None
    """Number of the episode in its job; removed when the sample is graded."""
    reward_ahead: Mapping[str, Any] | None = None
    """An episode worker's reward; removed when slime requests the reward."""
    score_s: float | None = None
    """Seconds of the reward function in an episode worker."""
    queue_s: float | None = None
    """Seconds that the episode waited for an episode worker."""
    reward: Mapping[str, Any] | None = None
    """The dict of `reward_func`, if slime receives only its `score`."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> EpisodeFacts:
        """Read facts from untrusted metadata; values of a wrong type, NaN and infinite numbers become None."""
        known = {
            name: value
            for name, kind in _fact_types().items()
            if name in given and (value := _read_fact(given[name], kind)) is not None
        }
        return cls(**known)

    def to_metadata(self) -> dict[str, Any]:
        """Return the known facts by name.

        A fact that is None is unknown and left out, with two exceptions. In an ended episode, an `error` of None means
        that there was no error. If `template_kwargs` is known, a `tool_parser` of None means that the parser has no
        name.
        """
        keeps_none = {"error": self.stop_reason is not None, "tool_parser": self.template_kwargs is not None}
        return {
            name: value for name in _fact_types() if (value := getattr(self, name)) is not None or keeps_none.get(name)
        }


_NO_FACTS: Final = EpisodeFacts()


@functools.cache
def _fact_types() -> dict[str, type]:
    """Return the classes of the facts by name, from their annotations `TYPE | None`."""
    kinds = {name: get_args(hint)[0] for name, hint in get_type_hints(EpisodeFacts).items()}
    return {name: get_origin(kind) or kind for name, kind in kinds.items()}


def _read_fact(value: object, kind: type) -> Any:  # noqa: ANN401 - an instance of `kind`
    """Return the value if its type is `kind`, else None. Numbers must be finite.

    If `kind` is float, an int is returned as it is; if `kind` is int, a float without a fraction becomes an int.
    """
    if kind is bool or kind not in (int, float):
        return value if isinstance(value, kind) else None
    number = finite_number(value)
    if number is None or kind is float or isinstance(value, int):
        return None if number is None else value
    return int(number) if number.is_integer() else None


def facts_of(sample: object) -> EpisodeFacts:
    """Return the facts of the sample's episode; all are None if its metadata has no facts."""
    facts = recorded_facts(getattr(sample, "metadata", None))
    return EpisodeFacts.read(facts) if facts else _NO_FACTS


def recorded_facts(metadata: object) -> Mapping[str, Any]:
    """Return the raw mapping of facts in a sample's metadata, unknown keys included; empty if there is none."""
    facts = metadata.get(METADATA_KEY) if isinstance(metadata, Mapping) else None
    return facts if isinstance(facts, Mapping) else {}


def add_facts(sample: SampleLike, added: EpisodeFacts) -> None:
    """Add facts that are known only after the sample's episode has been written."""
    sample.metadata[METADATA_KEY] = {**recorded_facts(sample.metadata), **added.to_metadata()}


def take_fact(sample: object, name: Literal["episode_number", "reward_ahead"]) -> Any:  # noqa: ANN401 - either fact's
    """Remove and return a fact that is needed only once; None if the sample lacks the fact."""
    facts = recorded_facts(getattr(sample, "metadata", None))
    return facts.pop(name, None) if isinstance(facts, dict) else None


PART_PREFIX: Final = "parts/"
"""Prefix of the keys of the parts in a reward's dict."""
REWARD_FAILED: Final = "error"
"""Value of `method` in the dict of a reward whose function failed."""
NO_JUDGE: Final = "no_judge"
"""Value of `method` in the dict of a reward that failed with an EnvironmentFaultError, for example without a judge's
answer."""
FAILED_METHODS: Final = frozenset({REWARD_FAILED, NO_JUDGE})
"""Values of `method` of failed rewards, whose samples are not trained on."""
UNGRADED_METHODS: Final = FAILED_METHODS | {"no_label"}
"""Values of `method` of rewards without a verdict on the answer; an evaluation leaves out their samples."""
_MAX_FLOAT32: Final = 3.4028234663852886e38  # the trainer's tensors are float32: larger numbers are infinite there
_ROLLOUT_ID_FIELDS: Final = ("rollout_id", "group_id")  # group_id: the name in slime 0.3.0


def rollout_id_field(sample: object) -> str | None:
    """Return the name of the field with the rollout id; None if the sample has no such field, as before slime 0.3.0."""
    return next((name for name in _ROLLOUT_ID_FIELDS if hasattr(sample, name)), None)


def rollout_id_of(sample: object) -> int | None:
    """Return the rollout id, which the siblings of a fan-out share; None if the sample has none."""
    name = rollout_id_field(sample)
    return None if name is None else getattr(sample, name)


def question_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt's question: the prompt if it is a string, else its last user message's text ("" if none)."""
    if isinstance(prompt, str):
        return prompt
    texts = [str(message.get("content", "")) for message in prompt if message.get("role") == "user"]
    return texts[-1] if texts else ""


def usable_number(value: object) -> float | None:
    """Return the value as a float; None if it is a string, can't be converted, or is not finite in float32.

    Accepts anything that converts to a float: bool, Decimal, Fraction, scalars of NumPy and torch.
    """
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # the conversion of another library's number may raise anything
        return None
    return number if abs(number) <= _MAX_FLOAT32 else None


def fan_out_part(sample: object) -> int | None:
    """Return the sample's number in its fan-out, 0 for the main agent's last segment; None if there was no fan-out."""
    part = (facts_of(sample).fan_out or {}).get("part")
    return part if isinstance(part, int) else None


def reward_details(sample: object) -> Mapping[str, Any]:
    """Return the reward's dict, from the sample's reward or from its facts; empty if there is none."""
    reward = getattr(sample, "reward", None)
    return reward if isinstance(reward, Mapping) else facts_of(sample).reward or {}


def parts_of(rewards: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the finite values of each part in all rewards, by the part's key `parts/NAME`."""
    values: dict[str, list[float]] = {}
    for key, value in (entry for reward in rewards for entry in reward.items()):
        if key.startswith(PART_PREFIX) and (number := finite_number(value)) is not None:
            values.setdefault(key, []).append(number)
    return values


# the spans that slime 0.3 traces around a reward function (slime/rollout/sglang_rollout.py)
_SCORE_SPANS: Final = frozenset({"reward_model", "group_reward_model"})
_INTEGER: Final = re.compile(r"-?\d{1,18}")


def run_metric(name: str, compute: Callable[[], T], *, of_sample: bool = False) -> T | None:
    """Compute a metric; if it fails, return None, and log each type of error once per process and metric.

    With `of_sample`, `compute` reads a single sample, and the warning says that the metric leaves this sample out.
    """
    try:
        return compute()
    except Exception as e:  # a failing metric must not end a training run
        problem = "metric failed for a sample and left it out" if of_sample else "metric failed and was left out"
        message = f"{problem} name=%s error=%s"
        log_once(logger, logging.WARNING, message, name, type(e).__name__, exc_info=e)
        return None


def _none_if_unreadable(read: Callable[P, T]) -> Callable[P, T | None]:
    """Return `read`, changed to log a warning and return None if it raises."""

    @functools.wraps(read)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return run_metric(read.__name__, lambda: read(*args, **kwargs), of_sample=True)

    return guarded


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A read-only view of a sample; values that are missing or unreadable are None or empty."""

    sample: Any  # slime's Sample, this package's, or any object
    facts: EpisodeFacts

    @property
    @_none_if_unreadable
    def status(self) -> str | None:
        """Value of slime's status, such as "completed"."""
        status = getattr(self.sample, "status", None)
        return None if status is None else str(getattr(status, "value", status))

    @property
    def is_ungraded(self) -> bool:
        """True if the reward has no verdict on the answer, for example because the judge was unavailable."""
        return self.reward_details.get("method") in UNGRADED_METHODS

    @property
    def is_missing(self) -> bool:
        """True if the episode failed or was aborted, or the reward has no verdict; reward metrics omit such samples."""
        return self.status in ("failed", "aborted") or self.is_ungraded

    @property
    def reward_details(self) -> Mapping[str, Any]:
        """The reward's dict, from the sample's reward or from its facts; empty if there is none."""
        return run_metric("reward_details", lambda: reward_details(self.sample), of_sample=True) or {}

    @property
    @_none_if_unreadable
    def is_removed(self) -> bool:
        """True if the sample is excluded from training."""
        return bool(getattr(self.sample, "remove_sample", False))

    @property
    def weight_versions(self) -> list[str]:
        """Distinct weight versions that the engine reported for the sampled tokens, in order of their first token."""
        known = self.facts.weight_versions or []
        return list(dict.fromkeys(str(version) for version in known if version is not None))

    @property
    def weight_version_spread(self) -> int | None:
        """Newest minus oldest weight version; None if no version is known, or not all are integers of one numbering."""
        versions, numberings = self.weight_versions, self.facts.version_numberings or ()
        if len(numberings) > 1 or not versions or not all(map(_INTEGER.fullmatch, versions)):
            return None
        return max(map(int, versions)) - min(map(int, versions))

    @property
    @_none_if_unreadable
    def response_length(self) -> float | None:
        """Number of tokens after the prompt."""
        return finite_number(getattr(self.sample, "response_length", None))

    @property
    def turn_bounds(self) -> list[tuple[int, int]] | None:
        """Start and end position of each turn with sampled tokens; None if unknown."""
        bounds = self.bounds_by_turn
        return None if bounds is None else [(start, end) for start, end in bounds.values() if end > start]

    @property
    @_none_if_unreadable
    def bounds_by_turn(self) -> dict[int, tuple[int, int]] | None:
        """Start and end position of each turn, by its number from 0; None if unknown."""
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
    @_none_if_unreadable
    def score_s(self) -> float | None:
        """Seconds in the reward function, from slime's trace and the episode worker; None if unknown."""
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
        return finite_number(sum(seconds)) if seconds else None

    @_none_if_unreadable
    def reward(self, key: str | None) -> float | None:
        """Return the reward's number; if the reward is a dict, its value at `key`."""
        reward = getattr(self.sample, "reward", None)
        if isinstance(reward, Mapping):
            reward = reward.get(key)
        return float(reward) if isinstance(reward, bool) else finite_number(reward)


def finished_samples(samples: object) -> list[FinishedSample]:
    """Return views of all samples of a step, in the samples' order; lists may be nested, as with fan-out."""
    if samples is None:
        return []
    if isinstance(samples, list | tuple):
        return [view for sample in samples for view in finished_samples(sample)]
    facts = run_metric("facts", lambda: facts_of(samples), of_sample=True)
    return [FinishedSample(samples, facts or EpisodeFacts())]


def finite_number(value: object) -> float | None:
    """Return a finite number as a float; None for anything else, including bools."""
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
