"""The doctor on the machine: Python and packages, GPUs, disks, limits, proxies, Ray, wandb and the sandbox."""

import platform
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging import requirements, specifiers, version  # noqa: F401 - before sys.path is replaced
from processes import ends
from stand_in_machine import assert_fault, installed, only, program, question

from strands_rollout.code_tool import SandboxReport
from strands_rollout.diagnostics import doctor
from strands_rollout.diagnostics.doctor import check_gpus, check_packages, check_wandb, judge_sandbox

HERE = Path("nowhere")
OURS = "strands-rollout"
GPU = "echo 'NVIDIA H100 80GB HBM3, 81559, 570.1'"
KEY = "0123456789abcdef0123456789abcdef01234567"
PROXY = {"http_proxy": "http://user:secret@proxy.example:3128", "SLIME_HOST_IP": "10.1.2.3"}
LACKING = SandboxReport({"limits": "some"}, {"files": "no Landlock"}, "seccomp", 0.5)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which packages are looked for."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_a_python_that_is_too_old_is_an_error(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault(check_packages(question(site)), "packages", "error", "is not installed", remedy="pip install")
    installed(site, OURS, "0.1.0")
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.4")
    assert_fault(check_packages(question(site)), "python", "error", "3.10.4", ">=3.11", remedy=">=3.11")


@pytest.mark.parametrize(
    ("present", "status", "words", "remedy"),
    [
        ("1.50.0", "error", "1.50.0; expected <2,>=1.51: too old", "pip install 'strands-agents"),
        ("2.1.0", "warning", "newer", "pip install"),
        (None, "error", "not installed; expected <2,>=1.51", "pip install 'strands-agents<2,>=1.51'"),
    ],
)
def test_a_required_package_of_another_version_is_named_with_what_installs_it(
    present: str | None, status: str, words: str, remedy: str, site: Path
) -> None:
    installed(site, OURS, "0.1.0", ["strands-agents<2,>=1.51"])
    if present is not None:
        installed(site, "strands-agents", present)
    assert_fault(check_packages(question(site)), "package strands-agents", status, words, remedy=remedy)


@pytest.mark.parametrize(
    ("env", "asked", "status", "words", "remedy"),
    [
        ({}, {"gpus": 2}, "ok", "2 GPUs: NVIDIA H100 80GB HBM3 with 81559 MiB; driver 570.1", None),
        ({}, {"gpus": 8}, "error", "8 were asked for", "--gpus 2"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"gpus": 2}, "error", "1 GPUs of 2 (CUDA_VISIBLE_DEVICES=1)", "--gpus 1"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {"gpus": 0}, "ok", "0 GPUs of 2", None),
        ({"NUM_GPUS": "8"}, {"gpus": 4}, "error", "4 were asked for", "NUM_GPUS=2"),
        ({}, {"training": True}, "error", "8 were asked for", "--gpus 2"),
        ({"RAY_ADDRESS": "http://elsewhere:8265"}, {"training": True}, "ok", "2 GPUs", None),
        # the following without nvidia-smi
        ({"PATH": ""}, {}, "warning", "no nvidia-smi", "--gpus all"),
        ({"PATH": "", "RAY_ADDRESS": "http://elsewhere:8265"}, {"training": True}, "warning", "", "--gpus all"),
    ],
)
def test_gpus_are_counted_and_compared_with_what_is_asked_for(
    env: dict[str, str], asked: dict[str, Any], status: str, words: str, remedy: str | None, tmp_path: Path
) -> None:
    with_gpus = program(tmp_path / "bin", "nvidia-smi", f"{GPU}; {GPU}")
    found = only(check_gpus(question(tmp_path, {**with_gpus, **env}, **asked)), "gpus")
    assert (found.status, words in found.found, (remedy or "") in (found.remedy or "")) == (status, True, True), found
    assert (found.remedy is None) == (remedy is None)


def test_a_driver_that_hangs_does_not_hang_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SMI_S", 0.2)
    env = program(tmp_path / "bin", "nvidia-smi", f"sleep 60 & echo $! > {tmp_path / 'pid'}; sleep 60")
    found = check_gpus(question(tmp_path, env, gpus=8))
    assert_fault(found, "gpus", "error", "did not answer within 0.2 s", remedy="nvidia-smi")
    pid = tmp_path / "pid"
    started = pid.read_text() if pid.is_file() else ""  # "": it was ended before it came so far
    assert not started or ends(int(started))


def test_a_proxy_between_engines_and_router_is_a_warning_that_shows_no_password() -> None:
    def found(env: dict[str, str]) -> Any:
        return only(doctor.check_proxies(question(HERE, env)), "proxies")

    for env in ({}, {**PROXY, "no_proxy": "127.0.0.1, 10.1.2.3"}, {**PROXY, "NO_PROXY": "*"}):
        assert found(env).status == "ok"
    proxied = found({**PROXY, "no_proxy": "localhost,127.0.0.1"})
    words, remedy = "http_proxy set without no_proxy for 10.1.2.3", "export no_proxy=localhost,127.0.0.1,10.1.2.3"
    assert_fault([proxied], "proxies", "warning", words, remedy=remedy)
    assert "secret" not in repr(proxied)
    assert "without no_proxy for 127.0.0.1" in found({"all_proxy": "http://proxy.example"}).found


@pytest.mark.parametrize(
    ("env", "is_installed", "status", "words"),
    [
        ({}, True, "ok", "off"),
        ({"WANDB_API_KEY": KEY}, True, "ok", "on: WANDB_API_KEY"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": KEY}, False, "ok", "off"),
        ({"WANDB_API_KEY": KEY}, False, "error", "not installed"),
    ],
)
def test_wandb_must_be_installed_where_it_is_on(
    env: dict[str, str], is_installed: bool, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: is_installed or None)
    found = only(check_wandb(question(HERE, env)), "wandb")
    assert (found.status, words in found.found) == (status, True), found
    assert KEY not in repr(found)


def test_a_missing_layer_is_an_error_with_both_ways_out_if_it_was_asked_for() -> None:
    found = list(judge_sandbox(LACKING, "full"))
    assert_fault(found, "sandbox files", "error", "MISSING", "no Landlock", remedy="isolation: seccomp")
    assert "Landlock (Linux 5.13" in (only(found, "sandbox files").remedy or "")
    assert "not root" in only(found, "sandbox user").found
    unasked = only(judge_sandbox(LACKING, "seccomp"), "sandbox files")
    assert (unasked.status, "no Landlock" in unasked.found) == ("skipped", True)


def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    found = doctor.check_sandbox(question(HERE, isolation="rlimits"))
    assert_fault(found, "sandbox", "error", "does not start", remedy="another executor")
