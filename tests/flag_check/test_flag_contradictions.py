"""Flags that slime takes one by one and refuses together."""

from __future__ import annotations

import pytest

from strands_rollout.flag_check.findings import Finding
from strands_rollout.flag_check.judgement import check_command

WHOLE = ["--rollout-batch-size", "4", "--num-rollout", "10"]
BATCHES = ["--n-samples-per-prompt", "8", "--global-batch-size", "32"]
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
