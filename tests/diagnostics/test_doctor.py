"""The doctor as a whole: every check is run, none can stop another, and the exit code is the verdict."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stand_in_machine import assert_fault, installed, only, program

from strands_rollout.doctor.check_run import Check, run_checks
from strands_rollout.doctor.diagnosis import Diagnosis
from strands_rollout.doctor.finding import Finding, error, good, skipped, warning
from strands_rollout.doctor.sandbox_layers import check_sandbox, judge, to_isolation
from strands_rollout.errors import ConfigError
from strands_rollout.sandbox import SandboxReport

LACKING = SandboxReport({"limits": "some"}, {"files": "no Landlock"}, "seccomp", 0.5)
ONE_OF_EACH = (
    good("a", "fine"),
    warning("b", "hm", "do b"),
    error("c", "bad [red]", "do c"),
    skipped("d", "not asked"),
)


def doctor(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own, with nothing in its environment but this."""
    return subprocess.run(
        [sys.executable, "-m", "strands_rollout.cli", "doctor", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.defpath, **environment},
    )


def test_a_clean_machine_passes_and_the_json_tells_all(tmp_path: Path) -> None:
    done = doctor("--json", "--isolation", "rlimits", HOME=str(tmp_path))
    told = json.loads(done.stdout)
    assert done.returncode == 0, [check for check in told["checks"] if check["status"] == "error"]
    assert told["ok"] is True
    assert told["versions"]["strands-rollout"]
    assert told["sandbox"]["enforced"]["limits"]
    names = {check["name"].partition(" ")[0].rstrip(":") for check in told["checks"]}
    looked_at = "python packages slime megatron gpus memory open proxies disk shared ray wandb model tokenizer config"
    assert names >= {*looked_at.split(), "data", "sandbox", "server"}
    assert all(check["remedy"] for check in told["checks"] if check["status"] in ("warning", "error"))


def test_a_bare_machine_can_not_train(tmp_path: Path) -> None:
    empty = {"HOME": str(tmp_path), "MODEL_DIR": str(tmp_path), "DATA_DIR": str(tmp_path)}
    done = doctor("--training", "--json", "--isolation", "rlimits", "--model-name", "Qwen3-4B", **empty)
    assert done.returncode == 1
    errors = {check["name"] for check in json.loads(done.stdout)["checks"] if check["status"] == "error"}
    lacking = {"slime", "megatron", "ray", "gpus", "model", "converted model"}
    assert errors == {*lacking, "data: dapo-math-17k.jsonl", "data: aime-2024.jsonl"}
    assert "--model Qwen/Qwen3-4B" in done.stdout


def test_faults_of_a_machine_are_shown_with_their_remedies_and_fail(tmp_path: Path) -> None:
    site = tmp_path / "site"
    installed(site, "slime", "0.1.4")
    installed(site, "transformers", "4.40.0")
    (site / "slime").mkdir()
    (site / "slime" / "__init__.py").write_text("raise RuntimeError('the doctor imported slime')")
    env = program(tmp_path / "bin", "nvidia-smi", "echo 'No devices were found'; exit 6")
    limited = f"ulimit -n 512; exec {sys.executable} -m strands_rollout.cli doctor --isolation rlimits"
    done = subprocess.run(
        ["sh", "-c", limited],
        capture_output=True,
        text=True,
        check=False,
        env={**env, "PYTHONPATH": str(site), "HOME": str(tmp_path), "WANDB_API_KEY": "'abc'"},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    for start, remedy in (
        ("error    package transformers: transformers 4.40.0", "pip install 'transformers"),
        ("error    slime package: the importable slime, 0.1.4", "pip uninstall slime"),
        ("warning  gpus: no GPU here: nvidia-smi failed: No devices were found", "--gpus all"),
        ("warning  open files: ulimit -n is 512", "ulimit -n 65535"),
        ("error    wandb: WANDB_API_KEY", "export WANDB_API_KEY"),
    ):
        (at,) = [number for number, line in enumerate(lines) if line.startswith(start)]
        assert remedy in lines[at + 1]


def test_an_unknown_isolation_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="expected one of full, seccomp, rlimits"):
        to_isolation("none")
    assert doctor("--isolation", "none").returncode == 2


