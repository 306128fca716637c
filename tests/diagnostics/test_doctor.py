"""The doctor: every check runs, no check stops another, the exit code is the verdict.

Servers: dead, loading, not SGLang, too small a context, another vocabulary, behind a router. Machine: Python and
packages, GPUs, disks, limits, proxies, Ray, wandb, sandbox.
"""

import asyncio
import io
import json
import os
import platform
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import dead_url
from packaging import requirements, specifiers, version  # noqa: F401 - before sys.path is replaced
from processes import exits_within
from rich.console import Console
from stand_in_machine import (
    REPOSITORY,
    SHIPPED,
    assert_fault,
    doctor_options,
    find_only,
    serve_json,
    tokenizer_folder,
    write_distribution,
    write_program,
)
from typer.testing import CliRunner

from strands_rollout import diagnostics
from strands_rollout.cli.commands import app
from strands_rollout.code_tool import SandboxReport
from strands_rollout.diagnostics import (
    Check,
    Diagnosis,
    DoctorOptions,
    Finding,
    doctor,
    error,
    good,
    run_checks,
    skipped,
    warning,
)

FINE, DOUBTFUL, BAD, NOT_ASKED = (
    good("a", "fine"),
    warning("b", "hm", "do b"),
    error("c", "bad [red]", "do c"),
    skipped("d", "no"),
)

HERE = Path("nowhere")
OURS = "strands-rollout"
GPU = "echo 'NVIDIA H100 80GB HBM3, 81559, 570.1'"
KEY = "0123456789abcdef0123456789abcdef01234567"
FLAG = "--no-such-flag-of-slime"
PROXY = {"http_proxy": "http://user:secret@proxy.example:3128", "SLIME_HOST_IP": "10.1.2.3"}
LACKING = SandboxReport({"limits": "some"}, {"files": "no Landlock"}, "seccomp", 0.5)


def test_doctor_checks_name_only_the_requested_model(tmp_path: Path) -> None:
    asked = doctor_options(tmp_path, {"SAVE_DIR": "/dev/shm"}, model_name="foo/Foo-14B")
    assert not [
        finding for finding in (*doctor.check_disk(asked), *doctor.check_limits(asked)) if "Qwen" in finding.found
    ]


async def test_run_doctor_passes_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "run_checks", partial(run_checks, timeout_s=250))  # the machine may be busy
    env = {"PATH": os.defpath, "HOME": str(tmp_path)}
    found = await asyncio.to_thread(doctor.run_doctor, doctor_options(REPOSITORY, env, isolation="rlimits"))
    report = json.loads(found.to_json())
    assert (found.ok(), report["ok"]) == (True, True), [one for one in report["checks"] if one["status"] == "error"]
    assert report["versions"]["strands-rollout"]
    assert report["python"]
    missing = {check["name"] for check in report["checks"] if "MISSING" in check["found"]}
    assert missing == {f"sandbox {layer}" for layer in report["sandbox"]["missing"]}
    (limits,) = [check["found"] for check in report["checks"] if check["name"] == "sandbox limits"]
    assert limits.endswith(report["sandbox"]["enforced"]["limits"])
    names = {check["name"].partition(" ")[0].rstrip(":") for check in report["checks"]}
    checked = "python packages slime megatron gpus memory open proxies disk shared ray wandb model tokenizer config"
    assert names >= {*checked.split(), "data", "sandbox", "server"}
    assert all(check["remedy"] for check in report["checks"] if check["status"] in ("warning", "error"))


LAPTOP = [
    warning("slime", "no slime found", "work in the image"),
    warning("gpus", "no GPU here", "use a machine with GPUs"),
    warning("disk: checkpoints", "78 GB free", "free some"),
    warning("data: aime-2024.jsonl", "is not there", "python data_prep/aime_2024.py"),
    warning("proxies", "set without no_proxy", "export no_proxy"),
    error("disk: data", "can't be written to", "free some"),
]


def shown_lines(findings: Sequence[Finding]) -> list[str]:
    out = io.StringIO()
    Diagnosis(findings).show(Console(file=out, width=80))
    return out.getvalue().splitlines()


def test_without_training_folds_findings_into_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_folders", lambda name: [])
    found = doctor.skip_training_warnings(LAPTOP, doctor_options(tmp_path))
    assert [(one.status, one.remedy) for one in found[:4]] == [("skipped", one.remedy) for one in LAPTOP[:4]]
    assert found[4:] == LAPTOP[4:]
    lines = shown_lines(found)
    assert [line.partition(" ")[0] for line in lines if line[:1].strip()] == ["warning", "error", "skipped", "warning:"]
    training = " ".join(" ".join(lines).split()).partition("skipped training: ")[2]
    assert "slime, gpus, disk, data" in training
    assert "strands-rollout doctor --training" in training
    assert lines[-1] == "warning: 1, error: 1, skipped: 1"
    assert Diagnosis(found[:4]).ok(strict=True)


