"""Requests that can't be meant: they would read something else than they name, or overwrite what they read.

Knows the request and which files are there; must not know what is in them.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from preparation.request import Request
from strands_rollout.errors import ConfigError
from strands_rollout.sglang_connection import redacted


def check_usage(request: Request, *, force: bool) -> None:
    """Refuse what can't be meant.

    Args:
        request: The settings.
        force: Whether a file without a manifest may be replaced.

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
