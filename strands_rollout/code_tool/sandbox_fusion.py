"""A backend that runs code on servers of ByteDance's SandboxFusion, over HTTP.

This module relies on this behavior, found in the sources of bytedance/SandboxFusion (sandbox/server/sandbox_api.py,
sandbox/runners/base.py and types.py, sandbox/utils/execution.py; July 2026) and its issues:

- `POST /run_code` takes {"code", "language", "run_timeout", "compile_timeout", "memory_limit_MB", "stdin", "files",
  "fetch_files"} and answers 200 with {"status": "Success" | "Failed" | "SandboxError", "message", "compile_result",
  "run_result", "executor_pod_name", "files"}; each result is {"status": "Finished" | "Error" | "TimeLimitExceeded",
  "execution_time", "return_code", "stdout", "stderr"}. All but the status may be null. "SandboxError" is the server's
  own fault; an unexpected exception is a 500 with {"detail", "traceback"}.
- The server reads the script's pipes only after the script has ended. A script that prints about 200 KB or more
  therefore hangs until the time limit, and its output is cut (issues 53, 62). Output that is not UTF-8 is replaced as a
  whole. Therefore the script prints a small report in ASCII, and the code never writes to the server's pipes.
- `stdin` may fail with a SandboxError of its own (verl's issue 4074), so it is not sent.
- The server's Python is 3.10, and `run_timeout` starts before the interpreter does. With `isolation: none`, the
  default, code can use the network. `memory_limit_MB` has an effect only with that setting, so the script also limits
  its own memory.
- A server does not notice that a client has disconnected. Behind a gateway, 429, 502, 503 and 504 occur (verl's
  utils/reward_score/sandbox_fusion retries at 504); a busy server answers late (verl's issue 3478).
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
_COMPILE_TIMEOUT_S: Final = 10.0  # required by the server, unused for Python
_ANSWER_MARGIN_S: Final = 30.0  # after the server's own limit; a server that has not answered by then counts as hanging
# a report must fit into the 64 KiB of a pipe and of asyncio's reader: the server reads after the script has ended
_MAX_REPORT_BYTES: Final = 60_000
_COOLDOWN_S: Final = 5.0
_MAX_COOLDOWN_S: Final = 60.0
_RETRY_DELAY_S: Final = 0.5
_MAX_RETRY_DELAY_S: Final = 10.0
_SHOWN_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class _Fault:
    """The reason why a server gave no result.

    Attributes:
        message: Text for the error of the call.
        wait_s: How long the server asked to wait, in seconds (Retry-After); None if it named no number of seconds.
        is_retryable: The same server may succeed at a second attempt.
    """

    message: str
    wait_s: float | None = None
    is_retryable: bool = True


@dataclass(slots=True)
class _Server:
    """A server with its connection, requests in flight and recent faults; used on the executor's own loop only."""

    url: httpx.URL
    client: httpx.AsyncClient | None = None
    in_flight: int = 0
    faults: int = 0
    cooldown_until: float = 0.0
    last_used: int = 0
    redacted_url: str = field(init=False)

    def __post_init__(self) -> None:
        self.redacted_url = redacted(self.url)

    def record_outcome(self, fault: _Fault | None) -> None:
        now = time.monotonic()
        if fault is None:
            self.faults, self.cooldown_until = 0, 0.0
        elif now >= self.cooldown_until:  # faults during a cooldown don't extend it
            cooldown_s = min(_COOLDOWN_S * 2.0**self.faults, _MAX_COOLDOWN_S)
            self.faults += 1
            self.cooldown_until = now + max(cooldown_s, min(fault.wait_s or 0.0, _MAX_COOLDOWN_S))


