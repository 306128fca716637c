"""The doctor on prompt data sets: rows, labels, manifests, and where they are looked for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from stand_in_machine import REPOSITORY, assert_fault, only, question

from strands_rollout.doctor.data_file import check_data, check_manifest
from strands_rollout.doctor.finding import Finding
from strands_rollout.doctor.model_folder import check_converted_model, check_model

ROW = {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "label": "2"}


def data(folder: Path, *rows: object, name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def look_at_data(path: Path) -> list[Finding]:
    return check_data(question(path.parent, data=(path,)))


def manifest(path: Path, rows: int, sha256: str) -> None:
    facts = {"format": 1, "dataset": "some/set", "revision": None, "rows": rows, "sha256": sha256}
    Path(f"{path}.manifest.json").write_text(json.dumps(facts))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_good_data_is_counted_against_its_manifest(tmp_path: Path) -> None:
    path = data(tmp_path, ROW, {"prompt": "What is 2 + 2?", "label": 4})
    assert [finding.status for finding in look_at_data(path)] == ["ok", "skipped"]
    manifest(path, 2, digest(path))
    found = look_at_data(path)
    assert {finding.status for finding in found} == {"ok"}
    assert "2 rows of some/set" in only(found, "manifest: train.jsonl").found


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("{broken", "not JSON"),
        ({"question": "What?"}, "prompt and label"),
        ({"prompt": "", "label": "2"}, "empty prompt"),
        ({"prompt": [{"role": "assistant", "content": "2"}], "label": "2"}, "user's message"),
        ({"prompt": 7, "label": "2"}, "type int"),
        ({"prompt": "What?", "label": ""}, "label"),
        ({"prompt": "What?", "label": None}, "label"),
        ({"prompt": "What?", "label": {"a": 1}}, "{'a': 1}"),
        ({"prompt": "What?", "label": [True]}, "[True]"),
        ({"prompt": "What?", "label": ["", None]}, "every answer is wrong"),
    ],
)
def test_a_row_that_can_not_be_trained_on_is_an_error(row: object, word: str, tmp_path: Path) -> None:
    found = look_at_data(data(tmp_path, ROW, row, row))
    assert_fault(found, "data: train.jsonl", "error", "row 2", word, "1 more", remedy='"prompt"')


@pytest.mark.parametrize("as_chat", [False, True])
def test_a_rendered_prompt_is_an_error(tmp_path: Path, *, as_chat: bool) -> None:
    text = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    prompt = [{"role": "user", "content": text}] if as_chat else text
    found = look_at_data(data(tmp_path, {"prompt": prompt, "label": "2"}))
    assert_fault(found, "data: train.jsonl", "error", "row 1", "rendered", remedy="--apply-chat-template")


def test_data_is_read_though_the_tokenizer_is_broken(tmp_path: Path) -> None:
    path = data(tmp_path, ROW)
    found = check_data(question(tmp_path, data=(path,), tokenizer=tmp_path / "none"))
    assert only(found, "data: train.jsonl").status == "ok"


def test_an_empty_data_file_is_an_error(tmp_path: Path) -> None:
    assert_fault(look_at_data(data(tmp_path)), "data: train.jsonl", "error", "no rows", remedy="JSON")


def test_a_missing_file_is_an_error_if_it_was_named(tmp_path: Path) -> None:
    named = look_at_data(tmp_path / "dapo-math-17k.jsonl")
    assert_fault(named, "data: dapo-math-17k.jsonl", "error", remedy="python data_prep/dapo_math_17k.py")
    default = check_data(question(tmp_path))
    assert_fault(default, "data: dapo-math-17k.jsonl", "warning", remedy="python data_prep/dapo_math_17k.py")
    assert_fault(default, "data: aime-2024.jsonl", "warning", remedy="python data_prep/aime_2024.py")


def test_the_scripts_that_remedies_name_exist(tmp_path: Path) -> None:
    asked = question(tmp_path, data=tuple(Path(f"{name}.jsonl") for name in ("aime-2025", "gsm8k-train", "gsm8k-test")))
    found = [*check_data(question(tmp_path)), *check_data(asked), *check_model(asked), *check_converted_model(asked)]
    scripts = {str(finding.remedy).split(maxsplit=1)[1] for finding in found}
    assert len(scripts) == 5
    assert all((REPOSITORY / script).is_file() for script in scripts)


def test_data_that_was_changed_since_it_was_prepared_is_an_error(tmp_path: Path) -> None:
    path = data(tmp_path, ROW, ROW, name="gsm8k-test.jsonl")
    manifest(path, 2, digest(path))
    with path.open("a") as file:
        file.write(json.dumps(ROW))
    found = check_manifest(path)
    assert_fault(found, "manifest: gsm8k-test.jsonl", "error", "3 rows", "2 rows", remedy="data_prep/gsm8k.py")
    manifest(path, 2, digest(path))
    assert_fault(check_manifest(path), "manifest: gsm8k-test.jsonl", "error", "3 rows", remedy="data_prep/gsm8k.py")
    Path(f"{path}.manifest.json").write_text("{}")
    assert_fault(check_manifest(path), "manifest: gsm8k-test.jsonl", "error", "KeyError", remedy="data_prep/gsm8k.py")


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = data(tmp_path, ROW)
    manifest(path, 7, "0" * 64)
    assert check_manifest(path, max_bytes=10)[0].status == "skipped"


def test_data_is_looked_for_where_the_scripts_read_it(tmp_path: Path) -> None:
    env = {"PROMPT_DATA": "/a/mine.jsonl", "EVAL_SETS": "aime-2025,gsm8k-test", "DATA_DIR": "/b"}
    assert [finding.found.split()[0] for finding in check_data(question(tmp_path, env))] == [
        "/a/mine.jsonl",
        "/b/aime-2025.jsonl",
        "/b/gsm8k-test.jsonl",
    ]
    names = {finding.name for finding in check_data(question(tmp_path, {"EVAL_CONFIG": "eval.yaml"}))}
    assert names == {"data: dapo-math-17k.jsonl", "data: aime-2025.jsonl"}
