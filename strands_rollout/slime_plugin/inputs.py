"""The inputs of a run: the configuration, with a check of the code that it names, and the rows of a data set.

A row has a prompt and may have settings of its own. A prompt is converted to what an agent starts with: a system
prompt, earlier turns and the user's message. Rows are data: they choose among the tools that the configuration names,
and can neither import nor start anything.
"""

import asyncio
import functools
import inspect
import logging
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from strands_rollout.agent import tool_loading
from strands_rollout.code_tool.executors import make_executor
from strands_rollout.errors import ConfigError, PromptError, RolloutError
from strands_rollout.log_once import log_once
from strands_rollout.model.images import image_block
from strands_rollout.samples import SampleLike, SlimeArgs
from strands_rollout.settings import (
    CODE_TOOL_PATH,
    McpServer,
    RolloutSettings,
    read_config_file,
    settings_from_args,
    validate_settings,
)
from strands_rollout.slime_plugin.own_reward import check_reward
from strands_rollout.slime_plugin.slime_adapter import load_should_abort
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.tool_parsers import AUTO, get_parser
from strands_rollout.tool_parsers.base import StrictJSONError, decode_single_value
from strands_rollout.user_code import add_config_folder, find_file

logger = logging.getLogger(__name__)
SLIME_TOOLS_KEY: Final = "tools"  # the metadata key of a row's tool schemas (slime's `--tool-key`)
ROW_SETTINGS_KEY: Final = "strands_rollout_settings"
ROW_SETTINGS: Final = (
    "enable_thinking",
    "episode_timeout_s",
    "max_parallel_tool_calls",
    "max_tool_calls",
    "max_tool_iterations",
    "max_turn_tokens",
    "max_user_turns",
    "min_turn_tokens",
    "system_prompt",
    "tool_timeout_s",
    "tools",
)
_ABSENT: Final = object()
_add_config_folder: Final = functools.cache(add_config_folder)
Message = dict[str, Any]


def run_settings(args: SlimeArgs) -> RolloutSettings:
    """Return the settings of the run, and add the folder of their file to the places where user code is searched.

    Raises:
        ConfigError: The settings can't be used.
    """
    settings = settings_from_args(args)
    _add_config_folder(getattr(args, "custom_config_path", None))
    return settings


async def read_checked_config(path: Path | None, changes: Sequence[str] | None = None) -> RolloutSettings:
    """Return the settings of a file, after loading all code that they name.

    The file's folder and the working directory are searched for user code.

    Args:
        path: The configuration file; None for the default settings. The code of the default settings is loaded only if
            there are changes.
        changes: Changes from the command line, as `setting=value`.

    Raises:
        ConfigError: The file or a change can't be used, or `check_loadable` raises.
    """
    settings = read_config_file(path, changes)
    if path is not None or changes:
        await check_loadable(path, settings, changes)
    return settings


async def check_loadable(path: Path | None, settings: RolloutSettings, changes: Sequence[str] | None = None) -> None:
    """Check that the code named in the settings can be loaded, and that values such as `tool_parser` can be used.

    Args:
        path: The configuration file, whose folder is searched too; None if there is no file.
        settings: The settings to check.
        changes: Changes from the command line, as `setting=value`; their errors are reported under "the command line".

    Raises:
        ConfigError: Some code can't be loaded, or a value can't be used; the message has a line for each such setting.
    """
    add_config_folder(path)
    changed = {re.split(r"[.=]", change.strip().removeprefix("strands_rollout."))[0] for change in changes or ()}
    file_errors: list[str] = []
    command_errors: list[str] = []
    for name, error in await find_load_errors(settings):
        (command_errors if path is None or name in changed else file_errors).append(f"  {name}: {error}")
    lines: list[str] = []
    for source, found in ((path, file_errors), ("the command line", command_errors)):
        if found:
            lines += [f"{source} has settings that can't be used:", *found]
    if lines:
        raise ConfigError("\n".join(lines))


