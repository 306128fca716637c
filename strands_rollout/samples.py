"""What a finished sample says of its episode, read without trust: facts may be absent, foreign or of another version.

Knows a sample's attributes and its facts by name; must not know how they were filled, so that samples of other generate
functions and of other versions are read too. What can't be read or computed is reported once and left out (`kept`), of
one sample where it is one sample's.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from strands_rollout.episode_facts import episode_facts

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# the spans that slime 0.3 opens around a reward function (slime/rollout/sglang_rollout.py)
_SCORE_SPANS: Final = frozenset({"reward_model", "group_reward_model"})
_INTEGER: Final = re.compile(r"-?\d{1,18}")


def kept(name: str, compute: Callable[[], T], *, of_sample: bool = False) -> T | None:
    """What `compute` returns; None, and one warning in the process's life, where it fails.

    Args:
        name: What is computed.
        compute: Called once.
        of_sample: Whether it is one sample's part of a metric, and the other samples still count.
    """
    try:
        return compute()
    except Exception as e:  # a training run must not end for want of a metric, nor a metric for one odd sample
        lost = "metric failed for a sample and left it out" if of_sample else "metric failed and was left out"
        _report_once(lost, name, type(e).__name__)
        return None


@functools.cache
def _report_once(lost: str, name: str, error: str) -> None:
    """Called while the exception is handled; the same failure at a later step would say nothing new."""
    logger.warning("%s name=%s error=%s", lost, name, error, exc_info=True)


def _readable(read: Callable[P, T]) -> Callable[P, T | None]:
    """What `read` finds in a sample; None where the sample can't be read, as where it lacks it."""

    @functools.wraps(read)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return kept(read.__name__, lambda: read(*args, **kwargs), of_sample=True)

    return guarded


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A read-only view of a sample; what it lacks, or can't be read, is None, never a guess.

    Attributes:
        sample: slime's Sample, ours, or anything else.
        facts: Its episode's facts; empty where there are none.
    """

    sample: Any
    facts: Mapping[str, Any]

    def number(self, *keys: str) -> float | None:
        """The finite number under these keys of the facts, one level each."""
        value: Any = self.facts
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return finite(value)

    def text(self, key: str) -> str | None:
        """The text under a key of the facts."""
        value = self.facts.get(key)
        return value if isinstance(value, str) else None

    @property
    @_readable
    def status(self) -> str | None:
        """The status in slime's words: "completed", "truncated" ..."""
        status = getattr(self.sample, "status", None)
        return None if status is None else str(getattr(status, "value", status))

    @property
    @_readable
    def is_removed(self) -> bool:
        """Whether the sample is kept out of training."""
        return bool(getattr(self.sample, "remove_sample", False))

    @property
    def weight_versions(self) -> list[str]:
        """Distinct weight versions that it was sampled with, as far as the engine named them, in order."""
        versions = self.facts.get("weight_versions")
        if not isinstance(versions, list):
            return []
        return list(dict.fromkeys(str(version) for version in versions if version is not None))

    @property
    def weight_version_spread(self) -> int | None:
        """Newest less oldest weight version; None unless all are integers."""
        versions = self.weight_versions
        if not versions or not all(map(_INTEGER.fullmatch, versions)):
            return None
        numbers = [int(version) for version in versions]
        return max(numbers) - min(numbers)

    @property
    @_readable
    def response_length(self) -> float | None:
        """Tokens after the prompt."""
        return finite(getattr(self.sample, "response_length", None))

    @property
    @_readable
    def turn_ids(self) -> list[list[int]] | None:
        """The sampled token ids of each turn that sampled any; None where the facts don't say which they are."""
        bounds = self.turn_bounds
        return None if bounds is None else [self.sample.tokens[start:end] for start, end in bounds]

    @property
    @_readable
    def turn_bounds(self) -> list[tuple[int, int]] | None:
        """Where each turn that sampled any begins and ends in the tokens; None where the facts don't say."""
        bounds = self.bounds_by_turn
        return None if bounds is None else [(start, end) for start, end in bounds.values() if end > start]

    @property
    @_readable
    def bounds_by_turn(self) -> dict[int, tuple[int, int]] | None:
        """By the turn's number from 0, where it begins and ends in the tokens; None where the facts don't say."""
        spans, tokens = self.facts.get("spans"), getattr(self.sample, "tokens", None)
        if not isinstance(spans, list) or not isinstance(tokens, list):
            return None
        bounds: dict[int, tuple[int, int]] = {}
        for span in spans:
            if not _is_span(span, len(tokens)):
                return None
            begin, _ = bounds.get(span[0], (span[1], 0))
            bounds[span[0]] = (begin, span[2])
        return bounds

    @property
    @_readable
    def score_s(self) -> float | None:
        """Seconds in the reward function by slime's trace; None where nothing was traced."""
        trace = getattr(self.sample, "trace", None)
        events = trace.get("events") if isinstance(trace, Mapping) else None
        starts: dict[Any, float] = {}
        seconds: list[float] = []
        for event in events or []:
            if event.get("name") not in _SCORE_SPANS:
                continue
            if event.get("type") == "span_start":
                starts[event.get("span_id")] = event["ts"]
            elif event.get("type") == "span_end" and event.get("span_id") in starts:
                seconds.append(event["ts"] - starts.pop(event.get("span_id")))
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
    facts = kept("facts", lambda: episode_facts(samples), of_sample=True)
    return [FinishedSample(samples, facts or {})]


def finite(value: object) -> float | None:
    """A finite number as a float; None for anything else, a bool included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _is_span(span: object, token_count: int) -> bool:
    if not isinstance(span, list | tuple) or len(span) < 3 or not all(type(value) is int for value in span[:3]):
        return False
    start, end = span[1:3]
    return bool(0 <= start <= end <= token_count)
