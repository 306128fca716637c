"""The command `try`: play a row through `generate` and `reward_func`, and print the transcript as it grows.

Start reading at `run_try`. If a script, a person or an OpenAI-compatible API plays the policy, a local server takes the
place of the engine. The server answers requests to `/generate` with the policy's turns, written in the chat template's
format. So template, tokenizer, tool parser, tools and reward are used as in training.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx
import orjson
import yaml
from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.text import Text
from strands import Agent
from strands.hooks import AfterToolCallEvent, BeforeModelCallEvent, HookProvider, HookRegistry, MessageAddedEvent

from strands_rollout.agent.environment import user_code_location
from strands_rollout.client.chat_api import ChatApi
from strands_rollout.dump.terminal import make_console, print_transcript, show_next
from strands_rollout.errors import (
    ConfigError,
    EngineError,
    EngineRejectedError,
    PolicyEndedError,
    RolloutError,
    TemplateError,
)
from strands_rollout.evaluation.plan import validated
from strands_rollout.evaluation.run import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from strands_rollout.files.yaml_files import yaml_text
from strands_rollout.play.audit import local_server
from strands_rollout.play.engine import (
    fetch_tokenizer_folder,
    load_settings,
    served_engine,
    shipped_model_note,
    start_executor,
)
from strands_rollout.play.options import SHIPPED_MODEL, TryOptions, merge_changes, slime_sampling_params
from strands_rollout.play.player import Outcome, open_player
from strands_rollout.play.rows import Row, load_rows, shipped_rows
from strands_rollout.samples import Sample
from strands_rollout.settings import CODE_TOOL_PATH, RolloutSettings
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.messages import system_text, to_chat_messages, to_chat_tools, tool_result_text
from strands_rollout.tool_parsers import AUTO, ToolCall, detect_format, get_parser

_GUTTER: Final = 7
_STYLES: Final = {"policy": "bold green", "call": "green", "result": "cyan", "error": "red", "thinks": "dim green"}
_MAX_NEW_TOKENS, _EMBEDDED_MAX_NEW_TOKENS = 16384, 1024
_NO_TOKENS: Final = "none: an API returns text only, which can't be trained on"
_API_TIMEOUT_S: Final = 300.0
_TYPED_CALL: Final = re.compile(r"/call\s+(\S+)\s*(.*)", re.DOTALL)
# matches the agent loop's messages about a limit. In them, the policy reads max_iterations and max_calls, as perhaps
# in training; `show` prints the settings' names instead: max_tool_iterations and max_tool_calls
_LIMIT_TEXT: Final = re.compile(
    r"(Not run|Stopped): the limit max_(?=(?:iterations|calls) of this episode is reached\.)"
)
_TYPING_HELP: Final = """you are the policy; type
  TEXT                          to answer
  /call NAME {"key": "value"}   to call a tool
  a line that ends in \\         to continue this turn in the next line
  Ctrl-D                        to end"""

AgentRequest: TypeAlias = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""An agent's request to a policy: messages and tools, as chat templates take them."""


