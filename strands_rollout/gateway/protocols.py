"""What APIs share, a request as Strands messages and a turn as what a client is sent; and Anthropic's Messages.

A field that can change tokens is honoured, refused, or listed among the facts as not heeded; docs/gateway.md has the
table. Fields that change no token are accepted.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import orjson

from strands_rollout.errors import PromptError
from strands_rollout.files.json_codec import decode_json, encode_json
from strands_rollout.model.sampling import GRAMMARS
from strands_rollout.record.branch import Block, Reply
from strands_rollout.template.tokens import shared_length
from strands_rollout.tool_parsers.base import StrictJSONError, check_depth

Message = dict[str, Any]
Item = Mapping[str, Any]
Piece = tuple[str, list[Block]]
"""What an item of a request says: by "system", "user", "assistant" or "tool", and which Strands blocks."""

_DATA_URL: Final = re.compile(r"data:image/(?P<format>[\w.+-]+);base64,(?P<data>.*)", re.DOTALL)
_SAMPLING: Final = (
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
# the names of the least length of a turn: SGLang's, and that of its and vLLM's chat endpoints
_LEAST_LENGTHS: Final = ("min_new_tokens", "min_tokens")
# each API's own fields, and those that SGLang's and vLLM's endpoints add to them
HONOURED: Final = frozenset(
    {
        *_SAMPLING,
        *_LEAST_LENGTHS,
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
        # with the one value that is meant anyway; any other is refused
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
    # of SGLang's and vLLM's endpoints
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
# of a tool: what else it says to the model, or how strictly its arguments are sampled
_OF_TOOLS: Final = ("strict", "input_examples", "defer_loading", "allowed_callers", "output_schema")
# grammars that are JSON themselves
_OF_JSON: Final = ("json_schema", "structural_tag")
_CLEARS_THINKING: Final = "clear_thinking_20251015"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a client asks for.

    Attributes:
        messages: Its history as Strands messages; the last is a user's.
        system: Its system prompt; None for none.
        tools: Strands tool specifications.
        params: Sampling parameters by SGLang's names.
        model: The model's name, which is sent back.
        streams: Whether the answer is to come as events.
        with_usage: Whether these end with the usage, where the API leaves the choice.
        body: What a later request may refer to: the fields that it would take over, with all that they refer to.
        template_kwargs: Arguments of the chat template, which must be the policy's own.
        unheeded: Further fields that could change tokens elsewhere, and change none here.
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
    unheeded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grammar(self) -> Mapping[str, Any]:
        """The parameters by which a grammar bounds the turn; an answer without them is an answer to something else."""
        return {name: self.params[name] for name in GRAMMARS if name in self.params}

    def is_repeated_by(self, other: TurnRequest) -> bool:
        """Whether another asks for the same turn."""
        return self.messages == other.messages and self.grammar == other.grammar


@dataclass(frozen=True, slots=True)
class _Body:
    """A body and what it was parsed to; `end` is where its list of items ends, 0 until a longer one has shown it."""

    raw: bytes
    parsed: dict[str, Any]
    end: int = 0

    def extended(self, raw: bytes, name: str) -> _Body | None:
        """One that differs by further items at the end of the list of this name; None where it is another."""
        end = self.end or _first_difference(self.raw, raw)
        tail, items = self.raw[end:], self.parsed.get(name)
        if raw[end : end + 1] != b"," or not raw.endswith(tail) or not raw.startswith(memoryview(self.raw)[:end]):
            return None
        try:
            more = decode_json(b"[%b]" % raw[end + 1 : len(raw) - len(tail)])
        except ValueError:
            return None
        if not more or not isinstance(items, list):
            return None
        parsed = {**self.parsed, name: [*items, *more]}
        # what is new is parsed alone from here on, if that is the same once: where the list ends does not change
        is_shown = self.end or parsed == decode_json(raw)
        return _Body(raw, parsed, len(raw) - len(tail)) if is_shown else None


def _first_difference(one: bytes, other: bytes) -> int:
    at = 0
    for size in (4096, 64, 1):
        while at < len(one) and one[at : at + size] == other[at : at + size]:
            at += size
    return at


@dataclass(slots=True)
class _Reading:
    """The items of a request, what each says, and what they come to; `last` is who says the last of it."""

    items: Sequence[Item]
    pieces: list[list[Piece]]
    system: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    last: str = ""

    def add(self, pieces: Sequence[Sequence[Piece]]) -> None:
        """Calls, reasoning and text of one turn are one message, as are its results.

        System messages after the first message of another kind are the user's, for no template has a place for them.
        """
        messages = self.messages
        for kind, blocks in (piece for item in pieces for piece in item):
            if kind == "system" and not messages:
                self.system.append("\n".join(system_texts(blocks)))
            elif kind == self.last and kind in ("assistant", "tool"):
                messages[-1] = {**messages[-1], "content": [*messages[-1]["content"], *blocks]}
            else:
                messages.append({"role": "assistant" if kind == "assistant" else "user", "content": blocks})
                self.last = kind


class ItemCache:
    """What a session's requests were parsed and converted to: most of one repeats the one before."""

    _KEPT: Final = 4

    def __init__(self) -> None:
        self._requests: list[_Reading] = []  # the newest first
        self._bodies: list[_Body] = []

    def parsed(self, raw: bytes, name: str) -> object:
        """A body's JSON; of one that is longer than an earlier one by items in the list of this name, these are parsed.

        Where all of each body is parsed, an episode takes 4% more CPU at 20 tool turns, and 10% at 80; see
        docs/performance.md.

        Raises:
            ValueError: It is no JSON.
        """
        found = next(((one, longer) for one in self._bodies if (longer := one.extended(raw, name))), None)
        if found is None:
            parsed = decode_json(raw)
            if isinstance(parsed, dict):
                self._bodies = [_Body(raw, parsed), *self._bodies[: self._KEPT - 1]]
            return parsed
        self._bodies = [found[1], *(one for one in self._bodies if one is not found[0])]
        return found[1].parsed

    def read(
        self, items: Sequence[Item], convert: Callable[[Item], list[Piece]], system: Sequence[str] = ()
    ) -> tuple[str | None, list[Message]]:
        """The system prompt, of which these texts are the first, and the messages.

        Messages that an earlier request had are the same objects, and so are quickly compared.
        """
        shared, known, kept = 0, _Reading((), []), list[_Reading]()
        for earlier in self._requests:
            length = shared_length(earlier.items, items)
            if length > shared:
                shared, known = length, earlier
            if length < len(earlier.items):  # else all of it is in this one
                kept.append(earlier)
        new = [convert(item) for item in items[shared:]]
        made = _Reading(items, known.pieces[:shared] + new)
        if shared == len(known.items):
            made.system, made.messages, made.last = [*known.system], [*known.messages], known.last
            made.add(new)
        else:
            made.add(made.pieces)
        self._requests = [made, *kept[: self._KEPT - 1]]
        if not made.messages or made.last == "assistant":
            got = "no message" if not made.messages else "a history that ends with the assistant"
            raise PromptError(f"got {got}; expected one that ends with a user's message or a tool's result")
        return "\n\n".join(text for text in (*system, *made.system) if text) or None, made.messages


