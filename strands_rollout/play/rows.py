"""Read the rows of a prompt data set: JSONL (like dapo-math-17k), JSON, CSV, Parquet, or the Hugging Face Hub."""

import copy
import csv
import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import orjson

from strands_rollout.errors import PromptError
from strands_rollout.files.safe_files import open_regular
from strands_rollout.samples import Sample

_TABLE_SUFFIXES: Final = (".parquet", ".json", ".csv")
_HUB: Final = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+(\[[^\]]*\])?))?")
_MAX_FIELD_CHARS: Final = 1 << 27
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a data set.

    Attributes:
        prompt: A string, or a chat as a list of messages.
        label: The ground truth; any JSON.
        line: The number of the line, or of the row in formats without lines, from 1; 0 if not read from data.
        metadata: slime's metadata; the episode's own settings are under `strands_rollout_settings`.
    """

    prompt: str | list[dict[str, Any]]
    label: Any
    line: int = field(default=0, compare=False)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def sample(self, **fields: Any) -> Sample:  # noqa: ANN401 - fields of a sample
        """Return a new sample of this row, with `fields` added; its prompt and metadata are copies."""
        return Sample(
            prompt=copy.deepcopy(self.prompt), label=self.label, metadata=copy.deepcopy(dict(self.metadata)), **fields
        )


def shipped_rows() -> Path:
    """Return the file of held-out problems that is installed with this package."""
    return Path(str(files("strands_rollout") / "data" / "demo.jsonl"))


def take_rows(path: Path, count: int) -> list[Row]:
    """Return the first `count` rows of a file; start again at the top if there are fewer."""
    return list(islice(cycle(load_rows(path)), count))


def load_rows(
    path: Path, *, prompt_key: str = "prompt", label_key: str | None = None, needs_label: bool = True
) -> list[Row]:
    """Return all rows of a file or of a data set of the Hugging Face Hub, in order.

    Raises:
        PromptError: The data can't be read or is empty; or a row is malformed, or lacks its prompt or a label that it
            must have.
    """
    rows = []
    for _, row in iter_rows(path, prompt_key=prompt_key, label_key=label_key, needs_label=needs_label):
        if isinstance(row, PromptError):
            raise row
        rows.append(row)
    return rows


def iter_rows(
    path: Path, *, prompt_key: str = "prompt", label_key: str | None = None, needs_label: bool = True
) -> Iterator[tuple[int, Row | PromptError]]:
    """Yield the number of each line or row, from 1, and the parsed row or its error; skip blank lines.

    Args:
        path: A file: JSON, CSV or Parquet by its suffix, otherwise JSONL. If there is no such file, a data set of the
            Hugging Face Hub: `OWNER/NAME[:CONFIG][@SPLIT]`.
        prompt_key: The key of the prompt; `a.b` also finds key `b` of the mapping `a`.
        label_key: The key of the label. If it is given, each row must have a label; None stands for "label".
        needs_label: True if each row must have a label even without a `label_key`; else a missing label becomes None.

    Raises:
        PromptError: The data can't be read, or is empty.
    """
    is_empty, keys, needs_label = True, (prompt_key, label_key or "label"), needs_label or label_key is not None
    try:
        for number, found in _raw_rows(path):
            is_empty = False
            try:
                if isinstance(found, PromptError):
                    raise found
                yield number, _parse_row(found, keys, path, number, needs_label=needs_label)
            except PromptError as e:
                yield number, e
    except (OSError, csv.Error, UnicodeDecodeError) as e:
        raise PromptError(f"can't read the data file {path}: {getattr(e, 'strerror', None) or e}") from e
    if is_empty:
        expected_csv = "a first line with the columns' names, and one line per row"
        expected = expected_csv if path.suffix == ".csv" else "at least one row (JSONL has a JSON object per line)"
        raise PromptError(f"the data file {path} has no rows; expected {expected}")


def is_hub_name(path: Path) -> bool:
    """Return whether a path names a data set of the hub: `OWNER/NAME[:CONFIG][@SPLIT]`.

    An existing path, or a path with the suffix of a data file, is not the name of a data set.
    """
    is_file = path.suffix in (".jsonl", *_TABLE_SUFFIXES) or path.exists()
    return not is_file and _HUB.fullmatch(str(path)) is not None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_regular(path) as file:
        yield from ((number, line.rstrip(b"\r\n")) for number, line in enumerate(file, start=1) if line.strip())


def _raw_rows(path: Path) -> Iterable[tuple[int, bytes | Mapping[str, Any] | PromptError]]:
    """Return the raw rows, each with its line number or, for Parquet, JSON and hub data sets, its row number from 1."""
    if path.suffix == ".csv":
        return _csv_rows(path)
    if path.suffix in _TABLE_SUFFIXES or is_hub_name(path):
        return enumerate(_read_table(path), start=1)
    return _lines(path)


def _csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, str] | PromptError]]:
    """Yield the line number of each row, and its fields by column.

    A row with too few fields lacks the last columns; for a row with too many, yield an error in place of the fields.
    """
    csv.field_size_limit(_MAX_FIELD_CHARS)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        columns = next(reader, [])
        for fields in filter(None, reader):
            number = reader.line_num - sum(field.count("\n") for field in fields)
            if len(fields) > len(columns):
                counts = f"got {len(fields)} fields; expected {len(columns)}, as in the first line"
                yield number, PromptError(f"{path}:{number}: {counts}; put values with commas into quotes")
            else:
                yield number, dict(zip(columns, fields, strict=False))


def _read_table(path: Path) -> Iterable[Mapping[str, Any]]:
    """Return the rows of a Parquet file (read as slime does), or of JSON or a data set of the hub (via `datasets`)."""
    is_parquet = path.suffix == ".parquet"
    try:
        import pyarrow.parquet as parquet

        if not is_parquet:
            import datasets
    except ModuleNotFoundError as e:
        library = str(e.name).partition(".")[0]
        raise PromptError(f"reading {path} needs {library!r}; run: pip install 'strands-rollout[data]'") from e
    try:
        if is_parquet:
            with parquet.ParquetFile(path) as table:
                return [row for batch in table.iter_batches() for row in batch.to_pylist()]
        datasets.disable_progress_bars()
        if is_hub_name(path):
            return _hub_rows(datasets, path)
        files = glob.escape(str(path))
        with TemporaryDirectory() as cache:  # the library's cache would keep a copy of each file forever
            return list(datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache))
    except PromptError:
        raise
    except Exception as e:  # `datasets` raises its own errors, pyarrow's, and its HTTP library's
        error: BaseException = e
        while error.__cause__ is not None:
            error = error.__cause__
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise PromptError(f"can't read {path} as a data set: {why}") from e


def _hub_rows(datasets: Any, path: Path) -> Iterable[Mapping[str, Any]]:  # noqa: ANN401 - the library
    from strands_rollout.slime_plugin.slime_adapter import hub_unreachable_reason

    match: Any = _HUB.fullmatch(str(path))
    if not os.environ.get("HF_HUB_OFFLINE") and (obstacle := hub_unreachable_reason()):
        raise PromptError(f"{path} is not a file on this machine, and {obstacle}")
    loaded = datasets.load_dataset(match["name"], match["config"], split=match["split"])
    if isinstance(loaded, dict):  # all splits
        if len(loaded) > 1:
            splits = ", ".join(loaded)
            raise PromptError(f"{path} has the splits {splits}; name one, as in {path}@{next(iter(loaded))}")
        (loaded,) = loaded.values()
    return cast(Iterable[Mapping[str, Any]], loaded)


def _parse_row(
    found: bytes | Mapping[str, Any], keys: tuple[str, str], path: Path, number: int, *, needs_label: bool
) -> Row:
    where, (prompt_key, label_key), is_csv = f"{path}:{number}", keys, path.suffix == ".csv"
    example = f'{{"{prompt_key}": [{{"role": "user", "content": "..."}}], "{label_key}": "34"}}'
    expected = (
        f"expected a line with the columns {prompt_key} and {label_key}"
        if is_csv
        else f"expected a JSON object like {example}"
    )
    try:
        # use slime's parser: other parsers, such as orjson, don't read integers above 64 bits exactly
        value = json.loads(found.decode()) if isinstance(found, bytes) else found
        if isinstance(found, bytes) and rb"\u" in found:
            json.dumps(value, ensure_ascii=False).encode()  # refuse half a surrogate pair, which is not valid text
    except (ValueError, RecursionError) as e:
        raise PromptError(f"{where}: {e}; {expected}") from e
    if not isinstance(value, Mapping):
        raise PromptError(f"{where}: got {found!r:.80}; {expected}")
    prompt, label = _get_path(value, prompt_key), _get_path(value, label_key)
    if prompt is _ABSENT or (label is _ABSENT and needs_label):
        got = f"got the keys {', '.join(map(str, value)) or 'none'}"
        no_label = f"no {label_key!r}: name the label's key with --label-key, or set a reward that needs no labels"
        missing = f"no {prompt_key!r}: name the prompt's key with --input-key" if prompt is _ABSENT else no_label
        raise PromptError(f"{where}: {got}, and {missing}; {expected}")
    raw_metadata = value.get("metadata") or {}
    metadata = _parse_json(raw_metadata) if is_csv and isinstance(raw_metadata, str) else raw_metadata
    if not isinstance(metadata, dict):
        raise PromptError(
            f"{where}: got metadata={raw_metadata!r:.80}; expected {'a JSON' if is_csv else 'an'} object, such as "
            f'{{"source": "mine"}}; or rename the {"column" if is_csv else "key"}'
        )
    return Row(prompt, None if label is _ABSENT else label, number, metadata)


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _get_path(value: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - any JSON
    """Return the value of a key, or of a dotted path into nested mappings; `_ABSENT` if there is none."""
    if key in value:
        return value[key]
    first, dot, rest = key.partition(".")
    return _get_path(value[first], rest) if dot and isinstance(value.get(first), Mapping) else _ABSENT


def json_line(value: Mapping[str, Any]) -> bytes:
    """Return an object as a line of JSONL; values that JSON can't hold become lists or texts, and NaN becomes null."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except TypeError:  # an integer above 64 bits, or half a surrogate pair
        text = json.dumps(value, default=lambda item: item.tolist() if hasattr(item, "tolist") else str(item))
        without_nan = json.loads(text, parse_constant=lambda _name: None)  # infinities, too, as orjson does
        return json.dumps(without_nan).encode() + b"\n"
