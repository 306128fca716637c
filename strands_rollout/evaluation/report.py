"""Results of samples -> the report of an evaluation, as JSON that depends on the results only, not on their order.

Knows results and statistics; decides what is counted. What is not scored (FAILED, or not graded: the infrastructure's
doing) is missing: it is in no share and no mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from strands_rollout.evaluation.majority import Ballot, has_answer, majority_of
from strands_rollout.evaluation.plan import EvalSet, SampleKey
from strands_rollout.evaluation.results_file import SampleResult
from strands_rollout.evaluation.statistics import accuracy_of, mean_pass_at_k

FORMAT: Final = 1
_DIGITS: Final = 6
Results = Mapping[SampleKey, SampleResult]


def evaluation_report(sets: Sequence[EvalSet], results: Results, ks: Sequence[int]) -> dict[str, Any]:
    """What the results amount to; equal for equal results.

    Args:
        sets: What was asked.
        results: The last result of each sample that has one.
        ks: For pass@k; those above a data set's samples per problem are left out there.
    """
    data_sets = {chosen.name: _data_set(chosen, results, ks) for chosen in sets}
    totals = {name: sum(report[name] for report in data_sets.values()) for name in ("planned", "scored", "missing")}
    scored = [result for result in results.values() if result.is_scored]
    audited = [result for result in scored if result.audited]
    return {
        "format": FORMAT,
        "complete": totals["missing"] == 0,
        **totals,
        "audited": len(audited),
        "violations": sum(result.violations for result in audited) if audited else None,
        "weight_versions": sorted({version for result in scored for version in result.weight_versions}),
        "data_sets": data_sets,
    }


def report_notes(report: Mapping[str, Any], weight_version: str | None) -> list[str]:
    """What a reader of the numbers should know, in words.

    Args:
        report: As `evaluation_report` makes it.
        weight_version: What the engine held when the run was begun; None where it does not tell.
    """
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
        [result for number in range(chosen.sampling.samples) if (result := results.get(_key(chosen, problem, number)))]
        for problem in range(len(chosen.rows))
    ]
    found = [result for group in by_problem for result in group]
    scored = [result for result in found if result.is_scored]
    problems = [_problem(chosen, number, group) for number, group in enumerate(by_problem)]
    counts = [(problem["right"], problem["scored"]) for problem in problems]
    accuracy = accuracy_of(counts)
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
        "avg_at_n": _rounded(accuracy.mean),
        "standard_error": _rounded(accuracy.standard_error),
        "interval_95": None if accuracy.interval is None else [_rounded(bound) for bound in accuracy.interval],
        "pass_at_k": {str(k): _rounded(mean_pass_at_k(counts, k)) for k in ks},
        "pass_at_k_problems": {str(k): sum(total >= k for _, total in counts) for k in ks},
        "maj_at_n": _mean([problem["majority_score"] for problem in problems if problem["scored"]]),
        "without_answer": sum(not has_answer(result.answer) for result in scored),
        "status": _counted(found, lambda result: result.status),
        "stop_reasons": _counted(found, lambda result: result.stop_reason),
        "methods": _counted([result for result in found if result.is_finished], lambda result: result.method),
        **_amounts(scored),
        "drift": _drift(scored),
        "by_problem": problems,
    }


def _key(chosen: EvalSet, problem: int, number: int) -> SampleKey:
    return SampleKey(chosen.name, problem, number)


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


def _amounts(scored: Sequence[SampleResult]) -> dict[str, Any]:
    return {
        "mean_response_tokens": _mean([result.response_tokens for result in scored]),
        "mean_turns": _mean([result.turns for result in scored]),
        "sampled_tokens": sum(result.sampled_tokens for result in scored),
        "tool_calls": sum(result.tool_calls for result in scored),
        "tool_errors": sum(result.tool_errors for result in scored),
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


def _counted(found: Sequence[SampleResult], name_of: Callable[[SampleResult], str]) -> dict[str, int]:
    """By name, in the alphabet's order."""
    return dict(sorted(Counter(map(name_of, found)).items()))


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(math.fsum(values) / len(values)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
