"""GSM8K end to end for SkyRL: the data, the configuration, the reward and the script, on the embedded engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import skyrl_rules

REPOSITORY = Path(__file__).parents[2]
PROBLEMS = Path(__file__).with_name("gsm8k.jsonl")


def run_script(script: str, *arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(REPOSITORY / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd="/").stdout


@pytest.mark.slow
def test_gsm8k_becomes_a_generator_output_on_the_embedded_engine(tmp_path: Path) -> None:
    data, out = tmp_path / "gsm8k.jsonl", tmp_path / "output.json"
    run_script("data_prep/gsm8k.py", "--from", PROBLEMS, "--out", data)
    summary = json.loads(
        run_script("scripts/skyrl_gsm8k.py", "--data", data, "--out", out, "--seed", 0).splitlines()[-1]
    )
    output: dict[str, Any] = json.loads(out.read_text())
    assert list(skyrl_rules.violations(output, 16)) == []
    assert set(output["rewards"]) == {0.0, 1.0}, "the shipped model solves some of these, and not all"
    assert summary["responses"] == 16
    assert summary["trained_tokens"] == sum(map(sum, output["loss_masks"]))
    if "SKYRL_PATH" in os.environ:
        skyrl_rules.validator_of(Path(os.environ["SKYRL_PATH"]))(16, output)


def test_a_configuration_without_the_key_is_refused_in_words(tmp_path: Path) -> None:
    config = tmp_path / "other.yaml"
    config.write_text("strands: {}\n")
    command = [sys.executable, str(REPOSITORY / "scripts/skyrl_gsm8k.py"), "--data", str(PROBLEMS)]
    done = subprocess.run([*command, "--config", str(config)], check=False, capture_output=True, text=True, cwd="/")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "strands_rollout" in done.stderr
