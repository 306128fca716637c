"""What of this process's surroundings breaks runs: proxies, the limit of open files, too little memory."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from strands_rollout.doctor.finding import Finding, good, warning

_PROXIES: Final = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
FILES: Final = 4096
RAY_FILES: Final = 65_535
MEMORY_GB: Final = 32.0
_GB: Final = 1e9


def check_proxies(env: Mapping[str, str]) -> list[Finding]:
    """Whether a proxy stands between engines and router.

    This package reaches engines directly whatever is set, and so do slime's own rollouts; but slime's engines register
    with `requests` (slime/backends/sglang_utils/sglang_engine.py), which uses a proxy for all hosts not in no_proxy.
    """
    used = [name for name in _PROXIES if env.get(name)]
    if not used:
        return [good("proxies", "none is set")]
    excepted = {name.strip() for key in ("no_proxy", "NO_PROXY") for name in env.get(key, "").split(",")}
    hosts = ["127.0.0.1", *_own_addresses(env)]
    proxied = [host for host in hosts if host not in excepted]
    if "*" in excepted or not proxied:
        return [good("proxies", f"{', '.join(used)} set, and no_proxy has {', '.join(hosts)}")]
    found = (
        f"{', '.join(used)} set without no_proxy for {', '.join(proxied)}: slime's engines would ask the proxy for "
        "their router"
    )
    return [warning("proxies", found, f"export no_proxy=localhost,{','.join(hosts)}; export NO_PROXY=$no_proxy")]


def check_open_files(soft_limit: int | None = None) -> list[Finding]:
    """Whether hundreds of episodes can have their sockets and pipes.

    Args:
        soft_limit: None for that of this process.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft_limit is None else soft_limit
    if limit == resource.RLIM_INFINITY:
        return [good("open files", "no limit")]
    if limit < FILES:
        found = f"ulimit -n is {limit}; hundreds of episodes at once need {FILES} open files, Ray wants {RAY_FILES}"
        return [warning("open files", found, f"ulimit -n {RAY_FILES} before the run")]
    return [good("open files", f"ulimit -n is {limit}" + (f"; Ray wants {RAY_FILES}" if limit < RAY_FILES else ""))]


def check_memory(total_gb: float | None = None) -> list[Finding]:
    """Whether there is memory for a model's weights.

    Args:
        total_gb: None for this machine's, or what its container may use.
    """
    total_gb = _memory_gb() if total_gb is None else total_gb
    if total_gb < MEMORY_GB:
        found = f"{total_gb:.0f} GB; to convert Qwen3-8B its weights, 16 GB, are read into memory"
        return [warning("memory", found, f"use a machine, or give the container, {MEMORY_GB:g} GB or more for that")]
    return [good("memory", f"{total_gb:.0f} GB")]


def _memory_gb() -> float:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total / _GB


def _own_addresses(env: Mapping[str, str]) -> list[str]:
    """The address at which slime's router is reached on this machine, as slime finds it (slime/utils/http_utils.py)."""
    if env.get("SLIME_HOST_IP"):
        return [env["SLIME_HOST_IP"]]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel picks the address that it would send from
        address = str(probe.getsockname()[0])
        return [] if address.startswith("127.") else [address]
    return []
