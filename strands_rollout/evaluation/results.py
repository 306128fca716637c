"""The results of an evaluation, one line of JSON per sample, appended as they come.

Knows the file and the form of a line. A line is written whole with one call, so that a kill leaves at most its
beginning, which is dropped when the file is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from strands_rollout.dataset_rows import json_line
from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.evaluation.plan import SampleKey
from strands_rollout.locked_file import open_alone

SCORED: Final = frozenset({"completed", "truncated"})
"""Statuses of samples that say something of the policy; any other is the infrastructure's doing."""


class _Reward(BaseModel):
    """What is read of the reward function's verdict."""

    model_config = ConfigDict(strict=True)

    acc: bool | float
    pred: str = ""
    method: str = ""
    error: str = ""

    @field_validator("acc")
    @classmethod
    def _is_a_verdict(cls, acc: float) -> float:
        if acc not in (0, 1):
            raise ValueError("expected 0 or 1")
        return acc


class DriftCounts(BaseModel):
    """What encoding a sample's text again would change, and its context that is not the template's, in tokens."""

    model_config = ConfigDict(strict=True, frozen=True)

    sampled_tokens: int = Field(ge=0)
    turn_drift: int = Field(ge=0)
    text_drift: int = Field(ge=0)
    off_policy: int = Field(ge=0)
    mismatched_tokens: int | None = Field(ge=0)


class _Line(BaseModel):
    """What is read of a line."""

    model_config = ConfigDict(strict=True)

    data_set: str
    problem: int = Field(ge=0)
    number: int = Field(ge=0)
    status: str
    stop_reason: str
    error: str | None
    reward: _Reward | None
    response_tokens: int = Field(ge=0)
    sampled_tokens: int = Field(ge=0)
    turns: int = Field(ge=0)
    tool_calls: int = Field(ge=0)
    tool_errors: int = Field(ge=0)
    seconds: float
    weight_versions: list[str]
    violations: list[str]
    audited: bool
    drift: DriftCounts | None = None

    @model_validator(mode="after")
    def _has_a_verdict_if_it_ended(self) -> Self:
        if self.status in SCORED and self.reward is None:
            raise ValueError(f"a {self.status} sample has no reward")
        return self


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What is kept in memory of a sample: no text, no tokens.

    Attributes:
        key: Which sample.
        status: slime's.
        stop_reason: Why its episode ended.
        error: Of a failed one, or why a finished one could not be graded, in words; else None.
        is_right: The grader's verdict.
        answer: As the grader cut it out; "" for none.
        response_tokens: After the prompt, tool results included.
        sampled_tokens: Of these, those that the policy wrote.
        turns: Of the policy.
        tool_calls: That were run.
        tool_errors: Of these, those that failed.
        seconds: Of its episode.
        violations: What is wrong with it, where it was audited.
        audited: Whether it was.
        method: What decided about its answer; "" where it was not graded.
        is_graded: Whether a finished one's answer, if any, could be judged.
        weight_versions: Those that it was sampled with.
        drift: What encoding its text again would change; None where that was not measured.
    """

    key: SampleKey
    status: str
    stop_reason: str
    error: str | None
    is_right: bool
    answer: str
    response_tokens: int
    sampled_tokens: int
    turns: int
    tool_calls: int
    tool_errors: int
    seconds: float
    violations: int
    audited: bool
    method: str
    is_graded: bool
    weight_versions: tuple[str, ...]
    drift: DriftCounts | None = None

    @property
    def is_finished(self) -> bool:
        """Whether its episode says something of the policy."""
        return self.status in SCORED

    @property
    def is_scored(self) -> bool:
        """Whether it counts; if not, it is tried again."""
        return self.is_finished and self.is_graded

    @classmethod
    def from_line(cls, line: object) -> SampleResult:
        """Read a line's object.

        Raises:
            ValueError: It lacks something, or something is of another kind.
        """
        try:
            read = _Line.model_validate(line)
        except ValidationError as e:
            first = e.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}") from e
        reward = read.reward
        ungraded = reward.error if reward and read.status in SCORED else ""
        return cls(
            key=SampleKey(read.data_set, read.problem, read.number),
            status=read.status,
            stop_reason=read.stop_reason,
            error=f"not graded: {ungraded}" if ungraded else read.error,
            is_right=bool(reward and reward.acc),
            answer=reward.pred if reward else "",
            response_tokens=read.response_tokens,
            sampled_tokens=read.sampled_tokens,
            turns=read.turns,
            tool_calls=read.tool_calls,
            tool_errors=read.tool_errors,
            seconds=read.seconds,
            violations=len(read.violations),
            audited=read.audited,
            method=reward.method if reward else "",
            is_graded=not ungraded,
            weight_versions=tuple(read.weight_versions),
            drift=read.drift,
        )


class ResultsFile:
    """The file, held by one process at a time; a context manager.

    Args:
        path: Made if it is missing, else gone on with.

    Attributes:
        dropped_bytes: Of a half-written last line, when the file was opened.

    Raises:
        ConfigError: It can't be opened, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_alone(path)
        self.dropped_bytes = _drop_half_line(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def results(self, planned: Container[SampleKey]) -> Iterator[SampleResult]:
        """Those in the file, in the order written; a sample that was tried again is there again. Blank lines are none.

        Args:
            planned: The samples of the run.

        Raises:
            ConfigError: A line is not a result, or is one of another sample.
        """
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _read(line, planned, f"{self.path}:{number}")

    def append(self, line: Mapping[str, Any]) -> SampleResult:
        """Write a line, and return what is kept of it.

        Raises:
            RolloutError: It can't be written.
        """
        written = json_line(line)
        try:
            if os.write(self._file, written) != len(written):
                raise RolloutError(f"can't write to {self.path}: no room; make some and run the same command again")
        except OSError as e:
            raise RolloutError(f"can't write to {self.path}: {e.strerror}; what is there is kept") from e
        return SampleResult.from_line(line)


def _read(line: bytes, planned: Container[SampleKey], where: str) -> SampleResult:
    try:
        result = SampleResult.from_line(json.loads(line))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{where} is not a result ({e}); remove the line, and its sample is run again") from e
    if result.key not in planned:
        key = result.key
        raise ConfigError(
            f"{where}: got sample {key.number} of problem {key.problem} of {key.data_set!r}, which this run does not "
            "ask; remove the line"
        )
    return result


def _drop_half_line(file: int) -> int:
    """Cut what follows the last line's end; how many bytes that were."""
    size = os.fstat(file).st_size
    kept = _end_of_lines(file, size)
    if kept < size:
        os.ftruncate(file, kept)
    return size - kept


def _end_of_lines(file: int, size: int) -> int:
    step = 1 << 16
    while size > 0:
        start = max(0, size - step)
        end = os.pread(file, size - start, start).rfind(b"\n")
        if end >= 0:
            return start + end + 1
        size = start
    return 0
