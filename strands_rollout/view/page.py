"""The page: one HTML file with its styles, its script and its data, that asks the network for nothing.

Knows how the parts are put together and how data is kept from being markup. The script may run by its hash alone, and
what a dump holds enters the page as JSON with `<` escaped, and as base64.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

import orjson

from strands_rollout.view.dump_view import DumpView

_SCRIPTS: Final = ("data.js", "list.js", "tokens.js", "talk.js", "timeline.js", "sample.js", "groups.js", "main.js")
_PLACE: Final = re.compile(r"\{\{(\w+)\}\}")


def write_page(view: DumpView, title: str) -> str:
    """A page that holds all of the dump."""
    details = (
        f'<script type="text/plain" id="d{position}">{base64.b64encode(detail).decode("ascii")}</script>'
        for position, detail in enumerate(view.details)
    )
    return _page(view.index(title, live=False), "\n".join(details))


def live_page(title: str) -> str:
    """A page that asks the server which sent it for rows and details."""
    return _page(DumpView().index(title, live=True), "")


def _page(index: Mapping[str, Any], details: str) -> str:
    style, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    parts = {
        "policy": _policy(style, script, live=bool(index["live"])),
        "style": style,
        "index": escaped_json(index),
        "details": details,
        "script": script,
    }
    return _PLACE.sub(lambda place: parts[place[1]], _asset("page.html"))


def escaped_json(value: Any) -> str:  # noqa: ANN401 - any value of JSON
    """JSON that ends no script element, whatever its texts hold."""
    text = orjson.dumps(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(style: str, script: str, *, live: bool) -> str:
    allowed = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {source}" for name, source in allowed.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _asset(name: str) -> str:
    return (files("strands_rollout.view") / "assets" / name).read_text(encoding="utf-8")
