"""HTTP to an engine: an `httpx.AsyncClient` on aiohttp's session, and one POST with its JSON answer or its `Fault`.

With aiohttp below it, httpx's API costs a quarter of what it costs with its own transport, at 64 concurrent requests.
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
# codes of sglang-router's and smg's 500 for a worker that can't be reached, or that closed the connection; while slime
# has not taken it out of their list, it may be the one that each request is sent to
_WORKER_LOST: Final = ("call_upstream_connection_failed", "call_upstream_request_error")
_OVERLONG: Final = re.compile(r"(?:longer than|exceeds?)\b.{0,60}?\b(?:context|allowed) length\D{0,12}(\d+)?", re.I)


def is_busy(status: int, body: bytes) -> bool:
    """Return True if an answer says that the engine is busy, or that its router has no worker, which may pass."""
    return status in _BUSY_STATUSES or (status == 404 and any(code in body for code in _NO_WORKERS))


def fault_of_status(
    status: int, body: bytes, headers: httpx.Headers, *, url: str, endpoint: str = "/generate"
) -> Fault:
    """Read an answer that is not a 200.

    Raises:
        EngineOverlongError: The engine says that the request is longer than its context.
        EngineRejectedError: The request is refused, and would be again.
    """
    try:
        found: Json = load_json(body)
    except NotJsonError:
        found = body.decode(errors="replace")
    message = _message_of(found)
    words = f"HTTP {status}: {message}" if message else f"HTTP {status}"
    if is_busy(status, body):
        return Fault(FaultKind.BUSY, words, _retry_after_s(headers))
    if status >= 500:
        error = found.get("error") if isinstance(found, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        return Fault(FaultKind.UNREACHABLE if code in _WORKER_LOST else FaultKind.SERVER_ERROR, words)
    overlong = _OVERLONG.search(message) if status in (400, 413) else None
    if overlong:
        limit = int(overlong[1]) if overlong[1] else None
        raise errors.EngineOverlongError(
            f"{url}{endpoint} refused the request as too long: {message}", status_code=status, context_length=limit
        )
    raise errors.EngineRejectedError(f"{url}{endpoint} refused the request with {words}", status_code=status)


def _message_of(found: Json) -> str:
    """The human part of an error body, on one line of at most 500 characters."""
    for key in ("error", "detail", "message"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = " ".join((found if isinstance(found, str) else repr(found)).split())
    return text if len(text) <= 500 else f"{text[:500]}..."


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """Seconds of a Retry-After header; its date form is rare among inference servers and ignored."""
    text = headers.get("retry-after", "")
    return float(text) if re.fullmatch(r"\d{1,9}(\.\d+)?", text) else None


# A peer that lost power never closes its socket: probes end a wait that has no time limit after about two minutes.
_KEEPALIVE_PROBES: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class EngineTransport(AiohttpTransport):  # type: ignore[misc] # the library has no types
    """aiohttp's transport; its session is made by the first request, in the loop that owns the sockets from then on."""

    def __init__(self, limits: httpx.Limits, *, secure: bool) -> None:
        # not secure: certificates are not read, which takes about 30 ms
        super().__init__(limits=limits, verify=secure, trust_env=True, client=self.session)
        self._session: aiohttp.ClientSession | None = None
        self._sockets: list[socket.socket] = []
        self._eras = 0

    @property
    def era(self) -> int:
        """Changes where no connection of before is left, so that another server may answer by now."""
        return self._eras + (not any(opened.fileno() >= 0 for opened in self._sockets))

    def _open_socket(self, address: tuple[Any, ...]) -> socket.socket:
        self._eras = self.era
        family, kind, protocol, _, _ = address
        opened = socket.socket(family=family, type=kind, proto=protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE_PROBES.items():
            if hasattr(socket, name):  # macOS and Windows have some of them only
                opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sockets = [*(one for one in self._sockets if one.fileno() >= 0), opened]
        return opened

    def session(self) -> aiohttp.ClientSession:
        """The one session, on the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self.limits.max_connections or 0,
                keepalive_timeout=self.limits.keepalive_expiry,
                ssl=self.ssl_context,
                socket_factory=self._open_socket,
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
    """An answer to `EngineClient.post_straight`: as much of an `httpx.Response` as an exchange reads."""

    __slots__ = ("_response", "status_code")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status_code: Final = response.status

    @property
    def headers(self) -> httpx.Headers:
        """The response's headers."""
        return httpx.Headers(list(self._response.raw_headers))

    async def aread(self) -> bytes:
        """The decoded body; the connection is free again, or closed where the body could not be read."""
        content = await self._response.read()
        if "Content-Encoding" not in self._response.headers:
            return content
        return httpx.Response(self.status_code, headers=self.headers, content=content).content

    async def aclose(self) -> None:
        """Close the connection, unless the body was read, which has freed it."""
        self._response.close()


@dataclass(frozen=True, slots=True)
class _Route:
    """A client's settings as they apply to a POST to a path, the same as httpx makes of them."""

    settings: tuple[object, ...]
    url: str
    headers: dict[str, str]
    authorization: str | None


class EngineClient(httpx.AsyncClient):
    """An httpx client whose POSTs go straight to the session below it, as long as only plain settings are in force.

    Through httpx's layers an episode of 20 tool turns takes 31% more CPU; see docs/performance.md.
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
        self._straight: Final = transport
        self._route: _Route | None = None
        self._limits: tuple[httpx.Timeout, aiohttp.ClientTimeout] | None = None

    @property
    def era(self) -> int:
        """See `EngineTransport`."""
        return self._straight.era

    async def post_straight(
        self, path: str, body: bytes, headers: Mapping[str, str], limits: httpx.Timeout
    ) -> StraightResponse | None:
        """POST as httpx would; None, and nothing was sent, where something was set that only httpx honours.

        That is: hooks, cookies, parameters, redirects, an authentication other than a password, a transport that is
        watched, and a client that was closed. Raises a ValueError for a header that can't be sent.
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
        if self._limits is None or self._limits[0] is not limits:
            own = aiohttp.ClientTimeout(sock_connect=limits.connect, sock_read=limits.read, connect=limits.pool)
            self._limits = (limits, own)
        answer = await self._straight.session().post(
            route.url, data=body, headers=sent_headers, timeout=self._limits[1], allow_redirects=False
        )
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


WRITE_TIMEOUT_S: Final = 60.0
# Below the 5 s after which SGLang's server closes an idle connection: a request must not meet that close.
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
    """Make the client that many models share; close it with `aclose()`.

    It may be made outside a running loop, and belongs to the loop of its first request. Proxies of the environment are
    not used, redirects not followed. Generations pass httpx's layers by; see `EngineClient.post_straight`.

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
            raise errors.ConfigError(f"{name} is {value!r}; expected a number above 0")
    limits = httpx.Limits(
        max_connections=max_connections,
        max_keepalive_connections=max_keepalive_connections,
        keepalive_expiry=_KEEPALIVE_EXPIRY_S,
    )
    timeouts = httpx.Timeout(connect=connect_timeout, read=timeout, write=WRITE_TIMEOUT_S, pool=None)
    return EngineClient(url, EngineTransport(limits, secure=url.scheme == "https"), dict(headers or {}), timeouts)


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
        raise errors.ConfigError(f"base_url can't be read as a URL ({e}); {expected}") from e
    shown = redacted(url)
    if url.scheme not in ("http", "https") or not url.host:
        raise errors.ConfigError(f"base_url is {shown!r}; {expected}")
    if url.query or url.fragment:
        raise errors.ConfigError(f"base_url {shown!r} has a query or a fragment, which no engine has; {expected}")
    path = url.path.rstrip("/")
    if path.endswith("/generate"):
        raise errors.ConfigError(f"base_url {shown!r} names the endpoint; leave '/generate' off: {expected}")
    return url.copy_with(path=path or "/")


def redacted(url: httpx.URL) -> str:
    """Write the URL for logs and messages: scheme, host, port and path only; never a user, password or query."""
    port = "" if url.port is None else f":{url.port}"
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}{port}{url.path.rstrip('/')}"


JSON_HEADERS: Final = {"content-type": "application/json"}
# aiohttp's transport lets some of its own errors through (an answer that isn't HTTP), and calls a refused connection a
# ConnectTimeout: kinds are told apart by when they happen, not by their class.
CONNECTION_ERRORS: Final = (httpx.TransportError, aiohttp.ClientError)
READ_TIMEOUTS: Final = (httpx.ReadTimeout, aiohttp.SocketTimeoutError)
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
        sent_headers = {**JSON_HEADERS, **(headers or {})}
        straight = isinstance(http, EngineClient) and await http.post_straight(_PATH, body, sent_headers, limits)
        # httpx's layers only where they would change something
        response: httpx.Response | StraightResponse = straight or await http.send(
            http.build_request("POST", _PATH, content=body, headers=sent_headers, timeout=limits), stream=True
        )
    except READ_TIMEOUTS:
        return slow
    except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, ValueError) as e:  # aiohttp: a header's ValueError
        raise errors.ConfigError(f"the request can't be sent to {url}: {e}") from e
    except CONNECTION_ERRORS as e:
        return Fault(FaultKind.UNREACHABLE, _words(e))
    try:
        content = await response.aread()
    except READ_TIMEOUTS:
        return slow
    except (*CONNECTION_ERRORS, httpx.DecodingError) as e:
        # an error is no less one because the connection was lost while it was read
        kind = FaultKind.BAD_BODY if response.status_code < 500 else FaultKind.UNREACHABLE
        return Fault(kind, f"HTTP {response.status_code} whose body ended early ({_words(e)})")
    finally:
        await response.aclose()
    if response.status_code != 200:
        return fault_of_status(response.status_code, content, response.headers, url=url)
    try:
        return load_json(content)
    except NotJsonError as e:
        got = f"{content[:80]!r} ({len(content)} bytes)"
        return Fault(FaultKind.BAD_BODY, f"HTTP 200 with a body that is not JSON: {got}: {e}")


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
