"""Which problems an evaluation takes: a row that can never be answered right is refused by its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strands_rollout.dataset_rows import load_rows
from strands_rollout.errors import PromptError
from strands_rollout.evaluation.plan import DataFile, EvalSet, Sampling

GOOD = {"prompt": "What is 17 * 2?", "label": "34"}


def load(folder: Path, *rows: dict[str, Any], limit: int | None = None) -> EvalSet:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvalSet.load(DataFile("rows", path), Sampling(1, 64), limit=limit)


@pytest.mark.parametrize("label", [None, "", "  ", [], {}, ["", None], "#### ", {"answer": "34"}])
def test_a_label_that_no_answer_equals_is_refused(tmp_path: Path, label: Any) -> None:
    with pytest.raises(PromptError, match=r"rows\.jsonl:2: got the label .*, which no answer equals"):
        load(tmp_path, GOOD, {**GOOD, "label": label})


@pytest.mark.parametrize("label", ["34", 34, 0, 0.5, ["34", ""], "... #### 34", 10**30])
def test_a_label_that_an_answer_may_equal_is_taken(tmp_path: Path, label: Any) -> None:
    assert load(tmp_path, {**GOOD, "label": label}).rows[0].label == label


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        " ",
        None,
        [],
        34,
        {},
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "tool", "content": "a"}],
    ],
)
def test_a_prompt_that_can_not_be_asked_is_refused(tmp_path: Path, prompt: Any) -> None:
    with pytest.raises(PromptError, match=r"rows\.jsonl:2: got "):
        load(tmp_path, GOOD, {**GOOD, "prompt": prompt})


def test_rows_that_are_not_asked_may_be_anything(tmp_path: Path) -> None:
    assert len(load(tmp_path, GOOD, {**GOOD, "label": None}, limit=1).rows) == 1


def test_blank_lines_count_in_a_rows_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, "label": ""}) + "\n")
    with pytest.raises(PromptError, match=r"rows\.jsonl:4: "):
        EvalSet.load(DataFile("rows", path), Sampling(1, 64))


def test_a_rows_metadata_is_taken_along(tmp_path: Path) -> None:
    first, second = load(tmp_path, {**GOOD, "metadata": {"source": "mine"}}, {**GOOD, "metadata": None}).rows
    assert (first.metadata, second.metadata) == ({"source": "mine"}, {})
    with pytest.raises(PromptError, match=r"rows\.jsonl:1: got metadata='mine'; expected an object"):
        load(tmp_path, {**GOOD, "metadata": "mine"})


def test_a_label_of_any_length_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "label": 123456789012345678901234567890}\n')
    assert load_rows(path)[0].label == 123456789012345678901234567890


@pytest.mark.parametrize("content", [b'"\\ud800"', b'"\xff"', b"9" * 5000, b"[" * 100_000])
def test_what_can_not_be_read_is_named_with_its_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": ' + content + b"}\n")
    with pytest.raises(PromptError, match=r"rows\.jsonl:1: "):
        load_rows(path)


def test_a_file_is_the_same_under_another_name(tmp_path: Path) -> None:
    real = load(tmp_path, GOOD)
    (tmp_path / "link.jsonl").symlink_to("rows.jsonl")
    link = EvalSet.load(DataFile("rows", tmp_path / "link.jsonl"), Sampling(1, 64))
    assert link.identity == real.identity
