"""Where model-written code runs: the `CodeExecutor` protocol and the backends that implement it.

Must not know agents, tools or samples.
"""

from strands_rollout.sandbox.executor import CodeExecutor, ExecutionResult
from strands_rollout.sandbox.subprocess_executor import SubprocessExecutor

__all__ = ["CodeExecutor", "ExecutionResult", "SubprocessExecutor"]
