"""The HTTP connection to an engine: an `httpx.AsyncClient` whose transport is aiohttp's.

Knows URLs, pools, time limits and sockets; nothing of `/generate`. With aiohttp below it, httpx's API costs a quarter
of what it costs with its own transport, at 64 concurrent requests.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from strands_rollout.errors import ConfigError

WRITE_TIMEOUT_S: Final = 60.0
# Below the 5 s after which SGLang's server closes an idle connection: a request must not meet that close.
KEEPALIVE_EXPIRY_S: Final = 4.0
# A peer that lost power never closes its socket: probes end a wait that has no time limit after about two minutes.
_KEEPALIVE_PROBES: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


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
    not used: an engine is reached directly. Redirects are not followed.

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
    return httpx.AsyncClient(
        base_url=url.copy_with(username=None, password=None),
        auth=(url.username, url.password) if url.userinfo else None,
        headers=dict(headers or {}),
        timeout=httpx.Timeout(connect=connect_timeout, read=timeout, write=WRITE_TIMEOUT_S, pool=None),
        transport=_transport(limits, secure=url.scheme == "https"),
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


def _transport(limits: httpx.Limits, *, secure: bool) -> AiohttpTransport:
    # Reading the certificates takes about 30 ms: only for a URL that needs them.
    transport = AiohttpTransport(limits=limits, verify=secure, trust_env=True)

    def session() -> aiohttp.ClientSession:
        """Called by the first request, in the loop that owns the sockets from then on."""
        connector = aiohttp.TCPConnector(
            limit=limits.max_connections or 0,
            keepalive_timeout=limits.keepalive_expiry,
            ssl=transport.ssl_context,
            socket_factory=_open_socket,
        )
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    transport.client = session
    return transport


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_PROBES.items():
        if hasattr(socket, name):  # macOS and Windows have some of them only
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened
