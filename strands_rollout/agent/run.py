"""The run of one episode, by any player: `EpisodeRun.play` plays the episode, finds out why it ended, and returns it.

There is a subclass for each of the three players: an agent in this process (`agent/episode.py`), an environment
(`agent/environment_player.py`), and a program at the gateway (`gateway/program.py`).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from strands.types.exceptions import EventLoopException

from strands_rollout import errors
from strands_rollout.agent.limits import EpisodeLimits, StopReason, stop_reason_of
from strands_rollout.agent.tool_call import ToolStats
from strands_rollout.client.retry import Fault
from strands_rollout.control import Control, Deadline
from strands_rollout.exits import exits_as_errors
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.saved import EpisodeProgress

Ending: TypeAlias = tuple[StopReason, Exception | None]
"""An episode's stop reason, and the exception that ended the episode; no exception (None) for an ordinary end."""

# reasons why an episode can't be continued
SEVERAL_SEGMENTS: Final = "it has several segments, and only one of them could be saved"
SEVERAL_AGENTS: Final = "it was played by a swarm or graph, whose state is not saved"


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """The outcome of an episode that a program (`agent_program` or `agent_command`) played.

    Attributes:
        text: Text that the program returned: the final answer, in place of the policy's last turn; None if it returned
            no text.
        score: The score that the program returned, as a mapping with `score`; None if it returned no score.
        facts: Facts about the program's requests to the endpoint, and about its process.
        dropped_tokens: Number of sampled tokens of an earlier attempt that this attempt did not repeat; None if there
            was no earlier attempt, or this attempt repeated all of it.
    """

    text: str | None
    score: dict[str, Any] | None
    facts: dict[str, Any]
    dropped_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """The outcome of an episode that an environment played.

    Attributes:
        stop_reason: The reason why the episode ended, as the environment sees it.
        error: The fault that ended the agent's turns; None for an ordinary end.
        scoring_error: The fault that prevented a score; None if scoring succeeded or the environment does not score.
        score: The environment's score, a mapping with `score`; None if the environment does not score. The reward of
            the settings then grades the answer.
        facts: Facts of the environment, as plain JSON.
    """

    stop_reason: StopReason
    error: Exception | None = None
    scoring_error: Exception | None = None
    score: dict[str, Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Episode:
    """A finished episode; its tokens are in the `trajectory` of the episode's model.

    Attributes:
        stop_reason: The reason why the episode ended.
        error: The exception that ended the episode; None for an ordinary end.
        tool_iterations: Number of turns whose tools were run.
        tool_calls: Number of calls that were run.
        tools: Counts, times and results of the tools.
        duration_s: Wall-clock seconds, including the seconds before a resume.
        limits: The limits of the episode.
        progress: State for another agent to continue; `progress.messages` is the main agent's history.
        user_turns: Number of user messages after the first.
        is_resumable: True if another agent can continue from `progress`; False for a swarm or graph, and for a program
            or an environment that can't repeat an aborted attempt.
        is_single_agent: False for a swarm or graph, whose agents each have a history.
        program: The program's outcome, if a program played.
        played: The environment's outcome, if an environment played.
    """

    stop_reason: StopReason
    error: BaseException | None
    tool_iterations: int
    tool_calls: int
    tools: ToolStats
    duration_s: float
    limits: EpisodeLimits
    progress: EpisodeProgress
    user_turns: int = 0
    is_resumable: bool = True
    is_single_agent: bool = True
    program: ProgramOutcome | None = None
    played: PlayedEpisode | None = None

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The agent's history, as Strands messages."""
        return self.progress.messages


class Journal(Protocol):
    """Protocol of a journal, which stores what another process needs to continue the episode."""

    async def turn_ended(self, progress: EpisodeProgress) -> None:
        """Store a finished turn; its tools run after this returns."""

    def call_ended(self, progress: EpisodeProgress) -> None:
        """Store a finished tool call; for a program, which runs its tools itself, store a finished turn."""

    def close(self, reason: str) -> None:
        """Store the reason why the episode can no longer be continued; later steps are not stored."""


class EpisodeRun(ABC):
    """A running episode.

    A subclass defines how the player plays (`_play`), how its exceptions end the episode (`_ending_by_error`), and what
    is recorded (`_history`, `_counts`). It may also define how root causes are found (`_root_cause`).

    Args:
        model: A model for this episode alone, resumed if there was an earlier attempt.
        control: The episode's control. An abort ends the episode immediately. But if a request is in flight, the engine
            first gets a grace period to return the sampled tokens.
        limits: The episode's limits.
        start: State at the start of this run, including the counts of the tools.

    Attributes:
        player_name: Name of the player in messages.
        stats: Counts of the episode's tools.
        user_turns: Number of user messages after the first.
        is_resumable: See `Episode.is_resumable`.
        is_single_agent: See `Episode.is_single_agent`.
    """

    player_name: ClassVar[str]

    def __init__(self, model: SGLangModel, control: Control, limits: EpisodeLimits, start: EpisodeProgress) -> None:
        self.model, self.control, self.limits, self.start = model, control, limits, start
        self.stats = ToolStats(
            control,
            start.tool_s,
            start.tool_errors,
            start.tool_timeouts,
            finished=dict(start.finished),
            unread=set(start.finished),
            calls=[dict(call) for call in start.calls],
        )
        self.user_turns = 0
        self.is_resumable = self.is_single_agent = True

    async def play(self) -> Episode:
        """Play the episode, and return it.

        Raises:
            asyncio.CancelledError: The caller was cancelled. All other failures are returned in `Episode.error`.
        """
        with self.control.running(self.start.duration_s):
            deadline = self._deadline()
            outcome: Ending | Exception
            try:
                with exits_as_errors(self.player_name, RuntimeError):
                    async with deadline:
                        outcome = await self._play()
            except Exception as e:  # the user's code may raise anything; a failed episode is a result
                outcome = e
            ending = self._ending(deadline, outcome)
            if isinstance(outcome, Exception) and outcome is not ending[1]:
                drop_traceback(outcome)
            del outcome  # its traceback refers to this frame
            return self._finish(ending)

    # ---------------------------------------------------------------------------
    # Play
    # ---------------------------------------------------------------------------

    @abstractmethod
    async def _play(self) -> Ending:
        """Play the episode until its ordinary end: an answer or a limit. Any exception ends it, too."""

    def _deadline(self) -> Deadline:
        return self.control.deadline(self.control.left_s(self.limits.episode_timeout_s), model=self.model)

    # ---------------------------------------------------------------------------
    # End
    # ---------------------------------------------------------------------------

    def _ending(self, deadline: Deadline, outcome: Ending | Exception) -> Ending:
        """Return why the episode ended: the first of these causes that applies.

        1. The abort that ended `_play`.
        2. A root cause that was noticed where it arose (`_root_cause`). The user's code often fails as a consequence.
        3. The episode's timeout that ended `_play`.
        4. The exception that `_play` raised.
        5. The ordinary end that `_play` returned.
        """
        was_cut = isinstance(outcome, Exception) and deadline.expired()
        if was_cut and deadline.was_aborted:
            return ending_by_abort()
        if (root_cause := self._root_cause()) is not None:
            return root_cause
        if was_cut:
            return self._ending_at_timeout()
        return self._ending_by_error(outcome) if isinstance(outcome, Exception) else outcome

    def _ending_at_timeout(self) -> Ending:
        return ending_at_timeout(self.limits.episode_timeout_s, self.model.engine_fault)

    def _root_cause(self) -> Ending | None:
        """Return the ending due to a root cause, which overrides the outcome of `_play`; None if no cause is known."""
        return None

    @abstractmethod
    def _ending_by_error(self, error: Exception) -> Ending:
        """Return the ending due to an exception of `_play`."""

    def _ending_of(self, error: Exception) -> Ending:
        """Return the ending due to an exception of the policy's turns; some exceptions mean that a limit is reached."""
        has_turns = self.model.conversation.turn_count > 0
        return stop_reason_of(error, cut_by=self.model.cut_by, has_turns=has_turns), error

    # ---------------------------------------------------------------------------
    # Result
    # ---------------------------------------------------------------------------

    def _finish(self, ending: Ending) -> Episode:
        # drop the reference to the journal: the agent's tools refer to `stats`, and a reference cycle in Strands keeps
        # the tools in memory
        self.stats.on_call_end = None
        conversation = self.model.conversation
        if conversation.drop_new_branch():  # a failed request with a rewritten history began the branch
            conversation.branch.forget_history()
        (stop_reason, error), progress, (iterations, calls) = ending, self.progress(), self._counts()
        return Episode(
            stop_reason=stop_reason,
            error=error,
            tool_iterations=iterations,
            tool_calls=calls,
            tools=self.stats,
            duration_s=progress.duration_s,
            limits=self.limits,
            progress=progress,
            user_turns=self.user_turns,
            is_resumable=self.is_resumable,
            is_single_agent=self.is_single_agent,
        )

    def progress(self) -> EpisodeProgress:
        """Return the state for another run to continue."""
        stats, (iterations, calls) = self.stats, self._counts()
        return EpisodeProgress(
            messages=self._history(),
            covered=self.model.conversation.branch.covered,
            tool_iterations=iterations,
            tool_calls=calls,
            tool_errors=stats.errors,
            tool_timeouts=stats.timeouts,
            tool_s=stats.seconds,
            duration_s=self.control.elapsed_s,
            calls=stats.calls,
        )

    @abstractmethod
    def _history(self) -> Sequence[Mapping[str, Any]]:
        """Return the main agent's history, as Strands messages."""

    @abstractmethod
    def _counts(self) -> tuple[int, int]:
        """Return the numbers of the main agent's tool iterations and tool calls."""


def drop_traceback(error: BaseException) -> None:
    """Drop the traceback of an exception, and of a cancellation that caused the exception.

    Frames of the traceback may refer to the exception. Such a cycle would keep the episode in memory until a garbage
    collection.
    """
    for each in (error, error.__cause__, error.__context__):
        if each is error or isinstance(each, asyncio.CancelledError):
            BaseException.with_traceback(each, None)  # a user's class may not allow setting attributes


def original_error(error: Exception) -> Exception:
    """Return the exception that Strands has wrapped in an EventLoopException, otherwise the error itself."""
    while isinstance(error, EventLoopException) and isinstance(error.original_exception, Exception):
        error = error.original_exception
    return error


def ending_by_abort() -> Ending:
    """Return the ending of an episode whose rollout was aborted."""
    return StopReason.ABORTED, errors.EngineAbortedError("the rollout was aborted")


def ending_at_timeout(limit_s: float | None, engine_fault: Fault | None) -> Ending:
    """Return the ending of an episode whose time was up.

    Args:
        limit_s: The episode's timeout.
        engine_fault: The engine's fault when the time was up; None if the engine was not failing then.
    """
    message = f"the episode took more than {limit_s:g} s"
    if engine_fault is not None:  # the engine's outage used up the time, which isn't the policy's fault
        error = errors.EngineUnavailableError(f"{message}; the engine fails: {engine_fault.message}")
        return StopReason.ENGINE_ERROR, error
    return StopReason.EPISODE_TIMEOUT, TimeoutError(message)
