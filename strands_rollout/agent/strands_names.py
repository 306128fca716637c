"""Names of Strands that this package reads, and what is lost without them.

Most of these names are private. A missing name is not an error: it is logged once per process, and
`strands-rollout doctor` reports it.
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

LOOP_LOST: Final = "episodes run in Strands' own loop, which takes more CPU time with each turn"
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
"""Attributes of an agent, as dotted names, that `loop` and its invocations read."""
_LOST_FEATURES: Final[Mapping[str, tuple[str, str]]] = {
    "_cancel_signal": ("", "conversations of several agents on one model are told apart by their histories alone"),
    "_checkpointing": ("checkpointing", "an agent with checkpointing=True is not refused"),
    "_middleware_registry": ("add_middleware", "a SystemExit of middleware ends the run"),
    "_model_router": ("ModelRouter", "a ModelRouter with other models is not refused"),
    "_session_manager": ("session_manager", "a session with another episode's messages is not refused"),
    "conversation_manager._compression_threshold": (
        "proactive_compression",
        "proactive compression gets no token count",
    ),
}
"""Attributes of an agent, each with its feature of Strands ("" for none) and what is lost without the attribute.

A missing attribute of a feature is reported only if the installed Strands has the feature.
"""


def lacks_attribute(owner: object, name: str) -> bool:
    """Return True if an object lacks an attribute; `name` may be dotted, such as `tool_executor._execute`."""
    for part in name.split("."):
        if not hasattr(owner, part):
            return True
        owner = getattr(owner, part)
    return False


def missing_loop_names(agent: Agent) -> list[str]:
    """Return the names of `LOOP_NAMES` that the agent lacks."""
    try:
        attrgetter(*LOOP_NAMES)(agent)
    except AttributeError:
        return [name for name in LOOP_NAMES if lacks_attribute(agent, name)]
    return []


def find_missing_names(import_fault: str) -> dict[str, str]:
    """Return the names that the installed Strands lacks, each with what is lost without it.

    Args:
        import_fault: Message of the ImportError in `loop`; "" if there was none. The message is returned in place of
            the names that the loop lacks.
    """
    agent = Agent(model=_StubModel(), callback_handler=None, conversation_manager=SlidingWindowConversationManager())
    found = dict.fromkeys([import_fault] if import_fault else missing_loop_names(agent), LOOP_LOST)
    for name, (feature, lost) in _LOST_FEATURES.items():
        if lacks_attribute(agent, name) and (not feature or _strands_has(feature)):
            found[name] = f"{found[name]}; {lost}" if name in found else lost
    return found


def _strands_has(feature: str) -> bool:
    parameters = [*signature(Agent).parameters, *signature(SlidingWindowConversationManager).parameters]
    return feature in parameters or hasattr(Agent, feature) or hasattr(models, feature)


@functools.cache
def report_missing_names(import_fault: str) -> None:
    """Log the names that the installed Strands lacks, once per process."""
    if found := find_missing_names(import_fault):
        message = "; ".join(f"{name}: {lost}" for name, lost in found.items())
        logger.warning("event=strands_names_missing strands=%s %s", strands_version(), message)


def strands_version() -> str:
    """Return the installed version of Strands."""
    return metadata.version("strands-agents")


class _StubModel(Model):
    """Model of an agent that is inspected and never run."""

    def update_config(self, **model_config: Any) -> None:  # noqa: ANN401 - Strands' signature
        """Do nothing."""

    def get_config(self) -> dict[str, Any]:
        return {}

    def stream(self, *_args: Any, **_kwargs: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401 - Strands' signature
        raise NotImplementedError

    def structured_output(self, *_args: Any, **_kwargs: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        raise NotImplementedError
