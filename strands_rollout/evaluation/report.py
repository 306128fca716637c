"""The report of an evaluation, as JSON: accuracy with its uncertainty, pass@k, the majority's answer, and counts.

It depends on the results only, not on their order. What is not scored (FAILED, or not graded: the infrastructure's
doing) is missing: it is in no share and no mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.evaluation.plan import EvalSet, SampleKey
from strands_rollout.evaluation.results import SampleResult
from strands_rollout.grading.comparison import compare
from strands_rollout.grading.dapo_score import NO_ANSWER

CONFIDENCE: Final = 0.95
_LARGEST_T: Final = 1e4


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of right samples, and how well it is known.

    `mean` is None without samples. `standard_error` is None with less than two problems, and 0 where all have the same
    accuracy, which says nothing; then there is no `interval` (95%, within 0 and 1).
    """

    mean: float | None
    standard_error: float | None
    interval: tuple[float, float] | None


def accuracy_of(counts: Sequence[tuple[int, int]]) -> Accuracy:
    """The accuracy over all samples, taking problems, not samples, as independent draws.

    Samples of one problem are alike, so the standard error is clustered by problem: with accuracy p, and c right of n
    samples of each of m problems, sqrt(m / (m - 1) * sum((c - p * n)^2)) / sum(n), which for equal n is the standard
    error of the problems' means. The interval is p -+ t * standard error, t being Student's with m - 1 degrees of
    freedom. `counts` are pairs of c and n; problems without samples are left out.
    """
    sampled = [(right, total) for right, total in counts if total]
    samples, problems = sum(total for _, total in sampled), len(sampled)
    if not samples:
        return Accuracy(None, None, None)
    all_right = sum(right for right, _ in sampled)
    mean = all_right / samples
    if problems == 1:
        return Accuracy(mean, None, None)
    if all(right * samples == all_right * total for right, total in sampled):
        return Accuracy(mean, 0.0, None)
    spread = math.fsum((right - mean * total) ** 2 for right, total in sampled)
    error = math.sqrt(problems / (problems - 1) * spread) / samples
    reach = t_quantile(problems - 1) * error
    return Accuracy(mean, error, (max(0.0, mean - reach), min(1.0, mean + reach)))


def pass_at_k(right: int, total: int, k: int) -> float:
    """The chance that k of these samples, drawn without replacement, hold a right one: 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: There are fewer than k samples.
    """
    if not 1 <= k <= total:
        raise ValueError(f"got k={k} with {total} samples; expected 1 to {total}")
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean of pass@k over the problems, as pairs of c and n, that have k samples; None if none has."""
    passed = [pass_at_k(right, total, k) for right, total in counts if total >= k]
    return math.fsum(passed) / len(passed) if passed else None


def t_quantile(degrees: int) -> float:
    """The t that Student's distribution exceeds in neither direction with a chance of `CONFIDENCE`."""
    low, high = 0.0, _LARGEST_T
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """The chance that |T| <= t, by the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    series = 0.0
    for step in range(1 + is_odd, degrees, 2):
        series += term
        term *= cosine**2 * step / (step + 1)
    return 2 / math.pi * (angle + sine * series) if is_odd else sine * series


_NO_ANSWERS: Final = frozenset({"", NO_ANSWER})


@dataclass(frozen=True, slots=True)
class Ballot:
    """One sample's vote: the answer as the grader cut it out, "" for none, and the grader's verdict."""

    answer: str
    is_right: bool


@dataclass(frozen=True, slots=True)
class Majority:
    """The answers with most votes, each in its most frequent notation: several in a tie, none without votes.

    `score` is 1.0 if the right one won, its share of a tie, else 0.0.
    """

    answers: tuple[str, ...]
    score: float


def majority_of(ballots: Iterable[Ballot]) -> Majority:
    """Count the votes of one problem.

    Answers that the grader's comparison calls equal are one: 1/2 and 0.5. So are all right answers,
    which equal the label. A tie is split: n winners with the right one among them score 1/n, which is what drawing one
    by lot would score on average.
    """
    votes = [ballot for ballot in ballots if has_answer(ballot.answer)]
    right = Counter(ballot.answer for ballot in votes if ballot.is_right)
    wrong = Counter(ballot.answer for ballot in votes if not ballot.is_right)
    groups = ([right] if right else []) + _equal_answers(wrong)
    most = max((group.total() for group in groups), default=0)
    winners = [group for group in groups if group.total() == most]
    score = 1 / len(winners) if right and winners[0] is right else 0.0
    spellings = (min(group, key=lambda answer: (-group[answer], len(answer), answer)) for group in winners)
    return Majority(tuple(sorted(spellings)), score)


def has_answer(answer: str) -> bool:
    """Whether the grader found an answer at all."""
    return answer.strip() not in _NO_ANSWERS


def _equal_answers(votes: Counter[str]) -> list[Counter[str]]:
    """The votes by answer; one that equals answers of two groups makes them one."""

    def is_equal(first: str, second: str) -> bool:  # either may be the label: the comparison is not symmetric
        return bool(compare(first, second).equal or compare(second, first).equal)

    groups: list[Counter[str]] = []
    for answer in votes:
        equal = [group for group in groups if any(is_equal(answer, other) for other in group)]
        groups = [group for group in groups if group not in equal]
        groups.append(Counter({answer: votes[answer]}))
        for group in equal:
            groups[-1].update(group)
    return groups


FORMAT: Final = 1
_DIGITS: Final = 6
_SUMS: Final = ("sampled_tokens", "tool_calls", "tool_errors")
Results = Mapping[SampleKey, SampleResult]


def evaluation_report(sets: Sequence[EvalSet], results: Results, ks: Sequence[int]) -> dict[str, Any]:
    """What the results amount to; a k above a data set's samples per problem is left out there."""
    data_sets = {chosen.name: _data_set(chosen, results, ks) for chosen in sets}
    totals = {name: sum(report[name] for report in data_sets.values()) for name in ("planned", "scored", "missing")}
    scored = [result for result in results.values() if result.is_scored]
    audited = [result for result in scored if result.audited]
    return {
        "format": FORMAT,
        "complete": totals["missing"] == 0,
        **totals,
        "audited": len(audited),
        "violations": sum(len(result.violations) for result in audited) if audited else None,
        "weight_versions": sorted({version for result in scored for version in result.weight_versions}),
        "data_sets": data_sets,
    }


