"""An episode's time as the viewer and traces show it: requests, tool calls and what is left, which is waiting.

Facts of before requests had start times give sums, and no places.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from strands_rollout.samples import finite


@dataclass(frozen=True, slots=True)
class Step:
    """A request to the engine ("generate"), or a tool call ("tool"), in seconds since the episode began.

    `turn` is the sample's, from 0, None where unknown; `call` the call among the facts' `calls`.
    """

    kind: str
    at_s: float
    s: float
    turn: int | None = None
    call: int | None = None


def steps_of(facts: Mapping[str, Any]) -> list[Step]:
    """All steps in the order of their beginnings; none where one of them does not say when it was."""
    requests, calls = (_list(facts.get(name)) for name in ("requests", "calls"))
    steps = []
    for item in requests:
        turn, at_s, s = item if isinstance(item, list | tuple) and len(item) == 3 else (None, None, None)
        steps.append(_step("generate", at_s, s, turn=turn if type(turn) is int else None))
    for number, call in enumerate(calls):
        facts_of_call = call if isinstance(call, Mapping) else {}
        steps.append(_step("tool", facts_of_call.get("at_s"), facts_of_call.get("s"), call=number))
    known = [step for step in steps if step is not None]
    return sorted(known, key=lambda step: step.at_s) if len(known) == len(steps) else []


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _step(kind: str, at_s: object, s: object, **more: int | None) -> Step | None:
    begun, seconds = _seconds(at_s), _seconds(s)
    return None if begun is None or seconds is None else Step(kind, begun, seconds, **more)


def sums_of(facts: Mapping[str, Any]) -> dict[str, float] | None:
    """Seconds of generating and of tools, side by side counted once; what is left of the episode is waiting.

    A tool's wait for a place in the sandbox is waiting, too. None where the episode does not say how long it took.
    """
    generate_s, tool_s, duration_s = (_seconds(facts.get(name)) for name in ("generate_s", "tool_s", "duration_s"))
    if duration_s is None:
        return None
    steps = steps_of(facts)
    if steps:
        generate_s = _covered(step for step in steps if step.kind == "generate")
        tool_s = _covered(step for step in steps if step.kind == "tool")
    code = facts.get("code")
    queued_s = _seconds(code.get("queued_s")) if isinstance(code, Mapping) else None
    generate_s, tool_s = generate_s or 0.0, max(0.0, (tool_s or 0.0) - (queued_s or 0.0))
    wait_s = max(0.0, duration_s - generate_s - tool_s)
    sums = {"generate": generate_s, "tool": tool_s, "wait": wait_s, "all": duration_s}
    return {name: round(value, 4) for name, value in sums.items()}


def _covered(steps: Iterable[Step]) -> float:
    """Seconds in which at least one of them, in order, was in progress."""
    total = end = 0.0
    for step in steps:
        total += max(0.0, step.at_s + step.s - max(end, step.at_s))
        end = max(end, step.at_s + step.s)
    return total


def _seconds(value: object) -> float | None:
    number = finite(value)
    return number if number is not None and number >= 0 else None
