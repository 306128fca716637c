"""The code tool that the agent calls, and the loading of tools by dotted path.

Knows Strands' tools and the `CodeExecutor` protocol. Must not know episodes, samples or slime.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Final

from strands import tool
from strands.tools import ToolProvider
from strands.tools.decorator import DecoratedFunctionTool
from strands.tools.loader import load_tools_from_module
from strands.types.tools import AgentTool

from strands_rollout.errors import ConfigError, SandboxError, ToolError
from strands_rollout.prompts import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA
from strands_rollout.sandbox import CodeExecutor, ExecutionResult, SubprocessExecutor
from strands_rollout.sandbox.capped_output import shorten

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    CodeTool = DecoratedFunctionTool[[str], Awaitable[str]]

NO_OUTPUT: Final = "(no output)"
DEFAULT_TIMEOUT_S: Final = 30.0
DEFAULT_MAX_OUTPUT_CHARS: Final = 20_000

_default_executors: dict[int, SubprocessExecutor] = {}


def format_result(result: ExecutionResult, max_output_chars: int | None = None) -> str:
    """What the model reads: stdout, then stderr, then how the run ended if it did not end well.

    Args:
        result: Its `infra_error` is not shown; see `code_tool`.
        max_output_chars: Limit on stdout and stderr together, cut in the middle; None for no limit.
    """
    printed = "\n".join(stream.rstrip("\n") for stream in (result.stdout, result.stderr) if stream.strip())
    if max_output_chars is not None:
        printed = shorten(printed, max_output_chars)
    return "\n".join(part for part in (printed, _status(result)) if part) or NO_OUTPUT


def _status(result: ExecutionResult) -> str:
    if result.timed_out:
        return f"TimeoutError: the code was stopped at the {result.killed_by or 'time limit'}."
    if result.killed_by is not None:
        return f"The code was ended by: {result.killed_by}."
    if result.exit_code and (result.exit_code != 1 or not result.stderr):
        return f"Exit code: {result.exit_code}"
    return ""  # an uncaught exception exits with 1 and has said so on stderr


def code_tool(
    executor: CodeExecutor, *, timeout_s: float = DEFAULT_TIMEOUT_S, max_output_chars: int = DEFAULT_MAX_OUTPUT_CHARS
) -> CodeTool:
    """A Strands tool that runs the model's Python on `executor`; its specification is that of `prompts`, word for word.

    Args:
        executor: Not owned: the caller closes it.
        timeout_s: Limit per call in seconds; the model can't raise it.
        max_output_chars: Limit on what one call prints, in characters, cut in the middle with a marker.

    Raises:
        SandboxError: From a call, when the executor itself failed. Strands turns whatever a tool raises into an error
            result for the model and keeps the exception as `AfterToolCallEvent.exception`: who drives the agent must
            look for it there, since the model is not to blame for it.
    """
    return _code_tool(lambda: executor, timeout_s=timeout_s, max_output_chars=max_output_chars)


def _code_tool(find_executor: Callable[[], CodeExecutor], *, timeout_s: float, max_output_chars: int) -> CodeTool:
    async def execute_python_code(code: str) -> str:
        """Run Python code; the model reads the description in `prompts` instead."""
        result = await find_executor().run(code, timeout_s=timeout_s)
        if result.infra_error is not None:
            raise SandboxError(f"the code executor failed: {result.infra_error}")
        return format_result(result, max_output_chars)

    decorate = tool(
        name=CODE_TOOL_NAME,
        description=CODE_TOOL_DESCRIPTION,
        inputSchema={"json": copy.deepcopy(CODE_TOOL_SCHEMA)},
    )
    return decorate(execute_python_code)


def _default_executor() -> SubprocessExecutor:
    """This process's own executor, made at the first call; a forked process makes its own."""
    pid = os.getpid()
    if pid not in _default_executors:
        return _default_executors.setdefault(pid, SubprocessExecutor())
    return _default_executors[pid]


