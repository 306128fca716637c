"""Anthropic's Messages API, and what all APIs share: their fields, and the code to convert requests and answers.

A field that can change tokens is applied, refused, or ignored and listed in the session's facts. Fields that can't
change tokens are accepted. docs/gateway.md lists the fields of each kind.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import orjson

from strands_rollout.errors import PromptError
from strands_rollout.files.json_codec import decode_json, encode_json
from strands_rollout.gateway.history_cache import History, HistoryCache, Item, Message, Piece, system_texts
from strands_rollout.model.sampling import GRAMMARS
from strands_rollout.record.record import Block, Reply
from strands_rollout.tool_parsers.base import StrictJSONError, check_depth

_DATA_URL: Final = re.compile(r"data:image/(?P<format>[\w.+-]+);base64,(?P<data>.*)", re.DOTALL)
_SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
)
# names of the field for a turn's minimum length: in SGLang's `/generate`, and in SGLang's and vLLM's chat endpoints
_MIN_LENGTHS: Final = ("min_new_tokens", "min_tokens")
# fields that are applied, from the APIs and from SGLang's and vLLM's endpoints
APPLIED: Final = frozenset(
    {
        *_SAMPLING_FIELDS,
        *_MIN_LENGTHS,
        *GRAMMARS,
        "messages",
        "input",
        "system",
        "instructions",
        "model",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "stop",
        "stop_sequences",
        "seed",
        "previous_response_id",
        "thread",
        "chat_template_kwargs",
        # only the default value is applied: others are refused by `refuse_unsupported`, or ignored
        "n",
        "response_format",
        "text",
        "output_config",
        "truncation",
        "modalities",
        "add_generation_prompt",
        "parallel_tool_calls",
    }
)
# fields that are accepted, since they can't change tokens
HARMLESS: Final = frozenset(
    {
        "metadata",
        "user",
        "user_profile_id",
        "safety_identifier",
        "client_metadata",
        "betas",
        "diagnostics",
        "store",
        "service_tier",
        "speed",
        "inference_geo",
        "fallback_credit_token",
        "include",
        "moderation",
        "cache_control",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "cache_salt",
        "rid",
        "request_id",
        "priority",
    }
)
# fields that must be absent, null, false, 0 or empty; see `refuse_unsupported`
REFUSED: Final = (
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "background",
    "prompt",
    "conversation",
    "max_tool_calls",
    "mcp_servers",
    "container",
    "output_format",
    "compaction",
    # SGLang's and vLLM's additions
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "stop_regex",
    "continue_final_message",
    "chat_template",
    "documents",
    "echo",
    "best_of",
    "use_beam_search",
    "beam_width",
    "length_penalty",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
    "custom_logit_processor",
    "custom_params",
    "session_params",
    "lora_path",
    "return_hidden_states",
    "truncate_prompt_tokens",
    "watermark",
    "include_stop_str_in_output",
    "thinking_token_budget",
    "mm_processor_kwargs",
)
# fields of a tool that make other servers change what the model reads, or constrain how calls are sampled
_IGNORED_TOOL_FIELDS: Final = ("strict", "input_examples", "defer_loading", "allowed_callers", "output_schema")
_JSON_GRAMMARS: Final = ("json_schema", "structural_tag")
_CLEARS_THINKING: Final = "clear_thinking_20251015"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A client's request.

    Attributes:
        messages: The history as Strands messages, ending with a user message.
        system: The system prompt; None if there is none.
        tools: Strands tool specifications.
        params: Sampling parameters by SGLang's names.
        model: The model's name, which the answer repeats.
        streams: True if the answer is to be streamed.
        with_usage: True if a stream of Chat Completions is to end with the usage; the other APIs always report it.
        body: What the API's class needs to build and remember the answer, including the items of the history; {} if it
            needs nothing.
        template_kwargs: Arguments of the chat template, which must be equal to the policy's.
        ignored_fields: See `find_ignored_fields`.
    """

    messages: list[Message]
    system: str | None
    tools: list[dict[str, Any]]
    params: dict[str, Any]
    model: str
    streams: bool
    with_usage: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ignored_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grammar(self) -> Mapping[str, Any]:
        """The sampling parameters of the grammar that constrains the turn; {} without a grammar.

        A repeated request gets the recorded turn only if that turn had the same grammar. If an earlier attempt sampled
        the turn, its grammar is unknown, and the turn answers requests with any grammar.
        """
        return {name: self.params[name] for name in GRAMMARS if name in self.params}

    def is_repeated_by(self, other: TurnRequest) -> bool:
        """Return whether another request has the same messages and grammar."""
        return self.messages == other.messages and self.grammar == other.grammar


