"""Private names of Strands that this package reads where there is no public way, and what is lost without each.

A version of Strands may rename any of them. Nothing fails then, so that it is said: once in the log, and by the doctor.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator, Mapping
from importlib import metadata
from inspect import signature
from operator import attrgetter
from typing import Any, Final

from strands import Agent, models
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.models import Model

logger = logging.getLogger(__name__)

LOOP_LOST: Final = "episodes run in Strands' own loop, which costs more with each turn"
LOOP_NAMES: Final = (
    "_background_tasks",
    "_cancel_message",
    "_checkpointing",
    "_default_structured_output_model",
    "_deferred_cancel",
    "_interrupt_state",
    "_middleware_registry._handlers",
    "_observe_cancellation",
    "_session_manager",
    "add_middleware",
    "cancel_signal",
    "event_loop_metrics",
    "tool_executor._execute",
    "tool_executor._should_retry",
)
"""Names of an agent that `loop.OwnCycles` reads."""
_LOST: Final[Mapping[str, tuple[str, str]]] = {
    "_cancel_signal": ("", "conversations of several agents on one model are told apart by their histories alone"),
    "_checkpointing": ("checkpointing", "an agent with checkpointing=True is not refused"),
    "_middleware_registry": ("add_middleware", "a SystemExit of middleware ends the run"),
    "_model_router": ("ModelRouter", "a ModelRouter with other models is not refused"),
    "_session_manager": ("session_manager", "a session with another episode's messages is not refused"),
    "conversation_manager._compression_threshold": (
        "proactive_compression",
        "proactive compression is given no count of tokens",
    ),
}
"""By name of an agent, what of Strands it is read for ("" for all agents), and what is lost without it."""


def lacks(owner: object, name: str) -> bool:
    """Return whether an object lacks the attribute of a dotted name."""
    for part in name.split("."):
        if not hasattr(owner, part):
            return True
        owner = getattr(owner, part)
    return False


def missing_of_loop(agent: Agent) -> list[str]:
    """Names that `loop.OwnCycles` reads and the agent does not have."""
    try:
        attrgetter(*LOOP_NAMES)(agent)
    except AttributeError:
        return [name for name in LOOP_NAMES if lacks(agent, name)]
    return []


def losses(import_fault: str) -> dict[str, str]:
    """Return the names that the installed Strands lacks, each with what is lost.

    Args:
        import_fault: Why `loop` could not import what it needs; "" where it could.
    """
    agent = Agent(model=_NoTurns(), callback_handler=None, conversation_manager=SlidingWindowConversationManager())
    found = dict.fromkeys([import_fault] if import_fault else missing_of_loop(agent), LOOP_LOST)
    for name, (feature, lost) in _LOST.items():
        if lacks(agent, name) and (not feature or _offers(feature)):
            found[name] = f"{found[name]}; {lost}" if name in found else lost
    return found


def _offers(feature: str) -> bool:
    """Return whether this Strands has a feature: a parameter or method of agents, a manager's parameter, or a model."""
    parameters = [*signature(Agent).parameters, *signature(SlidingWindowConversationManager).parameters]
    return feature in parameters or hasattr(Agent, feature) or hasattr(models, feature)


@functools.cache
def report_losses(import_fault: str) -> None:
    """Log what the installed Strands lacks; the first call does, any other returns at once."""
    if found := losses(import_fault):
        words = "; ".join(f"{name}: {lost}" for name, lost in found.items())
        logger.warning("event=strands_names_missing strands=%s %s", strands_version(), words)


def strands_version() -> str:
    """The version of Strands that is installed."""
    return metadata.version("strands-agents")


class _NoTurns(Model):
    """The model of an agent that is looked at only."""

    def update_config(self, **model_config: Any) -> None:  # noqa: ANN401 - Strands' signature
        """Change nothing."""

    def get_config(self) -> dict[str, Any]:
        """No settings."""
        return {}

    def stream(self, *_given: Any, **_more: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401 - Strands' signature
        """Not called."""
        raise NotImplementedError

    def structured_output(self, *_given: Any, **_more: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        """Not called."""
        raise NotImplementedError
