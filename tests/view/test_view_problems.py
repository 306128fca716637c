"""What is planted in a sample is seen there, and nothing is seen in a whole one."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import (
    ANSWER,
    CALL,
    DEFECTS,
    END,
    PROMPT,
    RESULT,
    Episode,
    other_spelling,
    shifted_mask,
    stale_version,
    whole,
)

from strands_rollout.dump import DumpRecord, TokenTexts
from strands_rollout.samples import Sample
from strands_rollout.template.drift import drift_of_turn, token_bytes
from strands_rollout.view.problems import Problem, find_problems
from strands_rollout.view.sample import Retokeniser, view_sample
from strands_rollout.view.tokens import TokenLists, TurnHabits, drift_marks, habits_of, is_control, token_kinds


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


def test_a_shifted_mask_and_older_weights_are_marked_at_their_tokens(
    shipped_tokenizer: Any, habits: TurnHabits
) -> None:
    first, second = whole(shipped_tokenizer).spans
    found = problems(shipped_tokenizer, shifted_mask(shipped_tokenizer), habits)
    assert {problem.start for problem in found if problem.kind == "mask"} == {first[1], first[2], second[1]}
    (stale,) = problems(shipped_tokenizer, stale_version(shipped_tokenizer), habits)
    assert (stale.start, stale.end) == tuple(first[1:3])


def test_a_whole_episode_one_whose_close_the_template_added_and_an_aborted_one_have_no_problem(
    shipped_tokenizer: Any, habits: TurnHabits
) -> None:
    stretches = (False, PROMPT), (True, CALL), (False, END + RESULT.format("34")), (True, ANSWER + END)
    aborted = whole(shipped_tokenizer)
    aborted.sample.status, aborted.sample.reward = Sample.Status.ABORTED, None
    aborted.facts["stop_reason"] = "aborted"
    for made in (whole(shipped_tokenizer), Episode(shipped_tokenizer, *stretches), aborted):
        assert problems(shipped_tokenizer, made.sample, habits) == []


def test_turns_with_calls_may_end_by_another_token(shipped_tokenizer: Any) -> None:
    def episode(end_of_calls: str) -> Sample:
        stretches = (False, PROMPT), (True, CALL + end_of_calls), (False, RESULT.format("34")), (True, ANSWER + END)
        return Episode(shipped_tokenizer, *stretches).sample

    habits = habits_of([record(shipped_tokenizer, episode("<|endoftext|>")) for _ in range(3)])
    assert problems(shipped_tokenizer, episode("<|endoftext|>"), habits) == []
    assert {problem.kind for problem in problems(shipped_tokenizer, episode(""), habits)} == {"not closed"}


def test_a_template_that_most_contexts_break_judges_none(shipped_tokenizer: Any) -> None:
    forge, _ = DEFECTS["forged control token"]
    all_alike = [record(shipped_tokenizer, forge(shipped_tokenizer)) for _ in range(3)]
    assert habits_of(all_alike).opening is None


def test_control_tokens_are_told_from_markup() -> None:
    written = [
        "<|im_end|>",
        "</think>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "<\uff5ctool\u2581call\uff5c>",
        "<start_of_turn>",
    ]
    ordinary = ["<br>", "</div>", "<", "[A]", "a_b", "<a href>"]
    assert [text for text in [*written, *ordinary] if is_control(text.encode())] == written


def test_drift_is_marked_where_it_is_with_what_would_be_there(shipped_tokenizer: Any, habits: TurnHabits) -> None:
    made = record(shipped_tokenizer, other_spelling(shipped_tokenizer))
    row, detail = view_sample(made, habits, Retokeniser(shipped_tokenizer))
    ((start, end, instead),) = detail["drift"]
    assert row["drift"] == end - start > 1
    assert len(instead) == 1
    there = b"".join(made.token_texts[token] for token in made.values["tokens"][start:end])
    assert there == Retokeniser(shipped_tokenizer).texts[instead[0]]


@settings(max_examples=40)
@given(ids=st.lists(st.integers(0, 1195), max_size=40))
def test_marks_count_what_drift_counts(ids: list[int], shipped_tokenizer: Any) -> None:
    bytes_of = token_bytes(shipped_tokenizer)
    marks = list(drift_marks(ids, shipped_tokenizer, bytes_of))
    assert sum(mark.end - mark.start for mark in marks) == drift_of_turn(ids, shipped_tokenizer, bytes_of)
    again = list(ids)
    for mark in reversed(marks):
        again[mark.start : mark.end] = mark.instead
    text = shipped_tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert again == shipped_tokenizer.encode(text, add_special_tokens=False)


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


def test_turns_of_a_foreign_sample_are_those_of_its_mask() -> None:
    values = Sample(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 0, 1], weight_versions=["4", "5"]).to_dict()
    lists = TokenLists.of(DumpRecord(values))
    assert [(span.start, span.end, span.version) for span in lists.spans] == [(1, 2, "4"), (3, 4, "5")]
    assert lists.contexts == [(2, 3)]


@settings(max_examples=50)
@given(
    tokens=st.lists(st.integers(0, 9)),
    length=st.none() | st.integers(-3, 20) | st.text(),
    mask=st.none() | st.text() | st.lists(st.integers(-1, 2) | st.none() | st.floats()),
    logprobs=st.none() | st.lists(st.floats() | st.none() | st.text()),
    spans=st.none() | st.lists(st.tuples(*[st.integers(-2, 12)] * 3, st.none() | st.text())),
    status=st.sampled_from(["completed", "failed", "nonsense"]),
)
def test_any_values_can_be_looked_at(status: str, spans: Any, length: Any, **lists: Any) -> None:
    named = {"tokens": lists["tokens"], "loss_mask": lists["mask"], "rollout_log_probs": lists["logprobs"]}
    facts = {"strands_rollout": {"spans": spans, "turns": length, "duration_s": length}}
    values = Sample().to_dict() | named | {"response_length": length, "metadata": facts, "status": status}
    _, detail = view_sample(DumpRecord(values), TurnHabits(frozenset({3}), (1, 2)), None)
    assert sum(end - start for _, start, end in detail["kinds"]) == len(lists["tokens"])
