"""A run's folder: what was asked (`run.json`), a line of JSON per sample (`results.jsonl`), and the report.

A folder with results belongs to one run: with anything else that results depend on it is refused, so that results of
different runs never mix. A line is written whole with one call, so that a kill leaves at most its beginning, which is
dropped when the file is opened again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, ValidationError, model_validator

from strands_rollout import __version__
from strands_rollout.client.client import ServerInfo
from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.evaluation.options import EvalOptions
from strands_rollout.evaluation.plan import EvalSet, SampleKey
from strands_rollout.evaluation.rows import json_line
from strands_rollout.files import differences, open_alone, read_json, write_json
from strands_rollout.secret_mask import masked_settings
from strands_rollout.settings import RolloutSettings

FORMAT: Final = 1
SCORED: Final = frozenset({"completed", "truncated"})
"""Statuses of samples that say something of the policy; any other is the infrastructure's doing."""


def run_identity(
    options: EvalOptions, sets: Sequence[EvalSet], settings: RolloutSettings, info: ServerInfo, tokenizer_dir: Path
) -> dict[str, Any]:
    """All that a run's results depend on, as JSON; the engine's address and the concurrency are not part of it."""
    return {
        "strands_rollout": __version__,
        "model": info.model_path,
        "weight_version": info.weight_version,
        "tokenizer": str(tokenizer_dir.resolve()),
        "seed": options.seed,
        "max_context_length": options.max_context_tokens,
        "settings": settings_identity(settings),
        "data_sets": {chosen.name: chosen.identity for chosen in sets},
    }


def settings_identity(settings: RolloutSettings) -> dict[str, Any]:
    """All settings that results depend on, as JSON; options of executors and MCP servers are hashed: secrets."""

    def without_options(named: object) -> object:
        if not isinstance(named, dict):
            return named
        options = json.dumps({key: value for key, value in named.items() if key != "name"}, sort_keys=True)
        return {"name": named.get("name"), "options_sha256": hashlib.sha256(options.encode()).hexdigest()}

    values = settings.model_dump(mode="json", exclude={"dump_dir", "dump_samples"})
    values["reward"] = masked_settings(values["reward"])
    tools = {name: [without_options(tool) for tool in values[name]] for name in ("tools", "row_tools")}
    return {**values, "executor": without_options(values["executor"]), **tools}


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Reward(_Read):
    """What is read of the reward function's verdict, and its parts."""

    model_config = ConfigDict(extra="allow")

    acc: bool | FiniteFloat
    score: FiniteFloat | None = None  # older runs may have none
    pred: str = ""
    method: str = ""
    error: str = ""


class DriftCounts(_Read):
    """Tokens that encoding a sample's text again would change, and tokens of context that are not the template's."""

    sampled_tokens: NonNegativeInt
    turn_drift: NonNegativeInt
    text_drift: NonNegativeInt
    off_policy: NonNegativeInt
    mismatched_tokens: NonNegativeInt | None


class SampleResult(_Read):
    """What is read of a sample's line, and kept in memory: no response, no tokens."""

    data_set: str
    problem: NonNegativeInt
    number: NonNegativeInt
    status: str
    stop_reason: str
    error: str | None
    reward: _Reward | None
    response_tokens: NonNegativeInt
    sampled_tokens: NonNegativeInt
    turns: NonNegativeInt
    tool_calls: NonNegativeInt
    tool_errors: NonNegativeInt
    unknown_tools: NonNegativeInt = 0  # older runs have neither
    nonzero_exits: NonNegativeInt = 0
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
    def ungraded(self) -> str:
        """Why a finished sample could not be graded; "" if it was."""
        return self.reward.error if self.reward and self.is_finished else ""

    @property
    def is_scored(self) -> bool:
        """Whether it counts; if not, it is tried again."""
        return self.is_finished and not self.ungraded

    @property
    def fault(self) -> str | None:
        """Why it does not count, where that is known."""
        return f"not graded: {self.ungraded}" if self.ungraded else self.error

    @property
    def is_right(self) -> bool:
        """The grader's verdict."""
        return bool(self.reward and self.reward.acc >= 1)

    @property
    def answer(self) -> str:
        """As the grader cut it out; "" for none."""
        return self.reward.pred if self.reward else ""

    @property
    def method(self) -> str:
        """How the answer was graded; "" where it was not."""
        return self.reward.method if self.reward else ""


class ResultsFile:
    """The file `results.jsonl` of a run's folder, held by one process at a time; a context manager.

    Attributes:
        dropped_bytes: Of a half-written last line, when the file was opened.

    Raises:
        ConfigError: The folder is another run's (the message names what differs), in use, or can't be written to.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"can't make {folder}: {e.strerror}; choose another folder with --out") from e
        self.path = folder / "results.jsonl"
        self._file = open_alone(self.path)
        with ExitStack() as stack:
            stack.callback(os.close, self._file)
            self.dropped_bytes = self._drop_half_line()
            self._claim(folder / "run.json", {"format": FORMAT, **identity})
            stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._file)

    def results(self, planned: Container[SampleKey]) -> Iterator[SampleResult]:
        """Those in the file, in the order written; a sample that was tried again is there again. Blank lines are none.

        Raises:
            ConfigError: A line is not a result, or is one of a sample that is not planned.
        """
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{self.path}:{number}"
                try:
                    result = SampleResult.from_line(json.loads(line))
                except (ValueError, RecursionError) as e:
                    raise ConfigError(
                        f"{where} is not a result ({e}); remove the line, and its sample is run again"
                    ) from e
                if result.key not in planned:
                    raise ConfigError(
                        f"{where}: got sample {result.number} of problem {result.problem} of {result.data_set!r}, "
                        "which this run does not ask; remove the line"
                    )
                yield result

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

    def _drop_half_line(self) -> int:
        """Cut what follows the last line's end; how many bytes that were."""
        size = os.fstat(self._file).st_size
        if not size:
            return 0
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as content:
            kept = content.rfind(b"\n") + 1
        if kept < size:
            os.ftruncate(self._file, kept)
        return size - kept

    def _claim(self, asked: Path, identity: dict[str, Any]) -> None:
        if not os.fstat(self._file).st_size:
            # an earlier run has left no result here that could be mixed with this one's
            write_json(asked, identity)
        elif not asked.exists():
            raise ConfigError(f"{self.path} has no {asked.name} beside it; choose another --out")
        elif differing := differences(read_json(asked), identity):
            raise ConfigError(
                f"{asked.parent} holds another run: {differing}. Run it with what it was begun with, or choose another "
                "--out"
            )