@pytest.mark.parametrize(
    ("env", "asked"),
    [({}, {"training": True}), ({"RAY_ADDRESS": "x"}, {}), ({"SLIME_DIR": "s"}, {}), ({}, {"gpus": 8})],
)
def test_without_training_keeps_findings_where_training_is_meant(env, asked, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "package_folders", lambda name: [])
    assert doctor.skip_training_warnings(LAPTOP, doctor_options(tmp_path, env, **asked)) == LAPTOP


def test_without_training_keeps_findings_on_named_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_folders", lambda name: [])
    found = doctor.skip_training_warnings(LAPTOP, doctor_options(tmp_path, data=[Path("aime-2024.jsonl")]))
    assert found[3] == LAPTOP[3]


def test_diagnosis_show_fits_80_columns_except_commands() -> None:
    found = [good("packages", "as required: " + "package 1.2.3, " * 20), warning("a", "b " * 60, "command " * 20)]
    lines = shown_lines(found)
    assert all(len(line) <= 80 for line in lines if "->" not in line)
    assert lines[1].startswith(" " * 9)


def test_doctor_command_passes_options_and_exits_by_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DoctorOptions] = []

    def find_doubts(options: DoctorOptions, _preflight: object) -> Diagnosis:
        asked.append(replace(options, env={}))
        return Diagnosis([FINE, DOUBTFUL])

    monkeypatch.setattr("strands_rollout.diagnostics.doctor.run_doctor", find_doubts)
    named = "--model-name Qwen3-4B --tokenizer t --config c --data d --data e --slime-dir s --megatron-dir m"
    options = f"--training --gpus 2 --isolation rlimits --base-url http://a:1 --max-context-length 9 {named}"
    done = CliRunner().invoke(app, ["doctor", "--json", *options.split()])
    strict = CliRunner().invoke(app, ["doctor", "--strict"])
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (0, True)
    assert (strict.exit_code, "-> do b" in strict.stdout) == (1, True)
    paths = {"tokenizer": Path("t"), "config": Path("c"), "slime_dir": Path("s"), "megatron_dir": Path("m")}
    given = {"isolation": "rlimits", "base_urls": ["http://a:1"], "data": [Path("d"), Path("e")], "gpus": 2, **paths}
    given |= {"training": True, "model_name": "Qwen3-4B", "max_context_length": 9}
    assert asked == [DoctorOptions({}, REPOSITORY, **given), DoctorOptions({}, REPOSITORY)]


