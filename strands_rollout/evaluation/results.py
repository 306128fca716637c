"""Results of an evaluation: a line of JSON for each time that a sample was played (`results.jsonl`), and the report.

A folder of results belongs to a single run: `run.json` has the values that identify the run, such as model, settings
and data sets. A run with other values must use another folder, so that results of different runs don't mix.

Apart from facts about the session, the report depends only on the results, not on their order. It has the accuracy with
its uncertainty, pass@k, the majority's answer, and counts. Samples that were not played, failed, were aborted or could
not be graded are missing: shares and means leave them out.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import mpmath
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, ValidationError, model_validator

from strands_rollout import __version__
from strands_rollout.client.client import ServerInfo
from strands_rollout.errors import ConfigError
from strands_rollout.evaluation.plan import EvalSet, SampleKey
from strands_rollout.evaluation.protocols import settings_identity
from strands_rollout.files.json_files import describe_differences, read_json, write_json
from strands_rollout.files.json_log import JsonLog, complete_lines
from strands_rollout.grading import NO_ANSWER
from strands_rollout.grading.comparison import compare
from strands_rollout.play.options import EvalOptions
from strands_rollout.play.rows import json_line
from strands_rollout.samples import PART_PREFIX, parts_of
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.reward import FOLLOWED_PART, INSTRUCTIONS_PART
from strands_rollout.validation import explain_fault

_RUN_FORMAT: Final = 1
_REPORT_FORMAT: Final = 1
_CONFIDENCE: Final = 0.95
_DIGITS: Final = 6  # decimal places of shares and means in the report
# methods that need not extract an answer
_WITHOUT_ANSWERS: Final = frozenset({"environment", "function", "parts", "instructions"})
_NO_ANSWERS: Final = frozenset({"", NO_ANSWER})
FINISHED_STATUSES: Final = frozenset({"completed", "truncated"})
"""Statuses of samples that measure the policy; samples with any other status were aborted or failed."""


def run_identity(
    options: EvalOptions, sets: Sequence[EvalSet], settings: RolloutSettings, info: ServerInfo, tokenizer_dir: Path
) -> dict[str, Any]:
    """Return the values that identify a run, as JSON; a run can be resumed only with the same values."""
    return {
        "strands_rollout": __version__,
        "protocol": options.protocol,
        "model": info.model_path,
        "weight_version": info.weight_version,
        "tokenizer": str(tokenizer_dir.resolve()),
        "seed": options.seed,
        "max_context_length": options.max_context_tokens,
        "settings": settings_identity(settings),
        "data_sets": {eval_set.name: eval_set.identity for eval_set in sets},
    }


class _ResultModel(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Reward(_ResultModel):
    """The parts of a reward function's result that the report reads."""

    model_config = ConfigDict(extra="allow")

    acc: bool | FiniteFloat
    score: FiniteFloat | None = None  # runs of older versions may lack it
    pred: str = ""
    method: str = ""
    error: str = ""


class DriftCounts(_ResultModel):
    """A sample's counts of drift and mismatches; see `EpisodeDrift`.

    `mismatched_tokens` is None if the context was not compared with the template's rendering.
    """

    sampled_tokens: NonNegativeInt
    turn_drift: NonNegativeInt
    text_drift: NonNegativeInt
    off_policy: NonNegativeInt
    mismatched_tokens: NonNegativeInt | None


