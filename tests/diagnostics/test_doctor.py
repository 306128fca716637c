"""The doctor as a whole: every check is run, none can stop another, the exit code is the verdict; and on servers.

Servers are dead, loading, foreign, with too small a context, of another vocabulary, behind a router. On the machine:
Python and packages, GPUs, disks, limits, proxies, Ray, wandb and the sandbox.
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
    answering,
    assert_fault,
    doctor_options,
    installed,
    only,
    program,
    tokenizer_folder,
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


def test_what_is_wanting_names_no_model_but_the_one_that_was_asked_for(tmp_path: Path) -> None:
    asked = doctor_options(tmp_path, {"SAVE_DIR": "/dev/shm"}, model_name="foo/Foo-14B")
    assert not [
        finding for finding in (*doctor.check_disk(asked), *doctor.check_limits(asked)) if "Qwen" in finding.found
    ]


async def test_a_clean_machine_passes_and_the_json_holds_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "run_checks", partial(run_checks, timeout_s=250))  # this machine may be busy
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
    warning("slime", "no slime here", "work in the image"),
    warning("gpus", "no GPU here", "use a machine with GPUs"),
    warning("disk: checkpoints", "78 GB free", "free some"),
    warning("data: aime-2024.jsonl", "is not there", "python data_prep/aime_2024.py"),
    warning("proxies", "set without no_proxy", "export no_proxy"),
    error("disk: data", "can't be written to", "free some"),
]


def shown(findings: Sequence[Finding]) -> list[str]:
    out = io.StringIO()
    Diagnosis(findings).show(Console(file=out, width=80))
    return out.getvalue().splitlines()


def test_on_a_laptop_what_only_training_needs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_folders", lambda name: [])
    found = doctor.without_training(LAPTOP, doctor_options(tmp_path))
    assert [(one.status, one.remedy) for one in found[:4]] == [("skipped", one.remedy) for one in LAPTOP[:4]]
    assert found[4:] == LAPTOP[4:]
    lines = shown(found)
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
def test_where_training_is_meant_all_that_it_lacks_is_listed(env, asked, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "package_folders", lambda name: [])
    assert doctor.without_training(LAPTOP, doctor_options(tmp_path, env, **asked)) == LAPTOP


def test_files_that_were_named_are_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_folders", lambda name: [])
    found = doctor.without_training(LAPTOP, doctor_options(tmp_path, data=[Path("aime-2024.jsonl")]))
    assert found[3] == LAPTOP[3]


def test_a_report_fits_into_80_columns_but_for_commands_to_copy() -> None:
    found = [good("packages", "as required: " + "package 1.2.3, " * 20), warning("a", "b " * 60, "command " * 20)]
    lines = shown(found)
    assert all(len(line) <= 80 for line in lines if "->" not in line)
    assert lines[1].startswith(" " * 9)


def test_the_command_asks_what_its_options_say_and_exits_with_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DoctorOptions] = []

    def find_doubts(options: DoctorOptions) -> Diagnosis:
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


def test_an_unknown_isolation_is_a_usage_error() -> None:
    done = CliRunner().invoke(app, ["doctor", "--isolation", "none"])
    assert (done.exit_code, "'none' is not one of 'full', 'files', 'seccomp', 'rlimits'" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [["--flags", "launch.txt"], ["--flags", "-"], ["--", FLAG, "3"], ["--flags", "good.txt", "--", FLAG, "3"]],
    ids=["file", "stdin", "arguments", "file and arguments"],
)
def test_the_flag_check_is_run_alone(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("launch.txt").write_text(f"python3 train.py {FLAG} 3\n")
    Path("good.txt").write_text("--lr 3\n")
    done = CliRunner().invoke(app, ["doctor", *arguments], input=Path("launch.txt").read_text())
    assert (done.exit_code, f"error: {FLAG}" in done.stdout, "sandbox" in done.stdout) == (1, True, False)


def test_no_check_stops_another() -> None:
    """One crashes, one can't import, one hangs."""
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


SERVES = {"model_path": "/models/m", "served_model_name": "m", "weight_version": "default"}
UP = {"/health": (200, None)}
SICK = {"workers": [{"url": "http://127.0.0.1:1", "is_healthy": False}]}


def serving(info: dict[str, Any]) -> dict[str, tuple[int, Any]]:
    return {**UP, "/server_info": (200, info)}


async def look(url: str, timeout_s: float = 15.0, **expected: Any) -> list[Finding]:
    return await asyncio.to_thread(doctor.check_server, url, doctor_options(Path("nowhere"), **expected), timeout_s)


