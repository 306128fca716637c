"""The samples of a dump as a table in wandb.

Knows dumps and wandb's tables, whose package may be absent.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from strands_rollout.dump import read_dump
from strands_rollout.errors import ExportError
from strands_rollout.finished_sample import FinishedSample
from strands_rollout.metric_log import Table
from strands_rollout.secret_mask import secret_values
from strands_rollout.transcript_table import SAMPLE_COLUMNS, TEXT_COLUMNS, sample_row
from strands_rollout.wandb_run import start_run


def sample_table(dump: Path, *, reward_key: str, with_contents: bool) -> Table:
    """A row for each sample, in order, with the columns of the metrics' transcripts.

    Args:
        dump: A file or a folder; see `read_dump`.
        reward_key: Where a reward that is a mapping has its number.
        with_contents: Whether prompt, response and label come along, long ones cut in the middle.

    Raises:
        DumpError: It can't be read.
    """
    count = len(SAMPLE_COLUMNS) - (0 if with_contents else len(TEXT_COLUMNS))
    rows, secrets = [], secret_values(os.environ)
    for record in read_dump(dump):
        sample = FinishedSample(SimpleNamespace(**record.values), record.facts)
        rows.append(sample_row(sample, sample.reward(reward_key), secrets)[:count])
    return Table(SAMPLE_COLUMNS[:count], rows)


def log_table(table: Table, project: str | None, name: str) -> None:
    """Log the table as `samples` in a run of wandb.

    Args:
        table: At most as many rows as wandb logs of one.
        project: None for what the environment says.
        name: A new run's, where the environment names none.

    Raises:
        ConfigError: wandb can't start a run.
        ExportError: The table has too many rows.
    """
    import wandb

    most = wandb.Table.MAX_ROWS
    if len(table.rows) > most:
        raise ExportError(f"got {len(table.rows)} samples; wandb logs tables of at most {most}: export single files")
    is_named = any(os.environ.get(variable) for variable in ("WANDB_NAME", "WANDB_RUN_ID"))
    with start_run(project=project, name=None if is_named else name) as run:
        run.log({"samples": wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])})
