"""What an episode is about, for the user's own code in it: agent factories, resources, environments, tools and hooks.

Knows nothing of agents, samples or slime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from strands_rollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data set on its way through an episode.

    Attributes:
        messages: Strands messages that the agent starts with; the last is the user's.
        system_prompt: The row's own, else the configured one; None for none.
        label: The row's.
        metadata: The row's, without what this package writes there.
        index: The sample's, where it has one.
        evaluation: Whether the episode is one of an evaluation.
        tools: The configured tools, and those of the environment, as `strands.Agent(tools=...)` takes them.
        resources: What is open while the episode runs, by the names in the settings.
        environment: What the settings' `environment` made; None without one.
    """

    messages: Sequence[Mapping[str, Any]]
    system_prompt: str | None = None
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    index: int | None = None
    evaluation: bool = False
    tools: Sequence[Any] = ()
    resources: Mapping[str, Any] = field(default_factory=dict)
    environment: Any = None

    @property
    def text(self) -> str:
        """The text of the user's last message."""
        return "\n".join(block["text"] for block in self.messages[-1]["content"] if "text" in block)


@dataclass(slots=True)
class _Episode:
    """What the context of an episode holds; contexts outlive it in timers and idle connections."""

    task: Task | None


_CURRENT: Final[ContextVar[_Episode | None]] = ContextVar("strands_rollout_task", default=None)


def current_task() -> Task:
    """The task of the episode that runs here, for tools and hooks: `current_task().resources["database"]`.

    Raises:
        ConfigError: No episode of `generate` runs here.
    """
    episode = _CURRENT.get()
    task = None if episode is None else episode.task
    if task is None:
        raise ConfigError(
            "current_task() was called outside of an episode; expected a call from a tool, a hook or an agent factory "
            "of an episode that strands_rollout.generate runs"
        )
    return task


@contextmanager
def running(task: Task) -> Iterator[None]:
    """Make this the task of whatever the block calls, awaits or starts."""
    episode = _Episode(task)
    token = _CURRENT.set(episode)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        episode.task = None
