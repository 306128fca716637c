"""What a script knows of its data set: where it is published, and where its file goes.

Knows names only; what a file holds is found out by reading it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

DATA_DIR: Final = Path(__file__).resolve().parents[2] / "data"


@dataclass(frozen=True, slots=True)
class DataSet:
    """Defaults of one script.

    Attributes:
        script: The script's file name.
        hub_id: Repository of the hub.
        id_source: Who says that this is its id.
        config: Configuration within the repository; None for its only or default one.
        split: Split within the configuration.
        file_stem: Name of the file in the data folder; `{split}` stands for the split.
        against: Stems of the prepared files that hold evaluation problems, of which no other should hold any.
    """

    script: str
    hub_id: str
    id_source: str
    config: str | None
    split: str
    file_stem: str
    against: tuple[str, ...] = ()

    def out(self, folder: Path, split: str) -> Path:
        """The default file of a split."""
        return folder / f"{self.file_stem.format(split=split)}.jsonl"

    def evaluation_files(self, folder: Path, split: str) -> tuple[Path, ...]:
        """The default files to compare a split with, or a part of it: all but its own."""
        own = {self.file_stem.format(split=part.partition("[")[0].strip()) for part in split.split("+")}
        return tuple(folder / f"{stem}.jsonl" for stem in self.against if own != {stem})
