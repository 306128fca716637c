"""Execution of model-written code: the `CodeExecutor` protocol, its backends, and the code tool.

This package must not import the code of agents or samples.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strands_rollout.code_tool.camel import CamelExecutor as CamelExecutor
    from strands_rollout.code_tool.executors import CodeExecutor as CodeExecutor
    from strands_rollout.code_tool.executors import ExecutionResult as ExecutionResult
    from strands_rollout.code_tool.executors import ExecutorFacts as ExecutorFacts
    from strands_rollout.code_tool.local import LocalExecutor as LocalExecutor
    from strands_rollout.code_tool.remote import SubprocessExecutor as SubprocessExecutor
    from strands_rollout.code_tool.sandbox_fusion import SandboxFusionExecutor as SandboxFusionExecutor
    from strands_rollout.code_tool.strands_sandbox import CodeExecutorSandbox as CodeExecutorSandbox
    from strands_rollout.code_tool.strands_sandbox import StrandsSandboxExecutor as StrandsSandboxExecutor
    from strands_rollout.code_tool.supervisor_link import SandboxReport as SandboxReport

_MODULES = {
    "CamelExecutor": "camel",
    "CodeExecutor": "executors",
    "CodeExecutorSandbox": "strands_sandbox",
    "ExecutionResult": "executors",
    "ExecutorFacts": "executors",
    "LocalExecutor": "local",
    "SandboxFusionExecutor": "sandbox_fusion",
    "SandboxReport": "supervisor_link",
    "StrandsSandboxExecutor": "strands_sandbox",
    "SubprocessExecutor": "remote",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import a name on first access: the processes that run code import this package too and must stay light."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