class SampleResult(_ResultModel):
    """The part of a sample's line that is held in memory, without response and tokens."""

    data_set: str
    problem: NonNegativeInt
    number: NonNegativeInt
    status: str
    stop_reason: str
    error: str | None
    reward: _Reward | None
    response_tokens: NonNegativeInt
    sampled_tokens: NonNegativeInt
    turns: NonNegativeInt
    tool_calls: NonNegativeInt
    tool_errors: NonNegativeInt
    unknown_tools: NonNegativeInt = 0  # runs of older versions lack this and `nonzero_exits`
    nonzero_exits: NonNegativeInt = 0
    seconds: float
    weight_versions: list[str]
    violations: list[str]
    audited: bool
    drift: DriftCounts | None = None

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        if self.is_finished and self.reward is None:
            raise ValueError(f"a {self.status} sample has no reward")
        return self

    @classmethod
    def from_line(cls, line: object) -> SampleResult:
        """Read the object of a line.

        Raises:
            ValueError: A key is missing, a value has the wrong type, or a finished sample has no reward.
        """
        try:
            return cls.model_validate(line)
        except ValidationError as e:
            raise ValueError(explain_fault(e.errors()[0])) from e

    @property
    def key(self) -> SampleKey:
        """The sample's key."""
        return SampleKey(self.data_set, self.problem, self.number)

    @property
    def is_finished(self) -> bool:
        """Return whether the sample is completed or truncated."""
        return self.status in FINISHED_STATUSES

    @property
    def grading_error(self) -> str:
        """Reason why a finished sample could not be graded; "" if it was graded."""
        return self.reward.error if self.reward and self.is_finished else ""

    @property
    def is_scored(self) -> bool:
        """Return whether the sample finished and was graded; other samples are played again when the run is resumed."""
        return self.is_finished and not self.grading_error

    @property
    def fault(self) -> str | None:
        """Reason why a sample has no score; None if that is unknown. Only for samples without a score."""
        return f"not graded: {self.grading_error}" if self.grading_error else self.error

    @property
    def is_right(self) -> bool:
        """Return whether the answer is right: the reward's `acc` is at least 1."""
        return bool(self.reward and self.reward.acc >= 1)

    @property
    def answer(self) -> str:
        """The extracted answer; "" if there is none."""
        return self.reward.pred if self.reward else ""

    @property
    def method(self) -> str:
        """The method that graded the answer; "" if there is no reward, or the reward names no method."""
        return self.reward.method if self.reward else ""


Results: TypeAlias = Mapping[SampleKey, SampleResult]


