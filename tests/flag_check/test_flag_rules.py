"""What is said about a command's flags, rule by rule, by the recorded list."""

from __future__ import annotations

import pytest

from strands_rollout.flag_check.findings import Finding
from strands_rollout.flag_check.judgement import check_command

WHOLE = ["--rollout-batch-size", "4", "--num-rollout", "10"]  # what slime does not start without


def faults(*words: str, program: str = "train.py") -> list[Finding]:
    return list(check_command([*WHOLE, *words], program=program).findings)


@pytest.mark.parametrize(
    ("typo", "nearest", "system"),
    [
        (["--rollout-max-respone-len", "1024"], "--rollout-max-response-len", "slime"),
        (["--colocat"], "--colocate", "slime"),
        (["--rollout-temp", "1"], "--rollout-temperature", "slime"),
        (["--tensor-model-paralel-size", "2"], "--tensor-model-parallel-size", "Megatron-LM"),
        (["--sequence_parallel"], "--sequence-parallel", "Megatron-LM"),
        (["--sglang-mem-fracton-static", "0.7"], "--sglang-mem-fraction-static", "SGLang"),
        (["--mem-fraction-static", "0.7"], "--sglang-mem-fraction-static", "SGLang"),
        (["--ep-size", "2"], "--sglang-ep-size", "SGLang"),
        (["--router-polcy", "random"], "--router-policy", "SGLang's router"),
    ],
)
def test_a_misspelled_flag_is_an_error_that_names_the_nearest_one_and_whose_it_is(
    typo: list[str], nearest: str, system: str
) -> None:
    (fault,) = faults(*typo)

    assert (fault.severity, fault.flag, fault.nearest) == ("error", typo[0], nearest)
    assert f"{nearest} ({system})" in fault.problem


def test_a_word_like_no_flag_is_an_error_without_a_guess() -> None:
    (fault,) = faults("--zzzqqq", "1")

    assert fault.severity == "error"
    assert fault.nearest is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--colocate", "true"], "further word 'true'"),
        (["--colocate=true"], "expected none"),
        (["--lr"], "expected a value"),
        (["--eval-prompt-data"], "expected a value"),
        (["--lr", "--colocate"], "got the flag --colocate next"),
        (["--lr", "-1e-5"], "needs --lr=VALUE"),
        (["--lr", "1e-6", "2e-6"], "further word '2e-6'"),
        (["--lr=1e-6", "2e-6"], "further word '2e-6'"),
        (["--lr", "abc"], "expected a number"),
        (["--lr=abc"], "expected a number"),
        (["--n-samples-per-prompt", "2.5"], "expected a whole number"),
        (["--rampup-batch-size", "1", "2"], "expected 3 values"),
        (["--apply-chat-template-kwargs", "{thinking: false}"], "expected JSON"),
        (["--advantage-estimator", "grop"], "expected one of grpo"),
        (["--onnx-safe", "False"], "reads any word as true"),
        (["--sglang-context-length", "abc"], "expected a whole number, such as"),
        (["--sglang-context-length", "1.5Ki"], "expected a whole number, such as"),
    ],
)
def test_a_value_that_the_parser_does_not_take_is_an_error(words: list[str], said: str) -> None:
    fault = next(fault for fault in faults(*words) if fault.flag == words[0].partition("=")[0])

    assert fault.severity == "error"
    assert said in fault.problem


@pytest.mark.parametrize(
    "words",
    [
        ["--lr=1e-6"],
        ["--rollout-top-k", "-1"],
        ["--lr=-1e-5"],
        ["--rampup-batch-size", "1", "2", "3"],
        ["--eval-prompt-data", "aime", "a.jsonl", "gsm8k", "b.jsonl"],
        ["--apply-chat-template-kwargs", '{"enable_thinking": false}'],
        ["--no-offload-train"],
        ["--advantage-estimator", "gspo"],
        ["--attention-backend", "flash"],
        ["--debug-rollout-only", "--train-backend", "megatron"],
        ["--sglang-context-length", "131072"],
        ["--sglang-context-length=128Ki", "--sglang-max-total-tokens", "25.6k"],
        ["--sglang-config", "engines.yaml"],
        ["--rollout-sample-hook-path", "a.b", "--rollout-sample-hook-path", "c.d"],
    ],
)
def test_what_the_parsers_take_is_no_fault(words: list[str]) -> None:
    assert faults(*words) == []


def test_a_flag_given_twice_is_a_warning_that_says_which_value_wins() -> None:
    (fault,) = faults("--lr", "1e-6", "--lr", "2e-6")

    assert fault.severity == "warning"
    assert "the last wins: '2e-6'" in fault.problem
    assert check_command([*WHOLE, "--lr", "1e-6", "--lr", "2e-6"]).ok


def test_two_names_of_one_flag_are_the_same_flag() -> None:
    (fault,) = faults("--sglang-dp-size", "1", "--sglang-data-parallel-size", "2")

    assert fault.severity == "warning"


def test_a_beginning_that_sglangs_parser_completes_is_an_error_with_the_whole_flag() -> None:
    (fault,) = faults("--sglang-mem-fraction", "0.7")

    assert fault.nearest == "--sglang-mem-fraction-static"
    assert "takes it for" in fault.problem


def test_a_beginning_of_several_flags_is_an_error_because_sglangs_parser_stops() -> None:
    (fault,) = faults("--sglang-disable", "1")

    assert "parser stops" in fault.problem


@pytest.mark.parametrize(
    ("flag", "instead"),
    [("--sglang-model-path", "--hf-checkpoint"), ("--sglang-tp-size", "--rollout-num-gpus-per-engine")],
)
def test_a_flag_that_slime_keeps_from_sglang_is_an_error_that_names_what_to_set(flag: str, instead: str) -> None:
    (fault,) = faults(flag, "4")

    assert fault.nearest == instead
    assert "drops yours" in fault.problem


def test_two_hyphens_alone_are_an_error() -> None:
    assert [fault.flag for fault in faults("--")] == ["--"]


def test_a_word_that_no_flag_takes_is_an_error() -> None:
    findings = check_command(["stray", *WHOLE])

    assert [fault.flag for fault in findings.findings] == ["stray"]


def test_a_word_with_a_blank_may_be_a_value_to_the_parser_that_does_not_know_its_flag() -> None:
    joined = '--sglang-json-model-override-args={"a": 1}'
    (fault,) = faults("--eval-prompt-data", "aime", "a.jsonl", joined)

    assert fault.flag == "--sglang-json-model-override-args"
    assert "write it as two words" in fault.problem
    assert faults("--lr", "1e-6", joined) == []


def test_a_secret_is_not_shown() -> None:
    found = faults("--wandb-key", "hush", "hush", "--wandb-key=hush", "hush")

    assert {fault.severity for fault in found} == {"error", "warning"}
    assert not any("hush" in fault.line() for fault in found)


def test_errors_come_before_warnings() -> None:
    assert [fault.severity for fault in faults("--lr", "1", "--lr", "2", "--colocat")] == ["error", "warning"]
