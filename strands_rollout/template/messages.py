"""Convert Strands messages, tool results and tool specifications to the dicts that chat templates read.

All content that a policy can read is kept; tool results come first in their message, in the order of their calls.
Content with images becomes a list of parts, as templates of vision-language models expect; other content becomes a
string. `normalize_tool_result` converts any return value of a tool to a Strands tool result. The result has only
values that later steps can copy, compare, save and show: plain JSON values and the bytes of images.
"""

import dataclasses
import json
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from enum import Enum
from typing import Any, Final, TypeGuard

from pydantic import BaseModel

from strands_rollout.errors import PromptError
from strands_rollout.files.json_codec import Json

_MAX_DEPTH: Final = 100
_MAX_VALUES: Final = 200_000
_MAX_INT_BITS: Final = 14_000  # about 4,200 digits; Python writes integers of up to 4,300 digits
# content blocks without content for the policy
_IGNORED_BLOCKS: Final = frozenset({"cachePoint", "guardContent"})
_PLAIN_TYPES: Final = frozenset({str, int, float, bool, type(None)})
_BLANK: Final = "[blank text]"
# Strands' replacement for an invalid tool name (strands/event_loop/streaming.py)
_INVALID_NAME: Final = "INVALID_TOOL_NAME"
_VALID_NAME: Final = re.compile(r"[a-zA-Z0-9_\-]{1,64}")

ChatMessage = dict[str, Any]
"""A message as Hugging Face chat templates read it."""


def to_chat_messages(
    messages: Iterable[Mapping[str, Any]],
    tool_names: Mapping[str, str] | None = None,
    *,
    answered: Mapping[str, Any] | None = None,
) -> list[ChatMessage]:
    """Convert Strands messages; each tool result becomes a tool message, in the order of the calls.

    Args:
        messages: Strands messages (`role` user or assistant, `content` a list of blocks).
        tool_names: Tool-use id -> tool name, for calls that are not in `messages`.
        answered: The assistant's message before `messages`, if the first messages may have results of its calls.

    Returns:
        Messages of roles user, assistant and tool, as Hugging Face chat templates expect them. The content of a
        message without blocks becomes an empty string for a user, and Strands' "[blank text]" for an assistant.

    Raises:
        PromptError: A block can't be converted, such as a document, a video, or an image in an assistant's message.
    """
    names = dict(tool_names or {})
    unanswered = [(call_id, names.get(call_id, name)) for call_id, name in _calls(answered)] if answered else []
    chat: list[ChatMessage] = []
    for message in messages:
        if message["role"] == "assistant":
            unanswered = _calls(message)
            chat.append(_assistant_message(message["content"], names))
        else:
            chat += _user_messages(message["content"], unanswered, names)
    return chat


def system_text(system_prompt: str | None, blocks: Sequence[Mapping[str, Any]] | None = None) -> str | None:
    """Return the system prompt as one string, or None; text blocks, if any, take precedence over the plain string."""
    texts = [block["text"] for block in blocks or () if "text" in block]
    text = "\n".join(texts) if texts else system_prompt
    return None if text is None else _replace_surrogates(text)