class Protocol(ABC):
    """One of the APIs. A request may name an earlier answer of its session, whose history then comes first.

    Attributes:
        items_name: Of the field that has the history.
        ping: Sent while a streamed answer is waited for.
    """

    items_name: ClassVar[str] = "messages"
    ping: ClassVar[bytes] = b": waiting\n\n"
    _KEPT: ClassVar[int] = 256

    def __init__(self) -> None:
        self._held: dict[str, Mapping[str, Any]] = {}  # by the ids of answers

    def hold(self, answer_id: str, body: Mapping[str, Any]) -> None:
        """Keep what a request may refer to by an answer's id; the oldest are forgotten."""
        self._held[answer_id] = body
        while len(self._held) > self._KEPT:
            del self._held[next(iter(self._held))]

    def held(self, field_name: str, answer_id: object) -> Mapping[str, Any]:
        """What is kept under an id."""
        if not isinstance(answer_id, str) or answer_id not in self._held:
            raise PromptError(f"got {field_name}={answer_id!r:.100}; expected one of this session's newest")
        return self._held[answer_id]

    @abstractmethod
    def read(self, body: dict[str, Any], cache: ItemCache) -> TurnRequest:
        """The request; PromptError where it can't be served, which says why."""

    @abstractmethod
    def whole(self, request: TurnRequest, reply: Reply) -> dict[str, Any]:
        """The answer as one object."""

    @abstractmethod
    def events(self, request: TurnRequest, reply: Reply) -> Iterator[bytes]:
        """The answer as server-sent events."""

    @abstractmethod
    def error(self, status: int, kind: str, words: str) -> dict[str, Any]:
        """An error's body; `kind` is a code such as "context_length_exceeded"."""

    def error_event(self, status: int, kind: str, words: str) -> bytes:
        """An error after the answer has begun."""
        return sse(self.error(status, kind, words))