def test_doctor_command_refuses_an_unknown_isolation() -> None:
    done = CliRunner().invoke(app, ["doctor", "--isolation", "none"])
    assert (done.exit_code, "'none' is not one of 'full', 'files', 'seccomp', 'rlimits'" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [["--flags", "launch.txt"], ["--flags", "-"], ["--", FLAG, "3"], ["--flags", "good.txt", "--", FLAG, "3"]],
    ids=["file", "stdin", "arguments", "file and arguments"],
)
def test_doctor_flags_runs_only_the_flag_check(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.txt").write_text(f"python3 train.py {FLAG} 3\n")
    Path("good.txt").write_text("--lr 3\n")
    done = CliRunner().invoke(app, ["doctor", *arguments], input=Path("launch.txt").read_text())
    assert (done.exit_code, f"error: {FLAG}" in done.stdout, "sandbox" in done.stdout) == (1, True, False)


def test_run_checks_continues_after_a_failing_check() -> None:
    """One check crashes, one cannot import a package, one hangs."""
    released = threading.Event()

    def crash(_: DoctorOptions) -> list[Finding]:
        raise KeyError("gone")

    def import_nothing(_: DoctorOptions) -> list[Finding]:
        import no_such_package  # noqa: F401

        return []

    def hang(_: DoctorOptions) -> list[Finding]:
        return [good("slow", str(released.wait()))]

    checks = [Check("a", crash), Check("b", lambda _: [good("b", "fine")]), Check("c", import_nothing)]
    ended = run_checks(checks, doctor_options(Path()))
    assert [finding.name for finding in ended] == ["a", "b", "c"]
    assert_fault(ended, "a", "error", "this is a bug in the check: KeyError: 'gone'", remedy="doctor --json")
    assert_fault(ended, "c", "error", "no_such_package can't be imported", remedy="pip install")
    found = run_checks([Check("slow", hang, waits=True)], doctor_options(Path()), timeout_s=0.1)
    released.set()
    assert_fault(found, "slow", "error", "did not end within 0.1 s", remedy="state D")


def test_run_checks_distinguishes_checks_that_never_started() -> None:
    released = threading.Event()

    def hang(_: DoctorOptions) -> list[Finding]:
        return [good("slow", str(released.wait()))]

    checks = [Check("slow", hang), Check("next", lambda _: [good("next", "fine")])]
    found = run_checks(checks, doctor_options(Path()), timeout_s=0.1)
    released.set()
    assert_fault(found, "slow", "error", "the check did not end within 0.1 s", remedy="state D")
    assert_fault(found, "next", "error", "did not start, because the check 'slow' did not end", remedy="doctor again")


SERVES = {"model_path": "/models/m", "served_model_name": "m", "weight_version": "default"}
UP = {"/health": (200, None)}
SICK = {"workers": [{"url": "http://127.0.0.1:1", "is_healthy": False}]}


def serving(info: dict[str, Any]) -> dict[str, tuple[int, Any]]:
    return {**UP, "/server_info": (200, info)}


async def check_server_at(url: str, timeout_s: float = 15.0, **expected: Any) -> list[Finding]:
    return await asyncio.to_thread(doctor.check_server, url, doctor_options(Path("nowhere"), **expected), timeout_s)


@pytest.mark.parametrize(
    ("routes", "name", "status", "words", "remedy"),
    [
        (serving({**SERVES, "version": "0.4.9"}), "server", "warning", "0.4.9", "sglang>=0.5"),
        ({"/health": (503, None)}, "server", "error", "is up, but not healthy (503)", "wait"),
        ({**UP, "/v1/models": (200, {"data": []})}, "server", "error", "not SGLang", "check the port"),
        ({**UP, "/server_info": (500, None)}, "server", "error", "is up, but fails: got HTTP 500", "log"),
        (serving(SERVES), "server context", "warning", "does not state", "--context-length 20480"),
        ({**UP, "/workers": (200, SICK)}, "server", "error", "1 worker, none of them healthy", "/workers"),
        (
            serving({**SERVES, "context_length": 9}),
            "server context",
            "warning",
            "has a context of 9 tokens; expected at least 20480",
            "length 20",
        ),
    ],
    ids=["too old", "loading", "not SGLang", "failing", "context unknown", "no workers", "context too small"],
)
async def test_check_server_names_values_the_run_does_not_expect(routes, name, status, words, remedy) -> None:
    async with serve_json(routes) as url:
        assert_fault(await check_server_at(url, max_context_length=20480), name, status, words, remedy=remedy)


async def test_check_server_unreachable_is_an_error() -> None:
    url = dead_url()
    assert_fault(await check_server_at(url), "server", "error", "nothing answers", url, remedy="sglang.launch_server")
    assert_fault(await check_server_at("http://127.0.0.1:1/generate"), "server", "error", "/generate", remedy="http://")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never reads from them
        found = await check_server_at(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
    assert_fault(found, "server", "error", "did not answer within 0.3 s", remedy="log")


async def test_check_server_other_vocabulary_is_an_error(tmp_path: Path) -> None:
    async with serve_json({**serving(SERVES), "/tokenize": (200, {"tokens": [1, 2, 3]})}) as url:
        named = await check_server_at(url, tokenizer=SHIPPED)
        guessed = await check_server_at(url, env={"HF_CHECKPOINT": str(tokenizer_folder(tmp_path / "model"))})
    assert_fault(named, "server tokens", "error", str(SHIPPED), "/models/m", "3 on the server", remedy="--tokenizer")
    assert find_only(guessed, "server tokens").status == "warning"
    async with serve_json(serving({**SERVES, "model_path": str(SHIPPED)})) as url:  # this server does not tokenize
        same = await check_server_at(url, tokenizer=SHIPPED)
    assert find_only(same, "server tokens").status == "ok"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_check_packages_old_python_is_an_error(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault(
        doctor.check_packages(doctor_options(site)), "packages", "error", "is not installed", remedy="pip install"
    )
    write_distribution(site, OURS, "0.1.0")
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.4")
    assert_fault(doctor.check_packages(doctor_options(site)), "python", "error", "3.10.4", ">=3.11", remedy=">=3.11")


@pytest.mark.parametrize(
    ("present", "status", "words", "remedy"),
    [
        ("1.50.0", "error", "1.50.0; expected <2,>=1.51: too old", "pip install 'strands-agents"),
        ("2.1.0", "warning", "newer", "pip install"),
        (None, "error", "not installed; expected <2,>=1.51", "pip install 'strands-agents<2,>=1.51'"),
    ],
)
def test_check_packages_other_version_names_the_install(present, status, words, remedy, site):
    write_distribution(site, OURS, "0.1.0", ["strands-agents<2,>=1.51"])
    if present is not None:
        write_distribution(site, "strands-agents", present)
    assert_fault(doctor.check_packages(doctor_options(site)), "package strands-agents", status, words, remedy=remedy)


@pytest.mark.parametrize(
    ("env", "asked", "status", "words", "remedy"),
    [
        ({}, {"gpus": 2}, "ok", "2 GPUs: NVIDIA H100 80GB HBM3 with 81559 MiB; driver 570.1", None),
        ({}, {"gpus": 8}, "error", "expected 8", "--gpus 2"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"gpus": 2}, "error", "1 GPU of 2 (CUDA_VISIBLE_DEVICES=1)", "--gpus 1"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}, "warning", "0 GPUs of 2", "unset CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {"training": True}, "error", "0 GPUs of 2", "--gpus 0"),
        ({"NUM_GPUS": "8"}, {"gpus": 4}, "error", "expected 4", "NUM_GPUS=2"),
        ({}, {"training": True}, "error", "expected 8", "--gpus 2"),
        ({"RAY_ADDRESS": "http://elsewhere:8265"}, {"training": True}, "ok", "2 GPUs", None),
        # without nvidia-smi from here on
        ({"PATH": ""}, {}, "warning", "no nvidia-smi", "--gpus all"),
        ({"PATH": "", "RAY_ADDRESS": "http://elsewhere:8265"}, {"training": True}, "warning", "", "--gpus all"),
    ],
)
def test_check_gpus_compares_the_count_with_the_need(env, asked, status, words, remedy, tmp_path) -> None:
    with_gpus = write_program(tmp_path / "bin", "nvidia-smi", f"{GPU}; {GPU}")
    found = find_only(doctor.check_gpus(doctor_options(tmp_path, {**with_gpus, **env}, **asked)), "gpus")
    assert (found.status, words in found.found, (remedy or "") in (found.remedy or "")) == (status, True, True), found
    assert (found.remedy is None) == (remedy is None)


def test_check_gpus_survives_a_hanging_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_NVIDIA_SMI_TIMEOUT_S", 0.2)
    env = write_program(tmp_path / "bin", "nvidia-smi", f"sleep 60 & echo $! > {tmp_path / 'pid'}; sleep 60")
    found = doctor.check_gpus(doctor_options(tmp_path, env, gpus=8))
    assert_fault(found, "gpus", "error", "did not answer within 0.2 s", remedy="nvidia-smi")
    pid = tmp_path / "pid"
    started = pid.read_text() if pid.is_file() else ""  # "": the program was killed before it wrote its pid
    assert not started or exits_within(int(started))


def test_run_program_kills_children_of_an_ended_program(tmp_path: Path) -> None:
    env = {**os.environ, **write_program(tmp_path / "bin", "leaves", f"sleep 60 & echo $! > {tmp_path / 'pid'}")}
    result = diagnostics.run_program("leaves", env=env, timeout_s=1.0)
    assert result is not None
    assert result.exit_code is None
    assert exits_within(int((tmp_path / "pid").read_text()))


def test_check_proxies_warns_without_showing_the_password() -> None:
    def found(env: dict[str, str]) -> Any:
        return find_only(doctor.check_proxies(doctor_options(HERE, env)), "proxies")

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
        ({"WANDB_MODE": "offline"}, True, "ok", "on: WANDB_MODE"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": KEY}, False, "ok", "off"),
        ({"WANDB_API_KEY": KEY}, False, "error", "not installed"),
    ],
)
def test_check_wandb_requires_the_package_when_on(env, is_installed, status, words, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: is_installed or None)
    found = find_only(doctor.check_wandb(doctor_options(HERE, env)), "wandb")
    assert (found.status, words in found.found) == (status, True), found
    assert KEY not in repr(found)


def test_judge_sandbox_missing_layer_is_an_error_if_required() -> None:
    found = list(doctor.sandbox_findings(LACKING, "full"))
    assert_fault(found, "sandbox files", "error", "MISSING", "no Landlock", remedy="isolation: seccomp")
    assert "Landlock (Linux 5.13" in (find_only(found, "sandbox files").remedy or "")
    assert "not root" in find_only(found, "sandbox user").found
    unasked = find_only(doctor.sandbox_findings(LACKING, "seccomp"), "sandbox files")
    assert (unasked.status, "no Landlock" in unasked.found) == ("skipped", True)


def test_check_sandbox_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    found = doctor.check_sandbox(doctor_options(HERE, isolation="rlimits"))
    assert_fault(found, "sandbox", "error", "does not start", remedy="another executor")
