"""What an engine says of itself: context length, model, weight version.

Knows SGLang's info endpoints under their new and old names; a router has none of them, and that is not an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import httpx

from strands_rollout.errors import EngineUnavailableError
from strands_rollout.generation import NotJsonError, load_json

INFO_TIMEOUT_S: Final = 10.0
_SERVER_PATHS: Final = ("/server_info", "/get_server_info")
_MODEL_PATHS: Final = ("/model_info", "/get_model_info")
_CARD_PATH: Final = "/v1/models"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts of one engine; None where it does not tell.

    Attributes:
        context_length: Tokens of prompt and answer together.
        model_path: Folder or name of the model that it serves.
        weight_version: Of the weights that it holds now.
        raw: Everything that was answered, merged.
    """

    context_length: int | None = None
    model_path: str | None = None
    weight_version: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)


async def fetch_server_info(http: httpx.AsyncClient, *, url: str) -> ServerInfo:
    """Ask an engine for its facts.

    `/server_info` holds the context length only where the server was started with one; `/v1/models` (max_model_len)
    holds the model's own.

    Raises:
        EngineUnavailableError: Nothing answers at this URL.
    """
    raw: dict[str, Any] = {}
    for paths in (_SERVER_PATHS, _MODEL_PATHS):
        for path in paths:
            part = await _get(http, path, url=url)
            if part:
                raw |= part
                break
    context_length = _positive(raw.get("context_length"))
    if context_length is None:
        cards = (await _get(http, _CARD_PATH, url=url)).get("data")
        card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        context_length = _positive(card.get("max_model_len"))
    return ServerInfo(
        context_length=context_length,
        model_path=_text(raw.get("model_path")),
        weight_version=_text(raw.get("weight_version")),
        raw=raw,
    )


async def _get(http: httpx.AsyncClient, path: str, *, url: str) -> dict[str, Any]:
    """The JSON object at a path; empty if there is none."""
    try:
        response = await http.get(path, timeout=INFO_TIMEOUT_S)
    except (httpx.TransportError, aiohttp.ClientError) as e:
        raise EngineUnavailableError(
            f"no answer from {url}{path}: {e or type(e).__name__}. Check that it is up."
        ) from e
    try:
        answer = load_json(response.content) if response.status_code == 200 else {}
    except NotJsonError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