class ApiProtocol(ABC):
    """An API's format of requests and answers, for one session.

    In some APIs, a request may refer to an earlier answer of the session, to continue the history of that answer.

    Attributes:
        items_name: Name of the field with the history.
        ping: Bytes that the server sends while a stream waits for its answer.
    """

    items_name: ClassVar[str] = "messages"
    ping: ClassVar[bytes] = b": waiting\n\n"
    _MAX_REMEMBERED: ClassVar[int] = 256

    def __init__(self) -> None:
        self._remembered: dict[str, Mapping[str, Any]] = {}
        self._cache = HistoryCache(self.items_name, self.pieces)

    def remember(self, answer_id: str, body: Mapping[str, Any]) -> None:
        """Store the fields for later requests that refer to this answer; keep the fields of the last 256 answers."""
        self._remembered[answer_id] = body
        while len(self._remembered) > self._MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    def recall(self, field_name: str, answer_id: object) -> Mapping[str, Any]:
        """Return the fields that were stored for an answer's id.

        Raises:
            PromptError: No fields are stored for this id, or they were dropped.
        """
        if not isinstance(answer_id, str) or answer_id not in self._remembered:
            raise PromptError(
                f"got {field_name}={answer_id!r:.100}; expected the id of one of this session's last answers. Send the "
                "whole history instead"
            )
        return self._remembered[answer_id]

    def read(self, raw: bytes) -> TurnRequest:
        """Convert a request; if it only appends items to an earlier request, only the new items are read.

        Raises:
            PromptError: The request can't be served.
        """
        history = self._cache.extended(raw)
        if history is None or history.settings is None:
            return self.read_body(decode_body(raw), raw)
        return self._request(history.settings, history)

    def read_body(self, body: object, raw: bytes = b"") -> TurnRequest:
        """Convert a request's parsed body; pass the body's bytes as `raw` if a later request may extend it.

        Raises:
            PromptError: The request can't be served.
        """
        if not isinstance(body, dict):
            raise PromptError(f"got a body of type {type(body).__name__}; expected a JSON object")
        whole = self.with_earlier_items(body)
        settings, items = self.read_settings(whole), list_of_objects(whole, self.items_name)
        return self._request(settings, self._cache.read(settings, items, body, raw if whole is body else b""))

    def _request(self, settings: TurnRequest, history: History) -> TurnRequest:
        system = "\n\n".join(text for text in (settings.system, *history.system) if text) or None
        # copy the items, since a later request may extend the history while this request is answered
        body = {**settings.body, self.items_name: [*history.items]} if settings.body else {}
        return replace(settings, messages=[*history.messages], system=system, body=body)

    def with_earlier_items(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body with its whole history, if the body refers to an earlier answer; else the body itself.

        Raises:
            PromptError: The earlier answer is unknown.
        """
        return body

    @abstractmethod
    def read_settings(self, body: dict[str, Any]) -> TurnRequest:
        """Convert all fields of a body except the history; `system` is the system prompt outside of the history.

        Raises:
            PromptError: The request can't be served.
        """

    @staticmethod
    @abstractmethod
    def pieces(item: Item) -> list[Piece]:
        """Convert an item of the history.

        Raises:
            PromptError: The item can't be converted.
        """

    @abstractmethod
    def response_body(self, request: TurnRequest, reply: Reply) -> dict[str, Any]:
        """Return the body of a non-streaming response."""

    @abstractmethod
    def events(self, request: TurnRequest, reply: Reply) -> Iterator[bytes]:
        """Yield a streaming response as server-sent events."""

    @abstractmethod
    def error(self, status: int, kind: str, message: str) -> dict[str, Any]:
        """Return an error's body; `kind` is a code such as "context_length_exceeded"."""

    def error_event(self, status: int, kind: str, message: str) -> bytes:
        """Return the event that reports an error within a stream."""
        return sse(self.error(status, kind, message))


def decode_body(raw: bytes) -> object:
    """Return the JSON of a request's body.

    Raises:
        PromptError: The body is not JSON.
    """
    try:
        return decode_json(raw)
    except ValueError as e:
        raise PromptError(f"got a body that is not valid JSON: {e}") from e


def sse(body: object) -> bytes:
    """Return a server-sent event with a body as JSON."""
    return b"data: " + encode_json(body) + b"\n\n"


def named_sse(body: Mapping[str, Any]) -> bytes:
    """Return a server-sent event that is named after its body's type."""
    return f"event: {body['type']}\n".encode() + sse(body)


def new_id(prefix: str) -> str:
    """Return a random id with this prefix."""
    return f"{prefix}{secrets.token_hex(12)}"


def field_of(body: Item, name: str, kind: type, expected: str) -> Any:  # noqa: ANN401 - JSON
    """Return the field `name` of type `kind`; an empty `kind` if the field is absent or null.

    Raises:
        PromptError: The field has another type; the message says that `expected` was expected.
    """
    value = body.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise PromptError(f"got {name}={value!r:.100}; expected {expected}")
    return value


def list_of_objects(body: Item, name: str) -> list[dict[str, Any]]:
    """Return a field with a list of objects; an empty list if the field is absent or null.

    Raises:
        PromptError: The field is not a list of objects.
    """
    values: list[dict[str, Any]] = field_of(body, name, list, "a list of objects")
    if not set(map(type, values)) <= {dict}:
        raise PromptError(f"got {name} with items that are not objects; expected a list of objects")
    return values


def refuse_unsupported(body: Item, **choices: Sequence[object]) -> None:
    """Refuse a request with a field, or a value of a field, that is not supported.

    Args:
        body: The request. Each field of `REFUSED` must be absent, null, false, 0 or empty, and `context_management`
            may only clear reasoning.
        **choices: Field name -> the supported values of the field, which may also be absent or null. If a value is an
            object, its `type` is compared with the supported values.

    Raises:
        PromptError: A field or its value is not supported.
    """
    for name in REFUSED:
        if body.get(name):
            raise PromptError(f"got {name}={body[name]!r:.100}, which is not supported; leave it out")
    for name, accepted in choices.items():
        value = body.get(name)
        chosen = value.get("type") if isinstance(value, dict) else value
        if chosen is not None and chosen not in accepted:
            expected = " or ".join(map(repr, accepted))
            raise PromptError(f"got {name}={value!r:.100}, which is not supported; expected {expected}")
    management = body.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else management
    # clearing reasoning is accepted: the chat template decides which reasoning of earlier turns is shown
    only_clears_thinking = isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("type") == _CLEARS_THINKING for edit in edits
    )
    if edits and not only_clears_thinking:
        raise PromptError(
            f"got context_management={management!r:.200}; expected none, or only edits of type {_CLEARS_THINKING!r}, "
            "since the gateway applies no edits to the history. Shorten the history in the client"
        )


