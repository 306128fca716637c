"""Policies of `strands-rollout try` that no engine serves: a script of turns, a person, an OpenAI-compatible API."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from strands_rollout.errors import ConfigError, PolicyEndedError
from strands_rollout.evaluation.plan import checked
from strands_rollout.settings import yaml_text

_API_TIMEOUT_S: Final = 300.0
_TYPED_CALL: Final = re.compile(r"/call\s+(\S+)\s*(.*)", re.DOTALL)
_KEYS: Final = """you are the policy; type
  TEXT                          to answer
  /call NAME {"key": "value"}   to call a tool
  a line that ends in \\         to go on with this turn in the next line
  Ctrl-D                        to end"""

Asked: TypeAlias = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""What the main agent asks a policy: messages and tools, in the form of chat templates."""


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


class Script:
    """Turns of a YAML list of texts and mappings; a ConfigError names the turn that is neither."""

    def __init__(self, path: Path) -> None:
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
        self._turns = [checked(Turn, one, f"{path}: turn {at}") for at, one in enumerate(turns, start=1)]
        self._path, self._played = path, 0

    async def turn(self, asked: Asked | None) -> Turn:  # noqa: ARG002 - a script does not listen
        """The next turn; PolicyEndedError where there is none."""
        self._played += 1
        if self._played > len(self._turns):
            raise PolicyEndedError(
                f"{self._path} ends too early: the episode goes on, and turn {self._played} of the policy is missing"
            )
        return self._turns[self._played - 1]

    def check_end(self, stop_reason: object) -> None:
        """Raise PolicyEndedError where turns are left when the episode has ended."""
        if self._played < len(self._turns):
            raise PolicyEndedError(
                f"{self._path} goes on too long: it has {len(self._turns)} turns, and the episode ended after turn "
                f"{self._played} ({stop_reason})"
            )


class Person:
    """Someone at the terminal."""

    def __init__(self, note: Callable[[str], None]) -> None:
        with suppress(ImportError):  # lets lines be edited
            import readline  # noqa: F401
        self._note = note
        note(_KEYS)

    async def turn(self, asked: Asked | None) -> Turn:  # noqa: ARG002 - they have read it
        """What is typed; asked again where a call can't be read. PolicyEndedError where they leave."""
        while True:
            try:
                return typed_turn(_typed_lines())
            except ValueError as e:
                self._note(str(e))


def _typed_lines() -> list[str]:
    # On this thread, though it blocks the loop: nothing else runs meanwhile, and another that waits for input can't be
    # ended. asyncio's own handler would only cancel a task.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        lines = [input("you> ")]
        while lines[-1].endswith("\\"):
            lines[-1:] = [lines[-1][:-1], input("...> ")]
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
        try:
            name, given = getattr(_TYPED_CALL.fullmatch(line), "groups", tuple)()
            calls.append(Call(name=name, arguments=yaml.safe_load(given) or {}))
        except (ValueError, ValidationError, yaml.YAMLError) as e:
            raise ValueError(f'got {line!r}; expected /call NAME {{"key": "value"}}') from e
    return Turn(text="\n".join(texts), calls=calls)


@dataclass(frozen=True, slots=True)
class ChatApi:
    """A model behind an OpenAI-compatible API: its texts and calls, none of its tokens."""

    base_url: str
    model: str

    async def turn(self, asked: Asked | None) -> Turn:
        """The API's answer to the conversation; PolicyEndedError where it gives none."""
        if asked is None:
            raise PolicyEndedError("an agent beside the main one asks its model; --api-base plays one agent alone")
        messages, tools = asked
        body = {"model": self.model, "messages": list(map(_openai_message, messages))}
        key, url = os.environ.get("OPENAI_API_KEY"), f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            async with httpx.AsyncClient(timeout=_API_TIMEOUT_S) as http:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                answer = await http.post(url, json=body | ({"tools": list(tools)} if tools else {}), headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise PolicyEndedError(f"{url} gives no answer: {e or type(e).__name__}") from e
        if answer.is_error:
            hint = "" if key else "; OPENAI_API_KEY is not set"
            raise PolicyEndedError(f"{url} answered {answer.status_code}: {answer.text[:300]}{hint}")
        try:
            message = answer.json()["choices"][0]["message"]
            calls = [one["function"] for one in message.get("tool_calls") or ()]
            made = [Call(name=one["name"], arguments=json.loads(one.get("arguments") or "{}")) for one in calls]
            return Turn(text=message.get("content") or "", calls=made)
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            expected = "expected a chat completion, whose calls have JSON objects as arguments"
            raise PolicyEndedError(f"{url} answered {answer.text[:300]!r}; {expected}: {e}") from e


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat template's message, whose arguments are objects, as the API wants it."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    kept = {name: value for name, value in message.items() if name in ("role", "content", "tool_call_id")}
    return kept | ({"tool_calls": calls} if calls else {})
