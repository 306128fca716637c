"""Code on servers of ByteDance's SandboxFusion, over HTTP.

What is relied on, from the sources of bytedance/SandboxFusion (sandbox/server/sandbox_api.py, sandbox/runners/base.py
and types.py, sandbox/utils/execution.py; July 2026) and its issues:

- `POST /run_code` takes {"code", "language", "run_timeout", "compile_timeout", "memory_limit_MB", "stdin", "files",
  "fetch_files"} and answers 200 with {"status": "Success" | "Failed" | "SandboxError", "message", "compile_result",
  "run_result", "executor_pod_name", "files"}; a result is {"status": "Finished" | "Error" | "TimeLimitExceeded",
  "execution_time", "return_code", "stdout", "stderr"}, all but the status nullable. "SandboxError" is the server's own
  fault; an unexpected exception is a 500 with {"detail", "traceback"}.
- The server waits for the script before it reads its pipes: a script that prints about 200 KB hangs until the time
  limit, and longer output is cut (issues 53, 62). Output that is not UTF-8 is replaced as a whole. So the program that
  is sent prints a small report in ASCII, and never lets the code write to the server's pipes.
- `stdin` may fail with a SandboxError of its own (verl's issue 4074): it is not sent.
- Python there is 3.10, and `run_timeout` starts before the interpreter does. With `isolation: none`, the default, code
  has the network; `memory_limit_MB` holds only there, so the program limits its memory by itself as well.
- A server does not notice a client that went away. Behind a gateway, 429, 502, 503 and 504 occur (verl's
  utils/reward_score/sandbox_fusion repeats at 504); a busy server answers late (verl's issue 3478).
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from strands_rollout.client.transport import create_client, parse_base_url, redacted
from strands_rollout.code_tool.executors import ExecutionResult, ExecutorFacts, check_positive, infra_failure
from strands_rollout.code_tool.remote import START_ALLOWANCE_S, LoopExecutor, RemoteProgram
from strands_rollout.errors import ConfigError

_ENDPOINT: Final = "/run_code"
_COMPILE_TIMEOUT_S: Final = 10.0  # Python compiles nothing; the server wants a number
_ANSWER_MARGIN_S: Final = 30.0  # beyond the server's own limit, before a server counts as hanging
# Below the 64 KiB of a pipe and of asyncio's reader: the server reads only when the program has ended.
_MAX_REPORT_BYTES: Final = 60_000
_REST_S: Final = 5.0
_MAX_REST_S: Final = 60.0
_REPEAT_AFTER_S: Final = 0.5
_MAX_REPEAT_AFTER_S: Final = 10.0
_SHOWN_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a server gave no result, what it asked to wait (Retry-After), and whether it may be asked again."""

    words: str
    wait_s: float | None = None
    may_pass: bool = True


@dataclass(slots=True)
class _Server:
    """One server, as the private loop sees it."""

    url: httpx.URL
    client: httpx.AsyncClient | None = None
    outstanding: int = 0
    faults: int = 0
    resting_until: float = 0.0
    last_used: int = 0
    words: str = field(init=False)

    def __post_init__(self) -> None:
        self.words = redacted(self.url)

    def remember(self, fault: _Fault | None) -> None:
        """Rest after a fault; requests that fail together count as one."""
        now = time.monotonic()
        if fault is None:
            self.faults, self.resting_until = 0, 0.0
        elif now >= self.resting_until:
            rest_s = min(_REST_S * 2.0**self.faults, _MAX_REST_S)
            self.faults += 1
            self.resting_until = now + max(rest_s, min(fault.wait_s or 0.0, _MAX_REST_S))


