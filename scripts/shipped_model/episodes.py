"""Writes whole episodes for problems: what the assistant says, what code it runs, what comes back, in several styles.

Knows problems and the tool's answers. Must not know tokens or models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from shipped_model.problems import Problem
from strands_rollout.prompts import CODE_TOOL_NAME

TWO_CALLS_SHARE: Final = 0.08
TWO_LINES_SHARE: Final = 0.08
RETRY_SHARE: Final = 0.08
NO_THINKING_SHARE: Final = 0.1

RunPrograms = Callable[[Sequence[str]], list[str]]
"""Runs Python programs, in order, and returns the tool's answer to each."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the assistant says once, without the end-of-turn token.

    Attributes:
        text: From the first character after the generation prompt.
        is_learned: Whether the model is trained to say it; a deliberate mistake is not.
        tool_answer: What the tool answers, or None after the last turn.
    """

    text: str
    is_learned: bool
    tool_answer: str | None


@dataclass(frozen=True, slots=True)
class Episode:
    """A question and all turns of its solution.

    Attributes:
        question: The user's text.
        enable_thinking: False where the template itself opens and closes an empty reasoning block.
        turns: At least two: the last one answers in a box, all others call the tool.
    """

    question: str
    enable_thinking: bool
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    plan: str
    code: str
    is_learned: bool = True


@dataclass(frozen=True, slots=True)
class _Script:
    problem: Problem
    enable_thinking: bool
    calls: tuple[_Call, ...]


def write_episodes(problems: Sequence[Problem], rng: Random, run_programs: RunPrograms) -> list[Episode]:
    """One episode for each problem; every tool answer is what running the code really gave."""
    first_values = _values([_program(problem.imports, problem.first or "0") for problem in problems], run_programs)
    scripts = [_script(problem, value, rng) for problem, value in zip(problems, first_values, strict=True)]
    answers = iter(run_programs([call.code for script in scripts for call in script.calls]))
    return [_episode(script, [next(answers) for _ in script.calls]) for script in scripts]


def answers_of(problems: Sequence[Problem], run_programs: RunPrograms) -> list[int]:
    """The integer answer to each problem, computed by running its program."""
    return _values([_program(problem.imports, problem.expression) for problem in problems], run_programs)


def _values(programs: Sequence[str], run_programs: RunPrograms) -> list[int]:
    return [int(answer) for answer in run_programs(programs)]


def _program(imports: str, *expressions: str) -> str:
    lines = [imports] if imports else []
    return "\n".join([*lines, *(f"print({expression})" for expression in expressions)])


def _script(problem: Problem, first_value: int, rng: Random) -> _Script:
    direct = _Call(problem.plan, _program(problem.imports, problem.expression))
    calls: tuple[_Call, ...] = (direct,)
    luck = rng.random()
    if luck < RETRY_SHARE:
        broken = _Call(problem.plan, _break(direct.code, rng), is_learned=False)
        calls = (broken, _Call("The code failed. I write it again.", direct.code))
    elif problem.first and luck < RETRY_SHARE + 2 * TWO_CALLS_SHARE:
        rest = problem.rest.format(first=first_value)
        calls = (_Call(problem.plan, f"print({problem.first})"), _Call(f"The first part is {first_value}.", f"print({rest})"))
    elif problem.first and luck < RETRY_SHARE + 2 * TWO_CALLS_SHARE + 2 * TWO_LINES_SHARE:
        code = f"part = {problem.first}\nprint(part)\nprint({problem.rest.format(first='part')})"
        calls = (_Call(problem.plan, code),)
    return _Script(problem, rng.random() >= NO_THINKING_SHARE, calls)


def _break(code: str, rng: Random) -> str:
    """The mistakes that a small model makes: a misspelled name, a lost bracket, digits run into a name, a lost quote."""
    return rng.choice(
        [
            code.replace("print", rng.choice(["pint", "prin", "rint"]), 1),
            code.removesuffix(")"),
            code.replace("(", "", 1),
            code.replace("(", "(x", 1),
            code.replace(" ", " * ", 1),
        ]
    )


def _episode(script: _Script, answers: Sequence[str]) -> Episode:
    def said(reasoning: str, speech: str) -> str:
        return f"<think>\n{reasoning}\n</think>\n\n{speech}" if script.enable_thinking else speech

    turns = [
        Turn(said(call.plan, tool_call_text(call.code)), call.is_learned, answer)
        for call, answer in zip(script.calls, answers, strict=True)
    ]
    result = answers[-1].split("\n")[-1]
    turns.append(Turn(said(f"The result is {result}.", f"The answer is \\boxed{{{result}}}."), True, None))
    return Episode(script.problem.question, script.enable_thinking, tuple(turns))


def tool_call_text(code: str) -> str:
    """A call of the code tool as Qwen3 writes it."""
    call = json.dumps({"name": CODE_TOOL_NAME, "arguments": {"code": code}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
