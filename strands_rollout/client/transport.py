"""HTTP to an engine: an `httpx.AsyncClient` on an aiohttp session, and one POST that returns JSON or a `Fault`.

At 64 concurrent requests, httpx's API costs a quarter as much on aiohttp as on httpx's own transport.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from strands_rollout import errors
from strands_rollout.client.generate_api import NotJsonError, load_json
from strands_rollout.client.retry import Fault, FaultKind
from strands_rollout.files.json_codec import Json

_BUSY_STATUSES: Final = frozenset({429, 502, 503, 504})
_NO_WORKERS: Final = (b"model_not_found", b"no_available_workers")
# error codes with status 500 from sglang-router and its successor smg: a worker is unreachable or has closed the
# connection. The router may send every request to this worker until slime removes it from the router's list
_WORKER_LOST: Final = ("call_upstream_connection_failed", "call_upstream_request_error")
_OVERLONG: Final = re.compile(r"(?:longer than|exceeds?)\b.{0,60}?\b(?:context|allowed) length\D{0,12}(\d+)?", re.I)


def is_busy(status: int, body: bytes) -> bool:
    """Return whether an answer comes from a busy engine, or from a router that has no workers at the moment."""
    return status in _BUSY_STATUSES or (status == 404 and any(code in body for code in _NO_WORKERS))


def fault_of_status(
    status: int, body: bytes, headers: httpx.Headers, *, url: str, endpoint: str = "/generate"
) -> Fault:
    """Return the `Fault` of an answer with a status other than 200 if the request may be retried; otherwise raise.

    Raises:
        EngineOverlongError: The engine answered that the request is longer than its context.
        EngineRejectedError: The engine refused the request, and would refuse it again.
    """
    try:
        content: Json = load_json(body)
    except NotJsonError:
        content = body.decode(errors="replace")
    detail = _error_detail(content)
    message = f"HTTP {status}: {detail}" if detail else f"HTTP {status}"
    if is_busy(status, body):
        return Fault(FaultKind.BUSY, message, _retry_after_s(headers))
    if status >= 500:
        error = content.get("error") if isinstance(content, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        return Fault(FaultKind.UNREACHABLE if code in _WORKER_LOST else FaultKind.SERVER_ERROR, message)
    overlong = _OVERLONG.search(detail) if status in (400, 413) else None
    if overlong:
        limit = int(overlong[1]) if overlong[1] else None
        raise errors.EngineOverlongError(
            f"{url}{endpoint} refused the request as too long: {detail}", status_code=status, context_length=limit
        )
    raise errors.EngineRejectedError(f"{url}{endpoint} refused the request with {message}", status_code=status)


def _error_detail(content: Json) -> str:
    for key in ("error", "detail", "message"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    text = " ".join((content if isinstance(content, str) else repr(content)).split())
    return text if len(text) <= 500 else f"{text[:500]}..."


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """Parse the seconds of a Retry-After header; dates, which inference servers rarely send, are ignored."""
    text = headers.get("retry-after", "")
    return float(text) if re.fullmatch(r"\d{1,9}(\.\d+)?", text) else None


# a peer that lost power never closes its socket: without a read timeout, probes end the wait after about two minutes
_KEEPALIVE_PROBES: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class EngineTransport(AiohttpTransport):  # type: ignore[misc] # the library has no types
    """An httpx transport on an aiohttp session; the session is made by the first request, for its event loop."""

    def __init__(self, limits: httpx.Limits, *, secure: bool) -> None:
        # without TLS, `verify` is False, since loading certificates would take about 30 ms
        super().__init__(limits=limits, verify=secure, trust_env=True, client=self.session)
        self._session: aiohttp.ClientSession | None = None
        self._sockets: list[socket.socket] = []
        self._epoch = 0

    @property
    def connection_epoch(self) -> int:
        """A number that changes once all connections have been closed: another server may answer from then on."""
        return self._epoch + (not any(opened.fileno() >= 0 for opened in self._sockets))

    def _open_socket(self, address: tuple[Any, ...]) -> socket.socket:
        self._epoch = self.connection_epoch
        family, kind, protocol, _, _ = address
        opened = socket.socket(family=family, type=kind, proto=protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE_PROBES.items():
            if hasattr(socket, name):  # macOS and Windows have only some of the options
                opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sockets = [*(known for known in self._sockets if known.fileno() >= 0), opened]
        return opened

    def session(self) -> aiohttp.ClientSession:
        """Return the session, made on the running loop at the first call."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self.limits.max_connections or 0,
                keepalive_timeout=self.limits.keepalive_expiry,
                ssl=self.ssl_context,
                socket_factory=self._open_socket,
            )
            # httpx decodes bodies: its Accept-Encoding header lists the encodings that it supports
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        return self._session

    async def aclose(self) -> None:
        """Close the session and its connections."""
        if self._session is not None:
            await self._session.close()


