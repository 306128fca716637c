"""The report of an evaluation for people: a table of problems and a few lines for each data set.

Knows rich and the report; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_ANSWER_WIDTH: Final = 24
_COLUMNS: Final = ("problem", "label", "right", "of", "majority", "tokens", "calls", "truncated", "failed")
_TEXTS: Final = frozenset({"label", "majority"})


def print_evaluation(console: Console, report: Mapping[str, Any]) -> None:
    """Everything that the report says, for each data set in turn."""
    for name, data_set in report["data_sets"].items():
        console.print(Text(name, style="bold"))
        console.print(_problem_table(data_set))
        _print_totals(console, name, data_set)
    for note in report["notes"]:
        console.print(Text(note, style="yellow"), soft_wrap=True)


def _problem_table(data_set: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _TEXTS else "right", no_wrap=True)
    for problem in data_set["by_problem"]:
        is_won = problem["majority_score"] == 1
        table.add_row(
            str(problem["problem"]),
            Text(shorten(str(problem["label"]), _ANSWER_WIDTH, placeholder="...")),
            str(problem["right"]),
            str(problem["scored"]),
            Text(
                shorten(" | ".join(problem["majority"]) or "-", _ANSWER_WIDTH, placeholder="..."),
                style="green" if is_won else "",
            ),
            _number(problem["mean_response_tokens"]),
            _number(problem["mean_tool_calls"], 1),
            str(problem["truncated"]),
            Text(str(problem["failed"]), style="red" if problem["failed"] else ""),
        )
    return table


def _print_totals(console: Console, name: str, data_set: Mapping[str, Any]) -> None:
    samples, interval = data_set["samples_per_problem"], data_set["interval_95"]
    if interval:
        between = f" (95% interval {_share(interval[0])} to {_share(interval[1])}, by problem)"
    else:
        between = " (95% interval -: all problems alike)" if data_set["standard_error"] == 0 else ""
    passed = "".join(
        f", pass@{k} {_share(value)}{_stands_on(data_set, data_set['pass_at_k_problems'][k])}"
        for k, value in data_set["pass_at_k"].items()
    )
    stands_on = _stands_on(data_set, data_set["problems_scored"])
    console.print(
        f"\n{name}: avg@{samples} {_share(data_set['avg_at_n'])}{stands_on}{between}{passed}, "
        f"maj@{samples} {_share(data_set['maj_at_n'])}{stands_on}",
        soft_wrap=True,
        markup=False,
    )
    reasons = ", ".join(f"{reason} {count}" for reason, count in data_set["stop_reasons"].items())
    console.print(
        f"{data_set['scored']} of {data_set['planned']} samples scored, {data_set['without_answer']} without an "
        f"answer; {data_set['tool_calls']} tool calls, {data_set['tool_errors']} with an error; "
        f"{data_set['sampled_tokens']} sampled tokens\nstop reasons: {reasons or 'none'}",
        soft_wrap=True,
        markup=False,
    )
    if data_set["missing"]:
        console.print(
            Text(f"{data_set['missing']} samples are missing ({data_set['failed']} failed) and count nowhere", "red"),
            soft_wrap=True,
        )
    console.print()


def _stands_on(data_set: Mapping[str, Any], problems: int) -> str:
    """On how many problems a number stands, where these are not all."""
    return "" if problems == data_set["problems"] else f" over {problems} of {data_set['problems']} problems"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
