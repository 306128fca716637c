"""Flags that slime takes one by one and refuses together."""

from __future__ import annotations

import pytest

from strands_rollout.flag_check.findings import Finding
from strands_rollout.flag_check.judgement import check_command

WHOLE = ["--rollout-batch-size", "4", "--num-rollout", "10"]
BATCHES = ["--n-samples-per-prompt", "8", "--global-batch-size", "32"]
DELTA = [
    *("--update-weight-mode", "delta", "--update-weight-transport", "disk", "--update-weight-disk-dir", "shared"),
    *("--update-weight-local-checkpoint-dir", "local"),
]
EVAL = ["--eval-interval", "5", "--eval-prompt-data", "aime", "aime.jsonl"]
FULLY_ASYNC = ["--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"]
OUR_GENERATE = ["--custom-generate-function-path", "strands_rollout.generate"]


def faults(*words: str, program: str = "train.py") -> list[Finding]:
    whole = [] if "--num-rollout=0" in words else WHOLE[2:]
    return list(check_command([*WHOLE[:2], *whole, *words], program=program).findings)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--use-tis", "--use-rollout-logprobs"], "--use-rollout-logprobs"),
        (["--kl-coef", "0.1", "--kl-loss-coef", "0.1"], "--kl-loss-coef"),
        (["--over-sampling-batch-size", "3"], "--over-sampling-batch-size"),
        (["--eval-interval", "5"], "--eval-interval"),
        (["--save-interval", "5"], "--save-interval"),
        (["--use-dynamic-batch-size"], "--use-dynamic-batch-size"),
        (["--n-samples-per-prompt", "8", "--global-batch-size", "64"], "--global-batch-size"),
        ([*BATCHES, "--num-steps-per-rollout", "2"], "--global-batch-size"),
        ([*OUR_GENERATE, "--apply-chat-template"], "--apply-chat-template"),
        (["--rollout-temperature", "0"], "--rollout-temperature"),
        (["--advantage-estimator", "reinforce_plus_plus"], "--advantage-estimator"),
        (["--advantage-estimator=reinforce_plus_plus_baseline"], "--advantage-estimator"),
        ([*DELTA, "--colocate"], "--update-weight-mode"),
        ([*DELTA[:2], *DELTA[4:]], "--update-weight-mode"),
        (DELTA[:6], "--update-weight-mode"),
        (["--update-weight-transport", "disk"], "--update-weight-transport"),
        (["--use-opd"], "--use-opd"),
        (["--use-opd", "--opd-type", "megatron"], "--opd-type"),
        (["--use-opd", "--opd-type", "sglang", "--opd-teacher-load", "teacher"], "--opd-teacher-load"),
        (["--opd-teacher-load", "teacher"], "--opd-teacher-load"),
        (["--eval-prompt-data", "aime", "aime.jsonl", "gsm8k"], "--eval-prompt-data"),
        (["--rollout-max-prompt-len", "8", "--rollout-max-context-len", "8"], "--rollout-max-prompt-len"),
        ([*FULLY_ASYNC, *EVAL], "--eval-interval"),
        ([*FULLY_ASYNC, *EVAL, "--eval-function-path", FULLY_ASYNC[1]], "--eval-interval"),
    ],
)
def test_a_contradiction_is_an_error_at_its_flag(words: list[str], flag: str) -> None:
    assert [(fault.severity, fault.flag) for fault in faults(*words)] == [("error", flag)]


@pytest.mark.parametrize(
    "words",
    [
        ["--use-tis"],
        ["--kl-coef", "0", "--kl-loss-coef", "0.1"],
        ["--over-sampling-batch-size", "4"],
        ["--eval-interval", "5", "--eval-prompt-data", "aime", "aime.jsonl"],
        ["--eval-interval", "5", "--eval-config", "eval.yaml"],
        ["--save-interval", "5", "--save", "out"],
        ["--n-samples-per-prompt", "8", "--global-batch-size", "16"],
        ["--n-samples-per-prompt", "8", "--global-batch-size", "16", "--num-steps-per-rollout", "2"],
        ["--custom-generate-function-path", "mine.generate", "--apply-chat-template"],
        ["--n-samples-per-prompt", "8", "--global-batch-size", "64", "--num-rollout=0"],
        ["--colocate"],
        ["--rollout-temperature", "0.1"],
        ["--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"],
        DELTA,
        [*DELTA, "--colocate", "--debug-rollout-only"],
        ["--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "teacher"],
        ["--use-opd", "--opd-type", "sglang"],
        ["--eval-prompt-data", "aime.jsonl"],
        ["--eval-prompt-data", "aime", "aime.jsonl", "gsm8k", "--eval-config", "eval.yaml"],
        ["--rollout-max-prompt-len", "7", "--rollout-max-context-len", "8"],
        FULLY_ASYNC,
        [*FULLY_ASYNC, *EVAL, "--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout"],
        ["--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"],
        ["--rollout-num-gpus", "3"],
        ["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2", "--sglang-config", "engines.yaml"],
    ],
)
def test_what_slime_takes_together_is_no_fault(words: list[str]) -> None:
    assert faults(*words) == []


def test_samples_that_do_not_fill_the_last_step_are_a_warning() -> None:
    (fault,) = faults("--n-samples-per-prompt", "8", "--global-batch-size", "12")

    assert fault.severity == "warning"
    assert "the last 8 are not trained on" in fault.problem


def test_colocation_is_refused_by_asynchronous_training_only() -> None:
    (fault,) = faults("--colocate", program="train_async.py")

    assert fault.flag == "--colocate"


def test_what_slime_does_not_start_without_is_missed() -> None:
    found = check_command(["--lr", "1e-6"]).findings

    assert [fault.flag for fault in found] == ["--rollout-batch-size", "--num-rollout"]


def test_gpus_that_no_engine_gets_are_a_warning() -> None:
    (fault,) = faults("--rollout-num-gpus", "7", "--rollout-num-gpus-per-engine", "2")

    assert (fault.severity, fault.flag) == ("warning", "--rollout-num-gpus")
    assert "1 stay unused" in fault.problem


def test_what_a_configuration_file_may_still_change_is_a_warning() -> None:
    (fault,) = faults(
        "--rollout-max-prompt-len", "8", "--rollout-max-context-len", "8", "--custom-config-path", "x.yaml"
    )

    assert fault.severity == "warning"
    assert "unless the file of --custom-config-path says otherwise" in fault.problem


@pytest.mark.parametrize("value", ["<|im_end|>", "<SLIME>", "a<b"])
def test_a_value_in_angle_brackets_does_not_stop_the_search_for_what_is_lacking(value: str) -> None:
    found = check_command(["--rollout-batch-size", "4", "--rollout-stop", value, "--eval-interval", "5"]).findings

    assert [fault.flag for fault in found] == ["--eval-interval", "--num-rollout"]


@pytest.mark.parametrize("open_end", ["<SLIME_DIR>", "<MODEL_ARGS of scripts/models/qwen3-8B.sh in slime>"])
def test_a_dry_runs_placeholder_may_stand_for_what_is_lacking(open_end: str) -> None:
    assert check_command([open_end, "--rollout-batch-size", "4", "--eval-interval", "5"]).findings == ()