class DirectResponse:
    """An answer to `EngineClient.post_direct`, with the part of `httpx.Response` that `post_generate` uses."""

    __slots__ = ("_response", "status_code")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status_code: Final = response.status

    @property
    def headers(self) -> httpx.Headers:
        """The response's headers."""
        return httpx.Headers(list(self._response.raw_headers))

    async def aread(self) -> bytes:
        """Read and decode the body; this frees the connection, or closes it if the body can't be read."""
        content = await self._response.read()
        if "Content-Encoding" not in self._response.headers:
            return content
        return httpx.Response(self.status_code, headers=self.headers, content=content).content

    async def aclose(self) -> None:
        """Close the connection, unless it was freed when the body was read."""
        self._response.close()


@dataclass(frozen=True, slots=True)
class _Route:
    """The URL and headers that httpx would use for a POST to a path, cached for the client's current settings."""

    settings: tuple[object, ...]
    url: str
    headers: dict[str, str]
    authorization: str | None


class EngineClient(httpx.AsyncClient):
    """An httpx client with a direct POST through its aiohttp session, unless its settings need httpx's layers.

    Through httpx's layers, an episode of 20 tool turns takes 31% more of the client's CPU time; see
    docs/performance.md.
    """

    def __init__(
        self, url: httpx.URL, transport: EngineTransport, headers: dict[str, str], timeout: httpx.Timeout
    ) -> None:
        super().__init__(
            transport=transport,
            base_url=url.copy_with(username=None, password=None),
            auth=(url.username, url.password) if url.userinfo else None,
            headers=headers,
            timeout=timeout,
            trust_env=False,
        )
        self._direct_transport: Final = transport
        self._route: _Route | None = None
        self._timeouts: tuple[httpx.Timeout, aiohttp.ClientTimeout] | None = None

    @property
    def connection_epoch(self) -> int:
        """See `EngineTransport.connection_epoch`."""
        return self._direct_transport.connection_epoch

    async def post_direct(
        self, path: str, body: bytes, headers: Mapping[str, str], timeouts: httpx.Timeout
    ) -> DirectResponse | None:
        """POST as httpx would, but without its layers.

        Returns:
            The response. None, without sending anything, if the client is closed or uses a feature that only httpx
            supports. Such features are hooks, cookies, parameters, redirects, authentication other than basic, and a
            transport wrapped by a tracer.

        Raises:
            ValueError: A header can't be sent.
            aiohttp.ClientError: There was no connection or no valid answer, or the read timeout was reached.
        """
        route = self._route_to(path)
        if route is None:
            return None
        sent_headers = dict(route.headers)
        for name, value in headers.items():
            if not (isinstance(value, str) and name.isascii() and value.isascii()):
                raise ValueError(_header_fault(name, value))
            sent_headers[name.lower()] = value
        if route.authorization is not None:
            sent_headers["authorization"] = route.authorization
        if self._timeouts is None or self._timeouts[0] is not timeouts:
            own = aiohttp.ClientTimeout(sock_connect=timeouts.connect, sock_read=timeouts.read, connect=timeouts.pool)
            self._timeouts = (timeouts, own)
        answer = await self._direct_transport.session().post(
            route.url, data=body, headers=sent_headers, timeout=self._timeouts[1], allow_redirects=False
        )
        response = DirectResponse(answer)
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
            or "handle_async_request" in vars(self._direct_transport)  # a tracer's wrapper
        ):
            return None
        settings = (path, self.base_url, self.auth, self.headers.raw)
        if self._route is not None and self._route.settings == settings:
            return self._route
        self._route = None
        if self.base_url.userinfo or not (self.auth is None or type(self.auth) is httpx.BasicAuth):
            return None
        request = self.build_request("POST", path)
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        authorization = None
        if self.auth is not None:
            authorization = next(self.auth.auth_flow(request)).headers["Authorization"]
        self._route = _Route(settings, str(request.url), headers, authorization)
        return self._route


