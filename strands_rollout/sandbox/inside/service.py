"""The supervisor process, beside the trainer: takes orders from the executor's socket and answers with results.

Frames in: `{"do": "run", "id": 7, "code": ..., "timeout_s": 30, "session": null}`, `{"do": "cancel", "id": 7}` and
`{"do": "close_session", "id": 8, "session": ...}`. Frames out: `{"id": 7, "result": {...}}`, after a first `{"facts":
{...}}` or `{"failure": ...}`. When the socket closes, all children are killed, all files are deleted and the process
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
from collections.abc import Mapping
from typing import Any, Final

from strands_rollout.sandbox.inside import scratch
from strands_rollout.sandbox.inside.frames import LENGTH, frame
from strands_rollout.sandbox.inside.supervisor import Supervisor, fault
from strands_rollout.sandbox.inside.template_link import TemplateLink

_PARENT_POLL_S: Final = 1.0


class Service:
    """Answers one executor.

    Args:
        supervisor: Who runs the code.
        writer: Where answers go.
    """

    def __init__(self, supervisor: Supervisor, writer: asyncio.StreamWriter) -> None:
        self._supervisor = supervisor
        self._writer = writer
        self._runs: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Take orders until the socket closes."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._take(json.loads(await reader.readexactly(length)))

    def _take(self, order: Mapping[str, Any]) -> None:
        if order["do"] == "cancel":
            run = self._runs.get(order["id"])
            if run is not None:
                run.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._carry_out(order))
        self._runs[order["id"]] = task
        task.add_done_callback(lambda _: self._runs.pop(order["id"]))

    async def _carry_out(self, order: Mapping[str, Any]) -> None:
        result = None
        try:
            if order["do"] == "run":
                result = await self._supervisor.run(order["code"], order["timeout_s"], order["session"])
            else:
                await self._supervisor.close_session(order["session"])
        except Exception as e:  # whatever it is, somebody waits for an answer
            result = fault(f"{type(e).__name__}: {e}")
        self._writer.write(frame({"id": order["id"], "result": result}))


async def _serve(executor: socket.socket, settings: dict[str, Any], parent: int) -> None:
    reader, writer = await asyncio.open_connection(sock=executor)
    template = TemplateLink(settings["template"])
    try:
        try:
            facts = await template.facts
        except RuntimeError as e:
            writer.write(frame({"failure": str(e)}))
            return
        supervisor = Supervisor(settings, template)
        writer.write(frame({"facts": facts}))
        supervisor.top_up()
        serving = asyncio.create_task(Service(supervisor, writer).serve(reader))
        orphaned = asyncio.create_task(_until_orphaned(parent))
        await asyncio.wait([serving, orphaned], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        orphaned.cancel()
    finally:
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await template.close()
        scratch.delete(settings["root"])


async def _until_orphaned(parent: int) -> None:
    """A fork of the trainer may hold the other end of the socket open after the trainer has ended."""
    while os.getppid() == parent:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(_PARENT_POLL_S)


def main() -> None:
    """Run as a process: arguments are the number of the socket and the settings in JSON."""
    parent = os.getppid()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]), parent))
