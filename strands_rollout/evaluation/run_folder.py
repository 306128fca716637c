"""The folder of an evaluation: what was asked (`run.json`), the results, and the report.

Knows files. A folder with results belongs to one run: with other settings it is refused, so that results are never
mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.evaluation.results_file import ResultsFile
from strands_rollout.json_file import differences, read_json, write_json

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that is there; see `open_folder`.

    Attributes:
        path: Where.
    """

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

        Args:
            identity: All that the results depend on, as JSON.

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
