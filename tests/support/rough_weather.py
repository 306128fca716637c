"""Episodes of several kinds, and what goes wrong with them at the engine: by chance, but the same with the same seed.

Knows the policy of the interruption tests; nothing of rollouts.
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    "parallel": [turn("Two at once:", call("work", "a", seconds=0.15), call("work", "b")), ANSWER],
    "mixed": [
        turn(call("work", "a", seconds=0.05), _BROKEN, call("fail", "b"), call("block", "c", seconds=0.01)),
        _WORK,
        ANSWER,
    ],
    "failing": [turn(call("fail")), turn(call("fail")), ANSWER],
    "slowtool": [_SLOW_WORK, _SLOW_WORK, ANSWER],
    "lingers": [turn("This takes very long.", call("linger", seconds=2.0)), ANSWER],
    "slowmodel": ["Let me think about that for a while. " * 4 + ANSWER],
    "slowboth": ["Let me think. " * 5 + _SLOW_WORK, "Let me think again. " * 5 + ANSWER],
}
SLOW: Final = frozenset({"slowmodel", "slowboth"})


def prompts(names: Sequence[str], count: int) -> Iterator[tuple[str, str]]:
    """(prompt, label) of so many tasks, the names in turn."""
    named = zip(itertools.cycle(names), itertools.count(), strict=False)
    return ((prompt_of(name, number), "34") for name, number in itertools.islice(named, count))


@dataclass
class Weather:
    """What goes wrong, as a `Disturb`.

    Args:
        seed: Of the dice.
        rates: Share of requests that meet each fault; a retry of the same request meets none.
    """

    seed: int
    rates: Mapping[str, float]

    def __call__(self, asked: Asked) -> Reply | Change | None:
        dice = random.Random(f"{self.seed}:{asked.key}:{asked.visit}")
        chance = dice.random()
        for kind, rate in self.rates.items():
            chance -= rate
            if chance < 0 and asked.attempt == 1:
                return _FAULTS[kind](dice)
        return paced(0.005, queued_s=0.02) if asked.name in SLOW else None


_FAULTS: Final[Mapping[str, Any]] = {
    "delayed": lambda dice: lambda rest: rest.after(dice.uniform(0.0, 0.05)),
    "aborted": lambda dice: abort_after(dice.randint(1, 9)),
    "dequeued": lambda _dice: aborted_in_queue,
}
