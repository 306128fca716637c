"""The HTTP connection to an engine: an `httpx.AsyncClient` whose transport is aiohttp's.

Knows URLs, pools and time limits; nothing of `/generate`. With aiohttp below it, httpx's API costs a quarter
of what it costs with its own transport, at 64 concurrent requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import httpx

from strands_rollout.errors import ConfigError
from strands_rollout.sglang_transport import EngineClient, EngineTransport

WRITE_TIMEOUT_S: Final = 60.0
# Below the 5 s after which SGLang's server closes an idle connection: a request must not meet that close.
KEEPALIVE_EXPIRY_S: Final = 4.0


def create_client(
    base_url: str,
    *,
    max_connections: int = 1024,
    max_keepalive_connections: int | None = None,
    timeout: float | None = None,
    connect_timeout: float = 10.0,
    headers: Mapping[str, str] | None = None,
) -> httpx.AsyncClient:
    """Make the client that many models share; close it with `aclose()`.

    It may be made outside a running loop, and belongs to the loop of its first request. Proxies of the environment are
    not used: an engine is reached directly. Redirects are not followed. Generations pass httpx's layers by, as long as
    nothing was set that only httpx honours, such as event hooks; see `EngineClient.post_straight`.

    Args:
        base_url: `http://host:port`, with a path prefix if a gateway needs one. Without a scheme, http. User and
            password in it are sent as basic authentication and never logged.
        max_connections: Requests in flight at once; more wait for a free connection, without a time limit.
        max_keepalive_connections: Accepted for httpx's sake; aiohttp keeps every idle connection for 4 s.
        timeout: Seconds to wait for each read of an answer. None: a generation may take as long as it takes.
        connect_timeout: Seconds to open a connection.
        headers: Sent with every request, such as an authorization.

    Raises:
        ConfigError: The URL is not one of an HTTP server, or a number is out of range.
    """
    url = parse_base_url(base_url)
    numbers = {"max_connections": max_connections, "connect_timeout": connect_timeout, "timeout": timeout}
    for name, value in numbers.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value!r}; expected a number above 0")
    limits = httpx.Limits(
        max_connections=max_connections,
        max_keepalive_connections=max_keepalive_connections,
        keepalive_expiry=KEEPALIVE_EXPIRY_S,
    )
    return EngineClient(
        EngineTransport(limits, secure=url.scheme == "https"),
        base_url=url.copy_with(username=None, password=None),
        auth=(url.username, url.password) if url.userinfo else None,
        headers=dict(headers or {}),
        timeout=httpx.Timeout(connect=connect_timeout, read=timeout, write=WRITE_TIMEOUT_S, pool=None),
        trust_env=False,
    )


def parse_base_url(base_url: str) -> httpx.URL:
    """Return the URL with a scheme and without a trailing slash, or say what is wrong with it.

    Raises:
        ConfigError: It is not `http(s)://host[:port][/prefix]`.
    """
    text = base_url.strip() if isinstance(base_url, str) else ""
    expected = "expected http://host:port, as in http://127.0.0.1:30000"
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except httpx.InvalidURL as e:
        raise ConfigError(f"base_url can't be read as a URL ({e}); {expected}") from e
    shown = redacted(url)
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base_url is {shown!r}; {expected}")
    if url.query or url.fragment:
        raise ConfigError(f"base_url {shown!r} has a query or a fragment, which no engine has; {expected}")
    path = url.path.rstrip("/")
    if path.endswith("/generate"):
        raise ConfigError(f"base_url {shown!r} names the endpoint; leave '/generate' off: {expected}")
    return url.copy_with(path=path or "/")


def redacted(url: httpx.URL) -> str:
    """Write the URL for logs and messages: scheme, host, port and path only; never a user, password or query."""
    port = "" if url.port is None else f":{url.port}"
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}{port}{url.path.rstrip('/')}"
