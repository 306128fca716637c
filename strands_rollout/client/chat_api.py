"""A client of OpenAI-compatible chat APIs, for judges and `strands-rollout try`.

The answers have no token ids, so they are never trained on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from strands_rollout.aio import LoopCache
from strands_rollout.client.retry import Fault, FaultKind, RetriesExhaustedError, RetryPolicy, with_retries
from strands_rollout.client.transport import fault_of_status
from strands_rollout.errors import EngineResponseError, EngineUnavailableError
from strands_rollout.secret_mask import mask_text

_CLIENTS: Final[LoopCache[httpx.AsyncClient]] = LoopCache()
_MAX_CONNECTIONS: Final = 256


@dataclass(frozen=True, slots=True)
class ChatApi:
    """A model of an OpenAI-compatible API.

    Attributes:
        base_url: The API's URL, including `/v1`.
        model: The model's name at this API.
        api_key: API key, sent as a bearer token; "" for no key.
        params: Further fields of each request.
        timeout_s: Limit in seconds for connecting, for each write and for each read of an attempt (httpx's `Timeout`).
        retries: Maximum number of retries after a 429, a 5xx, a 404 for a missing model or worker, or no answer.
    """

    base_url: str
    model: str
    api_key: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0
    retries: int = 0

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Send messages and return the model's message, unchanged.

        Raises:
            EngineUnavailableError: Each attempt got a 429, a 5xx, a 404 for a missing model or worker, or no answer.
            EngineRejectedError: The API refused the request or the key.
            EngineResponseError: The answer is not a chat completion.
        """
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        masked_url = mask_text(url)
        client = _CLIENTS.get("chat", lambda: httpx.AsyncClient(limits=httpx.Limits(max_connections=_MAX_CONNECTIONS)))
        body = {**self.params, "model": self.model, "messages": list(messages)}
        body |= {"tools": list(tools)} if tools else {}
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(self.timeout_s, pool=None)

        async def attempt() -> httpx.Response | Fault:
            try:
                answer = await client.post(url, json=body, headers=headers, timeout=timeout)
            except (httpx.HTTPError, httpx.InvalidURL) as e:
                return Fault(FaultKind.UNREACHABLE, f"{type(e).__name__}: {mask_text(str(e))}")
            if answer.status_code == httpx.codes.OK:
                return answer
            return fault_of_status(answer.status_code, answer.content, answer.headers, url=masked_url, endpoint="")

        try:
            answer = await with_retries(attempt, RetryPolicy(patience_s=math.inf, max_attempts=self.retries + 1))
        except RetriesExhaustedError as e:
            count = len(e.outage.faults)
            attempts = f"{count} attempt{'s' * (count > 1)}"
            raise EngineUnavailableError(
                f"{masked_url} gave no chat completion in {attempts}; the last failed with: {e}"
            ) from None
        try:
            message = answer.json()["choices"][0]["message"]
        except (ValueError, LookupError, TypeError) as e:
            got = f"{masked_url} answered {answer.text[:300]!r}"
            raise EngineResponseError(f"{got}; expected a chat completion ({type(e).__name__}: {e})") from e
        if not isinstance(message, dict):
            raise EngineResponseError(f"{masked_url} answered with the message {message!r:.300}; expected an object")
        return message