def sse(body: object) -> bytes:
    """A server-sent event."""
    return b"data: " + encode_json(body) + b"\n\n"


def named_sse(body: Mapping[str, Any]) -> bytes:
    """A server-sent event with the name of its body's type."""
    return f"event: {body['type']}\n".encode() + sse(body)


def new_id(prefix: str) -> str:
    """A random id."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


def field_of(body: Item, name: str, kind: type, expected: str) -> Any:  # noqa: ANN401 - JSON
    """A field of this type; an empty one where it is absent or null."""
    value = body.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise PromptError(f"got {name}={value!r:.100}; expected {expected}")
    return value


def objects(body: Item, name: str) -> list[dict[str, Any]]:
    """A list of objects; an empty one where it is absent or null."""
    values: list[dict[str, Any]] = field_of(body, name, list, "a list of objects")
    if not set(map(type, values)) <= {dict}:
        raise PromptError(f"got {name} with something else than objects in it; expected a list of objects")
    return values


def refuse(body: Item, **choices: Sequence[object]) -> None:
    """Refuse what is asked for and the policy can't honour.

    Args:
        body: The request. Each of `REFUSED` must be absent, empty or false.
        **choices: Fields with those of their values that can be honoured.
    """
    for name in REFUSED:
        if body.get(name):
            raise PromptError(f"got {name}={body[name]!r:.100}, which this policy can't honour; leave it out")
    for name, accepted in choices.items():
        value = body.get(name)
        chosen = value.get("type") if isinstance(value, dict) else value
        if chosen is not None and chosen not in accepted:
            can = ", ".join(repr(one) for one in accepted)
            raise PromptError(f"got {name}={value!r:.100}, which this policy can't honour; expected one of {can}")
    managed = body.get("context_management")
    edits = managed.get("edits") if isinstance(managed, dict) else managed
    is_kept = isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("type") == _CLEARS_THINKING for edit in edits
    )
    if edits and not is_kept:  # which reasoning of earlier turns is shown is the chat template's affair
        raise PromptError(
            f"got context_management={managed!r:.200}; expected none: the history is read as it is sent. Shorten it "
            "in the client"
        )


def unheeded(body: Item, tools: Iterable[Item] = ()) -> dict[str, Any]:
    """Fields that could change tokens elsewhere and change none here, with those of objects and tools by dotted names.

    A field that nobody here knows is among them.
    """
    known = HONOURED | HARMLESS
    found = {name: value for name, value in body.items() if name not in known and value not in (None, "", [], {})}
    found = {name: value for name, value in found.items() if name not in REFUSED}  # false, or it were refused
    for outer in ("text", "output_config"):
        inner = field_of(body, outer, dict, "an object")
        found |= {f"{outer}.{name}": value for name, value in inner.items() if name != "format" and value is not None}
    choice = body.get("tool_choice")
    is_single = isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
    if is_single or body.get("parallel_tool_calls") is False:
        found["parallel_tool_calls"] = False
    return found | {f"tools.{name}": tool[name] for tool in tools for name in _OF_TOOLS if tool.get(name)}


def sampling_params(body: Item, *limits: str) -> dict[str, Any]:
    """Sampling parameters; `limits` are the API's names of the most tokens of a turn."""
    for name in (*_SAMPLING, *_LEAST_LENGTHS, *limits, "seed", "stop", "stop_sequences"):
        try:
            orjson.dumps(body.get(name))  # as the engine is sent it
        except TypeError as e:
            raise PromptError(f"got {name}={body[name]!r:.100}, which can't be sent to the engine: {e}") from e
    params = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    for name, value in params.items():
        if name not in ("stop_token_ids", "ignore_eos") and not _is_number(value):
            raise PromptError(f"got {name}={value!r:.100}; expected a number")
    ends = params.get("stop_token_ids", [])
    if not isinstance(ends, list) or not all(type(one) is int and one >= 0 for one in ends):
        raise PromptError(f"got stop_token_ids={ends!r:.100}; expected a list of token ids")
    stop = body.get("stop") or body.get("stop_sequences") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise PromptError(f"got the stop strings {stop!r:.100}; expected a text or a list of texts")
    further = {
        "stop": stops or None,
        "max_new_tokens": _whole(body, limits, at_least=1),
        "min_new_tokens": _whole(body, _LEAST_LENGTHS, at_least=0),
        "sampling_seed": _whole(body, ("seed",)),
        **_grammar(body),
    }
    return params | {name: value for name, value in further.items() if value is not None}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(body: Item, names: Sequence[str], *, at_least: int | None = None) -> int | None:
    """The first of these fields that is given, a whole number."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    value = body[name]
    if type(value) is not int or (at_least is not None and value < at_least):
        least = "" if at_least is None else f" of at least {at_least}"
        raise PromptError(f"got {name}={value!r:.100}; expected a whole number{least}")
    return value


def _grammar(body: Item) -> dict[str, str]:
    """The grammar that bounds the turn, by SGLang's name of its form; a JSON schema may be an object."""
    given = {name: body[name] for name in GRAMMARS if body.get(name)}
    if len(given) > 1:
        raise PromptError(f"got {' and '.join(given)}; expected one of them, as SGLang does")
    found = {}
    for name, value in given.items():
        text = encode_json(value).decode() if isinstance(value, dict) and name in _OF_JSON else value
        if not isinstance(text, str):
            raise PromptError(f"got {name}={value!r:.100}; expected a text")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise PromptError(f"got {name}={value!r:.100}, which can't be sent to the engine: {e}") from e
        found[name] = text
    return found


