"""The doctor on the machine: Python and packages, GPUs, disks, limits, proxies, Ray, wandb and the sandbox."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import dead_url
from processes import ends
from stand_in_machine import assert_fault, installed, only, program, question

from strands_rollout.code_tool import SandboxReport
from strands_rollout.diagnostics import machine
from strands_rollout.diagnostics.diagnosis import Finding
from strands_rollout.diagnostics.machine import (
    Place,
    check_disk,
    check_gpus,
    check_packages,
    check_proxies,
    check_ray,
    check_sandbox,
    check_wandb,
    judge_sandbox,
)

OURS = "strands-rollout"
GPU = "echo '{}, NVIDIA H100 80GB HBM3, 81559, 570.1'"
TWO_GPUS = f"{GPU.format(0)}; {GPU.format(1)}"
KEY = "0123456789abcdef0123456789abcdef01234567"
PROXY = {"http_proxy": "http://user:secret@proxy.example:3128", "SLIME_HOST_IP": "10.1.2.3"}
LACKING = SandboxReport({"limits": "some"}, {"files": "no Landlock"}, "seccomp", 0.5)


def test_this_environment_is_as_required() -> None:
    packages = check_packages()
    assert [finding.status for finding in (*machine.check_python(), packages[0])] == ["ok", "ok"]
    assert packages[0].facts["versions"][OURS]
    assert "error" not in {finding.status for finding in packages}


def test_a_python_that_is_too_old_is_an_error(tmp_path: Path) -> None:
    installed(tmp_path, OURS, "0.1.0")
    assert_fault(
        machine.check_python("3.10.4", [str(tmp_path)]), "python", "error", "3.10.4", ">=3.11", remedy=">=3.11"
    )


@pytest.mark.parametrize(
    ("version", "status", "word", "remedy"),
    [
        ("1.50.0", "error", "1.50.0; expected <2,>=1.51: too old", "pip install 'strands-agents"),
        ("2.1.0", "warning", "newer", "pip install"),
        ("one", "error", "can't be read", "--force-reinstall"),
        (None, "error", "not installed; expected <2,>=1.51", "pip install 'strands-agents<2,>=1.51'"),
    ],
)
def test_a_required_package_of_another_version_is_named_with_what_installs_it(
    version: str | None, status: str, word: str, remedy: str, tmp_path: Path
) -> None:
    installed(tmp_path, OURS, "0.1.0", ["strands-agents<2,>=1.51"])
    if version is not None:
        installed(tmp_path, "strands-agents", version)
    assert_fault(check_packages([str(tmp_path)]), "package strands-agents", status, word, remedy=remedy)


def test_an_optional_package_counts_where_it_is_installed_only(tmp_path: Path) -> None:
    requires = ['ray>=2.40; extra == "ray"', 'wandb>=0.21; extra == "wandb"', 'mypy>=1.18; extra == "dev"']
    installed(tmp_path, OURS, "0.1.0", requires, ["ray", "wandb", "dev"])
    installed(tmp_path, "wandb", "0.15.0")
    installed(tmp_path, "mypy", "1.0")
    found = check_packages([str(tmp_path)])
    assert_fault(found, "package wandb", "warning", "0.15.0", "too old", remedy="wandb>=0.21")
    assert [finding.name for finding in found] == ["packages", "package wandb"]


def test_what_an_extra_of_a_requirement_asks_for_is_checked_too(tmp_path: Path) -> None:
    installed(tmp_path, OURS, "0.1.0", ["math-verify[antlr4-13-2]>=0.9"])
    requires = ['antlr4-python3-runtime==4.13.2; extra == "antlr4_13_2"']
    installed(tmp_path, "math-verify", "0.9.0", requires, ["antlr4_13_2"])
    installed(tmp_path, "antlr4-python3-runtime", "4.9.3")
    found = check_packages([str(tmp_path)])
    assert_fault(found, "package antlr4-python3-runtime", "error", "4.9.3", remedy="==4.13.2")


@pytest.mark.parametrize(
    ("env", "asked", "status", "words", "remedy"),
    [
        ({}, {"gpus": 2}, "ok", "2 GPUs: NVIDIA H100 80GB HBM3 with 80 GiB; driver 570.1", None),
        ({}, {"gpus": 8}, "error", "8 were asked for", "--gpus 2"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"gpus": 2}, "error", "1 GPUs of 2 (CUDA_VISIBLE_DEVICES=1)", "--gpus 1"),
        ({"NUM_GPUS": "4"}, {}, "error", "4 were asked for", "NUM_GPUS=2"),
        ({"NUM_GPUS": "8"}, {"gpus": 4}, "error", "4 were asked for", "NUM_GPUS=2"),
        ({"NUM_GPUS": "all"}, {}, "error", "'all'", "NUM_GPUS=8"),
        ({}, {"training": True}, "error", "8 were asked for", "--gpus 2"),
        ({"RAY_ADDRESS": "http://elsewhere:8265"}, {"training": True}, "ok", "2 GPUs", None),
        # the following without nvidia-smi
        ({"PATH": ""}, {}, "warning", "no nvidia-smi", "--gpus all"),
        ({"PATH": ""}, {"gpus": 8}, "error", "8 were asked for", "--gpus all"),
        ({"PATH": ""}, {"gpus": 0}, "warning", "no nvidia-smi", "--gpus all"),
        ({"PATH": "", "RAY_ADDRESS": "http://elsewhere:8265"}, {"training": True}, "warning", "", "--gpus all"),
    ],
)
def test_gpus_are_counted_and_compared_with_what_is_asked_for(
    env: dict[str, str], asked: dict[str, Any], status: str, words: str, remedy: str | None, tmp_path: Path
) -> None:
    with_gpus = program(tmp_path / "bin", "nvidia-smi", TWO_GPUS)
    found = only(check_gpus(question(tmp_path, {**with_gpus, **env}, **asked)), "gpus")
    assert (found.status, words in found.found, (remedy or "") in (found.remedy or "")) == (status, True, True), found
    assert (found.remedy is None) == (remedy is None)


@pytest.mark.parametrize(
    ("chosen", "count"),
    [("0,1", 2), ("5", 0), ("0,5,1", 1), ("-1,0", 0), ("", 0), ("1, 0", 2), ("GPU-8a3f,GPU-9b", 2)],
)
def test_hidden_gpus_are_counted_as_cuda_does(chosen: str, count: int, tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", TWO_GPUS)
    found = only(check_gpus(question(tmp_path, {**env, "CUDA_VISIBLE_DEVICES": chosen}, gpus=0)), "gpus")
    assert found.found.startswith(f"{count} GPUs of 2")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Failed to initialize NVML: Driver mismatch'; exit 18", "failed: Failed to initialize NVML: Driver mis"),
        ("echo 'No devices were found'", "lists no GPU: No devices were found"),
    ],
)
def test_a_driver_that_fails_is_quoted(script: str, words: str, tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", script)
    assert_fault(check_gpus(question(tmp_path, env)), "gpus", "warning", words, remedy="nvidia-smi")


def test_a_driver_that_hangs_does_not_hang_the_doctor(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", f"sleep 60 & echo $! > {tmp_path / 'pid'}; sleep 60")
    found = check_gpus(question(tmp_path, env, gpus=8), limit_s=0.2)
    assert_fault(found, "gpus", "error", "did not answer within 0.2 s", remedy="nvidia-smi")
    pid = tmp_path / "pid"
    started = pid.read_text() if pid.is_file() else ""  # "": it was ended before it came so far
    assert not started or ends(int(started))


@pytest.mark.parametrize(("enough", "least", "status"), [(1e6, 0, "warning"), (1e6, 1e6, "error")])
def test_a_disk_with_too_little_room_is_named(enough: float, least: float, status: str, tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "there"
    found = check_disk([Place("checkpoints", path, enough, least, "SAVE_DIR")])
    assert_fault(found, "disk: checkpoints", status, str(path), "GB", remedy="SAVE_DIR")
    assert [finding.status for finding in check_disk([Place("models", path, 0, 0, "MODEL_DIR")])] == ["ok"]


def test_a_file_where_a_folder_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "models").touch()
    found = check_disk([Place("models", tmp_path / "models" / "Qwen3-8B", 0, 0, "MODEL_DIR")])
    assert_fault(found, "disk: models", "error", "is a file", remedy="MODEL_DIR")


def test_the_places_of_a_run_are_those_of_its_environment(tmp_path: Path) -> None:
    env = {"SAVE_DIR": "/a", "MODEL_DIR": "/b", "DATA_DIR": "/c", "TMPDIR": "/d"}
    assert [str(place.path) for place in machine.places_of(question(tmp_path, env))] == ["/a", "/b", "/c", "/d"]
    assert machine.places_of(question(tmp_path))[0].path == tmp_path / "checkpoints"


@pytest.mark.parametrize(
    ("look", "name", "words", "remedy"),
    [
        (lambda: machine.check_shared_memory(Path("/"), enough_gb=1e9), "shared memory", "at /; NCCL", "--shm-size"),
        (lambda: machine.check_open_files(1024), "open files", "1024", "ulimit -n 65535"),
        (lambda: machine.check_memory(8.0), "memory", "8 GB", "32 GB"),
        (lambda: check_proxies({**PROXY, "no_proxy": "localhost,127.0.0.1"}), "proxies",
         "http_proxy set without no_proxy for 10.1.2.3", "export no_proxy=localhost,127.0.0.1,10.1.2.3"),
    ],
    ids=["shared memory", "open files", "memory", "proxies"],
)  # fmt: skip
def test_what_is_too_little_or_in_the_way_is_a_warning(
    look: Callable[[], list[Finding]], name: str, words: str, remedy: str
) -> None:
    assert_fault(look(), name, "warning", words, remedy=remedy)
    assert "secret" not in repr(look())


def test_enough_of_everything_is_fine() -> None:
    proxies = [{}, {**PROXY, "no_proxy": "127.0.0.1, 10.1.2.3"}, {**PROXY, "NO_PROXY": "*"}]
    limits = [machine.check_open_files(100_000), machine.check_memory(512.0)]
    found = [machine.check_shared_memory(Path("/"), enough_gb=0), *limits, *map(check_proxies, proxies)]
    assert [finding.status for findings in found for finding in findings] == ["ok"] * 6


@pytest.mark.parametrize("address", ["http://127.0.0.1:{}", "127.0.0.1:{}", "ray://127.0.0.1:{}", "http://:x"])
def test_a_ray_address_at_which_nothing_listens_is_an_error(address: str) -> None:
    address = address.format(dead_url().rpartition(":")[2])
    found = check_ray({"RAY_ADDRESS": address}, installed=True)
    assert_fault(found, "ray cluster", "error", address, remedy="unset RAY_ADDRESS")


def test_a_ray_that_listens_is_found(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "ray", "true")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        given_port = check_ray({**env, "RAY_ADDRESS": f"http://127.0.0.1:{port}"}, installed=True)
        default_port = check_ray({**env, "RAY_ADDRESS": "127.0.0.1", "RAY_DASHBOARD_PORT": str(port)}, installed=True)
    assert [finding.status for finding in (*given_port, *default_port)] == ["ok"] * 4


@pytest.mark.parametrize("address", ["http://me:hunter2@127.0.0.1:{port}?token=hunter2", "me:hunter2@127.0.0.1:{port}"])
def test_a_password_in_rays_address_is_not_shown(address: str) -> None:
    port = dead_url().rpartition(":")[2]
    found = check_ray({"RAY_ADDRESS": address.format(port=port)}, installed=True)
    assert_fault(found, "ray cluster", "error", f"127.0.0.1:{port}, but", remedy="unset RAY_ADDRESS")
    broken = check_ray({"RAY_ADDRESS": address.format(port="hunter2")}, installed=True)
    assert_fault(broken, "ray cluster", "error", "RAY_ADDRESS is", remedy="unset RAY_ADDRESS")
    assert "hunter2" not in repr([*found, *broken])


@pytest.mark.parametrize(
    ("installed", "training", "status", "word", "remedy"),
    [
        (False, False, "warning", "not installed", "pip install"),
        (False, True, "error", "not installed", "pip install"),
        (True, True, "error", "PATH", "activate"),
    ],
)
def test_a_missing_ray_is_a_warning_or_ends_a_training_run(
    installed: bool, training: bool, status: str, word: str, remedy: str
) -> None:
    assert_fault(check_ray({}, installed=installed, training=training), "ray", status, word, remedy=remedy)


@pytest.mark.parametrize("key", [f" {KEY}", f"{KEY}\n", f'"{KEY}"', "$WANDB_KEY", "abc"])
@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_KEY"])
def test_a_malformed_wandb_key_is_an_error_that_does_not_show_it(name: str, key: str) -> None:
    found = check_wandb({name: key}, installed=True)
    assert_fault(found, "wandb", "error", name, remedy="export WANDB_API_KEY")
    assert key.strip() not in repr(found).replace("WANDB_KEY has", "")


@pytest.mark.parametrize(
    ("env", "netrc", "installed", "start"),
    [
        ({}, False, True, "off: no key"),
        ({"WANDB_API_KEY": KEY}, False, True, "on: WANDB_API_KEY"),
        ({"WANDB_API_KEY": f"local-{KEY}"}, False, True, "on: WANDB_API_KEY"),
        ({"WANDB_MODE": "offline"}, False, True, "WANDB_MODE=offline"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": KEY}, False, True, "off: WANDB_MODE=disabled"),
        ({}, True, True, "logged in to api.wandb.ai by ~/.netrc"),
        ({"USE_WANDB": "1", "WANDB_API_KEY": KEY}, False, True, "on"),
        ({"USE_WANDB": "1", "WANDB_MODE": "offline"}, False, True, "WANDB_MODE"),
        ({"USE_WANDB": "1"}, True, True, "logged in"),
        ({"USE_WANDB": "1", "NETRC": "mine"}, True, True, "logged in"),
        ({"USE_WANDB": "0", "WANDB_API_KEY": KEY}, False, False, "off: USE_WANDB=0"),
    ],
)
def test_wandb_is_off_or_on_as_the_environment_says(
    env: dict[str, str], netrc: bool, installed: bool, start: str, tmp_path: Path
) -> None:
    if netrc:
        file = Path(env.get("NETRC") or ".netrc")
        (tmp_path / file).write_text(f"machine api.wandb.ai login user password {KEY}\n")
        env = {**env, "NETRC": str(tmp_path / file)} if "NETRC" in env else env
    (found,) = check_wandb({"HOME": str(tmp_path), **env}, installed=installed)
    assert (found.status, found.found.startswith(start), KEY in repr(found)) == ("ok", True, False), found


@pytest.mark.parametrize(
    ("env", "installed", "status", "words", "remedy"),
    [
        ({"USE_WANDB": "1"}, True, "error", "USE_WANDB", "export WANDB_API_KEY"),
        ({"WANDB_API_KEY": KEY}, False, "error", "not installed", "strands-rollout[wandb]"),
        ({"WANDB_API_KEY": KEY, "WANDB_KEY": KEY[::-1]}, True, "warning", "differ", "unset WANDB_KEY"),
        ({"WANDB_MODE": "of"}, True, "error", "'of'", "WANDB_MODE="),
    ],
)
def test_wandb_faults_are_named(
    env: dict[str, str], installed: bool, status: str, words: str, remedy: str, tmp_path: Path
) -> None:
    found = check_wandb({"HOME": str(tmp_path), **env}, installed=installed)
    assert_fault(found, "wandb", status, words, remedy=remedy)


def test_a_missing_layer_is_an_error_with_both_ways_out_if_it_was_asked_for() -> None:
    found = judge_sandbox(LACKING, "full", 1.0)
    assert_fault(found, "sandbox files", "error", "MISSING", "no Landlock", remedy="isolation: seccomp")
    assert "Landlock (Linux 5.13" in (only(found, "sandbox files").remedy or "")
    assert "not root" in only(found, "sandbox user").found
    unasked = only(judge_sandbox(LACKING, "seccomp", 1.0), "sandbox files")
    assert (unasked.status, "no Landlock" in unasked.found) == ("skipped", True)


def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert_fault(check_sandbox("rlimits"), "sandbox", "error", "does not start", remedy="another executor")