async def find_load_errors(settings: RolloutSettings, *, connects: bool = False) -> list[tuple[str, RolloutError]]:
    """Return the name and the error of each setting with unloadable code or an unusable value.

    If `connects` is set, also start the MCP servers, or connect to those that run already.
    """
    load = tool_loading.load_function
    load_tools: Callable[[tool_loading.ToolNames], object] = (
        tool_loading.check_tools if connects else tool_loading.load_tools
    )
    # tools come first, since their modules may register parsers
    steps: dict[str, Callable[[], object]] = {
        "tools": lambda: load_tools(settings.tools),
        "row_tools": lambda: load_tools(settings.row_tools),
        "agent_factory": lambda: settings.agent_factory and load(settings.agent_factory, "an agent", ["model", "task"]),
        "agent_program": lambda: settings.agent_program and load(settings.agent_program, None, ["task", "endpoint"]),
        "environment_config": lambda: _check_environment_config(settings),
        "environment": lambda: _load_environment(settings),
        "resources": lambda: [load(path, "a resource", ["task"]) for path in settings.resources.values()],
        "hooks": lambda: tool_loading.load_hooks(settings.hooks),
        "conversation_manager": lambda: tool_loading.load_conversation_manager(settings.conversation_manager),
        "should_abort": lambda: isinstance(settings.should_abort, str) and load_should_abort(settings.should_abort),
        "tool_parser": lambda: settings.tool_parser == AUTO or get_parser(settings.tool_parser),
        "executor": lambda: make_executor(settings.executor).aclose(),
        "reward": lambda: check_reward(settings.reward),
    }
    found = []
    for name, step in steps.items():
        try:
            if inspect.isawaitable(pending := step()):
                await pending
        except RolloutError as e:
            found.append((name, e))
    return found


def _check_environment_config(settings: RolloutSettings) -> None:
    """Check that the file exists, and call `check_config(path)` if the agent program's module has this function."""
    if not isinstance(settings.environment_config, str):
        return
    path = find_file(settings.environment_config)
    if not path.is_file():
        raise ConfigError(
            f"got {settings.environment_config!r}; expected the path of an existing file, absolute or relative to the "
            "configuration's folder or the working directory"
        )
    if settings.agent_program is None:
        return
    program = tool_loading.load_function(settings.agent_program)
    check = getattr(sys.modules.get(program.__module__), "check_config", None)
    if check is not None:
        check(path)


def _load_environment(settings: RolloutSettings) -> object:
    if settings.environment_path is None:
        return None
    if not settings.environment_plays:
        return tool_loading.load_function(settings.environment_path, "an environment", ["task"])
    library: Any = tool_loading.load_function(settings.environment_path, "an environment")
    return library.check(settings.environment_factory)


@dataclass(frozen=True, slots=True)
class EpisodePrompt:
    """The system prompt and the messages that an agent starts with.

    Attributes:
        system_prompt: None if there is no system message.
        messages: Strands messages, at least one; the last is the user's.
    """

    system_prompt: str | None
    messages: list[Message]


async def episode_prompt(
    sample: SampleLike, configured_system: str | None, template: ChatTemplate | None
) -> EpisodePrompt:
    """Convert the prompt of a sample with `to_episode_prompt`, in a thread if the prompt holds images."""
    prompt, loaded = sample.prompt, getattr(sample, "multimodal_inputs", None)
    chat = prompt if isinstance(prompt, list) else []
    if any(isinstance(message, Mapping) and _has_image(message.get("content")) for message in chat):
        return await asyncio.to_thread(to_episode_prompt, prompt, configured_system, template, loaded)
    return to_episode_prompt(prompt, configured_system, template, loaded)


def to_episode_prompt(
    prompt: object,
    configured_system: str | None,
    template: ChatTemplate | None,
    loaded: Mapping[str, Any] | None = None,
) -> EpisodePrompt:
    """Convert the prompt of a data set's row; a system message in the row replaces the configured system prompt.

    Args:
        prompt: A string or a chat.
        configured_system: The system prompt of the settings.
        template: The model's template, which recognizes a prompt that is already rendered; None to skip that check.
        loaded: The sample's `multimodal_inputs`, whose `images` are the images of the chat, in order; None if slime has
            no processor.

    Raises:
        PromptError: The prompt is empty, already rendered or malformed; a chat does not end with a user's message; a
            message holds content other than text, a user's images, and an assistant's reasoning and tool calls; an
            image can't be read; there are more or fewer images than `loaded` images; or `loaded` holds something other
            than images.
        ConfigError: The prompt has images, and Pillow is not installed.
    """
    images = _loaded_images(loaded or {})
    if isinstance(prompt, str):
        if images:
            raise PromptError(
                f"got a string as prompt, and {len(images)} images; expected a chat with a part for each image, as "
                "slime makes it with --multimodal-keys and without --apply-chat-template"
            )
        _refuse_empty(prompt, "prompt")
        if template is not None and template.looks_rendered(prompt):
            raise PromptError(
                f"got a prompt that a chat template has already rendered ({prompt[:60]!r}...); expected the plain text "
                "or the chat. Remove --apply-chat-template from slime's arguments: the agent renders its conversation "
                "itself, and would render this prompt a second time"
            )
        return EpisodePrompt(configured_system, [_message("user", prompt)])
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise PromptError(
            f"got a prompt of type {type(prompt).__name__}; expected a string, or a chat as a list of "
            '{"role": ..., "content": ...} messages. Check --input-key'
        )
    # if slime has a processor, it has cut each text at its images. In a row without images, it has cut between all
    # characters. Therefore, the pieces are joined without a separator
    return _convert_chat(prompt, configured_system, images, separator="\n" if loaded is None else "")


