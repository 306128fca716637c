"""Samples as rows of a table: Parquet or datasets.Dataset for other trainers, or wandb.

Fields that have a column in Parquet are read back unchanged. Parquet and datasets need the extra `data`, wandb needs
the extra `wandb`. This module reads wandb's API key only to check that it is set, and to mask it in texts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.dump import read_dump
from strands_rollout.errors import ConfigError, ExportError
from strands_rollout.files.safe_files import atomic_replacement
from strands_rollout.integrations.conversion import FinishedEpisode, finished_episodes
from strands_rollout.samples import FinishedSample, Sample
from strands_rollout.secret_mask import find_secrets
from strands_rollout.settings import REWARD_KEY
from strands_rollout.slime_plugin.metrics import SAMPLE_COLUMNS, TEXT_COLUMNS, Table, sample_row

if TYPE_CHECKING:
    import datasets
    import pyarrow
    import wandb


_PLAIN_COLUMNS: Final = (
    "index",
    "group_index",
    "rollout_id",
    "tokens",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "response",
    "remove_sample",
)
_JSON_COLUMNS: Final = ("prompt", "label", "reward", "weight_versions", "metadata")


def to_rows(samples: Iterable[Any], *, reward_key: str = REWARD_KEY) -> list[dict[str, Any]]:
    """Return one row per sample, in the samples' order.

    Columns have the names of the sample's fields. `prompt`, `label`, `reward`, `weight_versions` and `metadata` are
    JSON text. `status` is the status's value, `score` the reward's number, `prompt_length` the number of prompt tokens
    at the beginning of `tokens`. `loss_mask` and `rollout_log_probs` have a value for each token after the prompt.

    Raises:
        ExportError: See `finished_episodes`, but images are allowed; or a value can't be written as JSON and read back
            unchanged.
    """
    episodes = finished_episodes(samples, reward_key=reward_key, allow_images=True)
    return [_row(episode, number) for number, episode in enumerate(episodes)]


def _row(episode: FinishedEpisode, number: int) -> dict[str, Any]:
    sample = episode.sample
    return {
        **{name: getattr(sample, name) for name in _PLAIN_COLUMNS},
        "prompt_length": len(episode.prompt_ids),
        "status": episode.status,
        "score": episode.reward,
        **{name: _to_json_text(getattr(sample, name), name, number, sample.index) for name in _JSON_COLUMNS},
    }


def _to_json_text(value: object, name: str, number: int, index: int | None) -> str:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ExportError(f"sample {number} (index={index}): its {name} can't be written as JSON: {e}") from e
    if json.loads(text) != value:
        raise ExportError(
            f"sample {number} (index={index}): its {name} changes when it is written as JSON; expected string keys, "
            "and lists instead of tuples"
        )
    return text


def from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """Return the samples of rows that `to_rows` returned; fields without a column have their defaults."""
    return [
        Sample(
            **{name: row[name] for name in _PLAIN_COLUMNS},
            **{name: json.loads(row[name]) for name in _JSON_COLUMNS},
            status=Sample.Status(row["status"]),
        )
        for row in rows
    ]


def to_dataset(samples: Iterable[Any], *, reward_key: str = REWARD_KEY) -> datasets.Dataset:
    """Return the rows of `to_rows` as a `datasets.Dataset`, whose column types don't depend on the samples.

    Raises:
        ExportError: See `to_rows`.
    """
    from datasets import Dataset

    return Dataset(_table(to_rows(samples, reward_key=reward_key)))


def to_parquet(samples: Iterable[Any], path: Path, *, reward_key: str = REWARD_KEY) -> None:
    """Write the rows of `to_rows` as a Parquet file, atomically.

    Raises:
        ExportError: See `to_rows`; or the file can't be written.
    """
    import pyarrow.parquet

    table = _table(to_rows(samples, reward_key=reward_key))
    try:
        with atomic_replacement(path) as temporary:
            pyarrow.parquet.write_table(table, temporary)
    except OSError as e:
        raise ExportError(f"can't write {path}: {e}") from e


def read_parquet(path: Path) -> list[Sample]:
    """Return the samples of a file that `to_parquet` wrote."""
    import pyarrow.parquet

    return from_rows(pyarrow.parquet.read_table(path).to_pylist())


def _table(rows: list[dict[str, Any]]) -> pyarrow.Table:
    import pyarrow as pa

    number, numbers, text = pa.int64(), pa.list_(pa.int64()), pa.string()
    types = {
        **dict.fromkeys(("index", "group_index", "rollout_id", "response_length", "prompt_length"), number),
        "tokens": numbers,
        "loss_mask": numbers,
        "rollout_log_probs": pa.list_(pa.float64()),
        "remove_sample": pa.bool_(),
        "score": pa.float64(),
        **dict.fromkeys(("response", "status", *_JSON_COLUMNS), text),
    }
    return pa.Table.from_pylist(rows, schema=pa.schema(types))


_KEYLESS_MODES: Final = frozenset({"offline", "dryrun", "disabled"})


def check_wandb(option: str = "--wandb") -> None:
    """Check that wandb is installed and has a key if it needs one; error messages name `option`.

    Raises:
        ConfigError: wandb is not installed, or needs a key and WANDB_API_KEY is not set (a key in ~/.netrc does not
            count).
    """
    if find_spec("wandb") is None:
        raise ConfigError(f"{option} needs wandb, which is not installed; run: pip install 'strands-rollout[wandb]'")
    mode = os.environ.get("WANDB_MODE", "")
    if mode not in _KEYLESS_MODES and not os.environ.get("WANDB_API_KEY"):
        raise ConfigError(
            f"{option} needs WANDB_API_KEY in the environment; set it, or WANDB_MODE=offline to upload later"
        )


def start_run(**settings: Any) -> wandb.Run:  # noqa: ANN401 - arguments of wandb.init
    """Start a wandb run with settings of `wandb.init`; environment variables (WANDB_MODE, WANDB_RUN_ID ...) apply.

    The command line, the output, the code and the git remote are not uploaded, since they may contain secrets. The
    settings must not contain secrets.

    Raises:
        ConfigError: wandb can't start a run.
    """
    import wandb

    private_settings = wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    try:
        return wandb.init(settings=private_settings, **settings)
    except (wandb.Error, OSError) as e:
        raise ConfigError(f"wandb can't start a run: {e}; fix the cause, or set WANDB_MODE=offline") from e


def sample_table(dump: Path, *, reward_key: str, with_contents: bool) -> Table:
    """Return a table with the columns of `SAMPLE_COLUMNS` and a row for each sample of a dump, in its order.

    If `with_contents`, rows include prompt, response and label, with secrets masked and long texts cut in the middle.
    """
    count = len(SAMPLE_COLUMNS) - (0 if with_contents else len(TEXT_COLUMNS))
    rows, secrets = [], find_secrets(os.environ)
    for record in read_dump(dump):
        sample = FinishedSample(SimpleNamespace(**record.values), record.facts)
        rows.append(sample_row(sample, sample.reward(reward_key), secrets)[:count])
    return Table(SAMPLE_COLUMNS[:count], rows)


def log_table(table: Table, project: str | None, name: str) -> None:
    """Log a table as `samples` in a wandb run; the run is named `name` unless WANDB_NAME or WANDB_RUN_ID is set.

    If `project` is None, wandb's own settings, such as WANDB_PROJECT, name the project.

    Raises:
        ConfigError: wandb can't start a run.
        ExportError: The table has more rows than wandb accepts.
    """
    import wandb

    max_rows = wandb.Table.MAX_ROWS
    if len(table.rows) > max_rows:
        raise ExportError(
            f"got {len(table.rows)} samples; wandb accepts at most {max_rows} per table; export each file of the dump"
        )
    is_named = any(os.environ.get(variable) for variable in ("WANDB_NAME", "WANDB_RUN_ID"))
    with start_run(project=project, name=None if is_named else name) as run:
        run.log({"samples": wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])})