class ResultsFile:
    """The file `results.jsonl` of a run, opened by a single process. A context manager.

    Attributes:
        dropped_bytes: Bytes of an incomplete last line, dropped when the file was opened; 0 if there was none.

    Raises:
        ConfigError: The folder belongs to another run (the message names the differences); is in use or can't be
            written to; or has results, but no readable `run.json`.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"can't create {folder}: {e.strerror}; choose another folder with --out") from e
        self.path = folder / "results.jsonl"
        self._log = JsonLog(
            self.path, remedy="earlier results are kept; free some space and run the same command again"
        )
        self.dropped_bytes = self._log.dropped_bytes
        try:
            self._claim(folder / "run.json", {"format": _RUN_FORMAT, **identity})
        except ConfigError:
            self._log.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._log.close()

    def results(self, planned: Container[SampleKey]) -> Iterator[SampleResult]:
        """Yield the results in the file's order, several for a sample that was played again; skip blank lines.

        Raises:
            ConfigError: A line is not a result, or its sample is not planned.
        """
        for number, line in enumerate(complete_lines(self.path), start=1):
            if not line.strip():
                continue
            where = f"{self.path}:{number}"
            try:
                result = SampleResult.from_line(json.loads(line))
            except (ValueError, RecursionError) as e:
                raise ConfigError(f"{where} is not a result ({e}); remove the line to play its sample again") from e
            if result.key not in planned:
                raise ConfigError(
                    f"{where}: got sample {result.number} of problem {result.problem} of {result.data_set!r}, "
                    "which is not part of this run; remove the line"
                )
            yield result

    def append(self, line: Mapping[str, Any]) -> SampleResult:
        """Write a line and return its result.

        Raises:
            RolloutError: The line can't be written.
        """
        self._log.append(json_line(line))
        return SampleResult.from_line(line)

    def _claim(self, identity_path: Path, identity: dict[str, Any]) -> None:
        """Write the run's identity into a folder without results; else check that the results are this run's.

        Raises:
            ConfigError: The results belong to another run, or the file that identifies their run is missing or can't be
                read; or the identity can't be written.
        """
        if self._log.is_empty:
            # an earlier run without results may be replaced
            write_json(identity_path, identity)
        elif not identity_path.exists():
            raise ConfigError(
                f"{self.path} has results, but {identity_path.name} is missing, so their run is unknown; choose "
                "another --out"
            )
        elif differing := _run_differences(read_json(identity_path), identity):
            raise ConfigError(
                f"{identity_path.parent} holds another run: {differing}. Use the values that the run began with, or "
                "choose another --out"
            )


def _run_differences(recorded: Mapping[str, Any], requested: Mapping[str, Any]) -> str:
    protocols = ({"protocol": run.get("protocol")} for run in (recorded, requested))
    return describe_differences(*protocols) or describe_differences(recorded, requested)


def accuracy_of(
    counts: Sequence[tuple[int, int]],
) -> tuple[float | None, float | None, tuple[float, float] | None]:
    """Return the accuracy over all samples, its standard error, and its 95% interval within 0 and 1.

    Samples of a problem are correlated, so the standard error is clustered by problem. With accuracy p, and c correct
    of n samples for each of m problems, the standard error is sqrt(m / (m - 1) * sum((c - p * n)^2)) / sum(n). For
    equal n, this is the standard error of the mean of the problems' accuracies. The interval is p +- t * standard
    error, with Student's t of m - 1 degrees of freedom.

    Args:
        counts: c and n of each problem; problems without samples are left out.

    Returns:
        Accuracy, standard error and interval. If there are no samples, all three are None. If there is a single
        problem, error and interval are None. If all problems have the same accuracy, the error is 0, which is not
        informative, and the interval is None.
    """
    sampled = [(right, total) for right, total in counts if total]
    samples, problems = sum(total for _, total in sampled), len(sampled)
    if not samples:
        return None, None, None
    total_right = sum(right for right, _ in sampled)
    mean = total_right / samples
    if problems == 1:
        return mean, None, None
    if all(right * samples == total_right * total for right, total in sampled):
        return mean, 0.0, None
    squares = math.fsum((right - mean * total) ** 2 for right, total in sampled)
    error = math.sqrt(problems / (problems - 1) * squares) / samples
    half_width = t_quantile(problems - 1) * error
    return mean, error, (max(0.0, mean - half_width), min(1.0, mean + half_width))


@functools.cache
def t_quantile(degrees: int) -> float:
    """Return the value that |T| exceeds with a probability of 5%, for Student's T with `degrees` degrees of freedom."""

    def excess(t: float) -> float:
        tail = mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True)
        return float(tail) - (1 - _CONFIDENCE)

    return float(mpmath.findroot(excess, (1.9, 13), solver="anderson"))


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """Return the mean of pass@k over the problems with at least k samples; None if there are no such problems.

    pass@k is the probability that k of a problem's samples, drawn without replacement, contain a correct sample. For c
    correct of n samples, pass@k is 1 - C(n - c, k) / C(n, k). `counts` holds c and n of each problem.
    """
    passed = [1.0 - math.comb(total - right, k) / math.comb(total, k) for right, total in counts if total >= k]
    return math.fsum(passed) / len(passed) if passed else None


def majority_vote(votes: Iterable[tuple[str, bool]]) -> tuple[list[str], float]:
    """Return the most frequent answer of a problem's samples, or several in a tie, and the score of this majority.

    `votes` has each sample's answer, and whether the grader accepted it. Answers that the grader's comparison finds
    equal count as one answer, such as 1/2 and 0.5; so do all correct answers. Samples without an answer don't vote.

    Returns:
        The answers with most votes, each in its most frequent notation, and the score. The score is 1.0 if the right
        answer won, 1/n in a tie of n answers that includes the right answer, else 0.0.
    """
    cast = [(answer, is_right) for answer, is_right in votes if has_answer(answer)]
    right = Counter(answer for answer, is_right in cast if is_right)
    wrong = Counter(answer for answer, is_right in cast if not is_right)
    groups = ([right] if right else []) + _group_equal_answers(wrong)
    most = max((group.total() for group in groups), default=0)
    winners = [group for group in groups if group.total() == most]
    score = 1 / len(winners) if right and winners[0] is right else 0.0
    return sorted(min(group, key=lambda answer: (-group[answer], len(answer), answer)) for group in winners), score


def has_answer(answer: str) -> bool:
    """Return whether a sample has an answer: `answer` is neither blank nor the grader's mark for a missing answer."""
    return answer.strip() not in _NO_ANSWERS


def _group_equal_answers(votes: Counter[str]) -> list[Counter[str]]:
    """Group the votes by equal answers; if an answer equals answers of two groups, the two groups are merged."""

    def is_equal(first: str, second: str) -> bool:  # compare both ways, since the comparison is not symmetric
        return bool(compare(first, second).equal or compare(second, first).equal)

    groups: list[Counter[str]] = []
    for answer in votes:
        equal_groups = [group for group in groups if any(is_equal(answer, other) for other in group)]
        groups = [group for group in groups if group not in equal_groups]
        groups.append(Counter({answer: votes[answer]}))
        for group in equal_groups:
            groups[-1].update(group)
    return groups


def evaluation_report(sets: Sequence[EvalSet], results: Results, ks: Sequence[int]) -> dict[str, Any]:
    """Return the report as JSON; pass@k is left out if k is above the number of samples per problem."""
    data_sets = {eval_set.name: _data_set_report(eval_set, results, ks) for eval_set in sets}
    totals = {name: sum(report[name] for report in data_sets.values()) for name in ("planned", "scored", "missing")}
    scored = [result for result in results.values() if result.is_scored]
    audited = [result for result in scored if result.audited]
    return {
        "format": _REPORT_FORMAT,
        "complete": totals["missing"] == 0,
        **totals,
        "audited": len(audited),
        "violations": sum(len(result.violations) for result in audited) if audited else None,
        "weight_versions": sorted({version for result in scored for version in result.weight_versions}),
        "data_sets": data_sets,
    }


def report_notes(report: Mapping[str, Any], weight_version: str | None) -> list[str]:
    """Return warnings about the numbers; `weight_version` is the engine's at the start of the run."""
    notes = []
    versions = report["weight_versions"]
    if len(versions) > 1 or (weight_version is not None and versions not in ([], [weight_version])):
        start = "" if weight_version is None else f"; the run began with {weight_version}"
        notes.append(f"sampled with the weights {', '.join(versions)}{start}: the numbers may mix several models")
    for name, data_set in report["data_sets"].items():
        drift = data_set["drift"] or {}
        if drift.get("mismatched"):
            notes.append(
                f"{name}: {drift['mismatched_tokens']} context tokens in {drift['mismatched']} of {drift['measured']} "
                "samples differ from the chat template's rendering; to list them, run eval with --save-tokens and "
                "another --out, then strands-rollout drift on that folder"
            )
        timed_out = data_set["methods"].get("algebra_timeout", 0)
        if timed_out:
            notes.append(
                f"{name}: {timed_out} answers count as wrong because comparing them took too long; to allow more time, "
                "run eval with another --out and --set reward.symbolic_timeout_s=SECONDS, at most 60"
            )
    return notes


def without_problems(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report without its entries per problem."""
    data_sets = {
        name: {key: value for key, value in data_set.items() if key != "by_problem"}
        for name, data_set in report["data_sets"].items()
    }
    return {**report, "data_sets": data_sets}


def _data_set_report(eval_set: EvalSet, results: Results, ks: Sequence[int]) -> dict[str, Any]:
    samples = eval_set.sampling.samples
    by_problem = [
        [results[key] for number in range(samples) if (key := SampleKey(eval_set.name, problem, number)) in results]
        for problem in range(len(eval_set.rows))
    ]
    played = [result for group in by_problem for result in group]
    scored = [result for result in played if result.is_scored]
    problems = [_problem_report(eval_set, number, group) for number, group in enumerate(by_problem)]
    counts = [(problem["right"], problem["scored"]) for problem in problems]
    mean, error, interval = accuracy_of(counts)
    ks = [k for k in ks if k <= samples]
    return {
        "protocol": eval_set.measurement and eval_set.measurement.to_json(),
        "problems": len(eval_set.rows),
        "problems_scored": sum(bool(total) for _, total in counts),
        "samples_per_problem": samples,
        "planned": len(eval_set.rows) * samples,
        "scored": len(scored),
        "missing": len(eval_set.rows) * samples - len(scored),
        "failed": len(played) - len(scored),
        "right": sum(right for right, _ in counts),
        "avg_at_n": _round(mean),
        "standard_error": _round(error),
        "interval_95": interval and [_round(bound) for bound in interval],
        "pass_at_k": {str(k): _round(mean_pass_at_k(counts, k)) for k in ks},
        "pass_at_k_problems": {str(k): sum(total >= k for _, total in counts) for k in ks},
        "maj_at_n": _mean([problem["majority_score"] for problem in problems if problem["scored"]]),
        **_reward_means(scored),
        "instruction_accuracy": _instruction_accuracy(scored),
        "without_answer": sum(not has_answer(result.answer) for result in scored),
        "status": _count(result.status for result in played),
        "stop_reasons": _count(result.stop_reason for result in played),
        "methods": _count(result.method for result in played if result.is_finished),
        "mean_response_tokens": _mean([result.response_tokens for result in scored]),
        "mean_turns": _mean([result.turns for result in scored]),
        "sampled_tokens": sum(result.sampled_tokens for result in scored),
        "tool_calls": sum(result.tool_calls for result in scored),
        "tool_errors": sum(result.tool_errors for result in scored),
        "unknown_tools": sum(result.unknown_tools for result in scored),
        "nonzero_exits": sum(result.nonzero_exits for result in scored),
        "drift": _drift_totals(scored),
        "by_problem": problems,
    }


def _problem_report(eval_set: EvalSet, number: int, found: Sequence[SampleResult]) -> dict[str, Any]:
    scored = [result for result in found if result.is_scored]
    answers, score = majority_vote((result.answer, result.is_right) for result in scored)
    return {
        "problem": number,
        "label": eval_set.rows[number].label,
        "scored": len(scored),
        "right": sum(result.is_right for result in scored),
        "majority": answers,
        "majority_score": _round(score),
        "mean_reward": _reward_means(scored)["mean_reward"],
        "mean_response_tokens": _mean([result.response_tokens for result in scored]),
        "mean_tool_calls": _mean([result.tool_calls for result in scored]),
        "truncated": sum(result.status == "truncated" for result in scored),
        "failed": len(found) - len(scored),
    }


def _reward_means(scored: Sequence[SampleResult]) -> dict[str, Any]:
    """Return the mean reward, and the mean of each part over the samples that have it.

    If the reward extracts no answers, also return `maj_at_n` as None, which replaces the report's majority score.
    """
    rewards = [result.reward for result in scored if result.reward is not None]
    # a user's reward, or an environment's, need not extract answers
    has_answers = any(has_answer(reward.pred) or reward.method not in _WITHOUT_ANSWERS for reward in rewards)
    return {
        **({} if has_answers else {"maj_at_n": None}),
        "mean_reward": _mean([reward.score for reward in rewards if reward.score is not None]),
        "mean_parts": {
            name: _mean(values) for name, values in parts_of(reward.model_extra or {} for reward in rewards).items()
        },
    }


def _instruction_accuracy(scored: Sequence[SampleResult]) -> float | None:
    """Return the share of IFEval's instructions that were followed; None if the samples have no instructions."""
    rewards = [(result.reward.model_extra or {}) if result.reward else {} for result in scored]
    followed, given = (
        sum(reward.get(f"{PART_PREFIX}{part}", 0.0) for reward in rewards)
        for part in (FOLLOWED_PART, INSTRUCTIONS_PART)
    )
    return _round(followed / given) if given else None


def _drift_totals(scored: Sequence[SampleResult]) -> dict[str, Any] | None:
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


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _mean(values: Sequence[float]) -> float | None:
    return _round(math.fsum(values) / len(values)) if values else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
