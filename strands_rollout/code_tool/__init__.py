"""Where model-written code runs: the `CodeExecutor` protocol and the backends that implement it.

Must not know agents, tools or samples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strands_rollout.sandbox.camel_executor import CamelExecutor
    from strands_rollout.sandbox.executor import CodeExecutor, ExecutionResult, ExecutorFacts
    from strands_rollout.sandbox.executor_sandbox import CodeExecutorSandbox
    from strands_rollout.sandbox.local_executor import LocalExecutor
    from strands_rollout.sandbox.ray_executor import RayExecutor
    from strands_rollout.sandbox.sandbox_fusion import SandboxFusionExecutor
    from strands_rollout.sandbox.sandbox_processes import SandboxReport
    from strands_rollout.sandbox.strands_sandbox import StrandsSandboxExecutor
    from strands_rollout.sandbox.subprocess_executor import SubprocessExecutor

_MODULES = {
    "CamelExecutor": "camel_executor",
    "CodeExecutor": "executor",
    "CodeExecutorSandbox": "executor_sandbox",
    "ExecutionResult": "executor",
    "ExecutorFacts": "executor",
    "LocalExecutor": "local_executor",
    "RayExecutor": "ray_executor",
    "SandboxFusionExecutor": "sandbox_fusion",
    "SandboxReport": "sandbox_processes",
    "StrandsSandboxExecutor": "strands_sandbox",
    "SubprocessExecutor": "subprocess_executor",
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
