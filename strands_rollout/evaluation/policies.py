"""Policies of `strands-rollout try` that no engine serves: a script of turns, a person, an OpenAI-compatible API.

`served_policy` writes their turns in the tokenizer's own format and answers with them at `/generate`, so that all else
of an episode is the real thing: template, tokens, parser, tools, reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import orjson
import yaml
from aiohttp import web
from pydantic import BaseModel, ConfigDict

from strands_rollout.errors import ConfigError, PolicyEndedError, RolloutError
from strands_rollout.evaluation.plan import checked
from strands_rollout.settings import yaml_text
from strands_rollout.template.chat_template import ChatTemplate

_CONTEXT_TOKENS: Final = 1 << 17
_MAX_BODY_BYTES: Final = 1 << 28
_API_TIMEOUT_S: Final = 300.0
_CALL: Final = "/call"
_KEYS: Final = """you are the policy; type
  TEXT                          to answer
  /call NAME {"key": "value"}   to call a tool; or: /call NAME key=value
  a line that ends in \\         to go on with this turn in the next line
  Ctrl-D                        to end"""


class Call(BaseModel):
    """A tool call of a turn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    arguments: dict[str, Any] = {}


class Turn(BaseModel):
    """One turn of a policy: text as it would write it, then calls."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = ""
    calls: list[Call] = []


@dataclass(frozen=True, slots=True)
class Asked:
    """What the main agent asks a policy: messages and tools in OpenAI's form."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]


class WrittenPolicy(Protocol):
    """Gives one turn after the other."""

    async def turn(self, asked: Asked | None) -> Turn:
        """The next turn; `asked` is None for an agent beside the main one. PolicyEndedError where there is none."""
        ...


@dataclass(slots=True)
class Script:
    """Turns of a file."""

    path: Path
    turns: Sequence[Turn]
    played: int = 0

    @classmethod
    def read(cls, path: Path) -> Script:
        """The turns of a YAML list of texts and mappings; a ConfigError names the turn that is neither."""
        try:
            given = yaml.safe_load(yaml_text(path))
        except (yaml.YAMLError, ValueError, ArithmeticError) as e:
            raise ConfigError(f"{path} is no YAML: {e}") from e
        if not isinstance(given, list) or not given:
            raise ConfigError(
                f"{path} holds {type(given).__name__}; expected a list of turns, each a text or "
                "{text: ..., calls: [{name: lookup, arguments: {item: apple}}]}"
            )
        turns = [{"text": one.rstrip("\n")} if isinstance(one, str) else one for one in given]
        return cls(path, [checked(Turn, one, f"{path}: turn {at}") for at, one in enumerate(turns, start=1)])

    async def turn(self, asked: Asked | None) -> Turn:  # noqa: ARG002 - a script does not listen
        """The next turn of the file."""
        if self.played == len(self.turns):
            raise PolicyEndedError(
                f"{self.path} ends after {counted(self.played, 'turn')}, but the episode goes on: write the policy's "
                f"turn {self.played + 1}"
            )
        self.played += 1
        return self.turns[self.played - 1]

    def check_end(self) -> None:
        """Raise PolicyEndedError where turns are left."""
        left = len(self.turns) - self.played
        if left:
            raise PolicyEndedError(
                f"{self.path} has {counted(left, 'turn')} too many: the episode ended after turn {self.played}"
            )


def counted(count: int, what: str) -> str:
    """As in "1 turn", "2 turns"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@dataclass(slots=True)
class Person:
    """Someone at the terminal."""

    note: Callable[[str], None]
    ask: Callable[[str], str] = input

    def __post_init__(self) -> None:
        with suppress(ImportError):  # lets lines be edited
            import readline  # noqa: F401
        self.note(_KEYS)

    async def turn(self, asked: Asked | None) -> Turn:  # noqa: ARG002 - they have read it
        """What is typed; asked again where a call can't be read."""
        while True:
            try:
                return typed_turn(self._typed())
            except ValueError as e:
                self.note(str(e))

    def _typed(self) -> list[str]:
        # On this thread, though it blocks the loop: nothing else runs meanwhile, and another that waits for input can't
        # be ended. asyncio's own handler would only cancel a task.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            lines = [self.ask("you> ")]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self.ask("...> "))
        except (EOFError, KeyboardInterrupt):
            raise PolicyEndedError("ended at the terminal; the episode was left where it was") from None
        finally:
            signal.signal(signal.SIGINT, handler)
        return lines


