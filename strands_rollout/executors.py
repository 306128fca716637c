"""Code executors by name, as settings choose them: made once per process and set of options, and shared.

Knows the backends by their dotted paths alone; none is imported before it is used.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import pkgutil
from collections.abc import Mapping
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.sandbox.executor import CodeExecutor

EXECUTORS: Final = {
    "local": "strands_rollout.sandbox.LocalExecutor",
    "subprocess": "strands_rollout.sandbox.SubprocessExecutor",
    "sandbox_fusion": "strands_rollout.sandbox.SandboxFusionExecutor",
    "camel": "strands_rollout.sandbox.CamelExecutor",
    "strands": "strands_rollout.sandbox.StrandsSandboxExecutor",
    "ray": "strands_rollout.sandbox.RayExecutor",
}
_shared: dict[tuple[int, str], CodeExecutor] = {}


def shared_executor(setting: str | Mapping[str, Any]) -> CodeExecutor:
    """This process's executor for a setting; a forked process makes its own.

    Args:
        setting: A name of `EXECUTORS`, the dotted path of a class or function that makes an executor, or a mapping
            with such a `name`; its other keys are the arguments.

    Raises:
        ConfigError: There is no such executor, or it does not take these arguments.
    """
    key = (os.getpid(), json.dumps(setting, sort_keys=True, default=repr))
    if key not in _shared:
        return _shared.setdefault(key, make_executor(setting))  # two threads may make one; neither has started it yet
    return _shared[key]


def make_executor(setting: str | Mapping[str, Any]) -> CodeExecutor:
    """A new executor for a setting, which the caller closes; see `shared_executor`."""
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"got executor={setting!r}; expected a name, or a mapping with the key name and options")
    make = _factory(name)
    try:
        bound = inspect.signature(make).bind(**options)
    except TypeError as e:
        raise ConfigError(f"the executor {name!r} can't take {_shown(options)}: {e}{_nearest(options, make)}") from e
    executor = make(*bound.args, **bound.kwargs)
    if not isinstance(executor, CodeExecutor):
        raise ConfigError(f"the executor {name!r} made a {type(executor).__name__}, which is no CodeExecutor")
    return executor


def _factory(name: str) -> Any:  # noqa: ANN401 - a class, or a function
    path = EXECUTORS.get(name, name)
    if "." not in path:
        near = difflib.get_close_matches(name, EXECUTORS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(EXECUTORS)}, or a dotted path"
        raise ConfigError(f"got the unknown executor {name!r}; {hint}")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"can't load the executor {name!r}: {e}") from e
    if not callable(found):
        raise ConfigError(f"the executor {name!r} is a {type(found).__name__}; expected a class or a function")
    return found


def _shown(options: Mapping[str, Any]) -> str:
    """The names of options; their values may be secret."""
    return f"the options {', '.join(options)}" if options else "no options"


def _nearest(options: Mapping[str, Any], make: Any) -> str:  # noqa: ANN401
    known = list(inspect.signature(make).parameters)
    unknown = [name for name in options if name not in known]
    near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.4) if unknown else []
    return f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known) or 'none'}"
