"""wandb: a run that holds nothing but what is logged to it, and the samples of a dump as a table in one.

No key is read or written here; the package may be absent.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.dump import read_dump
from strands_rollout.errors import ConfigError, ExportError
from strands_rollout.samples import FinishedSample
from strands_rollout.secret_mask import secret_values
from strands_rollout.slime_plugin.metrics import SAMPLE_COLUMNS, TEXT_COLUMNS, Table, sample_row

if TYPE_CHECKING:
    import wandb

_WITHOUT_KEY: Final = frozenset({"offline", "dryrun", "disabled"})


def check_wandb(asked_by: str = "--wandb") -> None:
    """Refuse to log, naming the option that asks for it, before anything runs.

    Raises:
        ConfigError: wandb is not installed, or would ask for a key.
    """
    if find_spec("wandb") is None:
        raise ConfigError(f"{asked_by} needs wandb, which is not installed; pip install 'strands-rollout[wandb]'")
    mode = os.environ.get("WANDB_MODE", "")
    if mode not in _WITHOUT_KEY and not os.environ.get("WANDB_API_KEY"):
        raise ConfigError(
            f"{asked_by} found no WANDB_API_KEY in the environment; set it, or WANDB_MODE=offline to upload later"
        )


def start_run(**settings: Any) -> wandb.Run:  # noqa: ANN401 - those of wandb.init
    """Start a run with settings of `wandb.init`; the rest says the environment (WANDB_MODE, WANDB_RUN_ID ...).

    No command line, no output, no code and no name of a git remote goes along, as any of these may hold a secret;
    nothing secret may be among the settings.

    Raises:
        ConfigError: wandb can't start a run.
    """
    import wandb

    quiet = wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    try:
        return wandb.init(settings=quiet, **settings)
    except (wandb.Error, OSError) as e:
        raise ConfigError(f"wandb can't start a run: {e}; mend that, or set WANDB_MODE=offline") from e


def sample_table(dump: Path, *, reward_key: str, with_contents: bool) -> Table:
    """A row for each sample of a dump, in order, with the columns of the metrics' transcripts.

    With contents prompt, response and label come along, long ones cut in the middle.
    """
    count = len(SAMPLE_COLUMNS) - (0 if with_contents else len(TEXT_COLUMNS))
    rows, secrets = [], secret_values(os.environ)
    for record in read_dump(dump):
        sample = FinishedSample(SimpleNamespace(**record.values), record.facts)
        rows.append(sample_row(sample, sample.reward(reward_key), secrets)[:count])
    return Table(SAMPLE_COLUMNS[:count], rows)


def log_table(table: Table, project: str | None, name: str) -> None:
    """Log the table as `samples` in a run of wandb, with this name where the environment names none.

    Raises:
        ConfigError: wandb can't start a run.
        ExportError: The table has more rows than wandb logs of one.
    """
    import wandb

    most = wandb.Table.MAX_ROWS
    if len(table.rows) > most:
        raise ExportError(f"got {len(table.rows)} samples; wandb logs tables of at most {most}: export single files")
    is_named = any(os.environ.get(variable) for variable in ("WANDB_NAME", "WANDB_RUN_ID"))
    with start_run(project=project, name=None if is_named else name) as run:
        run.log({"samples": wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])})
