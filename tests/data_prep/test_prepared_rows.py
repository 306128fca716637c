"""Rows of a source: which become lines of a data file, the form of their labels, and the reasons of rejected rows."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prep_support import Prepare, chat, dapo_row, problem, write_parquet
from preparation.report import warning_lines
from preparation.rows import PreparationError


def counts_add_up(manifest: dict[str, Any]) -> bool:
    parts = ("rows", "duplicates_removed", "rejected", "contaminated_removed", "beyond_limit")
    return manifest["rows_read"] == sum(manifest[part] for part in parts)


@pytest.mark.parametrize("settings", [{}, {"prompt_column": "puzzle", "label_column": "hint"}])
def test_prepare_missing_columns_error_lists_the_columns(prepare: Prepare, settings: dict[str, str]) -> None:
    with pytest.raises(PreparationError, match=r"got the columns puzzle, outcome, extra, extra\.value"):
        prepare([{"puzzle": "2 + 2", "outcome": "4", "extra": {"value": 4}}], **settings)
    named = prepare(
        [{"prompt": "What for?", "label": "none", "task": {"text": problem(2)}, "gold": 8}],
        prompt_column="task.text",
        label_column="gold",
    )
    assert (named.problems, named.labels) == ([problem(2)], ["8"])


def test_prepare_duplicates_ignore_spacing_and_instructions(prepare: Prepare) -> None:
    texts = [
        "Solve x^2 = 4  for\nx.",
        "Solve x^2 = 4 for x.",
        "Solve x² = 4 for x.",
        "Solve x2 = 4 for x.",
        "Solve X^2 = 4 for x.",
    ]
    rows = [{"prompt": chat(text), "label": "2"} for text in texts]
    rows.append({"prompt": chat(f"{texts[1]} Put your final answer within \\boxed{{}}."), "label": "2"})
    assert prepare(rows).problems == [texts[0], *texts[2:]]


def test_prepare_removes_duplicates_unless_kept(prepare: Prepare) -> None:
    rows = [dapo_row(2), dapo_row(3), dapo_row(2), dapo_row(2)]
    once = prepare(rows)
    assert (once.labels, once.manifest["duplicates_removed"]) == (["8", "12"], 2)
    assert counts_add_up(once.manifest)
    result = prepare([*rows[:3], dapo_row(2, "9")], keep_duplicates=True)
    assert (result.labels, result.manifest["duplicates_removed"]) == (["8", "12", "8", "9"], 0)
    assert result.manifest["conflicts"] == {"problems": 1, "left_out": 0}
    assert counts_add_up(result.manifest)


def test_prepare_keeps_the_majority_label(prepare: Prepare) -> None:
    rows = [dapo_row(2, "9"), dapo_row(2), dapo_row(2), dapo_row(3)]
    result = prepare(rows, allow_rejected=True)
    assert (result.labels, result.manifest["conflicts"]) == (["8", "12"], {"problems": 1, "left_out": 0})
    (lost,) = result.rejected
    assert (lost["kind"], lost["source"]["label"], lost["row"]) == ("conflict", "9", 0)
    assert "'9' 1x, '8' 2x; '8' is kept" in lost["reason"]
    assert counts_add_up(result.manifest)
    undecided = prepare([rows[0], rows[1], rows[3]], allow_rejected=True)
    assert (undecided.labels, undecided.manifest["conflicts"]) == (["12"], {"problems": 1, "left_out": 1})
    assert [one["source"]["label"] for one in undecided.rejected] == ["9", "8"]
    assert counts_add_up(undecided.manifest)
    assert not prepare(rows[2:]).rejected, "the rejected rows of an earlier run are removed"


@pytest.mark.parametrize(
    ("label", "written"),
    [
        (" 34 ", "34"),
        ("034", "34"),
        ("-07", "-7"),
        ("0", "0"),
        ("1,234", "1234"),
        ("\\boxed{34}", "34"),
        *(("so 3 + 4\n#### 7", "7"), ("$\\frac{1}{2}$", "$\\frac{1}{2}$"), (34, "34"), (34.0, "34"), (0.5, "0.5")),
        (["34"], "34"),
        (["a half", "1/2"], '["a half", "1/2"]'),
    ],
)
def test_prepare_normalizes_labels(prepare: Prepare, label: object, written: str) -> None:
    result = prepare([{"prompt": problem(2), "label": label}])
    assert result.labels == [written]


def test_prepare_rejects_labels_that_cannot_be_graded(prepare: Prepare) -> None:
    bad = ["", "  ", None, "x" * 601, "7}", "two\nlines", "a $3$ and **"]
    rows = [dapo_row(number) | {"label": label} for number, label in enumerate(bad)] + [dapo_row(50)]
    result = prepare(rows, allow_rejected=True)
    assert (result.labels, [lost["source"]["label"] for lost in result.rejected]) == (["200"], bad)
    assert all(lost["kind"] == "label" and lost["reason"].startswith("label: ") for lost in result.rejected)
    assert result.manifest["rejected_by_kind"] == {"prompt": 0, "label": len(bad), "conflict": 0}
    assert counts_add_up(result.manifest)


@pytest.mark.parametrize(
    "prompt", [[], chat(" "), [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]]
)
def test_prepare_rejects_unusable_prompts(prepare: Prepare, prompt: object) -> None:
    result = prepare([dapo_row(3), dapo_row(2) | {"prompt": prompt}], allow_rejected=True)
    assert result.labels == ["12"]
    (lost,) = result.rejected
    assert lost["kind"] == "prompt"
    assert lost["reason"].startswith("prompt: got ")


def test_prepare_fails_over_one_percent_rejected(prepare, tmp_path) -> None:
    rows = [dapo_row(number) for number in range(100)]
    rows[7]["label"] = ""
    assert prepare(rows).manifest["rejected"] == 1
    rows[8]["label"] = ""
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(PreparationError, match="2 of 100 different rows can't be used.*--allow-rejected"):
        prepare(rows)
    assert not (tmp_path / "out.jsonl").exists()
    assert len((tmp_path / "out.jsonl.rejected.jsonl").read_text().splitlines()) == 2
    assert len(prepare(rows, allow_rejected=True).rows) == 98
    with pytest.raises(PreparationError, match="none of the rows can be used: label: got ''"):
        prepare(rows[7:9], allow_rejected=True)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # datasets 4 leaves a CSV file open
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_prepare_reads_every_file_format(prepare: Prepare, tmp_path: Path, suffix: str) -> None:
    rows = [{"problem": problem(number), "answer": str(4 * number)} for number in (2, 3)]
    path = tmp_path / f"given.{suffix}"
    if suffix == "parquet":
        write_parquet(rows, path)
    elif suffix == "csv":
        lines = ["problem,answer", *(f'"{row["problem"]}",{row["answer"]}' for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text(json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows)))
    assert prepare(path).labels == ["8", "12"]


def test_prepare_reads_a_hub_folder_by_split(prepare: Prepare, tmp_path: Path) -> None:
    folder = tmp_path / "downloaded"
    write_parquet([dapo_row(2)], folder / "data/train-00000-of-00001.parquet")
    write_parquet([dapo_row(3)], folder / "data/test-00000-of-00001.parquet")
    assert prepare(folder, split="test").labels == ["12"]
    with pytest.raises(PreparationError, match="can't read .*downloaded as a data set.*dev"):
        prepare(folder, split="dev")


def test_prepare_warns_of_labels_that_are_not_numbers(prepare: Prepare) -> None:
    result = prepare([dapo_row(2), dapo_row(3, "see the solution"), dapo_row(4, "x+1")])
    assert result.manifest["labels_not_number"] == {"rows": 2, "example": "see the solution"}
    request: Any = SimpleNamespace(rejected_file=Path("rejected"), keep_duplicates=False)
    warnings = list(warning_lines(result.manifest, request))
    assert any("2 labels are not numbers" in line and "see the solution" in line for line in warnings)
    assert not list(warning_lines(prepare([dapo_row(2)]).manifest, request))