class Transcript(HookProvider):
    """Strands hooks that print the main agents' messages, and store their last request for the policy."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._agents: list[Agent] = []  # in order of their latest message
        self._request: AgentRequest | None = None
        self._error_places: dict[str, str] = {}  # places in the user's code where tools raised, by the call's id

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
        """Register the hooks; called by Strands."""
        registry.add_callback(MessageAddedEvent, self._message_added)
        registry.add_callback(BeforeModelCallEvent, self._before_model_call)
        registry.add_callback(AfterToolCallEvent, self._after_tool_call)

    def take_request(self) -> AgentRequest | None:
        """Return the last request of a main agent and forget it; None if the current request is a sub-agent's."""
        request, self._request = self._request, None
        return request

    def show(self, label: str, text: str, style: str = "") -> None:
        """Print a text after its label, wrapped to the width of a terminal."""
        width = self._console.width - _GUTTER - 3 if self._console.is_terminal else sys.maxsize
        paragraphs = _LIMIT_TEXT.sub(r"\1: the limit max_tool_", text).strip("\n").split("\n")
        lines = [part for line in paragraphs for part in textwrap.wrap(line, width, replace_whitespace=False) or [""]]
        for number, line in enumerate(lines):
            gutter = (f"{label if number == 0 else '':>{_GUTTER}} | ", "dim")
            self._console.print(Text.assemble(gutter, (line, style or _STYLES.get(label, ""))), soft_wrap=True)

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:
        agent = event.agent
        system = system_text(agent.system_prompt, agent.system_prompt_content)
        system_messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        tools = to_chat_tools(agent.tool_registry.get_all_tool_specs())
        self._request = [*system_messages, *to_chat_messages(agent.messages)], tools

    def _after_tool_call(self, event: AfterToolCallEvent) -> None:
        if event.exception is not None:
            self._error_places[event.tool_use["toolUseId"]] = user_code_location(event.exception)

    def _message_added(self, event: MessageAddedEvent) -> None:
        agent = event.agent
        if self._agents[-1:] != [agent]:
            if self._agents:
                self.show("agent", agent.name, "dim")
            if agent not in self._agents:
                self._show_agent(agent)
            self._agents = [*(other for other in self._agents if other is not agent), agent]
        self._show_message(event.message)

    def _show_agent(self, agent: Agent) -> None:
        if agent.system_prompt:
            self.show("system", agent.system_prompt)
        signatures = [
            f"{spec['name']}({', '.join(spec['inputSchema'].get('json', {}).get('properties', ()))})"
            for spec in agent.tool_registry.get_all_tool_specs()
        ]
        self.show("tools", ", ".join(signatures) or "none: the policy can only answer")
        for message in agent.messages[:-1]:
            self._show_message(message)

    def _show_message(self, message: Mapping[str, Any]) -> None:
        for block in message["content"]:
            if use := block.get("toolUse"):
                self.show("call", f"{use['name']} {json.dumps(use['input'], ensure_ascii=False, default=str)}")
            elif result := block.get("toolResult"):
                text, place = tool_result_text(result["content"]), self._error_places.pop(result["toolUseId"], "")
                self.show("error" if result["status"] == "error" else "result", text)
                if place:  # the policy does not read this
                    self.show("raised", place.strip(" ()"), "dim")
            elif reasoning := block.get("reasoningContent"):
                self.show("thinks", reasoning.get("reasoningText", {}).get("text", ""))
            else:
                shown = block.get("text", f"({', '.join(block)})")
                label = "limit" if _LIMIT_TEXT.match(shown) else "policy"
                self.show(label if message["role"] == "assistant" else "user", shown)

    def show_result(self, outcome: Outcome, *, has_tokens: bool) -> None:
        """Print reward, status, token counts and errors; if the episode failed without a turn, only the first error."""
        sample, facts = outcome.sample, outcome.facts
        if sample.status is Sample.Status.FAILED and not facts.turns:
            self.show("error", _list_errors(outcome)[0])
            return
        reward = sample.reward if isinstance(sample.reward, Mapping) else {"score": sample.reward}
        entries = {**reward, "label": sample.label, "error": ""}.items()  # errors follow on lines of their own
        self._console.print()
        self.show("reward", ", ".join(f"{name} {_short(value)}" for name, value in entries if value not in ("", None)))
        counts = {"turns": facts.turns, "tool calls": facts.tool_calls, "tool errors": facts.tool_errors}
        counts_text = ", ".join(f"{name}: {count or 0}" for name, count in counts.items())
        status = f"{sample.status.value} ({facts.stop_reason}); {counts_text}"
        self.show("status", status, "red" if sample.status is Sample.Status.FAILED else "")
        trained, prompt = sum(sample.loss_mask or ()), len(sample.tokens) - sample.response_length
        context = f"{prompt} of the prompt and {sample.response_length - trained} between turns"
        siblings = f"; siblings: {len(outcome.siblings)}" if outcome.siblings else ""
        self.show("tokens", f"{trained} trained, {context} read{siblings}" if has_tokens else _NO_TOKENS)
        for error in _list_errors(outcome):
            self.show("error", error)