def test_the_flag_check_is_run_alone(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("python3 train.py --no-such-flag-of-slime 3\n")
    of_a_file = doctor("--flags", str(script))
    on_stdin = doctor("--flags", "-", stdin=script.read_text())
    for done in (of_a_file, on_stdin):
        assert done.returncode == 1, done.stderr
        assert "no-such-flag-of-slime" in done.stdout
        assert "sandbox" not in done.stdout


def test_only_errors_fail_unless_it_is_strict() -> None:
    fine, doubtful, bad, unasked = ONE_OF_EACH
    assert Diagnosis((fine, doubtful, unasked)).ok()
    assert not Diagnosis((fine, doubtful)).ok(strict=True)
    assert Diagnosis((fine, unasked)).ok(strict=True)
    assert not Diagnosis((fine, bad)).ok()
    assert json.loads(Diagnosis((fine, doubtful)).to_json(strict=True))["ok"] is False


def test_people_read_one_line_and_the_remedy() -> None:
    output = io.StringIO()
    Diagnosis(ONE_OF_EACH).show(Console(file=output, width=20))
    assert output.getvalue().splitlines() == [
        "ok       a: fine",
        "warning  b: hm",
        "         -> do b",
        "error    c: bad [red]",
        "         -> do c",
        "skipped  d: not asked",
        "",
        "1 ok, 1 warning, 1 error, 1 skipped",
    ]


def test_a_check_that_crashes_is_a_line_and_the_rest_go_on() -> None:
    def crash() -> list[Finding]:
        raise KeyError("gone")

    def import_nothing() -> list[Finding]:
        import no_such_package  # noqa: F401

        return []

    fine = [Check("a", lambda: [good("a", "fine")], waits=waits) for waits in (False, True)]
    found = run_checks([Check("b", crash), *fine, Check("c", crash, waits=True), Check("d", import_nothing)])
    assert [finding.name for finding in found] == ["b", "a", "a", "c", "d"]
    assert_fault(found, "b", "error", "this is a bug in the check: KeyError: 'gone'", remedy="doctor --json")
    assert_fault(found, "d", "error", "no_such_package can't be imported", remedy="pip install")


def test_a_check_that_hangs_is_given_up() -> None:
    released = threading.Event()

    def hang() -> list[Finding]:
        released.wait()
        return []

    found = run_checks([Check("slow", hang, waits=True), Check("a", lambda: [good("a", "fine")])], limit_s=0.5)
    released.set()
    assert_fault(found, "slow", "error", "did not end within 0.5 s", remedy="state D")
    assert only(found, "a").status == "ok"


def test_checks_that_wait_wait_at_once() -> None:
    both = threading.Barrier(2)

    def meet(name: str) -> Any:
        return lambda: [good(name, str(both.wait(10)))]

    found = run_checks([Check("a", meet("a"), waits=True), Check("b", meet("b"), waits=True)])
    assert {finding.status for finding in found} == {"ok"}


def test_what_the_executor_enforces_is_reported() -> None:
    found = check_sandbox("rlimits")
    report = found[0].facts["sandbox"]
    assert found[0].status == "ok"
    assert only(found, "sandbox limits").found.endswith(report["enforced"]["limits"])
    assert {finding.name for finding in found if "MISSING" in finding.found} == {
        f"sandbox {layer}" for layer in report["missing"]
    }


def test_a_missing_layer_is_an_error_with_both_ways_out() -> None:
    found = judge(LACKING, "full", 1.0)
    assert_fault(found, "sandbox files", "error", "MISSING", "no Landlock", remedy="isolation: seccomp")
    assert "Landlock (Linux 5.13" in (only(found, "sandbox files").remedy or "")
    assert "not root" in only(found, "sandbox user").found


def test_a_missing_layer_that_was_not_asked_for_is_no_fault() -> None:
    found = judge(LACKING, "seccomp", 1.0)
    assert only(found, "sandbox files").status == "skipped"
    assert "no Landlock" in only(found, "sandbox files").found


def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert_fault(check_sandbox("rlimits"), "sandbox", "error", "does not start", remedy="another executor")
