"""A dump as a wandb table: its rows, and the files that wandb writes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strands_rollout import Sample
from strands_rollout.cli.commands import app
from strands_rollout.dump import write_dump
from strands_rollout.integrations.table import sample_table

KEY = "5ec4e75ec4e75ec4e75ec4e75ec4e75ec4e75ec4e7"
ROW = {
    "index": 4,
    "group": 1,
    "status": "truncated",
    "stop reason": "turn_length",
    "reward": 0.5,
    "turns": 2,
    "tool calls": None,
    "weight versions": "7, 8",
}
TEXTS = {"prompt": "What?", "response": "This.", "label": "34"}


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    facts = {"stop_reason": "turn_length", "turns": 2, "weight_versions": ["7", "8"]}
    sample = Sample(
        index=4,
        group_index=1,
        prompt="What?",
        response="This.",
        label=34,
        reward={"acc": 0.5},
        status=Sample.Status.TRUNCATED,
        metadata={"strands_rollout": {**facts, "api_key": KEY}},
    )
    write_dump(tmp_path / "samples.jsonl.gz", [sample, sample])
    return tmp_path / "samples.jsonl.gz"


@pytest.mark.parametrize("with_contents", [False, True])
def test_sample_table_holds_texts_only_if_asked(dump: Path, *, with_contents: bool) -> None:
    table = sample_table(dump, reward_key="acc", with_contents=with_contents)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert rows == [{**ROW, **(TEXTS if with_contents else {})}] * 2


def test_export_to_wandb_without_a_key_is_refused(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    result = CliRunner().invoke(app, ["export", str(dump), "--to", "wandb"])
    assert str(result.exception).startswith("--to wandb ")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_export_to_wandb_logs_the_table_without_secrets(dump: Path, tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))},
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": KEY,
        "WANDB_RUN_ID": "chosen",
        "WANDB_ERROR_REPORTING": "false",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        **{f"WANDB_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT")},
    }

    def child(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    given = ["export", str(dump), "--to", "wandb", "--project", "agents", "--reward-key", "acc"]
    assert child("-m", "strands_rollout.cli", *given) == "2 samples\n"
    (run,) = (tmp_path / "wandb").glob("offline-run-*-chosen")
    (logged,) = json.loads(child(str(Path(__file__).parents[1] / "support" / "wandb_file.py"), str(run)))
    table: dict[str, Any] = logged["samples"]
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == [ROW, ROW]
    assert b"agents" in b"".join(file.read_bytes() for file in run.glob("*.wandb"))
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
