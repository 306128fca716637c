"""Is Ray here, and does something listen where RAY_ADDRESS says that a cluster is?"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

from strands_rollout.doctor.finding import Finding, error, good, lacking
from strands_rollout.doctor.python_packages import installed_version

LIMIT_S: Final = 3.0
_DASHBOARD_PORT: Final = "8265"
_INSTALL: Final = "work in the image slimerl/slime, or: pip install 'ray[default]'"
_UNSET: Final = "unset RAY_ADDRESS to have a Ray started here; or, there: ray start --head --dashboard-host=0.0.0.0"


def check_ray(
    env: Mapping[str, str], *, training: bool = False, installed: bool | None = None, limit_s: float = LIMIT_S
) -> list[Finding]:
    """Whether a job could be given to Ray.

    Args:
        env: The run's environment.
        training: Whether a run is to start, which needs it.
        installed: Whether the package is; None to look.
        limit_s: Seconds that a cluster gets to accept a connection.
    """
    command = shutil.which("ray", path=env.get("PATH", ""))
    if not (find_spec("ray") is not None if installed is None else installed) and command is None:
        findings = [lacking("ray", "not installed: slime's training runs on it", _INSTALL, training=training)]
    elif command is None:
        found = "installed, but no `ray` on the PATH, which starts it"
        findings = [lacking("ray", found, "activate its environment", training=training)]
    else:
        findings = [good("ray", f"Ray {installed_version('ray') or ''} with {command}")]
    address = env.get("RAY_ADDRESS", "")
    return [*findings, *(_check_address(address, env, limit_s) if address not in ("", "auto", "local") else [])]


def _check_address(address: str, env: Mapping[str, str], limit_s: float) -> list[Finding]:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port or int(env.get("RAY_DASHBOARD_PORT") or _DASHBOARD_PORT)
    except ValueError:
        host, port = None, 0
    if not host:
        expected = "expected http://HOST:8265, ray://HOST:10001, HOST:6379 or auto"
        return [error("ray cluster", f"RAY_ADDRESS is {_shown(address)!r}; {expected}", _UNSET)]
    try:
        socket.create_connection((host, port), timeout=limit_s).close()
    except OSError as e:
        found = f"RAY_ADDRESS is {_shown(address)}, but nothing listens at {host}:{port}: {e}"
        return [error("ray cluster", found, _UNSET)]
    return [good("ray cluster", f"something listens at {host}:{port}, which RAY_ADDRESS names")]


def _shown(address: str) -> str:
    """The address, without user, password and query."""
    if not {"@", "?"} & set(address):
        return address
    import httpx

    from strands_rollout.sglang_connection import redacted

    try:
        url = redacted(httpx.URL(address if "://" in address else f"//{address}"))
    except httpx.InvalidURL:
        return "(not shown)"
    return url.removeprefix("://")
