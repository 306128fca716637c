"""Can a run log to wandb? The key itself is never shown."""

from __future__ import annotations

import netrc
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from strands_rollout.doctor.finding import Finding, error, good, warning

_KEYS: Final = ("WANDB_API_KEY", "WANDB_KEY")  # the scripts take the first that is set
_SHORTEST_KEY: Final = 40  # wandb itself refuses a shorter one
_MODES: Final = ("online", "offline", "disabled", "shared", "dryrun", "run", "")
_COPY: Final = "copy the key again: export WANDB_API_KEY=..., without quotes or spaces in it"

_LOG_IN: Final = "export WANDB_API_KEY=..., or: wandb login; or, to upload later: export WANDB_MODE=offline"


def check_wandb(env: Mapping[str, str], *, installed: bool | None = None) -> list[Finding]:
    """Whether wandb is on, and could log in.

    Args:
        env: The run's environment; HOME or NETRC in it tells where `.netrc` is.
        installed: Whether the package is; None to look.
    """
    mode = env.get("WANDB_MODE", "")
    if mode not in _MODES:
        return [error("wandb", f"WANDB_MODE is {mode!r}", "export WANDB_MODE=online, offline or disabled")]
    malformed = [error("wandb", fault, _COPY) for name in _KEYS if (fault := _fault_of_key(name, env.get(name, "")))]
    if malformed:
        return malformed
    login = _login(env)
    if env.get("USE_WANDB") == "0":
        return [good("wandb", "off: USE_WANDB=0; runs are logged without it")]
    if env.get("USE_WANDB") == "1" and login is None:
        return [error("wandb", "USE_WANDB is 1, but there is no key and no login", _LOG_IN)]
    if mode == "disabled" or login is None:
        off = "WANDB_MODE=disabled" if mode == "disabled" else "no key and no login"
        return [good("wandb", f"off: {off}; runs are logged without it")]
    if not (find_spec("wandb") is not None if installed is None else installed):
        return [error("wandb", f"{login}, but wandb is not installed", "pip install 'strands-rollout[wandb]'")]
    if all(env.get(name) for name in _KEYS) and env[_KEYS[0]] != env[_KEYS[1]]:
        found = f"{' and '.join(_KEYS)} are both set, and differ; {_KEYS[0]} counts"
        return [warning("wandb", found, f"unset {_KEYS[1]}, its older name")]
    return [good("wandb", login)]


def _login(env: Mapping[str, str]) -> str | None:
    """How wandb would log in, in words; None if it would not."""
    if env.get("WANDB_MODE") in ("offline", "dryrun"):
        return f"WANDB_MODE={env['WANDB_MODE']}"
    named = next((name for name in _KEYS if env.get(name)), None)
    if named is not None:
        return f"on: {named} is set"
    host = urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        file = env.get("NETRC") or Path(env.get("HOME") or Path.home()) / ".netrc"
        known = netrc.netrc(file).authenticators(str(host))
    except (OSError, netrc.NetrcParseError):
        return None
    return f"logged in to {host} by ~/.netrc" if known else None


def _fault_of_key(name: str, key: str) -> str | None:
    if not key:
        return None
    if not re.fullmatch(r"[\w.-]+", key):  # a dash after the name of an own server, dots in a token
        return f"{name} has characters in it that no key has, such as quotes, spaces or a line break"
    if len(key) < _SHORTEST_KEY:
        return f"{name} has {len(key)} characters; expected {_SHORTEST_KEY} or more"
    return None