def find_ignored_fields(body: Item, tools: Iterable[Item] = ()) -> dict[str, Any]:
    """Return the ignored fields that may change tokens in other servers, with their values.

    They include all unknown fields. Fields of objects and tools have dotted names, such as `text.verbosity`.

    Raises:
        PromptError: `text` or `output_config` is not an object.
    """
    known = APPLIED | HARMLESS
    found = {name: value for name, value in body.items() if name not in known and value not in (None, "", [], {})}
    # a field of `REFUSED` is 0 or false here: `refuse_unsupported` refuses other values that are not empty
    found = {name: value for name, value in found.items() if name not in REFUSED}
    for outer in ("text", "output_config"):
        inner = field_of(body, outer, dict, "an object")
        found |= {f"{outer}.{name}": value for name, value in inner.items() if name != "format" and value is not None}
    choice = body.get("tool_choice")
    is_single = isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
    if is_single or body.get("parallel_tool_calls") is False:
        found["parallel_tool_calls"] = False
    return found | {f"tools.{name}": tool[name] for tool in tools for name in _IGNORED_TOOL_FIELDS if tool.get(name)}


def sampling_params(body: Item, *limits: str) -> dict[str, Any]:
    """Return the sampling parameters under SGLang's names.

    Args:
        body: The request.
        *limits: The API's names for the maximum length of a turn.

    Raises:
        PromptError: A parameter has the wrong type, is too small, or can't be sent to the engine; or the request has
            several grammars.
    """
    for name in (*_SAMPLING_FIELDS, *_MIN_LENGTHS, *limits, "seed", "stop", "stop_sequences"):
        try:
            orjson.dumps(body.get(name))  # `SGLangClient` encodes its requests with orjson
        except TypeError as e:
            raise PromptError(f"got {name}={body[name]!r:.100}, which can't be sent to the engine: {e}") from e
    params = {name: body[name] for name in _SAMPLING_FIELDS if body.get(name) is not None}
    for name, value in params.items():
        if name not in ("stop_token_ids", "ignore_eos") and not _is_number(value):
            raise PromptError(f"got {name}={value!r:.100}; expected a number")
    stop_ids = params.get("stop_token_ids", [])
    if not isinstance(stop_ids, list) or not all(type(token_id) is int and token_id >= 0 for token_id in stop_ids):
        raise PromptError(f"got stop_token_ids={stop_ids!r:.100}; expected a list of token ids")
    stop = body.get("stop") or body.get("stop_sequences") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise PromptError(f"got the stop strings {stop!r:.100}; expected a string or a list of non-empty strings")
    further = {
        "stop": stops or None,
        "max_new_tokens": _whole_number(body, limits, at_least=1),
        "min_new_tokens": _whole_number(body, _MIN_LENGTHS, at_least=0),
        "sampling_seed": _whole_number(body, ("seed",)),
        **_grammar(body),
    }
    return params | {name: value for name, value in further.items() if value is not None}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole_number(body: Item, names: Sequence[str], *, at_least: int | None = None) -> int | None:
    """Return the value of the first field in `names` that the request has; None if it has none of them."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    value = body[name]
    if type(value) is not int or (at_least is not None and value < at_least):
        least = "" if at_least is None else f" of at least {at_least}"
        raise PromptError(f"got {name}={value!r:.100}; expected a whole number{least}")
    return value


def _grammar(body: Item) -> dict[str, str]:
    """Return {SGLang's name of the turn's grammar: its text}, or {} if the request has no grammar."""
    given = {name: body[name] for name in GRAMMARS if body.get(name)}
    if len(given) > 1:
        raise PromptError(f"got {' and '.join(given)}; expected only one of them, since SGLang applies only one")
    found = {}
    for name, value in given.items():
        try:
            text = encode_json(value).decode() if isinstance(value, dict) and name in _JSON_GRAMMARS else value
        except ValueError as e:
            raise PromptError(f"got a {name} that can't be written as JSON: {e}") from e
        if not isinstance(text, str):
            expected = "a string or an object" if name in _JSON_GRAMMARS else "a string"
            raise PromptError(f"got {name}={value!r:.100}; expected {expected}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise PromptError(f"got {name}={value!r:.100}, which can't be sent to the engine: {e}") from e
        found[name] = text
    return found


def tool_spec(name: object, description: object, schema: object) -> dict[str, Any]:
    """Return a Strands tool specification.

    Raises:
        PromptError: The name is missing, empty or not a string; or the schema is neither None nor an object, or is
            nested too deeply.
    """
    if not isinstance(name, str) or not name or not isinstance(schema, dict | None):
        raise PromptError(
            f"got a tool with the name {name!r:.100} and parameters of type {type(schema).__name__}; expected a name, "
            "and parameters that are an object with a JSON schema"
        )
    _check_depth(schema, f"the parameters of the tool {name!r:.100}")
    return {"name": name, "description": str(description or ""), "inputSchema": {"json": schema or {}}}


def client_tools(tools: list[dict[str, Any]], tool_type: str) -> list[dict[str, Any]]:
    """Check that the client runs all of these tools, and return them.

    Raises:
        PromptError: A tool's type is not `tool_type`, the API's type of tools that the client runs.
    """
    for tool in tools:
        if tool.get("type", tool_type) != tool_type:
            raise PromptError(
                f"got the tool {tool!r:.100}; expected a tool that the client runs, of type {tool_type!r}"
            )
    return tools


def image_block(format_: str, data: str) -> Block:
    """Return the block of an image in base64.

    Raises:
        PromptError: The data is not base64.
    """
    try:
        return {"image": {"format": format_, "source": {"bytes": base64.b64decode(data, validate=True)}}}
    except (ValueError, binascii.Error) as e:
        raise PromptError(f"got an image that is not base64: {e}") from e


def image_of_url(url: object) -> Block:
    """Return the block of an image in a data URL.

    Raises:
        PromptError: The URL is not a data URL of an image in base64.
    """
    found = _DATA_URL.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        raise PromptError(
            f"got the image {url!r:.80}; expected a data URL of an image in base64, such as data:image/png;base64,...; "
            "images at other locations are not fetched"
        )
    return image_block(found["format"], found["data"])


def _check_depth(value: object, what: str) -> None:
    """Raise PromptError if a value is nested deeper than the limit for the arguments of the policy's calls."""
    try:
        check_depth(value)
    except StrictJSONError as e:
        raise PromptError(f"got {what} {e}") from e


