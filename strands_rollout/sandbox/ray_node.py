"""One node of a Ray cluster as seen from here: its actor, whether it answers, and what it has to do.

Holds Ray's objects and never waits for them. Its counters belong to `RayCluster`, under that one's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from concurrent.futures import Future

CONTROL_GROUP: Final = "control"  # pings must not wait behind calls
START_LIMIT_S: Final = 120.0  # of an actor; a runtime environment may have to be built first
_PING_LIMIT_S: Final = 30.0  # an actor that has not answered by then is frozen or cut off
_PING_LOOKS: Final = 3  # after a stall of this process, the answers may be here but not yet be noted
_SLACK_S: Final = 60.0  # for everything that is neither waiting for a place nor running


@dataclass(eq=False, slots=True)
class RayNode:
    """A node and its actor.

    Attributes:
        node_id: Ray's id, in hex.
        address: The node's IP address.
        places: Calls that it runs at once, about.
        actor: Ray's handle of a `RayWorker`.
        greeting: Becomes the incarnation of the actor's process, or the reason why there is none.
        incarnation: The last known one.
        outstanding: Calls that were given to it and have not ended.
        sessions: Sessions that live there.
        turn: When it was last chosen, in calls.
        shunned_until: Monotonic seconds until which others are preferred, since it failed.
        lost: It is given up: nobody need wait for its answers.
    """

    node_id: str
    address: str
    places: float
    actor: Any
    greeting: Future[str] = field(init=False)
    incarnation: str | None = field(default=None, init=False)
    outstanding: int = 0
    sessions: int = 0
    turn: int = 0
    shunned_until: float = 0.0
    lost: bool = False
    _pong: Future[None] | None = field(default=None, init=False)
    _pinged_at: float = field(default=0.0, init=False)
    _looks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.greet()

    def __str__(self) -> str:
        return f"node {self.address} ({self.node_id[:8]})"

    @property
    def is_ready(self) -> bool:
        """Whether it can be given calls."""
        greeting = self.greeting  # another thread may put a new one there, for which this one would wait
        return not self.lost and greeting.done() and greeting.exception() is None

    @property
    def fault(self) -> BaseException | None:
        """Why it can't be given calls; None also where it has not answered yet."""
        greeting = self.greeting
        return greeting.exception() if greeting.done() else None

    def greet(self) -> None:
        """Ask whether it is there; it is not ready until it has answered."""
        self.greeting = self.actor.hello.remote().future()

    def is_silent(self, now: float) -> bool:
        """Whether a ping has gone unanswered for too long; sends the next one where the last was answered.

        Args:
            now: Monotonic seconds.
        """
        if self._pong is not None and not self._pong.done():
            self._looks += 1
            limit_s = START_LIMIT_S if self.incarnation is None else _PING_LIMIT_S
            return now - self._pinged_at > limit_s and self._looks >= _PING_LOOKS
        self._pong = self.actor.ping.options(concurrency_group=CONTROL_GROUP).remote().future()
        self._pinged_at = now
        self._looks = 0
        return False

    def deadline_s(self, timeout_s: float) -> float:
        """Seconds after which a call that was just given to it is beyond hope: those ahead took all of their time.

        Twice that, since its executor may run fewer calls at once than the node has places.
        """
        return _SLACK_S + 2 * timeout_s * (1 + self.outstanding / self.places)

    def load(self, *, of_sessions: bool = False) -> float:
        """What it would have to do with one more, relative to what it can do."""
        return ((self.sessions if of_sessions else self.outstanding) + 1) / self.places
