"""Write whole episodes for word problems: the assistant's turns, its code and the tool's results."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from experiments.shipped_model.episode import Episode, Turn, call_text, conclusion, turn_text
from experiments.shipped_model.problems import Problem
from experiments.shipped_model.tool_answers import answer_turns, code_tools, run_programs
from strands_rollout.code_tool.tool import CODE_TOOL_NAME

MISTAKE_SHARE: Final = 0.08
TWO_CALLS_SHARE: Final = 0.15
TWO_LINES_SHARE: Final = 0.15
NO_THINKING_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Call:
    plan: str
    code: str


@dataclass(frozen=True, slots=True)
class _Script:
    """The plan of an episode; `mistake` is the text of a failing first turn, or ""."""

    problem: Problem
    calls: tuple[_Call, ...]
    mistake: str = ""


def write_episodes(problems: Sequence[Problem], rng: Random) -> list[Episode]:
    """Return a newly written episode for each problem; every tool answer comes from running the code.

    Raises:
        ValueError: A program that should succeed failed, or a deliberate mistake did not fail.
    """
    first_values = run_programs([_program(problem.imports, problem.first or "0") for problem in problems])
    scripts = [_script(problem, value, rng) for problem, value in zip(problems, first_values, strict=True)]
    answers = iter(run_programs([call.code for script in scripts for call in script.calls]))
    errors = iter(_errors([script.mistake for script in scripts if script.mistake]))
    return [
        _episode(
            script,
            [next(answers) for _ in script.calls],
            next(errors) if script.mistake else "",
            enable_thinking=rng.random() >= NO_THINKING_SHARE,
        )
        for script in scripts
    ]


def answers_of(problems: Sequence[Problem]) -> list[int]:
    """Return the integer answer to each problem, computed by running its program."""
    programs = [_program(problem.imports, problem.expression) for problem in problems]
    return [int(answer) for answer in run_programs(programs)]


def tool_call_text(code: str) -> str:
    """Return a call of the code tool in Qwen3's format."""
    return call_text(CODE_TOOL_NAME, {"code": code})


def _program(imports: str, *expressions: str) -> str:
    lines = [imports] if imports else []
    return "\n".join([*lines, *(f"print({expression})" for expression in expressions)])


def _script(problem: Problem, first_value: str, rng: Random) -> _Script:
    code = _program(problem.imports, problem.expression)
    style = rng.random()
    if style < MISTAKE_SHARE:
        return _Script(problem, (_Call("The code failed. I write it again.", code),), _mistake(code, rng))
    if problem.first and style < MISTAKE_SHARE + TWO_CALLS_SHARE:
        rest = problem.rest.format(first=first_value)
        second = _Call(f"The first part is {first_value}.", f"print({rest})")
        return _Script(problem, (_Call(problem.plan, f"print({problem.first})"), second))
    if problem.first and style < MISTAKE_SHARE + TWO_CALLS_SHARE + TWO_LINES_SHARE:
        code = f"part = {problem.first}\nprint(part)\nprint({problem.rest.format(first='part')})"
    return _Script(problem, (_Call(problem.plan, code),))


def _mistake(code: str, rng: Random) -> str:
    """Return a call with a small model's typical mistake: a wrong name, a lost bracket, a stray letter, broken JSON."""
    call = tool_call_text(code)
    return rng.choice(
        [
            call.replace("print", rng.choice(["pint", "prin", "rint"])),
            tool_call_text(code.removesuffix(")")),
            tool_call_text(code.replace("print(", "print", 1)),
            tool_call_text(code.replace("print(", "print(x", 1)),
            call.replace('"}}', "}}"),
            call.replace('"}}', '"}'),
        ]
    )


def _errors(mistakes: Sequence[str]) -> list[str]:
    errors = [answer for (answer,) in answer_turns(mistakes, code_tools)]
    for mistake, error in zip(mistakes, errors, strict=True):
        if "Error" not in error:
            raise ValueError(f"expected the mistake {mistake!r} to fail; got the answer {error!r}")
    return errors


def _episode(script: _Script, answers: Sequence[str], error: str, *, enable_thinking: bool) -> Episode:
    turns = []
    if script.mistake:
        text = turn_text(script.problem.plan, script.mistake, enable_thinking=enable_thinking)
        turns.append(Turn(text, is_learned=False, tool_answer=error))
    for call, answer in zip(script.calls, answers, strict=True):
        text = turn_text(call.plan, tool_call_text(call.code), enable_thinking=enable_thinking)
        turns.append(Turn(text, is_learned=True, tool_answer=answer))
    turns.append(conclusion(answers[-1].split("\n")[-1], enable_thinking=enable_thinking))
    return Episode(script.problem.question, enable_thinking, tuple(turns))