def call_block(use_id: object, name: object, arguments: object) -> Block:
    """Return the block of a call in a history.

    `arguments` are an object or its JSON text; None and an empty text mean {}.

    Raises:
        PromptError: The name is missing, empty or not a string, or the arguments are not a JSON object or are nested
            too deeply.
    """
    if not isinstance(name, str) or not name:
        raise PromptError(f"got a tool call with the name {name!r:.100}; expected the name of a tool")
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments or "{}", is_finite=False)
        except ValueError as e:
            raise PromptError(f"got a tool call with the arguments {arguments!r:.200}; expected JSON ({e})") from e
    if not isinstance(arguments, dict | None):
        raise PromptError(f"got a tool call with the arguments {arguments!r:.200}; expected a JSON object")
    _check_depth(arguments, "the arguments of a tool call")
    return {"toolUse": {"toolUseId": str(use_id), "name": name, "input": arguments or {}}}


def result_block(use_id: object, content: list[Block], *, is_error: bool = False) -> Block:
    """Return the block of a call's result."""
    status = "error" if is_error else "success"
    return {"toolResult": {"toolUseId": str(use_id), "status": status, "content": content}}


def reasoning_block(text: str) -> Block:
    """Return the block of a reasoning text."""
    return {"reasoningContent": {"reasoningText": {"text": text}}}