def to_chat_tools(tool_specs: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Convert Strands tool specifications to OpenAI's `tools`, which chat templates read.

    A lone surrogate becomes a question mark. Nothing else is edited: the `"description": "Property x"` that Strands
    adds to properties without a description stays.

    Raises:
        PromptError: A tool's name contains a lone surrogate, so that no policy can call the tool.
    """
    return [_chat_tool(spec) for spec in tool_specs or ()]


def _chat_tool(spec: Mapping[str, Any]) -> dict[str, Any]:
    name = spec["name"]
    if _replace_surrogates(name) != name:
        raise PromptError(f"got a tool named {name!r}; expected a name without lone surrogates: rename the tool")
    parameters = spec["inputSchema"].get("json", spec["inputSchema"])
    function = {"name": name, "description": spec["description"], "parameters": parameters}
    return {"type": "function", "function": _replace_all_surrogates(function)}


def _replace_all_surrogates(value: Json) -> Json:
    if isinstance(value, str):
        return _replace_surrogates(value)
    if isinstance(value, Mapping):
        return {_replace_all_surrogates(key): _replace_all_surrogates(item) for key, item in value.items()}
    return [_replace_all_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


def clean_message(message: tuple[str, Any]) -> tuple[str, Any]:
    """Return a message's role and content, cleaned as Strands does; only an assistant's message changes.

    Blank texts are replaced or, if the message has calls, dropped; invalid tool names are replaced.
    """
    role, content = message
    if role != "assistant":
        return message
    has_calls = any("toolUse" in block for block in content)
    cleaned = []
    for block in content or [{"text": ""}]:
        if "text" in block:
            cleaned += [{**block, "text": text} for text in _clean_texts(content, [block["text"]], has_calls=has_calls)]
        elif "toolUse" in block and not _VALID_NAME.fullmatch(block["toolUse"]["name"]):
            cleaned.append({**block, "toolUse": {**block["toolUse"], "name": _INVALID_NAME}})
        else:
            cleaned.append(block)
    return role, cleaned


def take_images(message: ChatMessage) -> list[tuple[dict[str, Any], bytes]]:
    """Remove the images' bytes from a message's parts; return each image part with its bytes."""
    content = message["content"]
    return [(part, part.pop("image")) for part in content if "image" in part] if isinstance(content, list) else []


def tool_result_text(content: Iterable[Mapping[str, Any]]) -> str:
    """Return all blocks of a tool result as text, in order, joined by line breaks; "" if there are none.

    Raises:
        PromptError: A block has neither text nor JSON nor citations.
    """
    return "\n".join(map(_block_text, content))


_Call = tuple[str, str]
"""A call's id, which need not be unique, and its tool's name."""


def _calls(message: Mapping[str, Any]) -> list[_Call]:
    uses = (block["toolUse"] for block in message["content"] if "toolUse" in block)
    return [(use["toolUseId"], use["name"]) for use in uses]


def _tool_messages(results: Sequence[object], unanswered: list[_Call], names: Mapping[str, str]) -> list[ChatMessage]:
    """Convert a message's tool results, in the order of their calls; remove the answered calls from `unanswered`.

    The order matters because Strands puts errors of calls with invalid names before all other results, and most
    templates show no ids. Results with the same id keep their order. If a result's id matches no call, the result is
    assigned to a call without a result, if there is one, and gets that call's id.
    """
    if not results:
        return []
    converted = [
        result
        if _is_text_result(result)
        else normalize_tool_result(result, str(result.get("toolUseId")) if isinstance(result, Mapping) else "")
        for result in results
    ]
    if [result["toolUseId"] for result in converted] == [call_id for call_id, _ in unanswered]:
        ordered = [*zip(converted, unanswered, strict=True)]
        unanswered.clear()
    else:
        ordered = _assign_to_calls(converted, unanswered, names)
    return [
        {"role": "tool", "name": name, "tool_call_id": call_id, "content": _user_content(result["content"])}
        for result, (call_id, name) in ordered
    ]


def _assign_to_calls(
    converted: Sequence[dict[str, Any]], unanswered: list[_Call], names: Mapping[str, str]
) -> list[tuple[dict[str, Any], _Call]]:
    """Assign results to calls; return each result with its call, and remove that call from `unanswered`."""
    by_id: dict[str, deque[dict[str, Any]]] = {}
    for result in converted:
        by_id.setdefault(result["toolUseId"], deque()).append(result)
    matching = [by_id[call_id].popleft() if by_id.get(call_id) else None for call_id, _ in unanswered]
    unmatched = {id(result) for results in by_id.values() for result in results}
    others = deque(result for result in converted if id(result) in unmatched)
    ordered: list[tuple[dict[str, Any], _Call]] = []
    still_unanswered: list[_Call] = []
    for call, match in zip(unanswered, matching, strict=True):
        answer = match or (others.popleft() if others else None)
        if answer is None:
            still_unanswered.append(call)
        else:
            ordered.append((answer, call))
    unanswered[:] = still_unanswered
    return ordered + [(result, (result["toolUseId"], names.get(result["toolUseId"], "tool"))) for result in others]


def _assistant_message(content: Sequence[Mapping[str, Any]], names: dict[str, str]) -> ChatMessage:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        if "toolUse" in block:
            use = block["toolUse"]
            names[use["toolUseId"]] = use["name"]
            function = {"name": _replace_surrogates(use["name"]), "arguments": _replace_all_surrogates(use["input"])}
            calls.append({"type": "function", "id": use["toolUseId"], "function": function})
        elif "reasoningContent" in block:
            reasoning.append(block["reasoningContent"].get("reasoningText", {}).get("text", ""))
        elif _IGNORED_BLOCKS.isdisjoint(block):
            texts.append(_block_text(block))
    message: ChatMessage = {
        "role": "assistant",
        "content": "".join(_clean_texts(content, texts, has_calls=bool(calls))),
    }
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _clean_texts(content: Sequence[Mapping[str, Any]], texts: list[str], *, has_calls: bool) -> list[str]:
    """Replace or drop blank texts. Strands does this before it calls a model, but not if a model is called directly."""
    if not content:
        return [_BLANK]
    return [text if text.strip() else _BLANK for text in texts if text.strip() or not has_calls]


def _user_messages(
    content: Sequence[Mapping[str, Any]], unanswered: list[_Call], names: Mapping[str, str]
) -> list[ChatMessage]:
    results = [block["toolResult"] for block in content if "toolResult" in block]
    chat = _tool_messages(results, unanswered, names)
    shown_blocks = [block for block in content if "toolResult" not in block and _IGNORED_BLOCKS.isdisjoint(block)]
    if shown_blocks or not chat:
        chat.append({"role": "user", "content": _user_content(shown_blocks)})
    return chat


def _user_content(blocks: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    has_images = any("image" in block for block in blocks)
    return [_content_part(block) for block in blocks] if has_images else tool_result_text(blocks)


def _content_part(block: Mapping[str, Any]) -> dict[str, Any]:
    if "image" not in block:
        return {"type": "text", "text": _block_text(block)}
    data = block["image"].get("source", {}).get("bytes")
    if not isinstance(data, bytes):
        raise PromptError(
            f"got an image block with the source {sorted(block['image'].get('source', {}))}; expected "
            '{"format": ..., "source": {"bytes": ...}}: images at other locations are not fetched'
        )
    return {"type": "image", "image": data}


def _block_text(block: Mapping[str, Any]) -> str:
    if "text" in block:
        return _replace_surrogates(str(block["text"]))
    if "json" in block:
        return _replace_surrogates(json_text(block["json"]))
    if "citationsContent" in block:
        return _replace_surrogates(
            "".join(part.get("text", "") for part in block["citationsContent"].get("content", ()))
        )
    raise PromptError(
        f"got a content block with the keys {sorted(block)}; expected text or json, or, in a user message or a tool "
        "result, an image: this model reads nothing else. Change the prompt or the tool that made this block."
    )


def _replace_surrogates(text: str) -> str:
    """Replace each lone surrogate by a question mark, since no tokenizer accepts lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


_RESULT_KEYS: Final = frozenset({"toolUseId", "status", "content"})
_STATUSES: Final = ("success", "error")


def normalize_tool_result(returned: object, call_id: str) -> dict[str, Any]:
    """Convert a tool's return value to a Strands tool result with the id of the call.

    Any value except a result (`{"status": "success" or "error", "content": [blocks]}`) becomes text: a string
    unchanged, other values as `json_text` writes them. A JSON block with values that are not JSON becomes text too, as
    does a block of an unknown kind. A value that can't be shown to the policy becomes an error with the reason. This
    happens if it can't be converted, or has a block with a document, a video, or an image without bytes.
    """
    try:
        if _is_text_result(returned):  # a shortcut, since nearly all results are text
            texts = [{"text": block["text"]} for block in returned["content"]]
            return {"toolUseId": call_id, "status": returned["status"], "content": texts}
        if not _is_result(returned):
            value = returned
            if isinstance(returned, Mapping):
                value = {key: item for key, item in returned.items() if key != "toolUseId"}
            return {"toolUseId": call_id, "status": "success", "content": [{"text": _value_text(value)}]}
        further = {key: value for key, value in returned.items() if key not in _RESULT_KEYS and _is_plain(value)}
        content = [_plain_block(block) for block in returned["content"]]
    except Exception as e:  # a tool's own classes may fail in any way
        return error_result(call_id, f"Error: the tool's result can't be shown: {error_message(e)}")
    return {**further, "toolUseId": call_id, "status": returned["status"], "content": content}


def error_result(call_id: str, text: str) -> dict[str, Any]:
    """Make a tool result that reports an error."""
    return {"toolUseId": call_id, "status": "error", "content": [{"text": text}]}


def error_message(error: BaseException) -> str:
    """Return an error's message, or the name of its type if `str` fails on it."""
    try:
        return str(error)
    except Exception:  # `__str__` of a user's exception may raise anything
        return type(error).__name__


def json_text(value: object) -> str:
    """Write any value as JSON; convert values that JSON can't express.

    Dates and times become ISO 8601; sets become lists, sorted by their items' JSON; bytes become text, with escapes for
    bytes that are not UTF-8; NumPy arrays and numbers become lists and numbers; members of enums become their values;
    dataclasses and pydantic models become objects; any other value becomes its `str`. NaN and infinities are written as
    Python's `json` writes them.

    Raises:
        ValueError: The value is nested deeper than 100 levels, contains itself, has more than 200,000 values, or has an
            integer of more than 14,000 bits (about 4,200 digits).
    """
    return json.dumps(value if _is_plain(value) else _Converter().convert(value, ()), ensure_ascii=False)


def _is_text_result(returned: object) -> TypeGuard[dict[str, Any]]:
    if type(returned) is not dict or returned.keys() != _RESULT_KEYS or type(returned["content"]) is not list:
        return False
    if type(returned["toolUseId"]) is not str or returned["status"] not in _STATUSES:
        return False
    return all(type(block) is dict and type(block.get("text")) is str for block in returned["content"])


def _is_result(returned: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is a tool result as Strands defines it, not just an object with the same keys."""
    if not isinstance(returned, Mapping):
        return False
    status, content = returned.get("status"), returned.get("content")
    if not isinstance(status, str) or status not in _STATUSES:
        return False
    return isinstance(content, list | tuple) and all(isinstance(block, Mapping) and block for block in content)


def _plain_block(block: Mapping[str, Any]) -> dict[str, Any]:
    if "text" in block:
        text = block["text"]
        return {"text": text if type(text) is str else _value_text(text)}
    if "json" in block:
        value = block["json"]
        return {"json": value} if _is_plain(value) else {"text": json_text(value)}
    image = block.get("image")
    source = image.get("source") if isinstance(image, Mapping) else None
    if isinstance(source, Mapping) and isinstance(source.get("bytes"), bytes):
        return {"image": image}
    for kind in ("image", "document", "video"):
        if isinstance(block.get(kind), Mapping):
            raise ValueError(f"it is a {kind}, of which only images with their bytes in them are read")  # noqa: TRY004 - the value is what is wrong
    return {"text": json_text(block)} if _IGNORED_BLOCKS.isdisjoint(block) else dict(block)


def _value_text(value: object) -> str:
    return str.__str__(value) if isinstance(value, str) else json_text(value)


def _is_plain(value: object) -> bool:
    """Return whether a value has only types that `json.loads` returns, and is within the limits of `json_text`."""
    level: list[Any] = [value]
    count = 0
    for _ in range(_MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict and set(map(type, item)) - {str}:
                return False
            if kind is dict or kind is list:
                count += len(item)
                if count > _MAX_VALUES:  # even a small value may contain the same list many times
                    return False
                below += item.values() if kind is dict else item
            elif kind not in _PLAIN_TYPES or (kind is int and item.bit_length() > _MAX_INT_BITS):
                return False
        if not below:
            return True
        level = below
    return False


class _Converter:
    """Converter of one value to plain JSON, within limits of size and depth."""

    def __init__(self) -> None:
        self._left = _MAX_VALUES

    def convert(self, value: object, around: tuple[int, ...]) -> Json:
        """Convert a value to plain JSON; `around` has the `id`s of the containers that the value is in."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it holds more than {_MAX_VALUES:,} values")
        if len(around) > _MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
        if id(value) in around:
            raise ValueError("it holds itself")
        if value is None or isinstance(value, bool | float | str):
            return value
        if isinstance(value, int) and not isinstance(value, Enum):
            if value.bit_length() > _MAX_INT_BITS:
                raise ValueError("it holds an integer of more than 4,300 digits")
            return int(value)
        return self._convert_object(value, (*around, id(value)))

    def _convert_object(self, value: object, around: tuple[int, ...]) -> Json:
        if isinstance(value, Mapping):
            return {self._key(key): self.convert(item, around) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            items = [self.convert(item, around) for item in value]
            is_ordered = isinstance(value, list | tuple)
            return items if is_ordered else sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value).decode("utf-8", "backslashreplace")
        if isinstance(value, date | time):
            return value.isoformat()
        content = _unwrap(value)
        return str(value) if content is value else self.convert(content, around)

    def _key(self, key: object) -> str:
        return key if isinstance(key, str) else json.dumps(self.convert(key, ()), ensure_ascii=False).strip('"')


def _unwrap(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, BaseModel):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    tolist = getattr(value, "tolist", None)
    if not callable(tolist):
        return value
    if getattr(value, "nbytes", 0) > 8 * _MAX_VALUES:  # a NumPy array or a tensor
        raise ValueError(f"it holds more than {_MAX_VALUES:,} values")
    return tolist()
