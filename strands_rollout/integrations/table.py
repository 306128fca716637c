"""Samples as rows of a table: Parquet or datasets.Dataset for any other trainer, and back without a loss.

Needs the extra `data`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.errors import ExportError
from strands_rollout.integrations.conversion import FinishedEpisode, finished_episodes
from strands_rollout.samples import Sample
from strands_rollout.settings import REWARD_KEY

if TYPE_CHECKING:
    import datasets
    import pyarrow

_AS_THEY_ARE: Final = (
    *("index", "group_index", "rollout_id", "tokens", "response_length", "loss_mask", "rollout_log_probs"),
    *("response", "remove_sample"),
)
_AS_JSON: Final = ("prompt", "label", "reward", "weight_versions", "metadata")


def to_rows(samples: Iterable[Any], *, reward_key: str = REWARD_KEY) -> list[dict[str, Any]]:
    """One row per sample, in order.

    Fields of the sample go by their names: as they are, or as JSON text (`prompt`, `label`, `reward`,
    `weight_versions`, `metadata`). `status` is its word, `score` the reward's number, `prompt_length` counts the first
    tokens, which are the prompt; `loss_mask` and `rollout_log_probs` are of the tokens after it.

    Raises:
        ExportError: A sample is unfinished, has no reward, its lengths disagree, or a value has no JSON.
    """
    episodes = finished_episodes(samples, reward_key=reward_key, may_lose_images=True)
    return [_row(episode, number) for number, episode in enumerate(episodes)]


def _row(episode: FinishedEpisode, number: int) -> dict[str, Any]:
    sample = episode.sample
    return {
        **{name: getattr(sample, name) for name in _AS_THEY_ARE},
        "prompt_length": len(episode.prompt_ids),
        "status": episode.status,
        "score": episode.reward,
        **{name: _json(getattr(sample, name), name, number, sample.index) for name in _AS_JSON},
    }


def _json(value: object, name: str, number: int, index: int | None) -> str:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ExportError(f"sample {number} (index={index}): its {name} can't be written as JSON: {e}") from e
    if json.loads(text) != value:
        raise ExportError(
            f"sample {number} (index={index}): its {name} would come back from JSON as another value; expected keys "
            "that are text, and lists instead of tuples"
        )
    return text


def from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """Our Samples of such rows; fields that a row has no column for have their defaults."""
    return [
        Sample(
            **{name: row[name] for name in _AS_THEY_ARE},
            **{name: json.loads(row[name]) for name in _AS_JSON},
            status=Sample.Status(row["status"]),
        )
        for row in rows
    ]


def to_dataset(samples: Iterable[Any], *, reward_key: str = REWARD_KEY) -> datasets.Dataset:
    """The rows as a `datasets.Dataset`, whose columns have the same types whatever the samples hold; see `to_rows`."""
    from datasets import Dataset

    return Dataset(_table(to_rows(samples, reward_key=reward_key)))


def to_parquet(samples: Iterable[Any], path: Path, *, reward_key: str = REWARD_KEY) -> None:
    """Write the rows as a Parquet file, there whole or not at all; see `to_rows`.

    Raises:
        ExportError: See `to_rows`; or the file can't be written.
    """
    import pyarrow.parquet

    table = _table(to_rows(samples, reward_key=reward_key))
    beside = path.with_name(f".{path.name}.part")
    try:
        pyarrow.parquet.write_table(table, beside)
        beside.replace(path)
    except OSError as e:
        raise ExportError(f"can't write {path}: {e}") from e


def read_parquet(path: Path) -> list[Sample]:
    """The samples of a file that `to_parquet` has written."""
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
        **dict.fromkeys(("response", "status", *_AS_JSON), text),
    }
    return pa.Table.from_pylist(rows, schema=pa.schema(types))
