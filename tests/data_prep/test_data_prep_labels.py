"""Labels that are none, that reading changed, or that stand in another column are rejected or warned of."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preparation.errors import PreparationError
from preparation.labels import Labels, is_number
from preparation.prepare import Prepared
from preparation.report import warning_lines
from prepared_result import Prepare, Result
from problem_files import chat, dapo_row, gsm8k_row, problem


def warnings_of(result: Result, **settings: Any) -> list[str]:
    request: Any = SimpleNamespace(rejected_file=Path("rejected"), keep_duplicates=False, **settings)
    return list(warning_lines(Prepared(result.manifest, done_before=False), request))


def reason_of(label: object) -> str:
    labels = Labels()
    number = labels.number_of(label)
    labels.check()
    return labels.reason(number)


@pytest.mark.parametrize("label", ["null", "None", "N/A", "n/a.", "nan", "?", "???", "", " ", float("nan"), ["none"]])
def test_words_that_say_there_is_no_label_are_rejected(label: object) -> None:
    assert reason_of(label).startswith("label: got ")


@pytest.mark.parametrize(
    "label", [float(2**53), -1e20, datetime.datetime(2024, 1, 2), datetime.date(2024, 1, 2), datetime.timedelta(1)]
)
def test_labels_that_reading_changed_are_rejected(label: object) -> None:
    assert "store the labels as text" in reason_of(label)
    assert not reason_of(float(2**53 - 1))


def test_a_date_in_a_json_file_is_rejected_with_that_reason(prepare: Prepare, tmp_path: Path) -> None:
    path = tmp_path / "given.jsonl"
    rows = [{"problem": problem(number), "answer": f"2024-01-0{number}T00:00:00"} for number in (2, 3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(PreparationError, match="'2024-01-02 00:00:00', which was read as a date or time"):
        prepare(path)


@pytest.mark.parametrize("label", ["34", "-7", "1/2", "\\frac{1}{2}", "$1,234$", "50%", "(1, 2)", '["a half", "1/2"]'])
def test_numbers_are_told_from_words(label: str) -> None:
    assert is_number(label)
    assert not is_number("Tuesday")


def test_labels_that_are_no_number_are_counted_and_warned_of(prepare: Prepare) -> None:
    result = prepare([dapo_row(2), dapo_row(3, "see the solution"), dapo_row(4, "x+1")])
    assert result.manifest["labels_not_number"] == {"rows": 2, "example": "see the solution"}
    assert any("2 labels are no number" in line and "see the solution" in line for line in warnings_of(result))
    assert not warnings_of(prepare([dapo_row(2)]))


def test_a_solution_without_the_marker_that_the_others_have_is_rejected(prepare: Prepare) -> None:
    rows = [gsm8k_row(number) for number in (2, 3, 4)] + [{"question": problem(5), "answer": "4 rows of 5 make 20"}]
    result = prepare(rows, allow_rejected=True)
    assert result.labels == ["8", "12", "16"]
    (lost,) = result.rejected
    assert "got none after ####" in lost["reason"]
    few = prepare([dapo_row(number) for number in (2, 3, 4)] + [dapo_row(5, "so\n#### 20")])
    assert few.labels == ["8", "12", "16", "20"]


def test_several_label_columns_that_differ_are_named(prepare: Prepare) -> None:
    rows = [{"problem": problem(number), "label": number % 2, "answer": str(4 * number)} for number in (2, 3)]
    result = prepare(rows)
    (said,) = warnings_of(result)
    assert "from label ('0'), but answer differs ('8')" in said
    assert "--label-column" in said
    assert not warnings_of(prepare(rows, label_column="answer"))
    equal = [{"problem": problem(2), "label": "8", "answer": 8, "reward_model": {"ground_truth": " 08 "}}]
    assert not warnings_of(prepare(equal))


def test_a_file_that_a_limit_cut_is_warned_of(prepare: Prepare) -> None:
    (said,) = warnings_of(prepare([dapo_row(number) for number in (2, 3, 4)], limit=2))
    assert said == "the file holds 2 of 3 rows, because of --limit"


def test_a_chat_that_is_stored_as_json_text_is_read_as_a_chat(prepare: Prepare) -> None:
    said = [{"role": "system", "content": "Be brief."}, *chat(problem(2))]
    result = prepare(
        [{"prompt": json.dumps(said), "label": "8"}, {"prompt": json.dumps(chat(problem(3))[0]), "label": "12"}]
    )
    assert [row["prompt"] for row in result.rows] == [said, chat(problem(3))]
    broken = [{"prompt": str(said), "label": "8"}, {"prompt": problem(3), "label": "12"}]
    (lost,) = prepare(broken, allow_rejected=True).rejected
    assert "looks like a chat but is no JSON" in lost["reason"]


def test_a_prompt_that_is_only_an_instruction_is_rejected(prepare: Prepare) -> None:
    only = "Please reason step by step, and put your final answer within \\boxed{}."
    for instruction in ("remove", "keep"):
        rows = [{"prompt": chat(only), "label": "8"}, dapo_row(3)]
        (lost,) = prepare(rows, allow_rejected=True, instruction=instruction, force=True).rejected
        assert lost["reason"] == "prompt: got nothing but an answer instruction"