class SandboxFusionExecutor(LoopExecutor):
    """Executor that runs each piece of code on one of several SandboxFusion servers.

    A call goes to the server with the fewest requests in flight. A server that fails is avoided for 5 s. If it fails
    repeatedly or asks to wait (Retry-After), it is avoided for up to a minute. The failed call is repeated once, on
    another server. If there is only one server, the call is repeated there, but only if a second attempt may succeed.
    Isolation depends on the servers' configuration.

    These are failures of a server: it can't be reached; it gives no answer in time; it answers with an HTTP status
    other than 200, with "SandboxError" or in another format; it does not start the script.

    Cancelling `run` closes the request, which a server does not notice: the code runs on to its end or its time limit.
    A result's `queued_s` is the call's time without the code's run time. It includes waiting for a slot, the network,
    the server's own delays, and a failed first attempt.

    Args:
        urls: A list with the `http://host:port` of each server, or a string for a single server; a trailing `/run_code`
            is removed.
        timeout_s: Default limit in wall-clock seconds; a call may set its own.
        max_output_chars: Characters kept of stdout and of stderr, half from each end; fewer if the server's pipes
            can't carry that much.
        memory_mb: Maximum address space of one call in mebibytes; None for the server's own limit.
        max_concurrency: Maximum number of requests in flight over all servers; the other calls wait.
        headers: Sent with every request, for example for authorization; never logged.

    Raises:
        ConfigError: A URL or a limit is invalid.
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
        return await self._run_in_slot(code, timeout_s)  # `_attempt` makes the second attempt itself

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        began_at = time.monotonic()
        server = self._pick_server(failed=None)
        outcome = await self._call_server(server, code, timeout_s)
        faults = ""
        if isinstance(outcome, _Fault):
            faults = f"{server.redacted_url}: {outcome.message}"
            other = self._pick_server(failed=server)
            if other is not server or outcome.is_retryable:
                wait_s = min(outcome.wait_s or _RETRY_DELAY_S, _MAX_RETRY_DELAY_S)
                await asyncio.sleep(0.0 if other is not server else wait_s)
                outcome = await self._call_server(other, code, timeout_s)
                faults += f"; {other.redacted_url}: {outcome.message}" if isinstance(outcome, _Fault) else ""
        if isinstance(outcome, _Fault):
            return infra_failure(f"the SandboxFusion servers that were tried failed to run the code: {faults}")
        return replace(outcome, queued_s=max(0.0, time.monotonic() - began_at - outcome.duration_s))

    def _pick_server(self, *, failed: _Server | None) -> _Server:
        now = time.monotonic()
        others = [server for server in self._servers if server is not failed] or self._servers
        return min(others, key=lambda s: (max(0.0, s.cooldown_until - now), s.in_flight, s.last_used))

    async def _call_server(self, server: _Server, code: str, timeout_s: float) -> ExecutionResult | _Fault:
        server.in_flight += 1
        server.last_used = next(self._uses)
        try:
            outcome = await self._post(server, code, timeout_s)
        except TimeoutError:
            outcome = _Fault(f"no answer in {_answer_limit_s(timeout_s):g} s", is_retryable=False)
        except Exception as e:  # an error here is the backend's fault, never the code's
            message = f"{type(e).__name__}: {_one_line(str(e))}"
            outcome = _Fault(message, is_retryable=isinstance(e, httpx.HTTPError))
        finally:
            server.in_flight -= 1
        server.record_outcome(outcome if isinstance(outcome, _Fault) else None)
        return outcome

    async def _post(self, server: _Server, code: str, timeout_s: float) -> ExecutionResult | _Fault:
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
            return _parse_response(response, program)
        retry_after = response.headers.get("retry-after", "")
        return _Fault(
            f"HTTP {response.status_code}: {_one_line(response.text)}",
            wait_s=float(retry_after) if retry_after.isdecimal() else None,
            is_retryable=response.status_code in (408, 429) or response.status_code >= 500,
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
            raise ConfigError(f"urls contains {url!r:.80}; expected strings such as 'http://127.0.0.1:8080'")
    parsed = (parse_base_url(url.strip().rstrip("/").removesuffix(_ENDPOINT)) for url in listed)
    return list({str(url): url for url in parsed}.values())


def _answer_limit_s(timeout_s: float) -> float:
    return timeout_s + START_ALLOWANCE_S + _ANSWER_MARGIN_S


def _parse_response(response: httpx.Response, program: RemoteProgram) -> ExecutionResult | _Fault:
    try:
        answer: Any = response.json()
    except ValueError:
        return _Fault(f"an answer that is not valid JSON: {_one_line(response.text)}")
    run_result = answer.get("run_result") if isinstance(answer, dict) else None
    if isinstance(answer, dict) and answer.get("status") == "SandboxError":
        return _Fault(f"SandboxError: {_one_line(str(answer.get('message')))}")
    if not isinstance(run_result, dict) or run_result.get("status") not in ("Finished", "TimeLimitExceeded"):
        return _Fault(f"an answer without the run_result of a finished run: {_one_line(response.text)}")
    code = run_result.get("return_code")
    result = program.result(
        str(run_result.get("stdout") or ""),
        str(run_result.get("stderr") or ""),
        code if isinstance(code, int) else None,
        gave_up=run_result["status"] == "TimeLimitExceeded",
    )
    return result if result.infra_error is None else _Fault(result.infra_error)


def _one_line(text: str) -> str:
    """Join lines, and cut out the middle of a long text: a server may quote the whole script."""
    line = " ".join(text.split())
    half = _SHOWN_CHARS // 2
    return line if len(line) <= _SHOWN_CHARS else f"{line[:half]} ... {line[-half:]}"
