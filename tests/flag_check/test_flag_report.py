"""The report on a script: for people, and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.flag_check.command import report_flags

GOOD = "python3 slime/train.py --rollout-batch-size 4 --num-rollout 10 --lr 1e-6\n"


@pytest.fixture(autouse=True)
def without_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIME_DIR", raising=False)


def write(folder: Path, text: str) -> Path:
    file = folder / "run.sh"
    file.write_text(text)
    return file


def test_a_script_whose_flags_are_all_known_is_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_flags(write(tmp_path, GOOD), as_json=False)

    shown = capsys.readouterr().out
    assert "3 (its text was read, nothing was run)" in shown
    assert "Megatron-LM: recorded, commit" in shown
    assert shown.endswith("all known\n")


def test_a_fault_is_shown_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not report_flags(write(tmp_path, GOOD.replace("--lr", "--lrr")), as_json=False)

    shown = capsys.readouterr().out
    assert f"{tmp_path}/run.sh:1: error: --lrr: no parser knows it" in shown
    assert shown.endswith("1 errors, 0 warnings\n")


def test_the_report_is_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, GOOD.replace("1e-6", "1e-6 --lr 2e-6 $MORE"))
    assert report_flags(script, as_json=True)

    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert (report["ok"], report["script"], report["flags"]) == (True, str(script), 4)
    assert [source.partition(":")[0] for source in report["sources"]] == [
        "slime",
        "Megatron-LM",
        "SGLang",
        "SGLang's router",
    ]
    (finding,) = report["findings"]
    assert sorted(finding) == ["flag", "nearest", "problem", "severity", "where"]
    assert (finding["severity"], finding["where"]) == ("warning", f"{script}:1")


@pytest.mark.parametrize("text", [GOOD, GOOD.partition("train.py ")[2]])
def test_a_command_on_stdin_is_judged(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert report_flags(Path("-"), as_json=False)

    monkeypatch.setattr("sys.stdin", io.StringIO(text.replace("--lr", "--lrr")))
    assert not report_flags(Path("-"), as_json=False)


def test_a_script_without_any_flag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no flag"):
        report_flags(write(tmp_path, "echo --hello\n"), as_json=False)


def test_a_slime_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a checkout"):
        report_flags(write(tmp_path, GOOD), as_json=False, slime_dir=tmp_path)
