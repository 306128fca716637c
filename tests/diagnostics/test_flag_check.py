"""`check_flags` with the recorded flags, rule by rule; `report_flags` as text and JSON."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from flag_stage import findings_of
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.diagnostics.flag_check import FlagFinding, report_flags
from strands_rollout.errors import ConfigError

WHOLE = "--rollout-batch-size 4 --num-rollout 10"
BATCHES = "--n-samples-per-prompt 8 --global-batch-size"
GPUS = "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"
REPLICAS = f"{GPUS} --context-parallel-size 1"
OURS = "--custom-generate-function-path strands_rollout.generate"
BLANK = """'--sglang-json-model-override-args={"a": 1}'"""
GOOD = "python3 slime/train.py --rollout-batch-size 4 --num-rollout 10 --lr 1e-6\n"


def faults(words: str) -> list[FlagFinding]:
    whole = "--rollout-batch-size 4" if "--num-rollout=0" in words else WHOLE
    return list(findings_of(shlex.split(f"{whole} {words}")).findings)


@pytest.mark.parametrize(
    ("typo", "nearest", "said"),
    [
        ("--rollout-max-respone-len 1024", "--rollout-max-response-len", "(slime)"),
        ("--tensor-model-paralel-size 2", "--tensor-model-parallel-size", "(Megatron-LM)"),
        ("--mem-fraction-static 0.7", "--sglang-mem-fraction-static", "(SGLang)"),
        ("--router-polcy random", "--router-policy", "(SGLang's router)"),
        ("--zzzqqq 1", None, "no parser knows it"),
        ("--sglang-mem-fraction 0.7", "--sglang-mem-fraction-static", "reads it as"),
        ("--sglang-disable 1", ..., "parser ends the run"),
        ("--sglang-model-path 4", "--hf-checkpoint", "drops yours"),
        ("--", None, "argparse reads no flag after this word"),
    ],
)
def test_check_flags_unknown_flag_names_nearest_and_system(typo, nearest, said):
    (fault,) = faults(typo)
    assert (fault.severity, fault.flag) == ("error", typo.split()[0])
    assert nearest is ... or fault.nearest == nearest
    assert said in fault.problem
    assert fault.nearest is None or fault.nearest in fault.problem


@pytest.mark.parametrize(
    ("words", "severity", "flag", "said"),
    [
        ("--colocate true", "error", "--colocate", "extra word 'true'"),
        ("--lr 1e-6 2e-6", "error", "--lr", "extra word '2e-6'"),
        ("--rampup-batch-size 1 2 3 4", "error", "--rampup-batch-size", "extra word '4'"),
        (f"{OURS} --apply-chat-template", "error", "--apply-chat-template", ""),
        (f"{BATCHES} 64", "error", "--global-batch-size", ""),
        (f"{BATCHES} 12", "warning", "--global-batch-size", "the last 8 of "),
        (f"{REPLICAS} --actor-num-nodes 3 {BATCHES} 32", "error", "--global-batch-size", "12 replicas"),
        (f"{GPUS} {BATCHES} 32 --actor-num-nodes 3", "error", "--global-batch-size", "12 replicas"),
        (f"--actor-num-gpus-per-node 7 {BATCHES} 32", "error", "--global-batch-size", "7 replicas"),
        (f"{REPLICAS} {BATCHES} 16 --micro-batch-size 3", "error", "--global-batch-size", "of 3 samples"),
        (f"{REPLICAS} {BATCHES} 4 --pipeline-model-parallel-size 8", "error", "--actor-num-gpus-per-node", "16"),
        (f"{REPLICAS} --n-samples-per-prompt 8 --num-steps-per-rollout 16", "error", "--num-steps-per-rollout", "2"),
        (f"{BATCHES} 16 --num-steps-per-rollout 999", "error", "--num-steps-per-rollout", "samples of a rollout"),
        (f"{REPLICAS} --global-batch-size 2 --num-rollout=0", "error", "--global-batch-size", "4 replicas"),
    ],
)
def test_check_flags_names_the_flag_of_an_impossible_run(words: str, severity: str, flag: str, said: str) -> None:
    (fault,) = faults(words)
    assert (fault.severity, fault.flag, said in fault.problem) == (severity, flag, True)


FINE = f"""
--lr=-1e-5 | --lr 1e-6 {BLANK} | --rampup-batch-size 1 2 3 | --eval-prompt-data aime a.jsonl gsm8k b.jsonl
--sglang-context-length=128Ki --sglang-max-total-tokens 25.6k | --apply-chat-template
{BATCHES} 16 | {BATCHES} 12 --num-steps-per-rollout 2 | {BATCHES} 64 --num-rollout=0
{REPLICAS} {BATCHES} 32 | {GPUS} {BATCHES} 32 | {REPLICAS} {BATCHES} 32 --actor-num-nodes $NODES
{REPLICAS} --actor-num-nodes 3 {BATCHES} 32 --debug-rollout-only
{REPLICAS} --actor-num-nodes 3 {BATCHES} 32 --decrease-batch-size-if-needed
{REPLICAS} --n-samples-per-prompt 8 --num-steps-per-rollout 8
"""


@pytest.mark.parametrize("words", [words.strip() for line in FINE.splitlines()[1:] for words in line.split(" | ")])
def test_check_flags_accepts_flags_that_slime_accepts(words: str) -> None:
    assert faults(words) == []


def test_check_flags_stray_word_is_an_error() -> None:
    assert [fault.flag for fault in findings_of(["stray", *WHOLE.split()]).findings] == ["stray"]
    assert findings_of(["<SLIME_DIR>", *WHOLE.split()]).findings == ()


def test_check_flags_hides_secrets() -> None:
    found = faults("--wandb-key hush hush --wandb-key=hush hush")
    assert [fault.severity for fault in found] == ["error"]
    assert not any("hush" in fault.line() for fault in found)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.delenv("SLIME_DIR", raising=False)

    def write(text: str) -> Path:
        (tmp_path / "run.sh").write_text(text)
        return tmp_path / "run.sh"

    return write


def test_report_flags_lists_faults_and_sources(script, capsys) -> None:
    assert report_flags(script(GOOD), as_json=True)
    assert json.loads(capsys.readouterr().out)["ok"]
    assert report_flags(script(GOOD), as_json=False)
    shown = capsys.readouterr().out
    assert "run.sh: 3\n" in shown
    assert "Megatron-LM: recorded, commit" in shown
    assert shown.endswith("all known\n")
    file = script(GOOD.replace("--lr", "--lrr"))
    assert not report_flags(file, as_json=False)
    shown = capsys.readouterr().out
    assert "\nerror: --lrr: no parser knows it" in shown
    assert shown.endswith("errors: 1, warnings: 0\n")


def test_report_flags_strict_fails_on_a_warning(script, capsys) -> None:
    file = script(f"python3 slime/train.py {WHOLE} {BATCHES} 12\n")
    done = [CliRunner().invoke(app, ["doctor", "--flags", str(file), "--json", *more]) for more in ([], ["--strict"])]
    assert [(one.exit_code, json.loads(one.stdout)["ok"]) for one in done] == [(0, True), (1, False)]


def test_report_flags_refuses_input_without_flags(script: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no flag"):
        report_flags(script("echo hello\n"), as_json=False)
    with pytest.raises(ConfigError, match="expected a checkout"):
        report_flags(script(GOOD), as_json=False, slime_dir=tmp_path)