def report_notes(report: Mapping[str, Any], weight_version: str | None) -> list[str]:
    """What a reader of the numbers should know; `weight_version` is what the engine held when the run was begun."""
    notes = []
    versions = report["weight_versions"]
    if len(versions) > 1 or (weight_version is not None and versions not in ([], [weight_version])):
        begun = "" if weight_version is None else f"; the run was begun with {weight_version}"
        notes.append(f"sampled with the weights {', '.join(versions)}{begun}: the numbers are of no one model")
    for name, data_set in report["data_sets"].items():
        drift = data_set["drift"] or {}
        if drift.get("mismatched"):
            notes.append(
                f"{name}: {drift['mismatched_tokens']} context tokens in {drift['mismatched']} of {drift['measured']} "
                "samples are not what the chat template renders; see strands-rollout drift, with --save-tokens"
            )
        timed_out = data_set["methods"].get("algebra_timeout", 0)
        if timed_out:
            notes.append(
                f"{name}: {timed_out} answers count as wrong since comparing them took too long; see "
                "reward.symbolic_timeout_s"
            )
    return notes


def without_problems(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report less its entries per problem."""
    shorter = {
        name: {key: value for key, value in one.items() if key != "by_problem"}
        for name, one in report["data_sets"].items()
    }
    return {**report, "data_sets": shorter}


def _data_set(chosen: EvalSet, results: Results, ks: Sequence[int]) -> dict[str, Any]:
    by_problem = [
        [
            result
            for number in range(chosen.sampling.samples)
            if (result := results.get(SampleKey(chosen.name, problem, number)))
        ]
        for problem in range(len(chosen.rows))
    ]
    found = [result for group in by_problem for result in group]
    scored = [result for result in found if result.is_scored]
    problems = [_problem(chosen, number, group) for number, group in enumerate(by_problem)]
    counts = [(problem["right"], problem["scored"]) for problem in problems]
    planned = len(chosen.rows) * chosen.sampling.samples
    ks = [k for k in ks if k <= chosen.sampling.samples]
    return {
        "problems": len(chosen.rows),
        "problems_scored": sum(bool(total) for _, total in counts),
        "samples_per_problem": chosen.sampling.samples,
        "planned": planned,
        "scored": len(scored),
        "missing": planned - len(scored),
        "failed": len(found) - len(scored),
        "right": sum(right for right, _ in counts),
        **_accuracy(counts),
        "pass_at_k": {str(k): _rounded(mean_pass_at_k(counts, k)) for k in ks},
        "pass_at_k_problems": {str(k): sum(total >= k for _, total in counts) for k in ks},
        "maj_at_n": _mean([problem["majority_score"] for problem in problems if problem["scored"]]),
        "without_answer": sum(not has_answer(result.answer) for result in scored),
        "status": _counted(result.status for result in found),
        "stop_reasons": _counted(result.stop_reason for result in found),
        "methods": _counted(result.method for result in found if result.is_finished),
        **{
            f"mean_{name}": _mean([getattr(result, name) for result in scored]) for name in ("response_tokens", "turns")
        },
        **{name: sum(getattr(result, name) for result in scored) for name in _SUMS},
        "drift": _drift(scored),
        "by_problem": problems,
    }


def _accuracy(counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    accuracy = accuracy_of(counts)
    return {
        "avg_at_n": _rounded(accuracy.mean),
        "standard_error": _rounded(accuracy.standard_error),
        "interval_95": None if accuracy.interval is None else [_rounded(bound) for bound in accuracy.interval],
    }


def _problem(chosen: EvalSet, number: int, found: Sequence[SampleResult]) -> dict[str, Any]:
    scored = [result for result in found if result.is_scored]
    majority = majority_of(Ballot(result.answer, result.is_right) for result in scored)
    return {
        "problem": number,
        "label": chosen.rows[number].label,
        "scored": len(scored),
        "right": sum(result.is_right for result in scored),
        "majority": list(majority.answers),
        "majority_score": _rounded(majority.score),
        "mean_response_tokens": _mean([result.response_tokens for result in scored]),
        "mean_tool_calls": _mean([result.tool_calls for result in scored]),
        "truncated": sum(result.status == "truncated" for result in scored),
        "failed": len(found) - len(scored),
    }


def _drift(scored: Sequence[SampleResult]) -> dict[str, Any] | None:
    """Sums over the samples that were measured; None where none was."""
    found = [result.drift for result in scored if result.drift is not None]
    checked = [counts.mismatched_tokens for counts in found if counts.mismatched_tokens is not None]
    if not found:
        return None
    sums = ("sampled_tokens", "turn_drift", "text_drift", "off_policy")
    return {
        "measured": len(found),
        "drifted": sum(bool(counts.turn_drift or counts.text_drift) for counts in found),
        **{name: sum(getattr(counts, name) for counts in found) for name in sums},
        "mismatched": sum(map(bool, checked)) if checked else None,
        "mismatched_tokens": sum(checked) if checked else None,
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    """By name, in the alphabet's order."""
    return dict(sorted(Counter(names).items()))


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(math.fsum(values) / len(values)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