def _convert_chat(
    chat: Sequence[object], configured_system: str | None, images: list[object], separator: str
) -> EpisodePrompt:
    if not chat:
        raise PromptError("got an empty chat as prompt; expected at least a user's message")
    system: list[str] = []
    messages: list[Message] = []
    remaining_images = iter(images) if images else None
    for position, entry in enumerate(chat):
        message, role, content = _read_message(entry, position)
        if role == "user" and _has_image(content):
            messages.append(
                {"role": role, "content": [_convert_part(part, position, remaining_images) for part in content]}
            )
            continue
        text = _read_text(content, position, separator)
        if role == "user":
            messages.append(_message(role, text))
        elif role == "assistant":
            messages.append({"role": role, "content": _assistant_blocks(message, text, position)})
        elif role == "tool":
            _add_tool_result(messages, message, text, position)
        elif messages:
            raise PromptError(f"got a system message at position {position}; expected it before all other messages")
        else:
            system.append(text)
    if unused := len(list(remaining_images or ())):
        raise PromptError(
            f"got {len(images)} loaded images, {unused} more than there are image parts in the chat; expected "
            "one image for each image part"
        )
    _check_question(messages)
    return EpisodePrompt("\n".join(system) if system else configured_system, messages)


def _check_question(messages: Sequence[Message]) -> None:
    last = messages[-1] if messages else _message("system", "")
    if last["role"] != "user" or any("toolResult" in block for block in last["content"]):
        raise PromptError(
            "got a chat that does not end with a user's message; expected a user's message at the end, for the agent "
            "to answer"
        )
    if not any("image" in block for block in last["content"]):
        _refuse_empty(last["content"][0]["text"], "user's message")


def _loaded_images(loaded: Mapping[str, Any]) -> list[object]:
    others = sorted(name for name, values in loaded.items() if name != "images" and values is not None and len(values))
    if others:
        raise PromptError(f"got {others} in the sample's multimodal_inputs; expected images only")
    images = loaded.get("images")
    return list(images) if images is not None else []


def _has_image(content: object) -> bool:
    return isinstance(content, list | tuple) and any(
        isinstance(part, Mapping) and part.get("type") == "image" for part in content
    )


def _convert_part(part: object, position: int, loaded: Iterator[object] | None) -> dict[str, Any]:
    """Convert a part of a user's message to Strands' content block; `loaded` yields the images that slime loaded."""
    part = _drop_nulls(part)
    if not isinstance(part, Mapping) or not ("text" in part or part.get("type") == "image"):
        raise PromptError(f"got the part {part!r:.200} at position {position} of the chat; expected text or an image")
    if "text" in part:
        return {"text": str(part["text"])}
    if loaded is not None:
        try:
            return image_block(next(loaded))
        except StopIteration:
            raise PromptError("got more image parts than loaded images; expected one image for each part") from None
    others = sorted(part.keys() - {"type", "image"})
    if others or part.get("image") is None:
        raise PromptError(
            f"got an image with the keys {sorted(part)} at position {position} of the chat; expected `type` and "
            "`image` only, or an image that slime has loaded (--multimodal-keys, with a vision-language model)"
        )
    return image_block(part["image"])