def _list_errors(outcome: Outcome, *, of_episode: bool = True) -> list[str]:
    reward = outcome.sample.reward
    errors = of_episode and outcome.facts.error, reward.get("error") if isinstance(reward, Mapping) else None
    return [*(str(error) for error in errors if error), *outcome.contract_violations, *outcome.tito_violations]


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else textwrap.shorten(str(value), 60, placeholder="...")


_CURRENT_TRANSCRIPT: Final[ContextVar[Transcript]] = ContextVar("transcript")


def current_transcript() -> Transcript:
    """Return the transcript of the running episode; `try` adds this function to the setting `hooks`."""
    return _CURRENT_TRANSCRIPT.get()


class WrittenCall(BaseModel):
    """A tool call in a written turn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    arguments: dict[str, Any] = {}


class WrittenTurn(BaseModel):
    """A written turn of the policy: text, then calls."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = ""
    calls: list[WrittenCall] = []


class Script:
    """Turns from a YAML list: strings, and mappings with the fields of `WrittenTurn`.

    Raises:
        ConfigError: The file can't be read or holds no list of turns; or a turn (the message names it) is neither a
            string nor a mapping with the fields of `WrittenTurn`.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = yaml.safe_load(yaml_text(path))
        except (yaml.YAMLError, ValueError, ArithmeticError) as e:
            raise ConfigError(f"{path} can't be read as YAML: {e}") from e
        if not isinstance(content, list) or not content:
            raise ConfigError(
                f"{path} holds {type(content).__name__ if content else 'nothing'}; expected a list of turns, each a "
                "text or {text: ..., calls: [{name: lookup, arguments: {item: apple}}]}"
            )
        turns = [{"text": entry.rstrip("\n")} if isinstance(entry, str) else entry for entry in content]
        self._turns = [
            validated(WrittenTurn, turn, f"{path}: turn {number}") for number, turn in enumerate(turns, start=1)
        ]
        self._path, self._played = path, 0

    async def turn(self, request: AgentRequest | None) -> WrittenTurn:  # noqa: ARG002 - a script does not react
        """Return the next turn; raise PolicyEndedError if there is none."""
        self._played += 1
        if self._played > len(self._turns):
            raise PolicyEndedError(
                f"{self._path} ends too early: the episode continues, and turn {self._played} of the policy is missing"
            )
        return self._turns[self._played - 1]

    def check_end(self, stop_reason: object) -> None:
        """Raise PolicyEndedError if turns are left at the end of the episode."""
        if self._played < len(self._turns):
            raise PolicyEndedError(
                f"{self._path} is too long: it has {len(self._turns)} turns, and the episode ended after turn "
                f"{self._played} ({stop_reason})"
            )


class Person:
    """Turns typed at the terminal."""

    def __init__(self, note: Callable[[str], None]) -> None:
        with suppress(ImportError):  # makes input lines editable
            import readline  # noqa: F401
        self._note = note
        note(_TYPING_HELP)

    async def turn(self, request: AgentRequest | None) -> WrittenTurn:  # noqa: ARG002 - the person has read it
        """Return a typed turn; after a call that can't be parsed, explain the form of calls and ask again.

        Raises:
            PolicyEndedError: The person has pressed Ctrl-D or Ctrl-C.
        """
        while True:
            try:
                return parse_typed_turn(_read_typed_lines())
            except ValueError as e:
                self._note(str(e))


def _read_typed_lines() -> list[str]:
    # read the input in this thread: another thread could not be ended while it waits for input. The blocked event loop
    # does no harm, since nothing else runs. Python's own handler of Ctrl-C ends the input; asyncio's would only cancel
    # a task
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        lines = [""]
        while not lines[-1].strip():
            lines = [input("you> ")]
        while lines[-1].endswith("\\"):
            lines[-1:] = [lines[-1][:-1], input("...> ")]
    except (EOFError, KeyboardInterrupt):
        raise PolicyEndedError("the input at the terminal ended before the episode did") from None
    finally:
        signal.signal(signal.SIGINT, handler)
    return lines


def parse_typed_turn(lines: Sequence[str]) -> WrittenTurn:
    """Parse the lines of a typed turn; for a malformed call, raise a ValueError that shows how to write a call."""
    texts = [line for line in lines if not line.startswith("/")]
    calls = [_parse_typed_call(line) for line in lines if line.startswith("/")]
    return WrittenTurn(text="\n".join(texts), calls=calls)


def _parse_typed_call(line: str) -> WrittenCall:
    error: Exception | None = None
    if match := _TYPED_CALL.fullmatch(line):
        try:
            return WrittenCall(name=match[1], arguments=yaml.safe_load(match[2]) or {})
        except (ValueError, ValidationError, yaml.YAMLError) as e:
            error = e
    raise ValueError(f'got {line!r}; expected /call NAME {{"key": "value"}}') from error


@dataclass(frozen=True, slots=True)
class HostedModel:
    """Turns from a model behind an OpenAI-compatible API: its texts and calls, without its tokens."""

    api: ChatApi

    async def turn(self, request: AgentRequest | None) -> WrittenTurn:
        """Return the API's answer to the conversation.

        Raises:
            PolicyEndedError: The API gives no answer that can be used, or a sub-agent calls its model.
        """
        if request is None:
            raise PolicyEndedError("a sub-agent calls its model; the API of --api-base can answer only the main agent")
        messages, tools = request
        try:
            message = await self.api.complete(list(map(_openai_message, messages)), tools)
        except EngineRejectedError as e:
            is_denied = e.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
            hint = (
                "; OPENAI_API_KEY is not set" if not self.api.api_key else "; check OPENAI_API_KEY" if is_denied else ""
            )
            raise PolicyEndedError(f"the API answered {e.status_code}: {e}{hint}") from e
        except EngineError as e:
            raise PolicyEndedError(str(e)) from e
        try:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            return WrittenTurn(text=message.get("content") or "", calls=list(map(_parse_api_call, calls)))
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            got = f"the API answered with the message {message!r:.300}"
            expected = "expected content as text, and calls with a name, and with arguments as JSON text"
            raise PolicyEndedError(f"{got}; {expected} ({type(e).__name__}: {e})") from e


def _parse_api_call(function: Mapping[str, Any]) -> WrittenCall:
    name, arguments = str(function["name"]), function.get("arguments") or "{}"
    try:
        return WrittenCall(name=name, arguments=json.loads(arguments))
    except ValueError as e:
        got = f"the API's call of {name} has the arguments {arguments!r:.200}"
        raise PolicyEndedError(f"{got}; expected a JSON object") from e


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat template's message for the API, which takes the arguments of calls as JSON texts."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    fields = {name: value for name, value in message.items() if name in ("role", "content", "tool_call_id")}
    return fields | ({"tool_calls": calls} if calls else {})


WrittenPolicy: TypeAlias = Script | Person | HostedModel


class PolicyServer:
    """An HTTP server that answers `/generate` with a policy's turns, in SGLang's format, with logprobs of 0.

    Attributes:
        error: The policy's error, if it could not give a turn, else None. The server answers the request for this
            turn with an abort.
    """

    def __init__(self, policy: WrittenPolicy, folder: Path, settings: RolloutSettings, transcript: Transcript) -> None:
        thinking = {} if settings.enable_thinking is None else {"enable_thinking": settings.enable_thinking}
        self._template = ChatTemplate(load_tokenizer(str(folder)), **thinking)
        call, name = self._template.example_call, settings.tool_parser
        self._parser = get_parser(detect_format(*call) if name == AUTO else name)
        self._policy, self._transcript = policy, transcript
        self.error: RolloutError | None = None

    def running(self) -> AbstractAsyncContextManager[str]:
        """Listen until the block ends, and yield the URL."""
        return local_server(web.post("/generate", self._generate))

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        prompt_ids, encoder = body["input_ids"], self._template.encoder
        agent_request = self._transcript.take_request()
        if agent_request is None:
            self._transcript.show("reads", f"(another agent) {encoder.decode(prompt_ids)}")
        ids, max_tokens = [], body["sampling_params"]["max_new_tokens"]
        finish: dict[str, Any] = {"type": "abort", "message": "no turn"}
        try:
            text, end_id = self._write_turn(await self._policy.turn(agent_request))
        except RolloutError as e:
            self.error = e
        else:
            if agent_request is None:
                self._transcript.show("says", f"(another agent) {text}")
            turn_ids = [*encoder.encode_trusted(text), end_id]
            is_cut, ids = len(turn_ids) > max_tokens, turn_ids[:max_tokens]
            finish = {"type": "length", "length": max_tokens} if is_cut else {"type": "stop", "matched": end_id}
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(ids),
            "output_token_logprobs": [[0.0, token, None] for token in ids],
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    def _write_turn(self, turn: WrittenTurn) -> tuple[str, int]:
        """Return a turn as the template writes it, and its end token."""
        try:
            text, end_id = self._template.write_turn(turn.text, [(call.name, call.arguments) for call in turn.calls])
        except TemplateError as e:
            raise TemplateError(f"{e}; write them into the turn's text, in the policy's format") from e
        segments = self._parser.segments(text, self._template.opens_reasoning)
        if sum(isinstance(segment, ToolCall) for segment in segments) < len(turn.calls):
            raise PolicyEndedError(
                f"the tool parser does not read all calls of the turn, which the chat template writes as {text!r}. Set "
                "tool_parser: auto; or write a turn without text, or with a single call, since some formats allow no "
                "text with a call, or only one call"
            )
        return text, end_id


def run_try(options: TryOptions) -> int:
    """Play a row and print its transcript; after a success with a settings file, suggest `eval` with this file.

    Returns:
        The exit code:

        - 1: The episode, its reward or a check of its tokens failed, or its sample is not trained.
        - 130: After Ctrl-C. With --you, also after Ctrl-D or a turn with calls that the tool parser does not read.
        - 0: Otherwise.

    Raises:
        RolloutError: The configuration, the row, the engine or the tokenizer can't be used; a script has fewer or more
            turns than the episode; or a script or an API gives a turn that can't be used.
    """
    try:
        code = asyncio.run(_try(options))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except PolicyEndedError as e:
        if not options.you:
            raise
        print(f"\n{e}", file=sys.stderr)
        return EXIT_INTERRUPTED
    if code == EXIT_OK and (config := options.config) is not None:
        held_out = config.parent / "held_out.jsonl"
        arguments = [
            ("--data", held_out if held_out.is_file() else options.data),
            ("--base-url", options.base_url),
            ("--tokenizer", options.base_url and options.tokenizer_dir),
            ("--model", options.model_dir),
            ("--reward", options.reward),
            *(("--set", change) for change in options.changes or ()),
        ]
        show_next("eval", "--config", config, *(word for pair in arguments if pair[1] is not None for word in pair))
    return code


async def _try(options: TryOptions) -> int:
    log, transcript = make_console(stderr=True), Transcript(make_console())

    def note(text: str) -> None:
        log.print(text, markup=False, soft_wrap=True)

    changes = merge_changes(options.changes, options.reward)
    settings = await load_settings(options.config, changes, options.base_url, options.model_dir)
    row = _load_row(options, note, needs_label=settings.needs_labels)
    policy = _build_policy(options, note)
    if CODE_TOOL_PATH in settings.tools:
        note(f"code runs with isolation {await start_executor(settings.executor)!r}")
    async with AsyncExitStack() as stack:
        if policy is None:
            server = None
            if text := shipped_model_note(settings, options.config, options.base_url, options.model_dir):
                note(text)
            base_url = await stack.enter_async_context(served_engine(options.base_url, options.model_dir))
            folder = options.tokenizer_dir or await fetch_tokenizer_folder(base_url)
        else:
            folder = options.tokenizer_dir or SHIPPED_MODEL
            server = PolicyServer(policy, folder, settings, transcript)
            base_url = await stack.enter_async_context(server.running())
        # sub-agents send the main agent's routing key, so the audit can't tell their requests from the main agent's
        is_single_agent = settings.agent_factory is None and not settings.has_program
        player = await stack.enter_async_context(
            open_player(base_url, folder, _settings(settings, options), audited=is_single_agent)
        )
        _CURRENT_TRANSCRIPT.set(transcript)
        max_tokens = _EMBEDDED_MAX_NEW_TOKENS if policy is None and options.base_url is None else _MAX_NEW_TOKENS
        sampling_params = slime_sampling_params(options.temperature, max_tokens)
        seed = {} if options.seed is None else {"sampling_seed": options.seed}
        outcome = await player.play(row.sample(index=options.row, group_index=0), sampling_params | seed)
        if server and server.error:
            raise server.error
        transcript.show_result(outcome, has_tokens=options.api_base is None)
        if options.tokens or settings.has_program:  # no hook sees a program's turns
            print_transcript(make_console(), outcome.sample, player.decode)
    return _exit_code(outcome, policy)


def _exit_code(outcome: Outcome, policy: WrittenPolicy | None) -> int:
    sample = outcome.sample  # a truncated episode with tokens to train on is a success too
    if sample.remove_sample or sample.status is Sample.Status.ABORTED or _list_errors(outcome, of_episode=False):
        return EXIT_FAILED
    if isinstance(policy, Script):
        policy.check_end(outcome.facts.stop_reason)
    return EXIT_OK


def _settings(settings: RolloutSettings, options: TryOptions) -> dict[str, Any]:
    """Return the settings of the episode: with the transcript's hook, unless a program plays the episode."""
    hook = f"{current_transcript.__module__}.{current_transcript.__qualname__}"
    # the local server answers with an abort when the policy gives no turn: the episode then ends
    changes: dict[str, Any] = {"max_failed_groups": None, "on_engine_abort": "return"}
    if not settings.has_program:
        changes["hooks"] = [*settings.hooks, hook]
    if options.you:  # a person may take any time
        changes["episode_timeout_s"] = None
    return settings.model_dump(exclude_unset=True) | changes


