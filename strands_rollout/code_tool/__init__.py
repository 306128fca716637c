"""Where model-written code runs: the `CodeExecutor` protocol and the backends that implement it.

Must not know agents, tools or samples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strands_rollout.code_tool.camel import CamelExecutor
    from strands_rollout.code_tool.executors import CodeExecutor, ExecutionResult, ExecutorFacts
    from strands_rollout.code_tool.local.executor import LocalExecutor
    from strands_rollout.code_tool.local.supervisor_link import SandboxReport
    from strands_rollout.code_tool.ray import RayExecutor
    from strands_rollout.code_tool.sandbox_fusion import SandboxFusionExecutor
    from strands_rollout.code_tool.strands_sandbox import CodeExecutorSandbox, StrandsSandboxExecutor
    from strands_rollout.code_tool.subprocess import SubprocessExecutor

_MODULES = {
    "CamelExecutor": "camel",
    "CodeExecutor": "executors",
    "CodeExecutorSandbox": "strands_sandbox",
    "ExecutionResult": "executors",
    "ExecutorFacts": "executors",
    "LocalExecutor": "local.executor",
    "RayExecutor": "ray",
    "SandboxFusionExecutor": "sandbox_fusion",
    "SandboxReport": "local.supervisor_link",
    "StrandsSandboxExecutor": "strands_sandbox",
    "SubprocessExecutor": "subprocess",
}

__all__ = [
    "CamelExecutor",
    "CodeExecutor",
    "CodeExecutorSandbox",
    "ExecutionResult",
    "ExecutorFacts",
    "LocalExecutor",
    "RayExecutor",
    "SandboxFusionExecutor",
    "SandboxReport",
    "StrandsSandboxExecutor",
    "SubprocessExecutor",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the module holds
    """Import a backend when it is asked for: the processes that run code import this package as well."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
