"""The launch scripts and the shipped evaluation's configuration against slime itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from slime_install import find_slime

REPOSITORY = Path(__file__).parents[2]
SLIME = find_slime()
pytestmark = pytest.mark.slime
SCRIPTS = ["strands_qwen3_8b", "strands_qwen3_4b", "strands_qwen3_8b_async", "eval_aime", "prepare_model"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_finds_slimes_own_arguments_of_its_model(script: str) -> None:
    command = ["bash", str(REPOSITORY / "scripts" / f"{script}.sh"), "--dry-run"]
    shown = subprocess.run(
        command, env={**os.environ, "SLIME_DIR": str(SLIME)}, capture_output=True, text=True, check=True
    )
    assert "--num-layers 36" in shown.stdout
    assert "MODEL_ARGS" not in shown.stdout


@pytest.mark.parametrize("program", ["train.py", "train_async.py", "tools/convert_hf_to_torch_dist.py"])
def test_the_programs_that_the_scripts_run_are_there(program: str) -> None:
    assert SLIME is not None
    assert (SLIME / program).is_file()


def test_slime_reads_the_shipped_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.utils.eval_config import build_eval_dataset_configs, ensure_dataset_list

    monkeypatch.setenv("DATA_DIR", "/sets")
    config = OmegaConf.to_container(OmegaConf.load(REPOSITORY / "configs/aime_eval.yaml"), resolve=True)["eval"]
    datasets = build_eval_dataset_configs(
        SimpleNamespace(), ensure_dataset_list(config["datasets"]), config["defaults"]
    )
    assert [(each.name, each.n_samples_per_eval_prompt, each.max_response_len) for each in datasets] == [
        ("aime-2024", 32, 16384),
        ("aime-2025", 32, 16384),
        ("gsm8k-test", 1, 4096),
    ]
    assert {(each.input_key, each.label_key, each.temperature) for each in datasets} == {("prompt", "label", 1.0)}
