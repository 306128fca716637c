"""Open a data set on the hub, at a mirror or in local files.

No other module may import `datasets` or `huggingface_hub` earlier: when they are imported, they read the hub's endpoint
from the environment.
"""

import glob
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from preparation.files import sha256_of
from preparation.request import HUB, Request
from preparation.rows import PreparationError
from strands_rollout.errors import ConfigError

_BUILDERS: Final = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
_TIMEOUT_S: Final = 10.0
_OFFLINE_REASON: Final = "HF_HUB_OFFLINE is set: read from the cache of an earlier download"
_MESSAGES_BY_ERROR: Final = {
    "GatedRepoError": (
        "{what} at {where} is gated: accept its terms on {where}/datasets/{what}, then log in with `hf auth login` or "
        "HF_TOKEN"
    ),
    "RepositoryNotFoundError": (
        "{where} has no data set {what}, or the data set is private; name another data set with --dataset, or log in "
        "with `hf auth login` or HF_TOKEN"
    ),
    "RevisionNotFoundError": "{what} at {where} has no revision {revision!r}; name another revision with --revision",
}
"""Messages for huggingface_hub's errors, by class name, subclasses first."""


@dataclass(frozen=True, slots=True)
class Source:
    """An open data set.

    Attributes:
        kind: "hub", "mirror" or "local".
        revision: The commit that is read; None if it is unknown.
        revision_reason: The reason why the commit is unknown; "" if it is known.
        rows: A `datasets.Dataset`.
    """

    kind: str
    revision: str | None
    revision_reason: str
    rows: Any


def input_sha256(path: Path | None) -> str | None:
    """Return the digest of the data files at a local path; None without a local path.

    Raises:
        ConfigError: The path holds no data file, or is a folder whose name `datasets` would read as a pattern.
        PreparationError: The data files are empty.
    """
    if path is None:
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _BUILDERS)
    if not files or files[0].suffix not in _BUILDERS:
        raise ConfigError(f"--from {path}: expected a file or a folder with files of {', '.join(_BUILDERS)}")
    if path.is_dir() and glob.escape(str(path)) != str(path):
        raise ConfigError(
            f"--from {path}: `datasets` reads the characters [ ] * ? as patterns; rename the folder, or name one of "
            "its files"
        )
    if not any(map(_has_content, files)):
        raise PreparationError(f"can't read {path} as a data set: it has no content")
    return sha256_of(*files)


def _has_content(file: Path) -> bool:
    with file.open("rb") as lines:
        return any(line.strip() for line in lines)


def open_source(request: Request) -> Source:
    """Open the requested data set.

    To read the hub, sets HF_ENDPOINT in this process's environment.

    Raises:
        ConfigError: The data set's name is not valid.
        PreparationError: The data set can't be opened; the message has the attempt, the cause and the remedy.
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
    if request.path is not None:
        return Source("local", None, "read from local files, which don't record their revision", _load_local(request))
    revision, reason = _resolve(request)
    rows = _load_hub(request, revision, is_offline=reason == _OFFLINE_REASON)
    return Source("hub" if request.endpoint == HUB else "mirror", revision, reason, rows)


def _load_local(request: Request) -> Any:  # noqa: ANN401 - a datasets.Dataset
    import datasets

    path = str(request.path)
    try:
        if not os.path.isdir(path):  # noqa: PTH112
            builder = _BUILDERS[os.path.splitext(path)[1]]  # noqa: PTH122
            return datasets.load_dataset(builder, data_files=glob.escape(path), split="train")
        return datasets.load_dataset(path, request.config, split=request.split)
    except Exception as e:  # `datasets` raises its own errors, pyarrow's, ValueError and OSError
        raise PreparationError(
            f"can't read {path} as a data set: {_cause_of(e, request)}. Expected a file of {', '.join(_BUILDERS)}, or "
            f"a folder as downloaded from the hub with the split {request.split!r}; name one of its files with --from, "
            "or see --config and --split"
        ) from e


def _load_hub(request: Request, revision: str | None, *, is_offline: bool) -> Any:  # noqa: ANN401 - a datasets.Dataset
    import datasets

    try:
        return datasets.load_dataset(
            request.dataset, request.config, split=request.split, revision=revision or request.revision
        )
    except Exception as e:  # `datasets` raises errors of many libraries; its HTTP library differs between versions
        # The hub describes a gated data set to anyone, and refuses its files only. `datasets` reports this without the
        # hub's error in the chain of causes (datasets/load.py).
        if "is a gated dataset" in str(e):
            message = _MESSAGES_BY_ERROR["GatedRepoError"]
            raise PreparationError(message.format(what=request.dataset, where=request.shown_endpoint)) from e
        if is_offline:
            raise PreparationError(
                f"HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, and the cache of earlier downloads does not have "
                f"{request.dataset}; unset the variable. {_download_advice(request)}"
            ) from e
        raise PreparationError(
            f"{request.dataset} is at {request.shown_endpoint}, but can't be loaded with the configuration "
            f"{request.config!r} and the split {request.split!r}: {_cause_of(e, request)}. See --config and --split. "
            f"{_download_advice(request)}"
        ) from e


def _resolve(request: Request) -> tuple[str | None, str]:
    """Return the commit of the requested revision and "", or None and the reason why the commit is unknown.

    Unlike loading, this fails within seconds if the hub can't be reached.

    Raises:
        ConfigError: The data set's name is not valid.
        PreparationError: The hub can't be reached, or does not give access to the data set or its revision.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    dataset, where = request.dataset, request.shown_endpoint
    try:
        info = HfApi(endpoint=request.endpoint).dataset_info(dataset, revision=request.revision, timeout=_TIMEOUT_S)
    except OfflineModeIsEnabled:
        return None, _OFFLINE_REASON
    except HFValidationError as e:
        raise ConfigError(f"--dataset {dataset}: {_cause_of(e, request)}") from e
    except Exception as e:  # the HTTP library below huggingface_hub differs between its versions, and so do its errors
        kinds = {kind.__name__ for kind in type(e).__mro__}
        for kind, message in _MESSAGES_BY_ERROR.items():
            if kind in kinds:
                raise PreparationError(message.format(what=dataset, where=where, revision=request.revision)) from e
        raise PreparationError(
            f"can't reach the data set {dataset}: asked {where} for it, and got {_cause_of(e, request)}. "
            f"{_download_advice(request)}"
        ) from e
    return info.sha, "" if info.sha else f"{where} did not name the commit"


def _download_advice(request: Request) -> str:
    folder = request.dataset.rpartition("/")[2]
    return (
        "Where the hub can't be reached, name a mirror with --mirror URL (or HF_ENDPOINT), or bring the files: on "
        f"another machine run `hf download --repo-type dataset {request.dataset} --local-dir {folder}` (older: "
        f"huggingface-cli download), copy the folder here, and add --from {folder}"
    )


def _cause_of(error: BaseException, request: Request) -> str:
    """Return the type and first line of the root error, without the mirror's user and password."""
    while error.__cause__ is not None:
        error = error.__cause__
    secret = request.endpoint.partition("://")[2].partition("/")[0].rpartition("@")[0]
    lines = str(error).replace(f"{secret}@" if secret else "\0", "").strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
