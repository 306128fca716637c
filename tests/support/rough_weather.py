"""Episodes of every kind, and what goes wrong with them at the engine: by chance, but the same with the same seed.

Knows the policy of the interruption tests; nothing of rollouts.
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fake_sglang_reply import Reply
from interruptible_policy import Asked, Change, abort_after, aborted_in_queue, paced, prompt_of

ANSWER: Final = "So the product of the two numbers is \\boxed{34}.<|im_end|>"
_BROKEN: Final = "<tool_call>\n{not json}\n</tool_call>"


def call(name: str, part: str = "", **arguments: Any) -> str:
    """A tool call that names sample, turn and part."""
    named = {"call": f"@KEY:@TURN{part}", **arguments}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': named})}\n</tool_call>"


def turn(*parts: str) -> str:
    """A turn that ends as the template wants it."""
    return "\n".join(parts) + "<|im_end|>"


_WORK: Final = turn("I shall work on this first.", call("work", seconds=0.01))
_SLOW_WORK: Final = turn("This will take some time.", call("work", seconds=0.15))
PLANS: Final[Mapping[str, Sequence[str]]] = {
    "answers": [ANSWER],
    "calls": [_WORK, ANSWER],
    "callsmuch": [_WORK, _WORK, _WORK, _WORK, ANSWER],
    "parallel": [turn("Two at once:", call("work", "a", seconds=0.15), call("work", "b")), ANSWER],
    "mixed": [
        turn(call("work", "a", seconds=0.05), _BROKEN, call("fail", "b"), call("block", "c", seconds=0.01)),
        _WORK,
        ANSWER,
    ],
    "malformed": [turn(_BROKEN), turn("<tool_call>\n{}"), ANSWER],
    "unknown": [turn(call("nothing")), ANSWER],
    "failing": [turn(call("fail")), turn(call("fail")), ANSWER],
    "slowtool": [_SLOW_WORK, _SLOW_WORK, ANSWER],
    "lingers": [turn("This takes very long.", call("linger", seconds=2.0)), ANSWER],
    "slowmodel": ["Let me think about that for a while. " * 4 + ANSWER],
    "slowboth": ["Let me think. " * 5 + _SLOW_WORK, "Let me think again. " * 5 + ANSWER],
    "rambles": ["on and on " * 400],
    "ramblesafter": [_WORK, "on and on " * 400],
    "loops": [_WORK],
    "overflows": [turn("Tell me.", call("tell", words=900)), ANSWER],
    "dead": [ANSWER],
}
SLOW: Final = frozenset({"slowmodel", "slowboth"})
# what each ends with where it is let to; the others are completed
_FULL: Final = ("response_length", "context_length")
ENDS: Final[Mapping[str, tuple[str, ...]]] = {
    "rambles": _FULL,
    "ramblesafter": _FULL,
    "overflows": _FULL,
    "loops": ("max_tool_iterations",),
    "dead": ("engine_error",),
}


def prompts(names: Sequence[str], count: int | None = None) -> Iterator[tuple[str, str]]:
    """(prompt, label) of so many tasks, the names in turn; endless without a count."""
    named = zip(itertools.cycle(names), itertools.count(), strict=False)
    return ((prompt_of(name, number), "34") for name, number in itertools.islice(named, count))


@dataclass
class Weather:
    """What goes wrong, as a `Disturb`.

    Args:
        seed: Of the dice.
        rates: Share of requests that meet each fault; a retry of the same request meets none.
        token_s: Seconds per token of the slow tasks.

    Attributes:
        met: How many requests met each fault.
    """

    seed: int
    rates: Mapping[str, float]
    token_s: float = 0.005
    met: dict[str, int] = field(default_factory=dict)

    def __call__(self, asked: Asked) -> Reply | Change | None:
        if asked.name == "dead":
            return Reply.status(500, "no worker")
        dice = random.Random(f"{self.seed}:{asked.key}:{asked.visit}")
        chance = dice.random()
        for kind, rate in self.rates.items():
            chance -= rate
            if chance < 0 and asked.attempt == 1:
                self.met[kind] = self.met.get(kind, 0) + 1
                return _FAULTS[kind](dice)
        return paced(self.token_s, queued_s=0.02) if asked.name in SLOW else None


_FAULTS: Final[Mapping[str, Any]] = {
    "500": lambda _dice: Reply.status(500, "worker died"),
    "503": lambda _dice: Reply.status(503, "busy"),
    "429": lambda _dice: Reply.status(429, "slow down", {"Retry-After": "0.01"}),
    "dropped": lambda _dice: Reply.reset(),
    "cut": lambda _dice: Reply.cut(),
    "garbled": lambda _dice: Reply.raw(b"{"),
    "delayed": lambda dice: lambda rest: rest.after(dice.uniform(0.0, 0.05)),
    "aborted": lambda dice: abort_after(dice.randint(1, 9)),
    "dequeued": lambda _dice: aborted_in_queue,
    "slow": lambda dice: paced(dice.uniform(0.001, 0.02), queued_s=dice.uniform(0.0, 0.03)),
}
ALL_FAULTS: Final = dict.fromkeys(_FAULTS, 0.03)
