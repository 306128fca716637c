"""Fake parts of a machine that the doctor checks: programs on the PATH, installed packages, servers."""

import shutil
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from strands_rollout.diagnostics import DoctorOptions, Finding

REPOSITORY = Path(__file__).parents[2]
SHIPPED = REPOSITORY / "strands_rollout" / "engine" / "checkpoint"


def doctor_options(folder: Path, env: Mapping[str, str] | None = None, **changes: Any) -> DoctorOptions:
    """Return options for a machine with nothing prepared and only PATH set."""
    return DoctorOptions(env={"PATH": "/usr/bin:/bin", **(env or {})}, repository=folder, **changes)


def write_program(folder: Path, name: str, script: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def write_distribution(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    """Write a distribution's metadata as pip leaves it in site-packages."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.11"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def tokenizer_folder(folder: Path) -> Path:
    """Copy the shipped tokenizer into `folder`, so that a test can break it."""
    folder.mkdir(parents=True)
    for name in ("tokenizer", "tokenizer_config", "generation_config", "config"):
        shutil.copy(SHIPPED / f"{name}.json", folder)
    shutil.copy(SHIPPED / "chat_template.jinja", folder)
    return folder


@asynccontextmanager
async def serve_json(routes: Mapping[str, tuple[int, Any]]) -> AsyncIterator[str]:
    """Serve a status and JSON body for each path, whatever the method, and yield the URL."""

    async def answer(request: web.Request) -> web.Response:
        status, body = routes.get(request.path, (404, {"detail": "Not Found"}))
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def find_only(findings: Iterable[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def assert_fault(findings: Iterable[Finding], name: str, status: str, *words: str, remedy: str) -> None:
    """Assert that exactly one finding has the name, and that it has the status, the words and the remedy."""
    found = find_only(findings, name)
    assert found.status == status, found
    assert all(word in found.found for word in words), found
    assert found.remedy is not None, found
    assert remedy in found.remedy, found
