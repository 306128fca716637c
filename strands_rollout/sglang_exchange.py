"""One attempt at a generation: a POST and its answer's JSON, or what went wrong with it.

Knows httpx's and aiohttp's errors, so that the client above need not; never tries again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import aiohttp
import httpx

from strands_rollout.errors import ConfigError
from strands_rollout.generation import NotJsonError, load_json
from strands_rollout.sglang_retry import Fault, FaultKind, fault_of_status
from strands_rollout.sglang_transport import EngineClient, StraightResponse

JSON_HEADERS: Final = {"content-type": "application/json"}
# aiohttp's transport lets some of its own errors through (an answer that isn't HTTP), and calls a refused connection a
# ConnectTimeout: kinds are told apart by when they happen, not by their class.
CONNECTION_ERRORS: Final = (httpx.TransportError, aiohttp.ClientError)
_READ_TIMEOUTS: Final = (httpx.ReadTimeout, aiohttp.SocketTimeoutError)
_PATH: Final = "/generate"


async def exchange(
    http: httpx.AsyncClient, body: bytes, *, headers: Mapping[str, str] | None, limits: httpx.Timeout, url: str
) -> object:
    """POST this body to `/generate`; return the decoded JSON of a 200, or the `Fault` that may be tried again.

    Raises:
        EngineRejectedError: The engine refuses the request.
        ConfigError: The request can't be sent as it is, such as a header with a line break.
    """
    slow = Fault(FaultKind.SLOW, f"no answer within the read limit of {limits.read} s")
    try:
        response = await _post(http, body, {**JSON_HEADERS, **(headers or {})}, limits)
    except _READ_TIMEOUTS:
        return slow
    except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, ValueError) as e:  # aiohttp: a header's ValueError
        raise ConfigError(f"the request can't be sent to {url}: {e}") from e
    except CONNECTION_ERRORS as e:
        return Fault(FaultKind.UNREACHABLE, _words(e))
    try:
        content = await response.aread()
    except _READ_TIMEOUTS:
        return slow
    except (*CONNECTION_ERRORS, httpx.DecodingError) as e:
        return Fault(FaultKind.BAD_BODY, f"HTTP {response.status_code} whose body ended early ({_words(e)})")
    finally:
        await response.aclose()
    if response.status_code != 200:
        return fault_of_status(response.status_code, content, response.headers, url=url)
    try:
        return load_json(content)
    except NotJsonError as e:
        got = f"{content[:80]!r} ({len(content)} bytes)"
        return Fault(FaultKind.BAD_BODY, f"HTTP 200 with a body that is not JSON: {got}: {e}")


async def _post(
    http: httpx.AsyncClient, body: bytes, headers: Mapping[str, str], limits: httpx.Timeout
) -> httpx.Response | StraightResponse:
    """The response to this body, not yet read; without httpx's layers where they would change nothing."""
    straight = await http.post_straight(_PATH, body, headers, limits) if isinstance(http, EngineClient) else None
    if straight is not None:
        return straight
    request = http.build_request("POST", _PATH, content=body, headers=headers, timeout=limits)
    return await http.send(request, stream=True)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