def _read_message(message: object, position: int) -> tuple[Mapping[str, Any], str, Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or "role" not in message or ("content" not in message and not calls):
        raise PromptError(
            f'got {message!r:.200} at position {position} of the chat; expected {{"role": ..., "content": ...}}'
        )
    role, content = message["role"], message.get("content")
    if role not in ("system", "user", "assistant", "tool"):
        raise PromptError(
            f"got the role {role!r} at position {position} of the chat; expected 'system', 'user' or 'assistant', or "
            "'tool' after the calls of an assistant"
        )
    if calls and role != "assistant":
        raise PromptError(
            f"got tool calls at position {position} of the chat, in a message of '{role}'; expected them only "
            "in messages of 'assistant'"
        )
    return message, role, "" if content is None and calls else content


def _assistant_blocks(message: Mapping[str, Any], text: str, position: int) -> list[dict[str, Any]]:
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str | None):
        raise PromptError(f"got {reasoning!r:.200} as reasoning_content at position {position}; expected a string")
    blocks = [] if reasoning is None else [{"reasoningContent": {"reasoningText": {"text": reasoning}}}]
    calls = [
        {"toolUse": _tool_use(call, position, number)} for number, call in enumerate(message.get("tool_calls") or ())
    ]
    return [*blocks, *([{"text": text}] if text or not (blocks or calls) else []), *calls]


def _tool_use(call: object, position: int, number: int) -> dict[str, Any]:
    fields = call if isinstance(call, Mapping) else {}
    function = fields.get("function") or fields
    function = function if isinstance(function, Mapping) else {}
    name, arguments = function.get("name"), _read_arguments(function)
    if not isinstance(name, str) or not name or arguments is None:
        raise PromptError(
            f"got the tool call {call!r:.200} at position {position} of the chat; expected "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": an object, or its JSON}}'
        )
    # some templates require an id of 9 letters and digits
    return {"toolUseId": fields.get("id") or f"r{position:05d}{number:03d}", "name": name, "input": arguments}


def _read_arguments(function: Mapping[str, Any]) -> str | Mapping[str, Any] | None:
    """Return a call's arguments: an object or the JSON of an object, or {} if they are empty or null.

    JSON is returned unchanged, since templates render it as it is written. If the arguments are missing or of another
    kind, return None: the template would show the policy a call that it could never make.
    """
    arguments = function.get("arguments", _ABSENT)
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        with suppress(StrictJSONError):
            parsed = decode_single_value(arguments)
    return arguments if isinstance(parsed, Mapping) else None


def _add_tool_result(messages: list[Message], message: Mapping[str, Any], text: str, position: int) -> None:
    """Add a tool's result, in Strands' format, to the results of the calls in the last assistant message."""
    results = messages.pop() if len(messages) > 1 and "toolResult" in messages[-1]["content"][0] else _message("user")
    calling = messages[-1] if messages and messages[-1]["role"] == "assistant" else _message("assistant")
    unanswered = [block["toolUse"]["toolUseId"] for block in calling["content"] if "toolUse" in block]
    for block in results["content"]:  # calls may share an id; then their results are in the order of the calls
        unanswered.remove(block["toolResult"]["toolUseId"])
    call_id = message.get("tool_call_id") or next(iter(unanswered), None)
    if call_id not in unanswered:
        raise PromptError(
            f"got the role 'tool' at position {position} of the chat, with the tool_call_id {call_id!r}; expected "
            f"'system', 'user' or 'assistant', or the result of one of the unanswered calls: {unanswered}"
        )
    result = {"toolUseId": call_id, "status": "success", "content": [{"text": text}]}
    messages.append({"role": "user", "content": [*results["content"], {"toolResult": result}]})


