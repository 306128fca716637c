"""A scripted chat endpoint on a loopback socket, with response shapes of SGLang 0.5.23."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web


@dataclass(frozen=True)
class ChatAnswer:
    """One answer; `content` is the text of the turn without reasoning and calls.

    `calls` are pairs of name and JSON arguments; `sampled` is the text of each sampled token, if logprobs are returned.
    """

    content: str = ""
    reasoning: str | None = None
    calls: Sequence[tuple[str, str]] = ()
    sampled: Sequence[str] | None = None


class ScriptedChat:
    """The server, an async context manager. It answers in the order of the script; `requests` are the bodies."""

    def __init__(self, script: Sequence[ChatAnswer]) -> None:
        self._script = script
        self._runner: web.AppRunner | None = None
        self.requests: list[dict[str, Any]] = []
        self.base_url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/server_info", self._info)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _info(self, _http: web.Request) -> web.Response:
        return web.json_response({"context_length": 8192, "model_path": "/models/scripted"})

    async def _chat(self, http: web.Request) -> web.Response:
        number = len(self.requests)
        self.requests.append(await http.json())
        answer = self._script[number]
        return web.json_response(_completion(answer, number))


def _completion(answer: ChatAnswer, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning}
    if answer.calls:
        functions = [{"name": name, "arguments": arguments} for name, arguments in answer.calls]
        message["tool_calls"] = [
            {"id": f"call_{number}_{index}", "index": index, "type": "function", "function": function}
            for index, function in enumerate(functions)
        ]
    tokens = None
    if answer.sampled is not None:
        rest = {"logprob": -0.5, "top_logprobs": []}
        tokens = [{"token": text, "bytes": list(text.encode()), **rest} for text in answer.sampled]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None if tokens is None else {"content": tokens},
        "finish_reason": "tool_calls" if answer.calls else "stop",
        "matched_stop": None,
    }
    count = len(answer.sampled or ())
    return {
        "id": str(number),
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count},
        "metadata": {"weight_version": "default"},
    }
