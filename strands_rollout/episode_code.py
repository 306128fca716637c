"""The code tool of one episode: the configured executor, the episode's own session, its turn among the others.

Knows settings and executors; nothing of samples or slime.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from strands_rollout.config import CODE_TOOL_PATH, RolloutSettings
from strands_rollout.executors import shared_executor
from strands_rollout.prompts import CODE_TIMEOUT_S
from strands_rollout.sandbox.fair_queue import CALL_OWNER
from strands_rollout.tools import CodeCalls, code_tool

if TYPE_CHECKING:
    from strands_rollout.sandbox.executor import CodeExecutor
    from strands_rollout.tools import CodeTool

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S: Final = 10.0


@contextlib.asynccontextmanager
async def episode_code_tool(settings: RolloutSettings, calls: CodeCalls) -> AsyncIterator[CodeTool | None]:
    """The code tool for one episode, None where the settings name none; its session ends with the episode.

    Args:
        settings: Whose `executor`, `code_session` and `tool_timeout_s` count.
        calls: Where its calls are counted, those before the episode was resumed included.

    Raises:
        ConfigError: The executor can't be made, or keeps no sessions and one is wanted.
        SandboxError: The executor can't start.
    """
    if CODE_TOOL_PATH not in settings.tools:
        yield None
        return
    owner = uuid.uuid4().hex
    executor = shared_executor(settings.executor)
    start = getattr(executor, "start", None)
    if start is not None:
        await start()  # what it offers is known then, and what would fail every call fails here
    session = owner if settings.code_session else None
    timeout_s = settings.tool_timeout_s or CODE_TIMEOUT_S
    owner_before = CALL_OWNER.set(owner)
    try:
        # calls that were counted before are those of an aborted episode, whose session ended with it
        is_restarted = session is not None and calls.calls > 0
        yield code_tool(executor, timeout_s=timeout_s, session=session, calls=calls, is_restarted=is_restarted)
    finally:
        CALL_OWNER.reset(owner_before)
        if session is not None:
            await _close(executor, session)


async def _close(executor: CodeExecutor, session: str) -> None:
    """End the session; an episode that is over is not spoilt by a failure to do so."""
    try:
        async with asyncio.timeout(_CLOSE_LIMIT_S):
            await executor.close_session(session)
    except Exception as e:  # as said above, whatever it is
        logger.warning("a code session could not be closed error=%s: %s", type(e).__name__, e)
