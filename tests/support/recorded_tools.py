"""Tools that record the ends of their calls in one file for all processes, and a program with an agent that has them.

The argument `call` names a call.
"""

import asyncio
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

from strands import Agent, tool

_FILE: Final = Path(os.environ.setdefault("RECORDED_TOOLS", tempfile.mkstemp(prefix="recorded-tools-")[1]))
PATHS: Final = tuple(f"{__name__}.{name}" for name in ("work", "fail"))

if "STRANDS_ROLLOUT_TEST_DRIVER" in os.environ:
    from slime_workers import prepare_worker

    prepare_worker()


def clear_calls() -> None:
    _FILE.write_text("")


def ended_calls() -> list[str]:
    return _FILE.read_text().split()


def _note(call: str) -> None:
    with _FILE.open("a") as file:
        file.write(f"{call}\n")


def calls_ended_twice() -> list[str]:
    return [call for call, count in Counter(ended_calls()).items() if count > 1]


@tool
async def work(call: str, seconds: float = 0.0) -> str:
    """Work."""
    await asyncio.sleep(seconds)
    _note(call)
    return f"{call} is done"


@tool
async def fail(call: str) -> str:
    """Fail."""
    await asyncio.sleep(0)
    _note(call)
    raise RuntimeError(f"{call} went wrong")


@tool
async def die(call: str) -> str:
    """End the process."""
    _note(call)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


async def program(task: Any, endpoint: Any) -> str:
    """Play an agent with these tools through the endpoint of the gateway."""
    from strands.models.openai import OpenAIModel

    client = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    model = OpenAIModel(client_args=client, model_id=endpoint.model)
    agent = Agent(model, tools=[work, fail, die], callback_handler=None)
    return str(await agent.invoke_async(task.text))