class SandboxFusionExecutor(LoopExecutor):
    """Runs each piece of code on one of several SandboxFusion servers.

    A call goes to the server with the fewest requests in flight. One that fails (unreachable, 429, 5xx, an answer that
    is not SandboxFusion's, "SandboxError", no answer in time) is left alone for 5 s and up to a minute, and the call is
    repeated once, on another server if there is one. How far the code is isolated is the servers' configuration.

    Cancelling `run` closes the request, which a server does not notice: the code there ends at its time limit. A
    result's `queued_s` is all the time that the code did not run: the wait for a place here, the network, the server's
    own delays, and a first attempt that failed.

    Args:
        urls: `http://host:port` of each server, or one of them; a trailing `/run_code` is left off.
        timeout_s: Default limit in wall-clock seconds; a call may name its own.
        max_output_chars: Characters kept of stdout and of stderr, half from each end; fewer where the server's pipes
            can't carry that much.
        memory_mb: Address space of one call in mebibytes; None for the server's own limit.
        max_concurrency: Requests in flight at once over all servers; the rest wait.
        headers: Sent with every request, such as an authorization; never shown.

    Raises:
        ConfigError: A URL or a limit can't be used.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        max_output_chars: int = 20_000,
        memory_mb: int | None = None,
        max_concurrency: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(timeout_s, max_output_chars, max_concurrency, ExecutorFacts(memory_mb=memory_mb))
        if memory_mb is not None:
            check_positive(memory_mb=memory_mb)
        self._servers = [_Server(url) for url in _server_urls(urls)]
        self._memory_mb = None if memory_mb is None else int(memory_mb)
        self._headers = dict(headers or {})
        self._uses = itertools.count(1)

    async def _run(self, code: str, timeout_s: float) -> ExecutionResult:
        return await self._run_in_place(code, timeout_s)  # which repeats what failed by itself

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        began_at = time.monotonic()
        server = self._best_but(None)
        found = await self._ask(server, code, timeout_s)
        faults = ""
        if isinstance(found, _Fault):
            faults = f"{server.words}: {found.words}"
            other = self._best_but(server)
            if other is not server or found.may_pass:
                wait_s = min(found.wait_s or _REPEAT_AFTER_S, _MAX_REPEAT_AFTER_S)
                await asyncio.sleep(0.0 if other is not server else wait_s)
                found = await self._ask(other, code, timeout_s)
                faults += f"; {other.words}: {found.words}" if isinstance(found, _Fault) else ""
        if isinstance(found, _Fault):
            return infra_failure(f"no SandboxFusion server ran the code: {faults}")
        return replace(found, queued_s=max(0.0, time.monotonic() - began_at - found.duration_s))

    def _best_but(self, failed: _Server | None) -> _Server:
        """The server to ask next: not the failed one, not a resting one, few requests, longest unused."""
        now = time.monotonic()
        others = [server for server in self._servers if server is not failed] or self._servers
        return min(others, key=lambda s: (max(0.0, s.resting_until - now), s.outstanding, s.last_used))

    async def _ask(self, server: _Server, code: str, timeout_s: float) -> ExecutionResult | _Fault:
        """One request; what it says of the server is remembered."""
        server.outstanding += 1
        server.last_used = next(self._uses)
        try:
            found = await self._answer(server, code, timeout_s)
        except TimeoutError:
            found = _Fault(f"no answer in {_answer_limit_s(timeout_s):g} s", may_pass=False)
        except Exception as e:  # whatever breaks here is this backend's fault, and never the code's
            words = f"{type(e).__name__}: {_one_line(str(e))}"
            found = _Fault(words, may_pass=isinstance(e, httpx.HTTPError))
        finally:
            server.outstanding -= 1
        server.remember(found if isinstance(found, _Fault) else None)
        return found

    async def _answer(self, server: _Server, code: str, timeout_s: float) -> ExecutionResult | _Fault:
        program = RemoteProgram(code, timeout_s, self._max_output_chars, _MAX_REPORT_BYTES, self._memory_mb)
        request = {
            "code": program.text(),
            "language": "python",
            "run_timeout": timeout_s + START_ALLOWANCE_S,
            "compile_timeout": _COMPILE_TIMEOUT_S,
            "files": {},
            **({} if self._memory_mb is None else {"memory_limit_MB": self._memory_mb}),
        }
        async with asyncio.timeout(_answer_limit_s(timeout_s)):
            if server.client is None:
                server.client = create_client(
                    str(server.url), max_connections=self._max_concurrency, headers=self._headers, connect_timeout=10.0
                )
            response = await server.client.post(_ENDPOINT, json=request)
        if response.status_code == 200:
            return _result_of(response, program)
        asked = response.headers.get("retry-after", "")
        return _Fault(
            f"HTTP {response.status_code}: {_one_line(response.text)}",
            wait_s=float(asked) if asked.isdecimal() else None,
            may_pass=response.status_code in (408, 429) or response.status_code >= 500,
        )

    async def _release(self) -> None:
        for server in self._servers:
            if server.client is not None:
                await server.client.aclose()
                server.client = None


def _server_urls(urls: str | Sequence[str]) -> list[httpx.URL]:
    listed = [urls] if isinstance(urls, str) else list(urls)
    if not listed:
        raise ConfigError("urls is empty; expected the URL of at least one SandboxFusion server")
    for url in listed:
        if not isinstance(url, str):
            raise ConfigError(f"urls holds {url!r:.80}; expected strings such as 'http://127.0.0.1:8080'")
    parsed = (parse_base_url(url.strip().rstrip("/").removesuffix(_ENDPOINT)) for url in listed)
    return list({str(url): url for url in parsed}.values())


def _answer_limit_s(timeout_s: float) -> float:
    return timeout_s + START_ALLOWANCE_S + _ANSWER_MARGIN_S


def _result_of(response: httpx.Response, program: RemoteProgram) -> ExecutionResult | _Fault:
    try:
        answer: Any = response.json()
    except ValueError:
        return _Fault(f"an answer that is not JSON: {_one_line(response.text)}")
    ran = answer.get("run_result") if isinstance(answer, dict) else None
    if isinstance(answer, dict) and answer.get("status") == "SandboxError":
        return _Fault(f"SandboxError: {_one_line(str(answer.get('message')))}")
    if not isinstance(ran, dict) or ran.get("status") not in ("Finished", "TimeLimitExceeded"):
        return _Fault(f"an answer without a run_result: {_one_line(response.text)}")
    code = ran.get("return_code")
    result = program.result(
        str(ran.get("stdout") or ""),
        str(ran.get("stderr") or ""),
        code if isinstance(code, int) else None,
        gave_up=ran["status"] == "TimeLimitExceeded",
    )
    return result if result.infra_error is None else _Fault(result.infra_error)


def _one_line(text: str) -> str:
    """On one line, without the middle where it is long: a server may quote the whole program."""
    line = " ".join(text.split())
    half = _SHOWN_CHARS // 2
    return line if len(line) <= _SHOWN_CHARS else f"{line[:half]} ... {line[-half:]}"
