"""What is planted in a sample is seen there, and nothing is seen in a whole one."""

from typing import Any

import pytest
from planted import (
    ANSWER,
    CALL,
    DEFECTS,
    END,
    PROMPT,
    RESULT,
    Episode,
    other_spelling,
    whole,
)

from strands_rollout.dump import DumpRecord, TokenTexts
from strands_rollout.samples import Sample
from strands_rollout.view.sample import Problem, Retokeniser, find_problems, view_sample
from strands_rollout.view.tokens import TokenLists, TurnHabits, habits_of, token_kinds


def record(tokenizer: Any, sample: Sample) -> DumpRecord:
    return DumpRecord.from_sample(sample, TokenTexts(tokenizer))


@pytest.fixture(scope="module")
def habits(shipped_tokenizer: Any) -> TurnHabits:
    return habits_of([record(shipped_tokenizer, whole(shipped_tokenizer).sample) for _ in range(3)])


def problems(tokenizer: Any, sample: Sample, habits: TurnHabits) -> list[Problem]:
    made = record(tokenizer, sample)
    return find_problems(made, TokenLists.of(made), habits)


@pytest.mark.parametrize("name", DEFECTS)
def test_each_planted_defect_is_seen_as_what_it_is(name: str, shipped_tokenizer: Any, habits: TurnHabits) -> None:
    make, kind = DEFECTS[name]
    found = problems(shipped_tokenizer, make(shipped_tokenizer), habits)
    assert kind in {problem.kind for problem in found}, found


def test_a_whole_episode_one_whose_close_the_template_added_and_an_aborted_one_have_no_problem(
    shipped_tokenizer: Any, habits: TurnHabits
) -> None:
    stretches = (False, PROMPT), (True, CALL), (False, END + RESULT.format("34")), (True, ANSWER + END)
    aborted = whole(shipped_tokenizer)
    aborted.sample.status, aborted.sample.reward = Sample.Status.ABORTED, None
    aborted.facts["stop_reason"] = "aborted"
    for made in (whole(shipped_tokenizer), Episode(shipped_tokenizer, *stretches), aborted):
        assert problems(shipped_tokenizer, made.sample, habits) == []


def test_drift_is_marked_where_it_is_with_what_would_be_there(shipped_tokenizer: Any, habits: TurnHabits) -> None:
    made = record(shipped_tokenizer, other_spelling(shipped_tokenizer))
    row, detail = view_sample(made, habits, Retokeniser(shipped_tokenizer))
    ((start, end, instead),) = detail["drift"]
    assert row["drift"] == end - start > 1
    assert len(instead) == 1
    there = b"".join(made.token_texts[token] for token in made.values["tokens"][start:end])
    assert there == Retokeniser(shipped_tokenizer).texts[instead[0]]


@pytest.mark.parametrize(
    ("changes", "facts", "kind"),
    [
        ({}, {}, "trained"),
        ({"status": "failed", "loss_mask": [0, 0, 0]}, {}, "failed"),
        ({"remove_sample": True, "loss_mask": [0, 0, 0]}, {}, "removed"),
        ({"remove_sample": True}, {}, "removed"),
        ({"loss_mask": [0, 0, 1]}, {}, "masked"),
        ({"loss_mask": [0, 0, 1]}, {"stale_tokens": 1}, "stale"),
        ({"loss_mask": []}, {}, "unknown"),
    ],
)
def test_each_token_has_a_kind(changes: dict[str, Any], facts: dict[str, Any], kind: str) -> None:
    metadata = {"strands_rollout": {"spans": [[0, 1, 2, None], [1, 3, 4, None]], **facts}}
    made = DumpRecord(
        Sample(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 0, 1], metadata=metadata).to_dict() | changes
    )
    kinds = token_kinds(made, TokenLists.of(made))
    assert kinds[:3] == ["prompt", kind, "unknown" if kind == "unknown" else "context"]
