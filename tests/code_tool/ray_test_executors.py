"""Executors that misbehave on purpose, made on the nodes of a Ray cluster by their dotted path."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Self

from strands_rollout.code_tool.executors import ExecutionResult, ExecutorFacts


class ProcessExecutor:
    """Runs nothing: each answer names the actor's process, and the code is the seconds that it takes."""

    def __init__(self, *, faulty_node: str = "", faults_log: str = "", deaf: bool = False) -> None:
        self.facts = ExecutorFacts(keeps_sessions=True)
        self._faulty_node = faulty_node
        self._faults_log = faults_log
        self._deaf = deaf

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        import ray

        await asyncio.sleep(float(code) if not self._deaf else 3600)
        if ray.get_runtime_context().get_node_id() == self._faulty_node:
            self._note_fault()
            return ExecutionResult("", "", None, infra_error="the disk is full")
        return ExecutionResult(str(os.getpid()), "", 0)

    def _note_fault(self) -> None:
        with Path(self._faults_log).open("a") as log:
            log.write("fault\n")

    async def close_session(self, session: str) -> None: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...
