"""The recorded flag table, and small checkouts with slime's argument files."""

import functools
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from strands_rollout.diagnostics.flag_check import FlagFindings, FlagTable, check_flags, load_flag_table

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAUNCH_SCRIPTS = sorted(
    path.name for path in (*SCRIPTS.glob("strands_*.sh"), *SCRIPTS.glob("eval_*.sh"), SCRIPTS / "train.sh")
)


@functools.cache
def recorded_table() -> FlagTable:
    return load_flag_table(None)


def findings_of(words: Sequence[str], table: FlagTable | None = None) -> FlagFindings:
    """Check the arguments of train.py against the recorded table, or against `table`."""
    return check_flags(words, table or recorded_table())


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    return folder
