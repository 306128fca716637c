"""The launch scripts, the shipped evaluation configuration and the doctor, with slime itself."""

import ast
import importlib
import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from omegaconf import OmegaConf
from slime_install import REPOSITORY, find_slime

from strands_rollout.diagnostics import DoctorOptions
from strands_rollout.diagnostics.slime_episode import check_slime, check_slime_episode
from strands_rollout.evaluation import slime_protocol

SLIME = find_slime()
pytestmark = pytest.mark.slime
SCHEDULED = ["num_rollout", "lr_decay_iters", "rollout_batch_size", "global_batch_size"]
SCRIPTS = ["strands_qwen3_8b", "strands_qwen3_4b", "strands_qwen3_8b_async", "eval_aime", "prepare_model"]


def dry_run(script: str) -> str:
    command = ["bash", str(REPOSITORY / "scripts" / f"{script}.sh"), "--dry-run"]
    environment = {**os.environ, "SLIME_DIR": str(SLIME)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_launch_script_finds_slimes_model_arguments(script: str) -> None:
    shown = dry_run(script)
    assert "--num-layers 36" in shown
    assert "MODEL_ARGS" not in shown


@pytest.mark.parametrize("program", ["train.py", "train_async.py", "tools/convert_hf_to_torch_dist.py"])
def test_launch_scripts_name_programs_that_exist(program: str) -> None:
    assert SLIME is not None
    assert (SLIME / program).is_file()


def test_eval_config_is_read_by_slime(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_protocol_config_is_read_by_slime(tmp_path: Path) -> None:
    from slime.utils.eval_config import build_eval_dataset_configs, ensure_dataset_list

    data = tmp_path / "aime-2024.jsonl"
    data.write_text('{"prompt": [{"role": "user", "content": "1 + 0?"}], "label": "1"}\n')
    assert slime_protocol.main(["--protocol", "qwen3", "--out", str(tmp_path / "out"), f"aime-2024={data}"]) == 0
    (path,) = tmp_path.glob("out/*/eval.json")
    config = OmegaConf.to_container(OmegaConf.load(path), resolve=True)["eval"]
    (found,) = build_eval_dataset_configs(SimpleNamespace(), ensure_dataset_list(config["datasets"]), {})
    values = (found.name, found.n_samples_per_eval_prompt, found.temperature, found.top_p, found.top_k)
    assert values == ("aime-2024@qwen3+modified", 64, 0.6, 0.95, 20)
    rows = importlib.import_module("slime.utils.data").read_file(found.path)
    assert [row["metadata"]["strands_rollout_settings"]["tools"] for row in rows] == [[]]


class Scheduler:
    """Megatron's OptimizerParamScheduler, reduced to its checks."""

    def __init__(self, optimizer, *, lr_warmup_steps: float, lr_decay_steps: int, wd_incr_steps: int, **_) -> None:
        assert lr_decay_steps > 0
        assert lr_warmup_steps < lr_decay_steps
        assert wd_incr_steps >= 0


def test_eval_script_learning_rate_schedule_fits_megatron() -> None:
    """Up to 0.3.1, slime's own function makes a schedule although nothing is trained."""
    words = shlex.split(dry_run("eval_aime").replace("\\\n", ""))
    given = {name: int(words[words.index(f"--{name.replace('_', '-')}") + 1]) for name in SCHEDULED}
    defaults = dict.fromkeys(["lr_wsd_decay_iters", "lr_warmup_fraction", "lr_decay_style", "weight_decay_incr_style"])
    args = MagicMock(**{"n_samples_per_prompt": 1, "lr_warmup_iters": 0, **defaults, **given})
    assert SLIME is not None
    tree = ast.parse((SLIME / "slime/backends/megatron_utils/model.py").read_text())
    [made] = [node for node in tree.body if getattr(node, "name", "") == "get_optimizer_param_scheduler"]
    names: dict[str, Any] = {"OptimizerParamScheduler": Scheduler, "Namespace": object, "MegatronOptimizer": object}
    exec(compile(ast.Module([made], []), "slime", "exec"), names)
    names["get_optimizer_param_scheduler"](args, None)
    args.lr_decay_iters = None
    with pytest.raises(AssertionError):
        names["get_optimizer_param_scheduler"](args, None)


def asked(slime_package: Path, tmp_path: Path) -> DoctorOptions:
    return DoctorOptions(env=dict(os.environ), repository=tmp_path, slime_dir=slime_package)


def test_doctor_reports_slimes_version(slime_package: Path, tmp_path: Path) -> None:
    [found] = check_slime(asked(slime_package, tmp_path), lambda _: None)
    git = subprocess.run(["git", "-C", str(slime_package), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert found.status == "ok"
    assert f"slime 0.{2 if '0.2' in found.found else 3}" in found.found
    assert (git.stdout.strip()[:8] or "unknown") in found.found


def test_doctor_trial_episode_completes(slime_package: Path, tmp_path: Path) -> None:
    [found] = check_slime_episode(asked(slime_package, tmp_path), lambda _: None, timeout_s=250)
    assert found.status == "ok", found
    assert "as completed" in found.found
    assert "reward 1.0" in found.found
