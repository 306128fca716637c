"""The results of an evaluation, one line of JSON per sample, appended as they come.

Knows the file and the form of a line. A line is written whole with one call, so that a kill leaves at most its
beginning, which is dropped when the file is opened again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import orjson

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.evaluation.plan import SampleKey

SCORED: Final = frozenset({"completed", "truncated"})
"""Statuses of samples that say something of the policy; any other is the infrastructure's doing."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What is kept in memory of a sample: no text, no tokens.

    Attributes:
        key: Which sample.
        status: slime's.
        stop_reason: Why its episode ended.
        error: Of a failed one, in words; else None.
        is_right: The grader's verdict.
        answer: As the grader cut it out; "" for none.
        response_tokens: After the prompt, tool results included.
        sampled_tokens: Of these, those that the policy wrote.
        turns: Of the policy.
        tool_calls: That were run.
        tool_errors: Of these, those that failed.
        seconds: Of its episode.
        violations: What is wrong with it, where it was audited.
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

    @property
    def is_scored(self) -> bool:
        """Whether it counts; if not, it is tried again."""
        return self.status in SCORED

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> SampleResult:
        """Read a line's object.

        Raises:
            KeyError: It lacks something.
            TypeError, ValueError: Something is of another kind.
        """
        reward = line["reward"] or {}
        return cls(
            key=SampleKey(str(line["data_set"]), int(line["problem"]), int(line["number"])),
            status=str(line["status"]),
            stop_reason=str(line["stop_reason"]),
            error=line["error"],
            is_right=bool(reward.get("acc")),
            answer=str(reward.get("pred") or ""),
            response_tokens=int(line["response_tokens"]),
            sampled_tokens=int(line["sampled_tokens"]),
            turns=int(line["turns"]),
            tool_calls=int(line["tool_calls"]),
            tool_errors=int(line["tool_errors"]),
            seconds=float(line["seconds"]),
            violations=len(line["violations"]),
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
        self._file = _open_alone(path)
        self.dropped_bytes = _drop_half_line(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def results(self) -> Iterator[SampleResult]:
        """Those in the file, in the order written; a sample that was tried again is there again.

        Raises:
            ConfigError: A line is not a result.
        """
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield SampleResult.from_line(orjson.loads(line))
                except (KeyError, TypeError, ValueError, AttributeError) as e:
                    raise ConfigError(
                        f"{self.path}:{number} is not a result ({type(e).__name__}: {e}); remove the line, and its "
                        "sample is run again"
                    ) from e

    def append(self, line: Mapping[str, Any]) -> SampleResult:
        """Write a line, and return what is kept of it.

        Raises:
            RolloutError: It can't be written.
        """
        written = orjson.dumps(line, default=str, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        try:
            if os.write(self._file, written) != len(written):
                raise RolloutError(f"can't write to {self.path}: no room; make some and run the same command again")
        except OSError as e:
            raise RolloutError(f"can't write to {self.path}: {e.strerror}; what is there is kept") from e
        return SampleResult.from_line(line)


def _open_alone(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as e:
        raise ConfigError(f"can't open {path}: {e.strerror}; choose another folder with --out") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(file)
        raise ConfigError(f"{path} is in use by another run ({e.strerror}); wait, or choose another --out") from e
    return file


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
