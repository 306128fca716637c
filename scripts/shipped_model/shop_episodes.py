"""Writes whole episodes for the shop's questions: prices looked up one after the other, then one calculation.

Knows problems and the tools' answers. Must not know tokens or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Final

from strands.types.tools import AgentTool

from shipped_model.episode import Episode, Turn, call_text, conclusion, said
from shipped_model.shop_problems import ShopProblem, answer_to
from shipped_model.tool_answers import answer_turns
from strands_rollout.shop import calculate, look_up_price

MISTAKE_SHARE: Final = 0.1
NO_THINKING_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Call:
    """A turn that calls a tool, before it is answered; `is_mistake` where the tool must refuse it."""

    plan: str
    text: str
    is_mistake: bool = False


def shop_tools() -> AbstractAsyncContextManager[Sequence[AgentTool]]:
    """The shop's tools; there is nothing to close."""
    return nullcontext([look_up_price, calculate])


def write_episodes(problems: Sequence[ShopProblem], rng: Random) -> list[Episode]:
    """One episode for each problem; every tool answer is what the tool really gave.

    Raises:
        ValueError: A call failed that should not, or a deliberate mistake did not fail.
    """
    scripts = [_calls(problem, rng) for problem in problems]
    answers = iter(answer_turns([call.text for calls in scripts for call in calls], shop_tools))
    return [
        _episode(problem, calls, [next(answers)[0] for _ in calls], enable_thinking=rng.random() >= NO_THINKING_SHARE)
        for problem, calls in zip(problems, scripts, strict=True)
    ]


def answers_of(problems: Sequence[ShopProblem]) -> list[int]:
    """The answer to each problem."""
    return [answer_to(problem) for problem in problems]


def _calls(problem: ShopProblem, rng: Random) -> list[_Call]:
    """All calls in their order, with a mistake before one of them in a share of the episodes."""
    calls = [
        _Call(f"I need the price of item {item}.", call_text("look_up_price", {"item": item})) for item in problem.items
    ]
    calls.append(_Call(problem.plan, call_text("calculate", {"expression": problem.expression})))
    if rng.random() < MISTAKE_SHARE:
        at = rng.randrange(len(calls))
        wrong = _Call(calls[at].plan, _mistake(calls[at].text, rng), is_mistake=True)
        calls[at : at + 1] = [wrong, _Call("The call failed. I write it again.", calls[at].text)]
    return calls


def _mistake(call: str, rng: Random) -> str:
    """A call as a small model gets it wrong: broken JSON, or a stray letter."""
    return rng.choice(
        [
            call.replace('"}}', "}}"),
            call.replace('"}}', '"}'),
            call.replace('"}}', 'x"}}'),
        ]
    )


def _episode(problem: ShopProblem, calls: Sequence[_Call], answers: Sequence[str], *, enable_thinking: bool) -> Episode:
    turns = []
    for call, answer in zip(calls, answers, strict=True):
        if answer.isdigit() is call.is_mistake:
            raise ValueError(f"expected the call {call.text!r} to {_fate(call)}; got the answer {answer!r}")
        text = said(call.plan, call.text, enable_thinking=enable_thinking)
        turns.append(Turn(text, is_learned=not call.is_mistake, tool_answer=answer))
    turns.append(conclusion(answers[-1], enable_thinking=enable_thinking))
    return Episode(problem.question, enable_thinking, tuple(turns))


def _fate(call: _Call) -> str:
    return "fail" if call.is_mistake else "succeed"