def _read_text(content: object, position: int, separator: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = [_drop_nulls(part) for part in content] if isinstance(content, Sequence) else [None]
    if all(isinstance(part, Mapping) and "text" in part for part in parts):
        return separator.join(str(part["text"]) for part in parts)
    raise PromptError(
        f"got the content {reprlib.repr(content):.200} at position {position} of the chat; expected a string, "
        'or a list in which each part is {"type": "text", "text": ...} or, from a user, {"type": "image", "image": ...}'
    )


def _drop_nulls(part: Any) -> Any:  # noqa: ANN401 - whatever a row holds
    """Return a part of a message without null values: table formats fill each part with the keys of all parts."""
    return {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part


def _message(role: str, *texts: str) -> Message:
    return {"role": role, "content": [{"text": text} for text in texts]}


def _refuse_empty(text: str, what: str) -> None:
    if not text.strip():
        raise PromptError(f"got an empty {what}; expected the task's text. Check --input-key and the data file")


def with_row_settings(settings: RolloutSettings, metadata: object) -> RolloutSettings:
    """Return the settings of one episode: the run's, overridden by the row's.

    A row's settings are the mapping `strands_rollout_settings` in the sample's metadata. Its `tools` are dotted paths,
    or names of MCP servers, from `tools` or `row_tools` of the run's settings.

    Without `tools` in the mapping, the row's tool schemas choose from the same tools by name. slime's `--tool-key` puts
    the schemas under `tools` in the metadata itself. If the run's settings lack a tool of such a name, this is logged
    once as a warning. With an MCP server in the run's `tools`, there is no warning, since the tool may belong to the
    server.

    Raises:
        ConfigError: The row's settings are not a mapping, or hold a setting that rows can't have, a tool that the run
            lacks, or a bad value.
    """
    if not isinstance(metadata, Mapping):
        return settings
    row, schemas = metadata.get(ROW_SETTINGS_KEY), metadata.get(SLIME_TOOLS_KEY)
    if row is None and not schemas:
        return settings
    if not isinstance(row, Mapping | None):
        raise ConfigError(f"got {ROW_SETTINGS_KEY}={row!r:.200} in a row's metadata; expected a mapping of settings")
    overrides = dict(row or {})
    for name in overrides.keys() - set(ROW_SETTINGS):
        near = get_close_matches(str(name), ROW_SETTINGS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"a row can set {', '.join(ROW_SETTINGS)}"
        raise ConfigError(f"got {name!r} in {ROW_SETTINGS_KEY} of a row's metadata; {hint}")
    if "tools" in overrides:
        overrides["tools"] = _choose_tools(overrides["tools"], [*settings.tools, *settings.row_tools])
    elif schemas:
        overrides["tools"] = _tools_with_schemas(schemas, settings)
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    return validate_settings({**values, **overrides}, f"{ROW_SETTINGS_KEY} of a row's metadata")


def _choose_tools(names: object, offered: Sequence[str | McpServer]) -> list[str | McpServer]:
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise ConfigError(
            f"got tools={names!r:.200} in {ROW_SETTINGS_KEY} of a row's metadata; expected a list of names"
        )
    named = [(tool if isinstance(tool, str) else tool.name, tool) for tool in offered]
    by_name = {name: tool for name, tool in named if name is not None}
    missing = [name for name in names if not isinstance(name, str) or name not in by_name]
    if missing:
        raise ConfigError(
            f"got the tools {missing} in {ROW_SETTINGS_KEY} of a row's metadata; expected some of {sorted(by_name)}. A "
            "row chooses among the tools and row_tools of the configuration, and names an MCP server by its `name`"
        )
    return [by_name[name] for name in names]


def _tools_with_schemas(schemas: object, settings: RolloutSettings) -> Sequence[str | McpServer]:
    """Return the tools of the run that have a schema in the row; if no schema matches, all `tools` of the run.

    MCP servers in `tools` always stay: their tools are unknown before they are connected.
    """
    wanted = [_schema_name(schema) for schema in schemas] if isinstance(schemas, list | tuple) else []
    servers = [tool for tool in settings.tools if not isinstance(tool, str)]
    paths = [tool for tool in [*settings.tools, *settings.row_tools] if isinstance(tool, str)]
    names = {path: _tool_names(path) for path in paths}
    chosen = [path for path in dict.fromkeys(paths) if not names[path].isdisjoint(wanted)]
    known = frozenset[str]().union(*names.values())
    missing = sorted(set(wanted) - known)
    if not wanted or (missing and not servers):
        _warn_about_missing_tools(", ".join(missing) or f"a {type(schemas).__name__}", ", ".join(sorted(known)))
    return [*chosen, *servers] if chosen else settings.tools


def _schema_name(schema: object) -> str:
    """Return a tool's name from its OpenAI schema, with or without the key `function`; a plain name stays as it is."""
    inner = schema.get("function", schema) if isinstance(schema, Mapping) else schema
    return str(inner.get("name") if isinstance(inner, Mapping) else inner)


@functools.lru_cache(maxsize=256)
def _tool_names(path: str) -> frozenset[str]:
    if path == CODE_TOOL_PATH:
        return frozenset({path.rpartition(".")[2]})
    return frozenset(name for tool in tool_loading.load_tools([path]) if (name := getattr(tool, "tool_name", None)))


def _warn_about_missing_tools(missing: str, known: str) -> None:
    log_once(
        logger,
        logging.WARNING,
        "rows ask for tools that the settings do not have: got %s in metadata['tools'] (slime's --tool-key); the "
        "settings tools and row_tools have %s. Episodes run without the missing tools: add them to row_tools, or set "
        "--tool-key to another key",
        missing,
        known or "none",
    )