def _load_row(options: TryOptions, note: Callable[[str], None], *, needs_label: bool) -> Row:
    own_data = options.config and options.config.parent / "train.jsonl"
    data = options.data or (own_data if own_data and own_data.is_file() else shipped_rows())
    rows = load_rows(data, prompt_key=options.input_key, label_key=options.label_key, needs_label=needs_label)
    if options.row >= len(rows):
        count = f"{len(rows)} row{'s' if len(rows) > 1 else ''}"
        raise ConfigError(f"got --row {options.row}; expected an index from 0 to {len(rows) - 1} ({data} has {count})")
    shipped = " (the shipped problems: name your own with --data FILE)" if data == shipped_rows() else ""
    note(f"row {options.row} of {data}{shipped}")
    return rows[options.row]


def _build_policy(options: TryOptions, note: Callable[[str], None]) -> WrittenPolicy | None:
    if options.script is not None:
        return Script(options.script)
    if options.you:
        return Person(note)
    if options.api_base is not None and options.api_model is not None:
        note("the API returns text only: exact tokens, logprobs and training need an SGLang server (--base-url)")
        key = os.environ.get("OPENAI_API_KEY", "")
        return HostedModel(ChatApi(options.api_base, options.api_model, key, timeout_s=_API_TIMEOUT_S))
    return None
