"""A run's folder: what was asked (`run.json`), a line of JSON per sample (`results.jsonl`), and the report.

A folder with results belongs to one run: with anything else that results depend on it is refused, so that results of
different runs never mix. A line is written whole with one call, so that a kill leaves at most its beginning, which is
dropped when the file is opened again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from strands_rollout import __version__
from strands_rollout.client.client import ServerInfo
from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.evaluation.plan import EvalSet, SampleKey
from strands_rollout.evaluation.rows import json_line
from strands_rollout.files import differences, open_alone, read_json, write_json
from strands_rollout.settings import RolloutSettings

FORMAT: Final = 1
SCORED: Final = frozenset({"completed", "truncated"})
"""Statuses of samples that say something of the policy; any other is the infrastructure's doing."""


def run_identity(
    sets: Sequence[EvalSet],
    settings: RolloutSettings,
    info: ServerInfo,
    tokenizer_dir: Path,
    *,
    seed: int | None,
    max_context_tokens: int | None,
) -> dict[str, Any]:
    """All that a run's results depend on, as JSON; the engine's address and the concurrency are no part of it."""
    return {
        "strands_rollout": __version__,
        "model": info.model_path,
        "weight_version": info.weight_version,
        "tokenizer": str(tokenizer_dir.resolve()),
        "seed": seed,
        "max_context_length": max_context_tokens,
        "settings": settings_identity(settings),
        "data_sets": {chosen.name: chosen.identity for chosen in sets},
    }


def settings_identity(settings: RolloutSettings) -> dict[str, Any]:
    """All settings that results depend on, as JSON; options of executors and MCP servers, secret perhaps, hashed."""
    values = settings.model_dump(mode="json", exclude={"dump_dir", "dump_samples"})
    values["executor"] = _without_options(values["executor"])
    for name in ("tools", "row_tools"):
        values[name] = [_without_options(tool) for tool in values[name]]
    return values


def _without_options(named: object) -> object:
    """A name, or the name and a digest of the options beside it."""
    if not isinstance(named, dict):
        return named
    options = {key: value for key, value in named.items() if key != "name"}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    return {"name": named.get("name"), "options_sha256": digest}


class _Reward(BaseModel):
    """What is read of the reward function's verdict."""

    model_config = ConfigDict(strict=True, frozen=True)

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


class SampleResult(BaseModel):
    """What is read of a sample's line, and kept in memory: no response, no tokens."""

    model_config = ConfigDict(strict=True, frozen=True)

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
        if self.is_finished and self.reward is None:
            raise ValueError(f"a {self.status} sample has no reward")
        return self

    @classmethod
    def from_line(cls, line: object) -> SampleResult:
        """Read a line's object.

        Raises:
            ValueError: It lacks something, or something is of another kind.
        """
        try:
            return cls.model_validate(line)
        except ValidationError as e:
            first = e.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}") from e

    @property
    def key(self) -> SampleKey:
        """Which sample."""
        return SampleKey(self.data_set, self.problem, self.number)

    @property
    def is_finished(self) -> bool:
        """Whether its episode says something of the policy."""
        return self.status in SCORED

    @property
    def is_scored(self) -> bool:
        """Whether it counts; if not, it is tried again."""
        return self.is_finished and not self._ungraded

    @property
    def is_right(self) -> bool:
        """The grader's verdict."""
        return bool(self.reward and self.reward.acc)

    @property
    def answer(self) -> str:
        """As the grader cut it out; "" for none."""
        return self.reward.pred if self.reward else ""

    @property
    def method(self) -> str:
        """What decided about the answer; "" where it was not graded."""
        return self.reward.method if self.reward else ""

    @property
    def fault(self) -> str | None:
        """Why a finished sample could not be graded, or a failed one's error; else None."""
        return f"not graded: {self._ungraded}" if self._ungraded else self.error

    @property
    def _ungraded(self) -> str:
        return self.reward.error if self.reward and self.is_finished else ""


class ResultsFile:
    """The file, held by one process at a time; a context manager.

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

        Raises:
            ConfigError: A line is not a result, or is one of a sample that is not planned.
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


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run."""

    path: Path

    @property
    def results_path(self) -> Path:
        """One line per sample."""
        return self.path / "results.jsonl"

    @property
    def run_path(self) -> Path:
        """What was asked."""
        return self.path / "run.json"

    @property
    def report_path(self) -> Path:
        """What came of it."""
        return self.path / "report.json"

    def open_results(self, identity: Mapping[str, Any]) -> ResultsFile:
        """Open the results for a run, which is the folder's own if it is not new.

        Raises:
            ConfigError: The folder is another run's (the message names what differs), in use, or can't be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"can't make {self.path}: {e.strerror}; choose another folder with --out") from e
        file = ResultsFile(self.results_path)
        try:
            self._claim({"format": FORMAT, **identity})
        except BaseException:
            file.__exit__(None, None, None)
            raise
        return file

    def _claim(self, identity: dict[str, Any]) -> None:
        if not self.results_path.stat().st_size:
            # whatever was asked here before has left nothing that could be mixed with this
            write_json(self.run_path, identity)
            return
        if not self.run_path.exists():
            raise ConfigError(f"{self.results_path} has no {self.run_path.name} beside it; choose another --out")
        if differing := differences(read_json(self.run_path), identity):
            raise ConfigError(
                f"{self.path} holds another run: {differing}. Run it with what it was begun with, or choose another "
                "--out"
            )