def typed_turn(lines: Sequence[str]) -> Turn:
    """The turn of typed lines; a ValueError says how a call is written."""
    texts, calls = [], []
    for line in lines:
        if not line.startswith("/"):
            texts.append(line)
            continue
        command, _, rest = line.partition(" ")
        name, _, given = rest.strip().partition(" ")
        expected = f'expected {_CALL} NAME {{"key": "value"}} or {_CALL} NAME key=value'
        if command != _CALL or not name:
            raise ValueError(f"got {line!r}; {expected}")
        try:
            arguments = json.loads(given) if given.strip().startswith("{") else _named_values(given)
        except ValueError as e:
            raise ValueError(f"got {line!r}, whose arguments can't be read ({e}); {expected}") from e
        calls.append(Call(name=name, arguments=arguments))
    return Turn(text="\n".join(texts), calls=calls)


def _named_values(given: str) -> dict[str, Any]:
    pairs = [part.partition("=") for part in shlex.split(given)]
    if not all(name and equals for name, equals, _ in pairs):
        raise ValueError("no name=value")
    try:
        return {name: yaml.safe_load(value) for name, _, value in pairs}
    except yaml.YAMLError as e:
        raise ValueError(str(e)) from e


@dataclass(slots=True)
class ChatApi:
    """A model behind an OpenAI-compatible API: its texts and calls, none of its tokens."""

    base_url: str
    model: str
    key: str | None = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY"), repr=False)

    async def turn(self, asked: Asked | None) -> Turn:
        """The API's answer to the conversation."""
        if asked is None:
            raise PolicyEndedError("an agent beside the main one asks its model; --api-base plays one agent alone")
        body = {"model": self.model, "messages": [_openai_message(message) for message in asked.messages]}
        if asked.tools:
            body["tools"] = list(asked.tools)
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with httpx.AsyncClient(timeout=_API_TIMEOUT_S) as http:
                answer = await http.post(url, json=body, headers=headers)
            if answer.is_error:
                hint = "" if self.key else "; OPENAI_API_KEY is not set"
                raise PolicyEndedError(f"{url} answered {answer.status_code}: {answer.text[:300]}{hint}")
            message = answer.json()["choices"][0]["message"]
            calls = [one["function"] for one in message.get("tool_calls") or ()]
            made = [Call(name=one["name"], arguments=json.loads(one.get("arguments") or "{}")) for one in calls]
            return Turn(text=message.get("content") or "", calls=made)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise PolicyEndedError(f"{url} gives no answer: {e or type(e).__name__}") from e
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise PolicyEndedError(
                f"{url} answered {answer.text[:300]!r}; expected a chat completion with arguments as a JSON object: {e}"
            ) from e


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat template's message, whose arguments are objects, as the API wants it."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    kept = {name: value for name, value in message.items() if name in ("role", "content", "tool_call_id")}
    return kept | ({"tool_calls": calls} if calls else {})


class Watcher(Protocol):
    """What follows an episode."""

    def take_asked(self) -> Asked | None:
        """What the main agent asks now; None where another agent does."""
        ...

    def show_beside(self, label: str, text: str) -> None:
        """Show what an agent beside the main one reads or says."""
        ...


@asynccontextmanager
async def served_policy(
    policy: WrittenPolicy, template: ChatTemplate, watcher: Watcher
) -> AsyncIterator[tuple[str, asyncio.Future[None]]]:
    """Serve a policy on a free port of 127.0.0.1 until the block ends.

    Yields:
        The URL, and a future that fails with the RolloutError that ends the policy: its request is never answered, and
        the episode is to be cancelled.
    """
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    known: list[int] = []

    async def generate(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        read, asked = body["input_ids"], watcher.take_asked()
        if asked is None:
            same = len(known) if read[: len(known)] == known else 0
            watcher.show_beside("reads", template.encoder.decode(read[same:]))
        try:
            turn = await policy.turn(asked)
            text = template.written_turn(turn.text, [(call.name, call.arguments) for call in turn.calls])
        except RolloutError as e:
            if not ended.done():
                ended.set_exception(e)
            return await asyncio.Future()
        if asked is None:
            watcher.show_beside("says", text)
        ids, most = template.encoder.encode_trusted(text), body["sampling_params"].get("max_new_tokens")
        is_cut = most is not None and len(ids) > most
        finish = {"type": "length", "length": most} if is_cut else {"type": "stop", "matched": ids[-1]}
        known[:] = [*read, *ids[:most]]
        return _generation(body, ids[:most], finish)

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"context_length": _CONTEXT_TOKENS, "model_path": type(policy).__name__})

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes([web.post("/generate", generate), web.get("/server_info", info)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", ended
    finally:
        await runner.cleanup()


def _generation(request: Mapping[str, Any], ids: Sequence[int], finish: Mapping[str, Any]) -> web.Response:
    """A generation in SGLang's form; the logprob of what was written down is 0."""
    meta = {
        "id": request.get("rid"),
        "finish_reason": finish,
        "prompt_tokens": len(request["input_ids"]),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "output_token_logprobs": [[0.0, token, None] for token in ids],
    }
    return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})