def _header_fault(name: str, value: object) -> str:
    """Return why a header can't be sent, without its value, which may be a secret."""
    if not isinstance(value, str):
        return f"the value of the header {name!r} is a {type(value).__name__}; expected a str"
    which = f"the value of the header {name!r}" if name.isascii() else f"the header's name {name!r}"
    return f"{which} has a character outside ASCII; expected only ASCII characters"


WRITE_TIMEOUT_S: Final = 60.0
# SGLang's server closes a connection after 5 idle seconds. Closing the connection earlier here keeps new requests off a
# connection that the server is closing
_KEEPALIVE_EXPIRY_S: Final = 4.0


def create_client(
    base_url: str,
    *,
    max_connections: int = 1024,
    max_keepalive_connections: int | None = None,
    timeout: float | None = None,
    connect_timeout: float = 10.0,
    headers: Mapping[str, str] | None = None,
) -> httpx.AsyncClient:
    """Make an httpx client for an engine. Many models can share the client; close it with `aclose()`.

    No event loop needs to run when the client is made; the client belongs to the loop of its first request. It ignores
    proxies in the environment and does not follow redirects. Generations bypass httpx's layers if the client's settings
    allow that; see `EngineClient.post_direct`.

    Args:
        base_url: `http://host:port`, with a path prefix if a gateway needs one; the default scheme is http. A user and
            password in the URL are sent as basic authentication and never logged.
        max_connections: Maximum requests in flight; further requests wait for a free connection, without a time limit.
        max_keepalive_connections: Has no effect, since aiohttp keeps every idle connection for 4 s; accepted for
            compatibility with httpx.
        timeout: Seconds to wait for each read of an answer; None for no limit, which generations need.
        connect_timeout: Seconds to wait for a connection to open.
        headers: Headers of every request, for example for authorization.

    Raises:
        ConfigError: `base_url` is not the URL of an HTTP server, or a number is out of range.
    """
    url = parse_base_url(base_url)
    numbers = {"max_connections": max_connections, "connect_timeout": connect_timeout, "timeout": timeout}
    for name, value in numbers.items():
        if value is not None and value <= 0:
            raise errors.ConfigError(f"{name} is {value!r}; expected a number above 0")
    limits = httpx.Limits(
        max_connections=max_connections,
        max_keepalive_connections=max_keepalive_connections,
        keepalive_expiry=_KEEPALIVE_EXPIRY_S,
    )
    timeouts = httpx.Timeout(connect=connect_timeout, read=timeout, write=WRITE_TIMEOUT_S, pool=None)
    return EngineClient(url, EngineTransport(limits, secure=url.scheme == "https"), dict(headers or {}), timeouts)