@pytest.mark.parametrize(
    ("routes", "name", "status", "words", "remedy"),
    [
        (serving({**SERVES, "version": "0.4.9"}), "server", "warning", "0.4.9", "sglang>=0.5"),
        ({"/health": (503, None)}, "server", "error", "is up, but not healthy (503)", "wait"),
        ({**UP, "/v1/models": (200, {"data": []})}, "server", "error", "not SGLang", "check the port"),
        ({**UP, "/server_info": (500, None)}, "server", "error", "is up, but fails: got HTTP 500", "log"),
        (serving(SERVES), "server context", "warning", "does not state", "--context-length 20480"),
        ({**UP, "/workers": (200, SICK)}, "server", "error", "1 workers, none of them healthy", "/workers"),
        (
            serving({**SERVES, "context_length": 9}),
            "server context",
            "warning",
            "takes 9 tokens, 20480 are",
            "length 20",
        ),
    ],
    ids=["too old", "loading", "foreign", "failing", "context unknown", "no workers", "context too small"],
)
async def test_a_server_that_is_not_what_a_run_expects_is_named(routes, name, status, words, remedy) -> None:
    async with answering(routes) as url:
        assert_fault(await look(url, max_context_length=20480), name, status, words, remedy=remedy)


async def test_a_server_that_can_not_be_asked_is_an_error() -> None:
    url = dead_url()
    assert_fault(await look(url), "server", "error", "nothing answers", url, remedy="sglang.launch_server")
    assert_fault(await look("http://127.0.0.1:1/generate"), "server", "error", "/generate", remedy="http://")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and is never looked at
        found = await look(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
    assert_fault(found, "server", "error", "did not answer within 0.3 s", remedy="log")


async def test_a_server_with_another_vocabulary_is_an_error(tmp_path: Path) -> None:
    async with answering({**serving(SERVES), "/tokenize": (200, {"tokens": [1, 2, 3]})}) as url:
        named = await look(url, tokenizer=SHIPPED)
        guessed = await look(url, env={"HF_CHECKPOINT": str(tokenizer_folder(tmp_path / "model"))})
    assert_fault(named, "server tokens", "error", str(SHIPPED), "/models/m", "3 there", remedy="--tokenizer")
    assert only(guessed, "server tokens").status == "warning"
    async with answering(serving({**SERVES, "model_path": str(SHIPPED)})) as url:  # it does not tokenize
        same = await look(url, tokenizer=SHIPPED)
    assert only(same, "server tokens").status == "ok"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_a_python_that_is_too_old_is_an_error(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fault(
        doctor.check_packages(doctor_options(site)), "packages", "error", "is not installed", remedy="pip install"
    )
    installed(site, OURS, "0.1.0")
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
def test_a_required_package_of_another_version_is_named_with_what_installs_it(present, status, words, remedy, site):
    installed(site, OURS, "0.1.0", ["strands-agents<2,>=1.51"])
    if present is not None:
        installed(site, "strands-agents", present)
    assert_fault(doctor.check_packages(doctor_options(site)), "package strands-agents", status, words, remedy=remedy)


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
def test_gpus_are_counted_and_compared_with_what_is_asked_for(env, asked, status, words, remedy, tmp_path) -> None:
    with_gpus = program(tmp_path / "bin", "nvidia-smi", f"{GPU}; {GPU}")
    found = only(doctor.check_gpus(doctor_options(tmp_path, {**with_gpus, **env}, **asked)), "gpus")
    assert (found.status, words in found.found, (remedy or "") in (found.remedy or "")) == (status, True, True), found
    assert (found.remedy is None) == (remedy is None)


def test_a_driver_that_hangs_does_not_hang_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SMI_TIMEOUT_S", 0.2)
    env = program(tmp_path / "bin", "nvidia-smi", f"sleep 60 & echo $! > {tmp_path / 'pid'}; sleep 60")
    found = doctor.check_gpus(doctor_options(tmp_path, env, gpus=8))
    assert_fault(found, "gpus", "error", "did not answer within 0.2 s", remedy="nvidia-smi")
    pid = tmp_path / "pid"
    started = pid.read_text() if pid.is_file() else ""  # "": it was ended before it came so far
    assert not started or exits_within(int(started))


def test_a_proxy_between_engines_and_router_is_a_warning_that_shows_no_password() -> None:
    def found(env: dict[str, str]) -> Any:
        return only(doctor.check_proxies(doctor_options(HERE, env)), "proxies")

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
def test_wandb_must_be_installed_where_it_is_on(env, is_installed, status, words, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: is_installed or None)
    found = only(doctor.check_wandb(doctor_options(HERE, env)), "wandb")
    assert (found.status, words in found.found) == (status, True), found
    assert KEY not in repr(found)


def test_a_missing_layer_is_an_error_with_both_ways_out_if_it_was_asked_for() -> None:
    found = list(doctor.judge_sandbox(LACKING, "full"))
    assert_fault(found, "sandbox files", "error", "MISSING", "no Landlock", remedy="isolation: seccomp")
    assert "Landlock (Linux 5.13" in (only(found, "sandbox files").remedy or "")
    assert "not root" in only(found, "sandbox user").found
    unasked = only(doctor.judge_sandbox(LACKING, "seccomp"), "sandbox files")
    assert (unasked.status, "no Landlock" in unasked.found) == ("skipped", True)


def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    found = doctor.check_sandbox(doctor_options(HERE, isolation="rlimits"))
    assert_fault(found, "sandbox", "error", "does not start", remedy="another executor")
