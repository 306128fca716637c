"""The ways to run Python that are compared, each behind the same three calls.

camel-ai and strands_rollout are imported only by the contender that needs them: a worker's environment has one of them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol


class Contender(Protocol):
    """Runs programs.

    Attributes:
        helpers: Names of the processes that it keeps: the first is the caller's child, each other the one's before it.
        keeps_sessions: Whether `run` takes a session's name.
    """

    helpers: tuple[str, ...]
    keeps_sessions: bool

    async def start(self) -> None:
        """Be ready for calls."""
        ...

    async def run(self, code: str, session: str | None = None) -> str:
        """Run code to its end and return what it printed, errors included."""
        ...

    async def stop(self) -> None:
        """Release everything."""
        ...


class ColdPython:
    """`python -c` for each call, started from the event loop, as many at once as there are callers."""

    helpers: tuple[str, ...] = ()
    keeps_sessions = False

    async def start(self) -> None:
        """Nothing to do."""

    async def run(self, code: str, session: str | None = None) -> str:
        """Start an interpreter; see `Contender.run`."""
        del session
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=pipe, stderr=pipe)
        stdout, stderr = await process.communicate()
        return (stdout + stderr).decode()

    async def stop(self) -> None:
        """Nothing to do."""


class CamelInterpreter:
    """camel-ai's SubprocessInterpreter, made anew for each call and called in a thread.

    That is what becomes of slime's example: Strands runs a synchronous tool by `asyncio.to_thread`.

    Args:
        places: Calls at once; None for as many as asyncio has threads.
    """

    helpers: tuple[str, ...] = ()
    keeps_sessions = False

    def __init__(self, places: int | None) -> None:
        self._places = places

    async def start(self) -> None:
        """Make sure that its `python` is this environment's."""
        if self._places is not None:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._places))
        printed = await self.run("import sys; print(sys.prefix)")
        if printed.strip() != sys.prefix:
            raise RuntimeError(
                f"camel-ai starts the first 'python' of the PATH, which is that of {printed.strip()!r}; expected "
                f"{sys.prefix!r}: name the python of a virtual environment"
            )

    async def run(self, code: str, session: str | None = None) -> str:
        """Run code in a thread; see `Contender.run`."""
        del session
        return await asyncio.to_thread(_run_on_camel, code)

    async def stop(self) -> None:
        """End the threads."""
        await asyncio.get_running_loop().shutdown_default_executor()


def _run_on_camel(code: str) -> str:
    from camel.interpreters import SubprocessInterpreter  # type: ignore[import-not-found,unused-ignore]

    interpreter = SubprocessInterpreter(require_confirm=False, print_stdout=False, print_stderr=False)
    return str(interpreter.run(code, "python"))


class OwnExecutor:
    """An executor of strands_rollout with its default settings.

    Args:
        name: "LocalExecutor" or "SubprocessExecutor".
        places: Calls at once; None for its default.
    """

    def __init__(self, name: str, places: int | None) -> None:
        import strands_rollout.sandbox

        options: dict[str, Any] = {} if places is None else {"max_concurrency": places}
        self._executor = getattr(strands_rollout.sandbox, name)(**options)
        self.keeps_sessions = self._executor.facts.keeps_sessions
        self.helpers: tuple[str, ...] = ("supervisor", "template") if name == "LocalExecutor" else ()

    async def start(self) -> None:
        """Start what it keeps running."""
        if hasattr(self._executor, "start"):
            await self._executor.start()

    async def run(self, code: str, session: str | None = None) -> str:
        """Run code; see `Contender.run`."""
        result = await self._executor.run(code, session=session)
        return str(result.stdout + result.stderr) + (f"infra_error: {result.infra_error}" if result.infra_error else "")

    async def stop(self) -> None:
        """Close it."""
        await self._executor.aclose()


_MAKERS: Final[dict[str, Callable[[int | None], Contender]]] = {
    "local": lambda places: OwnExecutor("LocalExecutor", places),
    "camel": CamelInterpreter,
    "cold_python": lambda _: ColdPython(),
    "subprocess": lambda places: OwnExecutor("SubprocessExecutor", places),
}


def make_contender(name: str, places: int | None = None) -> Contender:
    """Make a contender by name.

    Args:
        name: "local", "camel", "cold_python" or "subprocess".
        places: Calls that it must be able to run at once; None for what it does by default.
    """
    return _MAKERS[name](places)
