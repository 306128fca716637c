"""An executor that names its process; the nodes of a Ray cluster make it by its dotted path."""

import asyncio
import os
from pathlib import Path

from strands_rollout.code_tool.executors import CodeExecutor, ExecutionResult, ExecutorFacts


class ProcessExecutor(CodeExecutor):
    """Runs nothing: each answer names the actor's process, and the code is a file that is waited for, or nothing."""

    def __init__(self, *, faulty_node: str = "", faults_log: str = "") -> None:
        self.facts = ExecutorFacts(keeps_sessions=True)
        self._faulty_node = faulty_node
        self._faults_log = faults_log

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        import ray

        while code and not Path(code).exists():  # noqa: ASYNC110, ASYNC240 - another process makes it
            await asyncio.sleep(0.02)
        if ray.get_runtime_context().get_node_id() == self._faulty_node:
            self._note_fault()
            return ExecutionResult("", "", None, infra_error="the disk is full")
        return ExecutionResult(str(os.getpid()), "", 0)

    def _note_fault(self) -> None:
        with Path(self._faults_log).open("a") as log:
            log.write("fault\n")

    async def aclose(self) -> None: ...
