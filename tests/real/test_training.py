"""Training on the real SGLang: it returns the trainer's logprobs, and loads each step's weights under their version."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strands_rollout.play.rows import shipped_rows

pytestmark = [pytest.mark.real, pytest.mark.torch]
SCRIPT = Path(__file__).parents[2] / "scripts/train_tiny.py"


async def test_train_on_sglang_matches_trainer_logprobs(sglang, shipped_tokenizer, report_row, tmp_path) -> None:
    pytest.importorskip("torch")
    from strands_rollout.train.trainer import WeightSync

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(shipped_rows().read_text().splitlines(keepends=True)[:8]))
    options = ["--steps", "2", "--prompts", "4", "--samples-per-prompt", "4", "--threads", "1", "--updates", "1"]
    files = ["--held-out", str(rows), "--out", str(tmp_path / "run")]
    try:
        done = subprocess.run(  # noqa: ASYNC221 - nothing else is to run
            [sys.executable, str(SCRIPT), "--base-url", sglang, *options, *files], capture_output=True, text=True
        )
    finally:
        async with WeightSync(sglang) as sync:
            await sync.load(Path(shipped_tokenizer.name_or_path), "default")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run/steps.jsonl").read_text().splitlines()]
    assert [record["weight_version"] for record in records] == [0, 1]
    assert all(record["logprob_gap_max"] < 1e-3 for record in records)
    assert all(record["stale_tokens"] == 0 for record in records)
    report_row("training on SGLang", logprob_gap_max=max(record["logprob_gap_max"] for record in records))