def tool_spec(name: object, description: object, schema: object) -> dict[str, Any]:
    """A Strands tool specification."""
    if not isinstance(name, str) or not name or not isinstance(schema, dict | None):
        raise PromptError(f"got a tool named {name!r:.100}; expected a name, and parameters as a JSON schema")
    _check_depth(schema, f"the parameters of the tool {name!r:.100}")
    return {"name": name, "description": str(description or ""), "inputSchema": {"json": schema or {}}}


def system_texts(blocks: Sequence[Block]) -> list[str]:
    """The texts of a system message."""
    if not all("text" in block for block in blocks):
        raise PromptError("got a system message with something else than text in it; expected text")
    return [block["text"] for block in blocks]


def client_tools(tools: list[dict[str, Any]], own: str) -> list[dict[str, Any]]:
    """Tools, which must be of the type `own`, or of none."""
    for tool in tools:
        if tool.get("type", own) != own:
            raise PromptError(f"got the tool {tool!r:.100}; expected one of the client's own, of type {own}")
    return tools


def image_block(format_: str, data: str) -> Block:
    """An image in base64."""
    try:
        return {"image": {"format": format_, "source": {"bytes": base64.b64decode(data, validate=True)}}}
    except (ValueError, binascii.Error) as e:
        raise PromptError(f"got an image that is no base64: {e}") from e


def image_of_url(url: object) -> Block:
    """An image in a data URL."""
    found = _DATA_URL.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        raise PromptError(f"got the image {url!r:.80}; expected a data URL: images that lie elsewhere are not fetched")
    return image_block(found["format"], found["data"])


def _check_depth(value: object, what: str) -> None:
    """Refuse a value that is nested more deeply than the policy's calls may be."""
    try:
        check_depth(value)
    except StrictJSONError as e:
        raise PromptError(f"got {what} {e}") from e


def call_block(use_id: object, name: object, arguments: object) -> Block:
    """A call in a history, whose arguments are JSON, or a text of it."""
    if not isinstance(name, str) or not name:
        raise PromptError(f"got a tool call of the tool {name!r:.100}; expected a name")
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments or "{}", is_finite=False)
        except ValueError as e:
            raise PromptError(f"got a tool call with the arguments {arguments!r:.200}; expected JSON: {e}") from e
    if not isinstance(arguments, dict | None):
        raise PromptError(f"got a tool call with the arguments {arguments!r:.200}; expected a JSON object")
    _check_depth(arguments, "the arguments of a tool call")
    return {"toolUse": {"toolUseId": str(use_id), "name": name, "input": arguments or {}}}


