"""The report of an evaluation, as JSON: accuracy with its uncertainty, pass@k, the majority's answer, and counts.

It depends on the results only, not on their order. What is not scored (FAILED, or not graded: the infrastructure's
doing) is missing: it is in no share and no mean.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import mpmath

from strands_rollout.evaluation.plan import EvalSet, SampleKey
from strands_rollout.evaluation.results import SampleResult
from strands_rollout.grading import NO_ANSWER
from strands_rollout.grading.comparison import compare
from strands_rollout.samples import parts_of

FORMAT: Final = 1
_CONFIDENCE: Final = 0.95
_DIGITS: Final = 6
_WITHOUT_ANSWERS: Final = frozenset({"environment", "function", "parts"})
_NO_ANSWERS: Final = frozenset({"", NO_ANSWER})
Results: TypeAlias = Mapping[SampleKey, SampleResult]


def accuracy_of(
    counts: Sequence[tuple[int, int]],
) -> tuple[float | None, float | None, tuple[float, float] | None]:
    """The accuracy over all samples, its standard error, and its 95% interval within 0 and 1.

    Samples of one problem are alike, so problems, not samples, are the independent draws: the standard error is
    clustered by problem. With accuracy p, and c right of n samples of each of m problems, it is
    sqrt(m / (m - 1) * sum((c - p * n)^2)) / sum(n), which for equal n is the standard error of the problems' means.
    The interval is p -+ t * standard error, t being Student's with m - 1 degrees of freedom.

    Args:
        counts: c and n of each problem; problems without samples are left out.

    Returns:
        None for what is unknown: everything without samples, error and interval with one problem. Where all problems
        have the same accuracy the error is 0, which says nothing, and there is no interval.
    """
    sampled = [(right, total) for right, total in counts if total]
    samples, problems = sum(total for _, total in sampled), len(sampled)
    if not samples:
        return None, None, None
    all_right = sum(right for right, _ in sampled)
    mean = all_right / samples
    if problems == 1:
        return mean, None, None
    if all(right * samples == all_right * total for right, total in sampled):
        return mean, 0.0, None
    spread = math.fsum((right - mean * total) ** 2 for right, total in sampled)
    error = math.sqrt(problems / (problems - 1) * spread) / samples
    reach = t_quantile(problems - 1) * error
    return mean, error, (max(0.0, mean - reach), min(1.0, mean + reach))


@functools.cache
def t_quantile(degrees: int) -> float:
    """The t that |T| exceeds with a chance of 5%, T being Student's."""

    def excess(t: float) -> float:
        tail = mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True)
        return float(tail) - (1 - _CONFIDENCE)

    return float(mpmath.findroot(excess, (1.9, 13), solver="anderson"))


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean of pass@k over the problems that have k samples; None if none has.

    pass@k is the chance that k of a problem's samples, drawn without replacement, hold a right one:
    1 - C(n - c, k) / C(n, k) with c right of n samples, the pairs that are given.
    """
    passed = [1.0 - math.comb(total - right, k) / math.comb(total, k) for right, total in counts if total >= k]
    return math.fsum(passed) / len(passed) if passed else None


def majority_of(votes: Iterable[tuple[str, bool]]) -> tuple[list[str], float]:
    """Count the votes of one problem: answers as the grader cut them out, with its verdicts.

    Answers that the grader's comparison calls equal are one: 1/2 and 0.5. So are all right answers, which equal the
    label. Samples without an answer don't vote.

    Returns:
        The answers with most votes, each in its most frequent notation, and the score: 1.0 if the right one won, its
        share of a tie (what drawing one by lot would score on average), else 0.0.
    """
    cast = [(answer, is_right) for answer, is_right in votes if has_answer(answer)]
    right = Counter(answer for answer, is_right in cast if is_right)
    wrong = Counter(answer for answer, is_right in cast if not is_right)
    groups = ([right] if right else []) + _equal_answers(wrong)
    most = max((group.total() for group in groups), default=0)
    winners = [group for group in groups if group.total() == most]
    score = 1 / len(winners) if right and winners[0] is right else 0.0
    return sorted(min(group, key=lambda answer: (-group[answer], len(answer), answer)) for group in winners), score


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


def evaluation_report(sets: Sequence[EvalSet], results: Results, ks: Sequence[int]) -> dict[str, Any]:
    """The report as JSON; a k above a data set's samples per problem is left out there."""
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
    """Warnings about the numbers; `weight_version` is what the engine reported when the run began."""
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
    data_sets = {name: {**one} for name, one in report["data_sets"].items()}
    for one in data_sets.values():
        del one["by_problem"]
    return {**report, "data_sets": data_sets}


