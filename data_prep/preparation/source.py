"""Opens a data set, on the hub, at a mirror or in local files, as a stream of rows.

Must be the first to import `datasets` and `huggingface_hub`: they read the endpoint from the environment once.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from preparation.output import sha256_of
from preparation.request import HUB, Request
from preparation.rows import PreparationError
from strands_rollout.errors import ConfigError

_BUILDERS: Final = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
_ROWS_AT_ONCE: Final = 5000
_ASKING_LIMIT_S: Final = 10.0
_OFFLINE: Final = "HF_HUB_OFFLINE is set: read from the cache of an earlier download"


@dataclass(frozen=True, slots=True)
class Source:
    """An open data set, on the "hub", at a "mirror" or "local", as a `datasets.Dataset` that is mapped from the disk.

    `revision` is the commit that is read, or None for the reason beside it.
    """

    kind: str
    revision: str | None
    revision_reason: str
    rows: Any

    def batches(self, columns: Iterable[str]) -> Iterator[dict[str, list[Any]]]:
        """The values of some columns, a few thousand rows at a time and in their order."""
        yield from self.rows.select_columns(list(dict.fromkeys(columns))).iter(batch_size=_ROWS_AT_ONCE)

    def rows_at(self, numbers: Sequence[int], only: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows with these numbers, whole or only some columns of them."""
        rows = self.rows if only is None else self.rows.select_columns(list(only))
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            columns = rows[numbers[start : start + _ROWS_AT_ONCE]]
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))


def input_sha256(path: Path | None) -> str | None:
    """Digest of the data files at a local path, None for none.

    Raises:
        ConfigError: The path holds no data file.
    """
    if path is None:
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _BUILDERS)
    if not files or files[0].suffix not in _BUILDERS:
        raise ConfigError(f"--from {path}: expected a file or a folder with files of {', '.join(_BUILDERS)}")
    if path.is_dir() and glob.escape(str(path)) != str(path):
        raise ConfigError(
            f"--from {path}: `datasets` takes [, ] * and ? for patterns; rename it, or name one of its files"
        )
    if not any(map(_has_content, files)):
        raise PreparationError(f"can't read {path} as a data set: it is empty")
    return sha256_of(*files)


def open_source(request: Request) -> Source:
    """Open what the request names.

    Raises:
        PreparationError: It can't be opened; the message says what was tried and what to do.
    """
    if request.path is None:
        os.environ["HF_ENDPOINT"] = request.endpoint
    try:
        import datasets
    except ModuleNotFoundError as e:
        raise PreparationError(
            f"the package {e.name!r} is not installed; run: pip install -e '.[data]' (in the repository)"
        ) from e
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return _open_hub(request) if request.path is None else _open_local(request, request.path)


def _open_local(request: Request, path: Path) -> Source:
    import datasets

    try:
        if path.is_file():
            rows = datasets.load_dataset(_BUILDERS[path.suffix], data_files=glob.escape(str(path)), split="train")
        else:
            rows = datasets.load_dataset(str(path), request.config, split=request.split)
    except Exception as e:  # `datasets` raises errors of its own, of pyarrow, ValueError and OSError
        kinds = ", ".join(_BUILDERS)
        raise PreparationError(
            f"can't read {path} as a data set: {_said(e, request)}. Expected a file of {kinds}, or a folder as "
            f"downloaded from the hub with the split {request.split!r}; name one of its files with --from, or see "
            "--config and --split."
        ) from e
    return Source("local", None, "read from local files, which don't say their revision", rows)


def _open_hub(request: Request) -> Source:
    import datasets

    revision, reason = _resolve(request)
    try:
        rows = datasets.load_dataset(
            request.dataset, request.config, split=request.split, revision=revision or request.revision
        )
    except Exception as e:  # as above, and those of the HTTP library, which differs between versions
        if reason == _OFFLINE:
            raise PreparationError(
                f"HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, and {request.dataset} is not in the cache of an "
                f"earlier download: unset it. {_by_hand(request)}"
            ) from e
        raise PreparationError(
            f"{request.dataset} is at {request.shown_endpoint}, but can't be loaded with the configuration "
            f"{request.config!r} and the split {request.split!r}: {_said(e, request)}. See --config and --split. "
            f"{_by_hand(request)}"
        ) from e
    return Source("hub" if request.endpoint == HUB else "mirror", revision, reason, rows)


def _resolve(request: Request) -> tuple[str | None, str]:
    """The commit of the revision, or None and why; it is asked first because this fails within seconds, or works."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what, where = request.dataset, request.shown_endpoint
    try:
        info = HfApi(endpoint=request.endpoint).dataset_info(what, revision=request.revision, timeout=_ASKING_LIMIT_S)
    except OfflineModeIsEnabled:
        return None, _OFFLINE
    except HFValidationError as e:
        raise ConfigError(f"--dataset {what}: {_said(e, request)}") from e
    except GatedRepoError as e:
        raise PreparationError(
            f"{what} at {where} is gated: accept its terms on its page, then log in with `hf auth login` or HF_TOKEN"
        ) from e
    except RepositoryNotFoundError as e:
        raise PreparationError(
            f"{where} knows no data set {what}, or it is private; give the right one with --dataset, or log in with "
            "`hf auth login` or HF_TOKEN"
        ) from e
    except RevisionNotFoundError as e:
        raise PreparationError(f"{what} at {where} has no revision {request.revision!r}; see --revision") from e
    except Exception as e:  # the HTTP library below huggingface_hub differs between its versions, and so do its errors
        raise PreparationError(
            f"can't reach the data set {what}: asked {where} for it, and got {_said(e, request)}. {_by_hand(request)}"
        ) from e
    return info.sha, "" if info.sha else f"{where} did not say it"


def _by_hand(request: Request) -> str:
    folder = request.dataset.rpartition("/")[2]
    return (
        "Where the hub can't be reached, name a mirror with --mirror URL (or HF_ENDPOINT), or bring the files: on "
        f"another machine run `hf download --repo-type dataset {request.dataset} --local-dir {folder}` (older: "
        f"huggingface-cli download), copy the folder here, and add --from {folder}"
    )


def _has_content(file: Path) -> bool:
    with file.open("rb") as lines:
        return any(line.strip() for line in lines)


def _said(error: BaseException, request: Request) -> str:
    """The first line of what caused the error in the first place, without the mirror's user and password."""
    while error.__cause__ is not None:
        error = error.__cause__
    secret = request.endpoint.partition("://")[2].partition("/")[0].rpartition("@")[0]
    said = str(error).replace(f"{secret}@", "").strip().splitlines() if secret else str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