def named_executor(name: str) -> CodeExecutor:
    """This process's shared executor of a kind: "subprocess".

    Raises:
        ConfigError: There is no such kind.
    """
    if name != "subprocess":
        raise ConfigError(f"got the unknown executor {name!r}; expected 'subprocess'")
    return _default_executor()


execute_python_code: CodeTool = _code_tool(
    _default_executor, timeout_s=DEFAULT_TIMEOUT_S, max_output_chars=DEFAULT_MAX_OUTPUT_CHARS
)
"""The code tool on this process's default `SubprocessExecutor`: `await execute_python_code(code="print(1)")` is "1"."""


def load_tools(paths: Sequence[str]) -> list[AgentTool | ToolProvider]:
    """Resolve dotted paths to Strands tools.

    Args:
        paths: Each `package.module.attribute`, `package.module:attribute`, or a module: one that holds `@strands.tool`
            functions (all are taken) or a `TOOL_SPEC` with a function named like the module.

    Raises:
        ToolError: A path can't be imported, does not name a tool, or two tools have one name. The message says what was
            found there instead, and the nearest name.
    """
    if isinstance(paths, str):
        raise ToolError(f"tools is the string {paths!r}; expected a list of dotted paths: [{paths!r}]")
    tools = [found for path in paths for found in _tools_at(path)]
    names = [found.tool_name for found in tools if isinstance(found, AgentTool)]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ToolError(f"tools {list(paths)} hold more than one tool named {', '.join(doubled)}; names must be unique")
    return tools


def _tools_at(path: str) -> list[AgentTool | ToolProvider]:
    found = _resolve(path)
    if isinstance(found, ModuleType):
        try:
            return list(load_tools_from_module(found, found.__name__.rpartition(".")[2]))
        except (AttributeError, TypeError) as e:
            raise ToolError(f"{path!r} is a module without Strands tools{_nearest('', found)}") from e
    if isinstance(found, AgentTool | ToolProvider):
        return [found]
    hint = "; decorate it with @strands.tool" if callable(found) and not isinstance(found, type) else ""
    raise ToolError(f"{path!r} is a {type(found).__name__}, expected a Strands tool{hint}")


def _resolve(path: str) -> object:
    """Import as much of a dotted path as is modules, then follow the attributes."""
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.replace(":", ".").split(".")):
        raise ToolError(f"{path!r} is not a dotted path; expected 'package.module.attribute'")
    module_path, _, attributes = path.partition(":")
    names = module_path.split(".")
    found: object = None
    depth = 0
    while depth < len(names) and (module := _import(".".join(names[: depth + 1]), path)) is not None:
        found = module
        depth += 1
    rest = [*names[depth:], *(attributes.split(".") if attributes else [])]
    if found is None or (attributes and depth < len(names)):
        raise ToolError(f"can't load the tool {path!r}: there is no module {'.'.join(names[: depth + 1])!r}")
    for name in rest:
        if not hasattr(found, name):
            owner = getattr(found, "__name__", type(found).__name__)
            raise ToolError(f"can't load the tool {path!r}: {owner!r} has no attribute {name!r}{_nearest(name, found)}")
        found = getattr(found, name)
    return found


def _import(module_path: str, path: str) -> ModuleType | None:
    """The module, or None where no such module exists; a module that exists but fails to import is an error."""
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as e:
        if e.name is not None and f"{module_path}.".startswith(f"{e.name}."):
            return None
        raise ToolError(f"can't load the tool {path!r}: importing {module_path!r} needs {e.name!r}") from e
    except Exception as e:  # a user's module may raise anything while it is imported
        raise ToolError(
            f"can't load the tool {path!r}: importing {module_path!r} raised {type(e).__name__}: {e}"
        ) from e


def _nearest(name: str, owner: object) -> str:
    """A hint: the closest public name, else the tools that the module does hold."""
    public = [known for known in dir(owner) if not known.startswith("_")]
    close = difflib.get_close_matches(name, public, n=1) if name else []
    if close:
        return f"; did you mean {close[0]!r}?"
    tools = [known for known in public if isinstance(getattr(owner, known, None), AgentTool)]
    return f"; its tools are {', '.join(tools)}" if tools else "; it holds no Strands tools"