def _data_set(chosen: EvalSet, results: Results, ks: Sequence[int]) -> dict[str, Any]:
    samples = chosen.sampling.samples
    keys = [[SampleKey(chosen.name, at, number) for number in range(samples)] for at in range(len(chosen.rows))]
    by_problem = [[results[key] for key in one if key in results] for one in keys]
    found = [result for group in by_problem for result in group]
    scored = [result for result in found if result.is_scored]
    problems = [_problem(chosen, number, group) for number, group in enumerate(by_problem)]
    counts = [(problem["right"], problem["scored"]) for problem in problems]
    mean, error, interval = accuracy_of(counts)
    ks = [k for k in ks if k <= samples]
    return {
        "problems": len(chosen.rows),
        "problems_scored": sum(bool(total) for _, total in counts),
        "samples_per_problem": samples,
        "planned": len(chosen.rows) * samples,
        "scored": len(scored),
        "missing": len(chosen.rows) * samples - len(scored),
        "failed": len(found) - len(scored),
        "right": sum(right for right, _ in counts),
        "avg_at_n": _rounded(mean),
        "standard_error": _rounded(error),
        "interval_95": interval and [_rounded(bound) for bound in interval],
        "pass_at_k": {str(k): _rounded(mean_pass_at_k(counts, k)) for k in ks},
        "pass_at_k_problems": {str(k): sum(total >= k for _, total in counts) for k in ks},
        "maj_at_n": _mean([problem["majority_score"] for problem in problems if problem["scored"]]),
        **_rewards(scored),
        "without_answer": sum(not has_answer(result.answer) for result in scored),
        "status": _counted(result.status for result in found),
        "stop_reasons": _counted(result.stop_reason for result in found),
        "methods": _counted(result.method for result in found if result.is_finished),
        "mean_response_tokens": _mean([result.response_tokens for result in scored]),
        "mean_turns": _mean([result.turns for result in scored]),
        "sampled_tokens": sum(result.sampled_tokens for result in scored),
        "tool_calls": sum(result.tool_calls for result in scored),
        "tool_errors": sum(result.tool_errors for result in scored),
        "unknown_tools": sum(result.unknown_tools for result in scored),
        "nonzero_exits": sum(result.nonzero_exits for result in scored),
        "drift": _drift(scored),
        "by_problem": problems,
    }


def _problem(chosen: EvalSet, number: int, found: Sequence[SampleResult]) -> dict[str, Any]:
    scored = [result for result in found if result.is_scored]
    answers, score = majority_of((result.answer, result.is_right) for result in scored)
    return {
        "problem": number,
        "label": chosen.rows[number].label,
        "scored": len(scored),
        "right": sum(result.is_right for result in scored),
        "majority": answers,
        "majority_score": _rounded(score),
        "mean_reward": _rewards(scored)["mean_reward"],
        "mean_response_tokens": _mean([result.response_tokens for result in scored]),
        "mean_tool_calls": _mean([result.tool_calls for result in scored]),
        "truncated": sum(result.status == "truncated" for result in scored),
        "failed": len(found) - len(scored),
    }


def _rewards(scored: Sequence[SampleResult]) -> dict[str, Any]:
    """The mean reward, and that of each further number of it over the samples that have it."""
    rewards = [result.reward for result in scored if result.reward is not None]
    # a reward of the user's own, or of an environment, need not cut out answers
    has_answers = any(has_answer(one.pred) or one.method not in _WITHOUT_ANSWERS for one in rewards)
    return {
        **({} if has_answers else {"maj_at_n": None}),
        "mean_reward": _mean([reward.score for reward in rewards if reward.score is not None]),
        "mean_parts": {
            name: _mean(values) for name, values in parts_of(one.model_extra or {} for one in rewards).items()
        },
    }


def _drift(scored: Sequence[SampleResult]) -> dict[str, Any] | None:
    """Sums over the samples whose drift was measured; None where there are none."""
    found = [result.drift for result in scored if result.drift is not None]
    if not found:
        return None
    checked = [drift.mismatched_tokens for drift in found if drift.mismatched_tokens is not None]
    sums = ("sampled_tokens", "turn_drift", "text_drift", "off_policy")
    return {
        "measured": len(found),
        "drifted": sum(bool(drift.turn_drift or drift.text_drift) for drift in found),
        **{name: sum(getattr(drift, name) for drift in found) for name in sums},
        "mismatched": sum(map(bool, checked)) if checked else None,
        "mismatched_tokens": sum(checked) if checked else None,
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(math.fsum(values) / len(values)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
