"""The settings of one preparation, and the ones that can't be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import httpx
from pydantic import BaseModel, ConfigDict

from strands_rollout.client.transport import redacted
from strands_rollout.errors import ConfigError

HUB: Final = "https://huggingface.co"
# a problem that says more than 13 words of another one, in a row, was taken from it or from its source
NGRAM_WORDS: Final = 13


class Request(BaseModel):
    """What to prepare, and where to; the scripts' --help says what each setting means.

    `path` is a local file or folder to read instead of the hub, for which `dataset` is only a name then; `endpoint` is
    the hub or its mirror, and `against` are evaluation files to compare with. A column of None is to be found.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str = "main"
    path: Path | None = None
    endpoint: str = HUB
    prompt_column: str | None = None
    label_column: str | None = None
    instruction: Literal["remove", "keep"] = "remove"
    keep_duplicates: bool = False
    allow_rejected: bool = False
    drop_contaminated: bool = False
    ngram_words: int = NGRAM_WORDS
    limit: int | None = None
    against: tuple[Path, ...] = ()
    out: Path

    @property
    def rejected_file(self) -> Path:
        """Where rows go that can't be used."""
        return self.out.with_name(f"{self.out.name}.rejected.jsonl")

    @property
    def manifest_file(self) -> Path:
        """Where the manifest goes."""
        return self.out.with_name(f"{self.out.name}.manifest.json")

    @property
    def shown_endpoint(self) -> str:
        """The hub or its mirror as people and manifests see it: without user, password and query."""
        return redacted(httpx.URL(self.endpoint))

    def arguments(self) -> dict[str, Any]:
        """The settings that decide the file's content, as JSON values; `manifest` adds those of the other files."""
        endpoint = self.shown_endpoint if self.path is None else None
        return {**self.model_dump(mode="json", exclude={"out", "against"}), "endpoint": endpoint}


def check_usage(request: Request, *, force: bool) -> None:
    """Refuse what would read something else than it names, or overwrite what it reads, or a file that is not ours.

    Raises:
        ConfigError: The message says what to do instead.
    """
    _check_outputs(request, force=force)
    if request.path is None:
        _check_endpoint(request.endpoint)
        _check_name(request)


def _check_outputs(request: Request, *, force: bool) -> None:
    read: dict[Path | None, str] = {request.path: "--from", **dict.fromkeys(request.against, "--against")}
    for written in (request.out, request.rejected_file, request.manifest_file):
        for path, option in read.items():
            if path is not None and path.resolve() == written.resolve():
                raise ConfigError(f"--out {request.out} would overwrite {path}, which {option} reads; name another one")
    if request.path is not None and request.path.is_dir() and request.path.resolve() in request.out.resolve().parents:
        raise ConfigError(f"--out {request.out} lies in the folder that --from reads; name a file elsewhere")
    if request.out.exists() and not request.manifest_file.exists() and not force:
        raise ConfigError(
            f"{request.out} is there without {request.manifest_file.name}, so it was not made here; name another file "
            "with --out, or replace it with --force"
        )


def _check_endpoint(endpoint: str) -> None:
    expected = "expected http:// or https:// and a host in --mirror (or HF_ENDPOINT)"
    try:
        url = httpx.URL(endpoint)
    except httpx.InvalidURL as e:
        raise ConfigError(f"the mirror's URL can't be read; {expected}") from e
    if url.scheme not in ("http", "https") or not url.host:
        bare = endpoint.rpartition("@")[2]
        raise ConfigError(f"the mirror {bare!r} has no scheme http or https; {expected}, such as https://{bare}")
    if url.query or url.fragment:
        raise ConfigError(f"the mirror {redacted(url)} has a query or a fragment; {expected} alone")


def _check_name(request: Request) -> None:
    if Path(request.dataset).exists():
        raise ConfigError(
            f"--dataset {request.dataset}: there is a local {Path(request.dataset).absolute()}, which would be read in "
            f"place of the hub's; give --from {request.dataset} if it is meant, else run this in another folder"
        )