def parse_base_url(base_url: str) -> httpx.URL:
    """Parse a URL; add the scheme http if it has none, and remove a trailing slash.

    Raises:
        ConfigError: The URL is not of the form `http(s)://host[:port][/prefix]`, or the prefix ends with `/generate`.
    """
    text = base_url.strip() if isinstance(base_url, str) else ""
    expected = "expected http://host:port, as in http://127.0.0.1:30000"
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except httpx.InvalidURL as e:
        raise errors.ConfigError(f"base_url can't be read as a URL ({e}); {expected}") from e
    shown = redacted(url)
    if url.scheme not in ("http", "https") or not url.host:
        raise errors.ConfigError(f"base_url is {shown!r}; {expected}")
    if url.query or url.fragment:
        raise errors.ConfigError(f"base_url {shown!r} has a query or a fragment; {expected}")
    path = url.path.rstrip("/")
    if path.endswith("/generate"):
        raise errors.ConfigError(f"base_url {shown!r} names the endpoint; remove '/generate': {expected}")
    return url.copy_with(path=path or "/")


def redacted(url: httpx.URL) -> str:
    """Format a URL for logs and messages: scheme, host, port and path only; never a user, password or query."""
    port = "" if url.port is None else f":{url.port}"
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}{port}{url.path.rstrip('/')}"


JSON_HEADERS: Final = {"content-type": "application/json"}
# The aiohttp transport lets some aiohttp errors through (an answer that is not HTTP), and reports a refused connection
# as a ConnectTimeout. Connection errors are therefore classified by when they occur, not by their class.
CONNECTION_ERRORS: Final = (httpx.TransportError, aiohttp.ClientError)
READ_TIMEOUTS: Final = (httpx.ReadTimeout, aiohttp.SocketTimeoutError)
_PATH: Final = "/generate"


async def post_generate(
    http: httpx.AsyncClient, body: bytes, *, headers: Mapping[str, str] | None, timeouts: httpx.Timeout, url: str
) -> object:
    """POST a body to `/generate`; return an answer's decoded JSON (status 200), or a `Fault` that may be retried.

    Raises:
        EngineOverlongError: The request does not fit the engine's context.
        EngineRejectedError: The engine refused the request.
        ConfigError: The request can't be sent, for example because a header contains a line break.
    """
    try:
        sent_headers = {**JSON_HEADERS, **(headers or {})}
        direct = isinstance(http, EngineClient) and await http.post_direct(_PATH, body, sent_headers, timeouts)
        # httpx's layers are used only if the client's settings need them
        response: httpx.Response | DirectResponse = direct or await http.send(
            http.build_request("POST", _PATH, content=body, headers=sent_headers, timeout=timeouts), stream=True
        )
    except READ_TIMEOUTS:
        return _timeout_fault(timeouts)
    # ValueError: a header can't be written, for example because of a line break
    except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, ValueError) as e:
        raise errors.ConfigError(f"the request can't be sent to {url}: {e}") from e
    except CONNECTION_ERRORS as e:
        return Fault(FaultKind.UNREACHABLE, _error_text(e))
    try:
        content = await response.aread()
    except READ_TIMEOUTS:
        return _timeout_fault(timeouts)
    except (*CONNECTION_ERRORS, httpx.DecodingError) as e:
        # a 5xx may be retried more often than BAD_BODY allows, even if its body could not be read
        kind = FaultKind.BAD_BODY if response.status_code < 500 else FaultKind.UNREACHABLE
        return Fault(kind, f"HTTP {response.status_code} whose body ended early ({_error_text(e)})")
    finally:
        await response.aclose()
    if response.status_code != 200:
        return fault_of_status(response.status_code, content, response.headers, url=url)
    try:
        return load_json(content)
    except NotJsonError as e:
        got = f"{content[:80]!r} ({len(content)} bytes)"
        return Fault(FaultKind.BAD_BODY, f"HTTP 200 with a body that is not valid JSON: {got}: {e}")


def _timeout_fault(timeouts: httpx.Timeout) -> Fault:
    return Fault(FaultKind.SLOW, f"no answer within the read timeout of {timeouts.read} s")


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