def blocks_of(content: object, convert: Callable[[Item], Block | None]) -> list[Block]:
    """Return the blocks of a message's content, which may be a string, a list of parts, or None (no blocks).

    If `convert` returns None for a part, the part is left out.

    Raises:
        PromptError: The content is something else, or `convert` refuses a part.
    """
    if content is None or isinstance(content, str):
        return [{"text": content}] if content else []
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise PromptError(f"got the content {content!r:.100}; expected a string, or a list of objects")
    return [block for part in content if (block := convert(part)) is not None]


# prefix of a note that Claude Code adds to the system prompt for Anthropic's server. The note is left out: it differs
# in each request
_BILLING_NOTE: Final = "x-anthropic-billing-header"


class Messages(ApiProtocol):
    """Anthropic's Messages API."""

    ping: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'

    def with_earlier_items(self, body: dict[str, Any]) -> dict[str, Any]:
        """See `ApiProtocol.with_earlier_items`: a request that continues a thread contains only its new messages."""
        thread = field_of(body, "thread", dict, "an object")
        if thread.get("type") != "continue":
            return body
        earlier = self.recall("thread.previous_message_id", thread.get("previous_message_id"))
        return {**body, **earlier, "messages": [*earlier["messages"], *list_of_objects(body, "messages")]}

    def read_settings(self, body: dict[str, Any]) -> TurnRequest:
        """See `ApiProtocol.read_settings`."""
        refuse_unsupported(body, tool_choice=("auto", "none"))
        if field_of(body, "output_config", dict, "an object").get("format"):
            raise PromptError("got output_config.format, which is not supported; leave it out")
        system = system_texts(blocks_of(body.get("system"), _messages_part))
        choice = field_of(body, "tool_choice", dict, "an object").get("type")
        tools = client_tools(list_of_objects(body, "tools"), "custom")
        return TurnRequest(
            [],
            "\n".join(text for text in system if not text.startswith(_BILLING_NOTE)),
            [] if choice == "none" else [*map(_messages_tool, tools)],
            sampling_params(body, "max_tokens"),
            str(body.get("model", "")),
            body.get("stream") is True,
            body={name: body.get(name) for name in ("system", "tools")} if body.get("thread") else {},
            template_kwargs=field_of(body, "chat_template_kwargs", dict, "an object"),
            ignored_fields=find_ignored_fields(body, tools),
        )

    @staticmethod
    def pieces(item: Item) -> list[Piece]:
        """See `ApiProtocol.pieces`."""
        role = item.get("role")
        if role not in ("user", "assistant", "system"):
            raise PromptError(f"got the role {role!r:.100}; expected 'user', 'assistant' or 'system'")
        return [(role, blocks_of(item.get("content"), _messages_part))]

    def response_body(self, request: TurnRequest, reply: Reply) -> dict[str, Any]:
        """See `ApiProtocol.response_body`."""
        message_id, content = new_id("msg_"), _content_blocks(reply)
        if request.body:
            answer = {"role": "assistant", "content": content}
            self.remember(message_id, {**request.body, "messages": [*request.body["messages"], answer]})
        return {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": content,
            "stop_reason": reply.stop_reason,
            "stop_sequence": reply.stop,
            "usage": _messages_usage(reply),
        }

    def events(self, request: TurnRequest, reply: Reply) -> Iterator[bytes]:
        """See `ApiProtocol.events`."""
        answer = self.response_body(request, reply)
        usage = {**answer["usage"], "output_tokens": 0}
        first = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield named_sse({"type": "message_start", "message": first})
        for index, block in enumerate(answer["content"]):
            start, deltas = _start_and_deltas(block)
            yield named_sse({"type": "content_block_start", "index": index, "content_block": start})
            for delta in deltas:
                yield named_sse({"type": "content_block_delta", "index": index, "delta": delta})
            yield named_sse({"type": "content_block_stop", "index": index})
        end = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        yield named_sse({"type": "message_delta", "delta": end, "usage": answer["usage"]})
        yield named_sse({"type": "message_stop"})

    def error(self, status: int, kind: str, message: str) -> dict[str, Any]:
        """See `ApiProtocol.error`. Clients shorten their history if the message contains "prompt is too long"."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
        type_ = kinds.get(status, "invalid_request_error" if status < 500 else "overloaded_error")
        shown = f"prompt is too long: {message}" if kind == "context_length_exceeded" else message
        return {"type": "error", "error": {"type": type_, "message": shown}}

    def error_event(self, status: int, kind: str, message: str) -> bytes:
        """See `ApiProtocol.error_event`."""
        return named_sse(self.error(status, kind, message))


def _messages_tool(tool: Item) -> dict[str, Any]:
    return tool_spec(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _content_blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "none"})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    uses = [{"type": "tool_use", "id": c["toolUseId"], "name": c["name"], "input": c["input"]} for c in reply.calls]
    return [*blocks, *uses]


def _start_and_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the start of `block` in a stream (a block without content), and the deltas that complete it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        text = encode_json(block["input"]).decode()
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    deltas = [{"type": f"{name}_delta", name: block[name]} for name in ("thinking", "signature")]
    return {**block, "thinking": "", "signature": ""}, deltas


def _messages_usage(reply: Reply) -> dict[str, int]:
    read, cached = reply.usage.get("inputTokens", 0), reply.usage.get("cacheReadInputTokens", 0)
    return {
        "input_tokens": max(0, read - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": min(cached, read),
        "output_tokens": reply.usage.get("outputTokens", 0),
    }


def _messages_part(part: Item) -> Block | None:
    kind = part.get("type")
    if kind == "text":
        return {"text": str(part.get("text", ""))}
    if kind == "thinking":
        return reasoning_block(str(part.get("thinking", "")))
    if kind == "redacted_thinking":
        return None
    if kind == "tool_use":
        return call_block(part.get("id"), part.get("name"), part.get("input"))
    if kind == "tool_result":
        content = blocks_of(part.get("content"), _messages_part)
        return result_block(part.get("tool_use_id"), content, is_error=part.get("is_error") is True)
    source = field_of(part, "source", dict, "an object") if kind == "image" else {}
    if source.get("type") == "base64":
        return image_block(str(source.get("media_type", "")).removeprefix("image/"), str(source.get("data", "")))
    raise PromptError(
        f"got a content block of type {kind!r:.100}; expected 'text', 'thinking', 'redacted_thinking', "
        "'tool_use', 'tool_result', or 'image' with a source of type 'base64'"
    )
