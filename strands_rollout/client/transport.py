"""The way to an engine below httpx: aiohttp's session, and an httpx client that can be passed by on the way to it.

Knows the settings of httpx's client and aiohttp's session; nothing of `/generate`. httpx's layers cost more CPU per
request than aiohttp's own work.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

# A peer that lost power never closes its socket: probes end a wait that has no time limit after about two minutes.
_KEEPALIVE_PROBES: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class EngineTransport(AiohttpTransport):  # type: ignore[misc] # the library has no types
    """aiohttp's transport; its session is made by the first request, in the loop that owns the sockets from then on.

    Args:
        limits: Of the pool.
        secure: Whether certificates are read, which takes about 30 ms.
    """

    def __init__(self, limits: httpx.Limits, *, secure: bool) -> None:
        super().__init__(limits=limits, verify=secure, trust_env=True, client=self.session)
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """The one session, on the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self.limits.max_connections or 0,
                keepalive_timeout=self.limits.keepalive_expiry,
                ssl=self.ssl_context,
                socket_factory=_open_socket,
            )
            # bodies are decoded by httpx, which has told the engine what it can decode
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        return self._session

    async def aclose(self) -> None:
        """Close the session and its connections."""
        if self._session is not None:
            await self._session.close()


class StraightResponse:
    """What `EngineClient.post_straight` gives: as much of an `httpx.Response` as an exchange reads."""

    __slots__ = ("_response", "status_code")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status_code: Final = response.status

    @property
    def headers(self) -> httpx.Headers:
        """The response's headers."""
        return httpx.Headers(list(self._response.raw_headers))

    async def aread(self) -> bytes:
        """The decoded body; the connection is free again, or closed where the body could not be read.

        Raises:
            aiohttp.ClientError: The body ended early, or took too long.
            httpx.DecodingError: It is not compressed as its header says.
        """
        content = await self._response.read()
        if "Content-Encoding" not in self._response.headers:
            return content
        return httpx.Response(self.status_code, headers=self.headers, content=content).content

    async def aclose(self) -> None:
        """Close the connection, unless the body was read, which has freed it."""
        self._response.close()


@dataclass(frozen=True, slots=True)
class _Route:
    """What a client's settings mean for a POST to a path: the same as httpx makes of them."""

    settings: tuple[object, ...]
    url: str
    headers: dict[str, str]
    authorization: str | None


class EngineClient(httpx.AsyncClient):
    """An httpx client whose POSTs can go straight to the session below it, as long as only plain settings are in force.

    Args:
        transport: The way to the session.
        settings: Of `httpx.AsyncClient`.
    """

    def __init__(self, transport: EngineTransport, **settings: Any) -> None:  # noqa: ANN401 - httpx's own
        super().__init__(transport=transport, **settings)
        self._straight = transport
        self._route: _Route | None = None
        self._limits: tuple[httpx.Timeout, aiohttp.ClientTimeout] | None = None

    async def post_straight(
        self, path: str, body: bytes, headers: Mapping[str, str], limits: httpx.Timeout
    ) -> StraightResponse | None:
        """POST as httpx would; None, and nothing was sent, where something was set that only httpx honours.

        That is: hooks, cookies, parameters, redirects, an authentication other than a password, a transport that is
        watched, and a client that was closed.

        Raises:
            aiohttp.ClientError: There is no answer.
            ValueError: A header can't be sent.
        """
        route = self._route_to(path)
        if route is None:
            return None
        sent_headers = dict(route.headers)
        for name, value in headers.items():
            if not (isinstance(value, str) and name.isascii() and value.isascii()):
                raise ValueError(f"the header {name!r} is a {type(value).__name__}; expected a str of ASCII characters")
            sent_headers[name.lower()] = value
        if route.authorization is not None:
            sent_headers["authorization"] = route.authorization
        session, limit = self._straight.session(), self._session_limits(limits)
        answer = await session.post(route.url, data=body, headers=sent_headers, timeout=limit, allow_redirects=False)
        response = StraightResponse(answer)
        if "Set-Cookie" in answer.headers:
            request = self.build_request("POST", path)
            self.cookies.extract_cookies(httpx.Response(answer.status, headers=response.headers, request=request))
        return response

    def _route_to(self, path: str) -> _Route | None:
        if (
            self.is_closed
            or any(self.event_hooks.values())
            or self.cookies
            or self.params
            or self.follow_redirects
            or "handle_async_request" in vars(self._straight)  # a tracer's wrapper
        ):
            return None
        settings = (path, self.base_url, self.auth, self.headers.raw)
        if self._route is None or self._route.settings != settings:
            self._route = self._new_route(path, settings)
        return self._route

    def _new_route(self, path: str, settings: tuple[object, ...]) -> _Route | None:
        if self.base_url.userinfo or not (self.auth is None or type(self.auth) is httpx.BasicAuth):
            return None
        request = self.build_request("POST", path)
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        if self.auth is not None:
            request = next(self.auth.auth_flow(request))
        authorization = None if self.auth is None else request.headers["Authorization"]
        return _Route(settings, str(request.url), headers, authorization)

    def _session_limits(self, limits: httpx.Timeout) -> aiohttp.ClientTimeout:
        if self._limits is None or self._limits[0] is not limits:
            own = aiohttp.ClientTimeout(sock_connect=limits.connect, sock_read=limits.read, connect=limits.pool)
            self._limits = (limits, own)
        return self._limits[1]


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_PROBES.items():
        if hasattr(socket, name):  # macOS and Windows have some of them only
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened
