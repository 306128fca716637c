"""What an evaluation's numbers mean, against brute force: pass@k, the interval, the majority."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from fractions import Fraction
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_rollout.evaluation.majority import Ballot, majority_of
from strands_rollout.evaluation.statistics import accuracy_of, mean_pass_at_k, pass_at_k, t_quantile

COUNTS = st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(COUNTS, st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_of_k_samples_that_hold_a_right_one(count: tuple[int, int], k: int) -> None:
    right, total = count
    if k > total:
        with pytest.raises(ValueError, match=f"got k={k}"):
            pass_at_k(right, total, k)
        return
    draws = list(combinations([1] * right + [0] * (total - right), k))
    assert pass_at_k(right, total, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_exact_for_many_samples() -> None:
    assert pass_at_k(1, 1024, 512) == 0.5
    assert pass_at_k(0, 1024, 512) == 0.0
    assert pass_at_k(513, 1024, 512) == 1.0


def test_a_problem_with_less_than_k_samples_is_left_out_of_pass_at_k() -> None:
    assert mean_pass_at_k([(1, 2), (1, 1), (0, 0)], 2) == 1.0
    assert mean_pass_at_k([(1, 1)], 2) is None


@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (29, 2.0452), (1000, 1.9623)]
)
def test_students_t_is_that_of_the_tables(degrees: int, t: float) -> None:
    assert t_quantile(degrees) == pytest.approx(t, abs=1e-4)


@given(st.lists(st.integers(0, 6), min_size=2, max_size=12))
def test_with_equally_many_samples_the_error_is_that_of_the_problems_means(rights: list[int]) -> None:
    accuracy = accuracy_of([(right, 6) for right in rights])
    shares = [right / 6 for right in rights]
    assert accuracy.mean == pytest.approx(statistics.mean(shares))
    assert accuracy.standard_error == pytest.approx(statistics.stdev(shares) / math.sqrt(len(shares)), abs=1e-12)


@given(st.lists(COUNTS, min_size=2, max_size=12))
def test_the_interval_holds_the_accuracy_and_stays_within_0_and_1(counts: list[tuple[int, int]]) -> None:
    accuracy = accuracy_of(counts)
    assert accuracy.mean is not None
    assert accuracy.mean == pytest.approx(sum(right for right, _ in counts) / sum(total for _, total in counts))
    if len({Fraction(*count) for count in counts}) == 1:
        assert (accuracy.standard_error, accuracy.interval) == (0.0, None)
        return
    assert accuracy.interval is not None
    assert 0 <= accuracy.interval[0] <= accuracy.mean + 1e-12
    assert accuracy.mean - 1e-12 <= accuracy.interval[1] <= 1


@pytest.mark.parametrize("counts", [[(0, 4), (0, 4)], [(4, 4), (2, 2)], [(1, 3), (2, 6), (3, 9)]])
def test_problems_that_are_all_alike_have_no_interval(counts: list[tuple[int, int]]) -> None:
    accuracy = accuracy_of(counts)
    assert (accuracy.standard_error, accuracy.interval) == (0.0, None)


def test_more_samples_that_all_agree_do_not_narrow_the_interval() -> None:
    few, many = accuracy_of([(1, 1), (0, 1), (1, 1), (0, 1)]), accuracy_of([(64, 64), (0, 64), (64, 64), (0, 64)])
    assert few.interval == many.interval


def test_about_95_of_100_intervals_hold_the_truth() -> None:
    """Problems of different difficulty, drawn anew each time; the truth is their mean difficulty."""
    random = Random(1)
    held = 0
    for _ in range(2000):
        chances = [random.betavariate(2, 2) for _ in range(30)]
        counts = [(sum(random.random() < chance for _ in range(16)), 16) for chance in chances]
        low, high = accuracy_of(counts).interval or (0.0, 0.0)
        held += low <= 0.5 <= high
    assert 0.93 <= held / 2000 <= 0.97


@pytest.mark.parametrize("counts", [[], [(0, 0)]])
def test_without_samples_there_is_no_accuracy(counts: list[tuple[int, int]]) -> None:
    assert accuracy_of(counts).mean is None


def test_one_problem_has_no_interval() -> None:
    accuracy = accuracy_of([(3, 4), (0, 0)])
    assert (accuracy.mean, accuracy.standard_error, accuracy.interval) == (0.75, None, None)


def ballots(*votes: tuple[str, bool]) -> list[Ballot]:
    return [Ballot(answer, is_right) for answer, is_right in votes]


def test_one_half_and_0_5_are_one_answer() -> None:
    assert majority_of(ballots(("1/2", False), ("0.5", False), ("5", True))).score == 0.0
    assert majority_of(ballots(("1/2", True), ("0.5", True), ("7", False), ("8", False), ("7.0", False))).score == 0.5


def test_the_most_frequent_notation_stands_for_an_answer() -> None:
    assert majority_of(ballots(("0.5", True), (r"\frac12", True), (r"\frac12", True), ("3", False))).answers == (
        r"\frac12",
    )


def test_a_tie_is_split() -> None:
    assert majority_of(ballots(("34", True), ("35", False))).score == 0.5
    assert majority_of(ballots(("34", True), ("35", False), ("36", False))).score == pytest.approx(1 / 3)
    assert majority_of(ballots(("35", False), ("36", False), ("34", True), ("35", False))).score == 0.0
    assert majority_of(ballots(("35", False), ("36", False))).score == 0.0


def test_samples_without_an_answer_do_not_vote() -> None:
    vote = majority_of(ballots(("", False), (" ", False), ("[INVALID]", False), ("34", True)))
    assert (vote.answers, vote.score) == (("34",), 1.0)
    assert majority_of(ballots(("", False))) == majority_of([])
    assert majority_of([]).score == 0.0


def test_right_answers_are_one_however_they_are_written() -> None:
    vote = majority_of(ballots((r"\sqrt{8}", True), (r"2\sqrt{2}", True), ("3", False), ("4", False)))
    assert vote.score == 1.0


@given(
    st.lists(st.sampled_from(["1/2", "0.5", "50%", "34", "34.0", "x", "", "(1,2)", "1,2", "2,1"]), max_size=12),
    st.sampled_from(["34", "0.5", "none"]),
    st.randoms(use_true_random=False),
)
def test_the_order_of_samples_means_nothing(answers: list[str], right: str, random: Random) -> None:
    votes = [Ballot(answer, answer == right) for answer in answers]
    shuffled = list(votes)
    random.shuffle(shuffled)
    assert majority_of(votes) == majority_of(shuffled)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 5))
def test_of_plain_numbers_the_most_frequent_wins(answers: list[int], label: int) -> None:
    vote = majority_of(Ballot(str(answer), answer == label) for answer in answers)
    counts = Counter(answers)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    assert set(vote.answers) == {str(answer) for answer in winners}
    assert vote.score == (1 / len(winners) if label in winners else 0.0)