def result_block(use_id: object, content: list[Block], *, is_error: bool = False) -> Block:
    """A call's result."""
    status = "error" if is_error else "success"
    return {"toolResult": {"toolUseId": str(use_id), "status": status, "content": content}}


def reasoning_block(text: str) -> Block:
    """Reasoning."""
    return {"reasoningContent": {"reasoningText": {"text": text}}}


def blocks_of(content: object, convert: Callable[[Item], Block | None]) -> list[Block]:
    """The blocks of a content: a text, or a list of parts."""
    if content is None or isinstance(content, str):
        return [{"text": content}] if content else []
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise PromptError(f"got the content {content!r:.100}; expected a text, or a list of parts")
    return [block for part in content if (block := convert(part)) is not None]


# a note of Claude Code's to its server, another one in each request
_NOT_FOR_MODELS: Final = "x-anthropic-billing-header"


class Messages(Protocol):
    """Anthropic's Messages."""

    ping: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: dict[str, Any], cache: ItemCache) -> TurnRequest:
        """See `Protocol.read`."""
        # a thread is continued with new messages alone
        thread = field_of(body, "thread", dict, "an object")
        if thread.get("type") == "continue":
            held = self.held("thread.previous_message_id", thread.get("previous_message_id"))
            body = {**body, **held, "messages": [*held["messages"], *objects(body, "messages")]}
        refuse(body, tool_choice=("auto", "none"))
        if field_of(body, "output_config", dict, "an object").get("format"):
            raise PromptError("got output_config.format, which this policy can't honour; leave it out")
        system = system_texts(blocks_of(body.get("system"), _messages_part))
        shown = "\n".join(text for text in system if not text.startswith(_NOT_FOR_MODELS))
        prompt, messages = cache.read(objects(body, "messages"), _of_message, [shown])
        choice = field_of(body, "tool_choice", dict, "an object").get("type")
        tools = client_tools(objects(body, "tools"), "custom")
        return TurnRequest(
            messages,
            prompt,
            [] if choice == "none" else [*map(_messages_tool, tools)],
            sampling_params(body, "max_tokens"),
            str(body.get("model", "")),
            body.get("stream") is True,
            body={name: body.get(name) for name in ("system", "tools", "messages")} if thread else {},
            template_kwargs=field_of(body, "chat_template_kwargs", dict, "an object"),
            unheeded=unheeded(body, tools),
        )

    def whole(self, request: TurnRequest, reply: Reply) -> dict[str, Any]:
        """See `Protocol.whole`."""
        message_id, content = new_id("msg_"), _content_blocks(reply)
        if request.body:
            said = {"role": "assistant", "content": content}
            self.hold(message_id, {**request.body, "messages": [*request.body["messages"], said]})
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
        """See `Protocol.events`."""
        answer = self.whole(request, reply)
        usage = {**answer["usage"], "output_tokens": 0}
        first = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield named_sse({"type": "message_start", "message": first})
        for index, block in enumerate(answer["content"]):
            opened, deltas = _opened(block)
            yield named_sse({"type": "content_block_start", "index": index, "content_block": opened})
            for delta in deltas:
                yield named_sse({"type": "content_block_delta", "index": index, "delta": delta})
            yield named_sse({"type": "content_block_stop", "index": index})
        end = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        yield named_sse({"type": "message_delta", "delta": end, "usage": answer["usage"]})
        yield named_sse({"type": "message_stop"})

    def error(self, status: int, kind: str, words: str) -> dict[str, Any]:
        """See `Protocol.error`; clients look for "prompt is too long" to know that they must shorten a history."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
        type_ = kinds.get(status, "invalid_request_error" if status < 500 else "overloaded_error")
        shown = f"prompt is too long: {words}" if kind == "context_length_exceeded" else words
        return {"type": "error", "error": {"type": type_, "message": shown}}

    def error_event(self, status: int, kind: str, words: str) -> bytes:
        """See `Protocol.error_event`."""
        return named_sse(self.error(status, kind, words))


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


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
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


def _of_message(message: Item) -> list[Piece]:
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise PromptError(f"got the role {role!r:.100}; expected user or assistant")
    return [(role, blocks_of(message.get("content"), _messages_part))]


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
        f"got a content block of type {kind!r:.100}; expected text, thinking, tools, or an image in base64"
    )
