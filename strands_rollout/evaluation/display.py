"""Episodes in a terminal: progress, a table of samples with totals, the report of an evaluation."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from strands_rollout.dump.terminal import make_console
from strands_rollout.evaluation.evaluate import Outcome, Summary
from strands_rollout.samples import PART_PREFIX, Sample, question_of

_TEXTS: Final = frozenset({"question", "label", "predicted", "status", "stop reason", "majority"})
_OTHER_COLUMNS_WIDTH: Final = 84
_MIN_QUESTION_WIDTH, _MAX_QUESTION_WIDTH = 24, 60
_ANSWER_WIDTH: Final = 12
_MAJORITY_WIDTH: Final = 24
_MAX_VIOLATIONS_SHOWN: Final = 20
_MAX_ERRORS_SHOWN: Final = 5
_LINES: Final = 10
_STATUS_STYLES: Final = {"completed": "green", "truncated": "yellow", "aborted": "yellow", "failed": "red"}


@contextmanager
def accuracy_bar(console: Console, total: int, earlier: Sequence[bool] = ()) -> Iterator[Callable[[bool | None], None]]:
    """A bar until the block ends; call what it yields with whether each sample is right, None for one without a score.

    Without a terminal, it is a line at each tenth of the samples. `total` counts the whole run, and
    `earlier` the samples that were done before: whether each was right.
    """
    done = scored = len(earlier)
    right = sum(earlier)
    with progress_bar(console) as bar:
        task = bar.add_task("episodes", total=total)

        def show(is_right: bool | None) -> None:  # noqa: FBT001 - a verdict, not a flag
            nonlocal done, right, scored
            done += 1
            scored += is_right is not None
            right += bool(is_right)
            accuracy = f"  accuracy {right / scored:.0%}" if scored else ""
            bar.update(task, completed=done, description=f"episodes{accuracy}")
            if not console.is_interactive and done * _LINES // total > (done - 1) * _LINES // total:
                console.print(f"episodes {done}/{total}{accuracy}", highlight=False, soft_wrap=True)

        yield show


@contextmanager
def counter(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A count on stderr until the block ends; call what it yields with how many more are done.

    Nothing without a terminal. A `total` of None is not known.
    """
    with progress_bar(make_console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda more: progress.advance(task, more)


def progress_bar(console: Console, *, transient: bool = False, refresh_per_second: float = 10) -> Progress:
    """A bar that counts steps; it shows nothing without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if not console.is_interactive:  # quiet, since rich before 15 ends a disabled bar with an empty line
        return Progress(*columns, console=Console(quiet=True), disable=True)
    return Progress(*columns, console=console, transient=transient, refresh_per_second=refresh_per_second)


def print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """The table, one line per sample; without the questions where the console is too narrow for them."""
    question_width = min(console.width - _OTHER_COLUMNS_WIDTH, _MAX_QUESTION_WIDTH)
    rows = [_outcome_row(outcome, max(question_width, _MIN_QUESTION_WIDTH)) for outcome in outcomes]
    if question_width < _MIN_QUESTION_WIDTH:
        for row in rows:
            del row["question"]
    console.print(_table(rows))


def _table(rows: Sequence[Mapping[str, str | Text]]) -> Table:
    """A table of at least one row, whose keys are the heads."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(name, justify="left" if name in _TEXTS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def _outcome_row(outcome: Outcome, question_width: int) -> dict[str, str | Text]:
    sample, facts, graded = outcome.sample, outcome.facts, outcome.graded
    status, score = str(sample.status.value), graded.get("score")
    return {
        "#": str(sample.index),
        "question": _clipped(question_of(sample.prompt), question_width),
        "label": _clipped(sample.label, _ANSWER_WIDTH),
        "predicted": _clipped(graded.get("pred") or "-", _ANSWER_WIDTH),
        "reward": Text("-" if score is None else f"{score:g}", style="green" if graded.get("acc") else ""),
        "status": Text(status, style=_STATUS_STYLES.get(status, "")),
        "stop reason": str(facts.get("stop_reason", "-")),
        "turns": str(facts.get("turns", 0)),
        "calls": str(facts.get("tool_calls", 0)),
        "tokens": str(sample.response_length),
    }


def _clipped(value: object, width: int, style: str = "") -> Text:
    return Text(shorten(str(value), width, placeholder="..."), style=style)


def print_summary(console: Console, outcomes: Sequence[Outcome], summary: Summary, *, seconds: float) -> None:
    """Totals, then the first violations and the errors of failed samples, if any."""
    reasons = Counter(str(outcome.facts.get("stop_reason")) for outcome in outcomes)
    tokens = sum(int(outcome.facts.get("sampled_tokens", 0)) for outcome in outcomes)
    console.print(
        f"{summary.samples} samples in {seconds:.1f} s: accuracy {summary.accuracy:.1%}, mean reward "
        f"{summary.mean_reward:.3f}, {summary.tool_calls} tool calls, {tokens} sampled tokens"
    )
    console.print(f"stop reasons: {_listed(dict(reasons.most_common()))}")
    for what, name in (("token exactness", "tito_violations"), ("slime's contract", "contract_violations")):
        violations = [(outcome.sample.index, found) for outcome in outcomes for found in getattr(outcome, name)]
        if not violations:
            console.print(Text(f"{what}: every sample passed", style="green"))
            continue
        console.print(Text(f"{what}: {len(violations)} violations", style="bold red"))
        for index, found in violations[:_MAX_VIOLATIONS_SHOWN]:
            console.print(Text(f"  sample {index}: {found}", style="red"), soft_wrap=True)
    failed = [outcome for outcome in outcomes if outcome.sample.status is Sample.Status.FAILED]
    errors = Counter(str(outcome.facts.get("error")) for outcome in failed)
    for error, count in errors.most_common(_MAX_ERRORS_SHOWN):
        console.print(Text(f"failed, {count} of {len(outcomes)}: {error}", style="red"), soft_wrap=True)


def print_evaluation(console: Console, report: Mapping[str, Any]) -> None:
    """Everything that the report says, for each data set in turn."""
    for name, data_set in report["data_sets"].items():
        console.print(Text(name, style="bold"))
        console.print(_table(_problem_rows(data_set["by_problem"])))
        for line in _totals(name, data_set):
            console.print(line, soft_wrap=True, markup=False)
        if missing := data_set["missing"]:
            words = f"{missing} samples are missing ({data_set['failed']} failed) and count nowhere"
            console.print(Text(words, "red"), soft_wrap=True)
        console.print()
    for note in report["notes"]:
        console.print(Text(note, style="yellow"), soft_wrap=True)


def _problem_rows(problems: Sequence[Mapping[str, Any]]) -> list[dict[str, str | Text]]:
    """The rows of the table; without labels where no problem has one, and with rewards in place of no answers."""
    has_answers = any(problem["majority"] for problem in problems)
    unused = {"reward" if has_answers else "majority"}
    unused |= {"label"} if all(problem["label"] is None for problem in problems) else set()
    rows = [_problem_row(problem) for problem in problems]
    return [{name: cell for name, cell in row.items() if name not in unused} for row in rows]


def _problem_row(problem: Mapping[str, Any]) -> dict[str, str | Text]:
    majority = " | ".join(problem["majority"]) or "-"
    tokens, calls = problem["mean_response_tokens"], problem["mean_tool_calls"]
    return {
        "problem": str(problem["problem"]),
        "label": _clipped(problem["label"], _MAJORITY_WIDTH),
        "reward": "-" if problem["mean_reward"] is None else f"{problem['mean_reward']:.3g}",
        "right": str(problem["right"]),
        "of": str(problem["scored"]),
        "majority": _clipped(majority, _MAJORITY_WIDTH, "green" if problem["majority_score"] == 1 else ""),
        "tokens": "-" if tokens is None else f"{tokens:.0f}",
        "calls": "-" if calls is None else f"{calls:.1f}",
        "truncated": str(problem["truncated"]),
        "failed": Text(str(problem["failed"]), style="red" if problem["failed"] else ""),
    }


def _totals(name: str, data_set: Mapping[str, Any]) -> Iterator[str]:
    samples, interval = data_set["samples_per_problem"], data_set["interval_95"]
    between = " (95% interval -: all problems alike)" if data_set["standard_error"] == 0 else ""
    if interval:
        between = f" (95% interval {_share(interval[0])} to {_share(interval[1])}, by problem)"

    def over(problems: int) -> str:
        return "" if problems == data_set["problems"] else f" over {problems} of {data_set['problems']} problems"

    scored = over(data_set["problems_scored"])
    passed = "".join(
        f", pass@{k} {_share(value)}{over(data_set['pass_at_k_problems'][k])}"
        for k, value in data_set["pass_at_k"].items()
    )
    graded, majority = data_set["maj_at_n"] is not None, f", maj@{samples} {_share(data_set['maj_at_n'])}{scored}"
    yield (
        f"\n{name}: avg@{samples} {_share(data_set['avg_at_n'])}{scored}{between}{passed}{majority if graded else ''}"
    )
    if data_set["mean_reward"] is not None:
        parts = [f"{part.removeprefix(PART_PREFIX)} {value:.4g}" for part, value in data_set["mean_parts"].items()]
        yield f"mean reward {data_set['mean_reward']:.4g}{scored}{': ' * bool(parts)}{', '.join(parts)}"
    without = f", {data_set['without_answer']} without an answer" if graded else ""
    yield (
        f"{data_set['scored']} of {data_set['planned']} samples scored{without}; {data_set['tool_calls']} tool calls, "
        f"{data_set['tool_errors']} with an error, {data_set['unknown_tools']} of them "
        f"of tools that do not exist; {data_set['nonzero_exits']} pieces of code exited with an error; "
        f"{data_set['sampled_tokens']} sampled tokens"
    )
    yield f"stop reasons: {_listed(data_set['stop_reasons']) or 'none'}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
