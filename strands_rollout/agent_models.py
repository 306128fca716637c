"""Models for further agents of a running episode: the same policy, each with a trajectory of its own.

Knows who made which model; nothing of samples or slime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from strands_rollout.bounded_tool import CURRENT_CALL
from strands_rollout.errors import ConfigError
from strands_rollout.sglang_model import SGLangModel


@dataclass(slots=True)
class _Episode:
    """What the context of an episode holds; contexts outlive it in timers and idle connections."""

    models: AgentModels | None


_CURRENT: Final[ContextVar[_Episode | None]] = ContextVar("strands_rollout_agent_models", default=None)


@dataclass(frozen=True, slots=True)
class MadeModel:
    """A model, and the id of the tool call that asked for it."""

    model: SGLangModel
    call: str


@dataclass(slots=True)
class AgentModels:
    """The models that the tools of one episode made.

    Attributes:
        make: Makes the model of the agent of this name.
        made: In the order of their making.
        is_closed: Whether the episode is over: no model samples any more.
    """

    make: Callable[[str], SGLangModel]
    made: list[MadeModel] = field(default_factory=list)
    is_closed: bool = False
    _names: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make `sub_agent_model` give models of this episode, to whatever the block calls, awaits or starts."""
        episode = _Episode(self)
        token = _CURRENT.set(episode)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            episode.models = None
            self.is_closed = True

    def new(self) -> SGLangModel:
        """A model for an agent of the tool call that runs here; its name is that call's and a number."""
        call = CURRENT_CALL.get()
        self._names[call] += 1
        self.made.append(MadeModel(self.make(f"{call}/{self._names[call]}"), call))
        return self.made[-1].model


def sub_agent_model() -> SGLangModel:
    """A model for one more agent, to be called by a tool of an episode that `generate` runs.

    The agent is played by the policy that is trained, under the episode's sampling parameters and token budgets, which
    count for each agent alone. With the setting `fan_out` its tokens are trained as a sample of their own. Each model
    is for one conversation. Where the agent's conversation manager drops or sums up messages, what was read before is
    a sample of its own too.

    Raises:
        ConfigError: No episode is running here.
    """
    episode = _CURRENT.get()
    models = None if episode is None else episode.models
    if models is None:
        raise ConfigError(
            "sub_agent_model() was called outside of an episode; expected a call from a tool that an agent of "
            "strands_rollout.generate runs. Elsewhere, make an SGLangModel"
        )
    return models.new()
