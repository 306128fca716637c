"""Files of an executor's session, read and written by small programs that run in that session.

Knows the `CodeExecutor` protocol. Each program runs in a namespace of its own, so that it neither sees nor leaves a
variable; what it reads comes back as base64, in pieces that fit into the executor's output.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from typing import Any, Final

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.executor import CodeExecutor

_MAX_READ_BYTES: Final = 12_000  # as base64 below 20 000 characters, which executors keep by default
_MIN_READ_BYTES: Final = 256
_WRITE_BYTES: Final = 48_000
_INVALID: Final = 22  # EINVAL: a path with a null character is a ValueError in Python

_READ: Final = """
with open(path, "rb") as file:
    file.seek(offset)
    data = file.read(size)
"""
_WRITE: Final = """
if folder:
    os.makedirs(folder, exist_ok=True)
with open(path, mode) as file:
    file.write(base64.b64decode(content))
data = b""
"""
_REMOVE: Final = """
os.remove(path)
data = b""
"""
_LIST: Final = """
def entry(found):
    try:
        return [found.name, found.is_dir(), found.stat().st_size]
    except OSError:
        return [found.name, None, None]
with os.scandir(path or ".") as entries:
    data = json.dumps(sorted(map(entry, entries))).encode()[offset:offset + size]
"""
_FRAME: Final = """
import base64, json, os
try:
{body}
    answer = {{"data": base64.b64encode(data).decode()}}
except OSError as e:
    answer = {{"errno": e.errno, "words": e.strerror}}
except ValueError as e:
    answer = {{"errno": {invalid}, "words": str(e)}}
print("\\n" + mark + json.dumps(answer))
"""


class SessionFiles:
    """The files that a session's code sees, by the paths that it would use.

    Args:
        executor: Keeps sessions.
        session: The session's name.
    """

    def __init__(self, executor: CodeExecutor, session: str) -> None:
        self._executor = executor
        self._session = session

    async def read(self, path: str) -> bytes:
        """The whole of a file.

        Raises:
            OSError: It can't be read; of the kind that `open` raises.
            SandboxError: The executor itself failed.
        """
        return await self._all(_READ, path)

    async def write(self, path: str, content: bytes) -> None:
        """Replace a file, with its folders.

        Raises:
            OSError: It can't be written; a part of it may be.
            SandboxError: The executor itself failed.
        """
        for start in range(0, max(1, len(content)), _WRITE_BYTES):
            piece = base64.b64encode(content[start : start + _WRITE_BYTES]).decode()
            mode = "ab" if start else "wb"
            await self._answer(_WRITE, path, folder=os.path.dirname(path), mode=mode, content=piece)  # noqa: PTH120

    async def remove(self, path: str) -> None:
        """Remove a file.

        Raises:
            OSError: It can't be removed, or is a folder.
            SandboxError: The executor itself failed.
        """
        await self._answer(_REMOVE, path)

    async def listed(self, path: str) -> list[tuple[str, bool | None, int | None]]:
        """Name, whether it is a folder, and size in bytes of each entry of a folder, sorted by name.

        Raises:
            OSError: It can't be listed.
            SandboxError: The executor itself failed.
        """
        return [(name, is_dir, size) for name, is_dir, size in json.loads(await self._all(_LIST, path))]

    async def _all(self, body: str, path: str) -> bytes:
        """Everything that a program gives piece by piece; pieces get smaller until they fit into the output."""
        found, size = b"", _MAX_READ_BYTES
        while True:
            piece = await self._answer(body, path, offset=len(found), size=size)
            if piece is None:
                size //= 2
                if size < _MIN_READ_BYTES:
                    raise OSError(f"the executor keeps too little output to read {path!r} through it")
                continue
            found += piece
            if len(piece) < size:
                return found

    async def _answer(self, body: str, path: str, **more: Any) -> bytes | None:  # noqa: ANN401 - JSON
        """Run one program; None where its output was cut."""
        mark = secrets.token_hex(8)
        indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
        source = _FRAME.format(body=indented.rstrip(), invalid=_INVALID)
        result = await self._executor.run(
            f"exec({source!r}, { ({'path': path, 'mark': mark} | more)!r})", session=self._session
        )
        if result.infra_error is not None:
            raise SandboxError(f"the code executor failed: {result.infra_error}")
        line = next((line for line in result.stdout.splitlines() if line.startswith(mark)), None)
        if line is None or not line.endswith("}"):
            if result.truncated:
                return None
            raise OSError(f"no access to {path!r} in the sandbox: {result.stderr or result.killed_by or 'no answer'}")
        answer = json.loads(line.removeprefix(mark))
        if "data" not in answer:
            raise OSError(answer["errno"] or _INVALID, answer["words"] or "can't be used", path)
        return base64.b64decode(answer["data"])
