"""The doctor on slime: its package and version, Megatron beside it, and the result of a trial episode."""

import json
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest
from stand_in_machine import REPOSITORY, assert_fault, doctor_options, find_only

from strands_rollout.diagnostics.slime_episode import TESTED_COMMIT, check_megatron, check_slime, check_slime_episode


def slime_in(folder: Path) -> Path:
    """Write the files of a slime checkout that the checks read, without git."""
    for name in ("train.py", "scripts/models/qwen3-8B.sh", "slime/rollout/sglang_rollout.py", "slime/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "slime" / "utils").mkdir()
    (folder / "slime" / "utils" / "types.py").write_text("@dataclass\nclass Sample:\n    pass\n")
    (folder / "setup.py").write_text('setup(\n    name="slime",\n    version="0.3.1",\n)\n')
    return folder


def nowhere(_name: str) -> ModuleSpec | None:
    return None


def test_check_slime_refuses_another_package_of_that_name(tmp_path: Path) -> None:
    def find(name: str) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(tmp_path)])

    (tmp_path / "slime").mkdir()
    assert_fault(check_slime(doctor_options(tmp_path), find), "slime", "warning", "no slime found", remedy="git clone")
    (tmp_path / "slime" / "__init__.py").touch()
    words = ("not THUDM's", str(tmp_path))
    assert [finding.name for finding in check_slime(doctor_options(tmp_path), find)] == ["slime package"]
    assert_fault(
        check_slime(doctor_options(tmp_path), find), "slime package", "error", *words, remedy="pip uninstall slime"
    )
    found = check_slime(doctor_options(tmp_path, slime_dir=tmp_path / "absent"), find)
    assert_fault(found, "slime", "error", "not a complete checkout", remedy="git clone")


def test_check_slime_shows_the_checkouts_version(tmp_path: Path) -> None:
    folder = slime_in(tmp_path / "checkout")
    for env, options in (({}, {"slime_dir": folder}), ({"SLIME_DIR": str(folder)}, {}), ({}, {})):
        find = nowhere if env or options else lambda name: PathFinder.find_spec(name, [str(folder)])
        (found,) = check_slime(doctor_options(tmp_path, env, **options), find)
        assert (found.status, found.found) == ("ok", f"slime 0.3.1 at {folder}, commit unknown")


def test_check_megatron_looks_where_the_scripts_look(tmp_path: Path) -> None:
    (tmp_path / "Megatron-LM" / "megatron" / "core").mkdir(parents=True)
    slime = slime_in(tmp_path / "slime")
    beside = check_megatron(doctor_options(tmp_path, slime_dir=slime), nowhere)
    named = check_megatron(doctor_options(tmp_path, {"MEGATRON_DIR": str(tmp_path / "Megatron-LM")}), nowhere)
    assert [find_only(found, "megatron").status for found in (beside, named)] == ["ok", "ok"]
    found = check_megatron(doctor_options(tmp_path, megatron_dir=slime), nowhere)
    assert_fault(found, "megatron", "error", str(slime), "megatron/core", remedy="MEGATRON_DIR")
    assert_fault(check_megatron(doctor_options(tmp_path), nowhere), "megatron", "warning", remedy="MEGATRON_DIR")


COMPLETED = {"status": "completed", "stop_reason": "completed", "error": None, "tokens": 9, "trained": 4, "reward": 1.0}
COMPLETED |= {"violations": [], "placeholders": ["ray"], "warnings": []}
FAILED = {"status": "failed", "stop_reason": "internal_error", "error": "No module named 'x'"}


@pytest.mark.parametrize(
    ("result", "status", "words"),
    [
        (COMPLETED, "ok", ["completed: 9 tokens, 4 of them trained, reward 1.0", "ray"]),
        ({**COMPLETED, **FAILED}, "error", ["as failed (internal_error): No module named 'x'"]),
        ({**COMPLETED, "violations": ["loss_mask has 3"]}, "error", ["loss_mask has 3"]),
        ({**COMPLETED, "warnings": ["slime's trace could not begin a span"]}, "warning", ["begin a span"]),
        ({"missing": "torch"}, "warning", ["'torch', which is not installed"]),
        ("sys.exit('no such module')", "error", ["could not be run: no such module"]),
        ("print('nothing of JSON')", "error", ["could not be run"]),
        ("import time; time.sleep(60)", "error", ["within 0.5 s"]),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_check_slime_episode_judges_the_result(result, status, words, tmp_path, monkeypatch) -> None:
    """A fake child process gives the result; tests/slime/test_slime_launch_kit.py runs the real one."""
    child = tmp_path / "python"
    code = result if isinstance(result, str) else f"print({json.dumps(result)!r})"
    child.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    asked = doctor_options(tmp_path, slime_dir=slime_in(tmp_path / "checkout"))
    [found] = check_slime_episode(asked, nowhere, 0.5 if "sleep" in str(result) else 30.0)
    assert (found.name, found.status) == ("slime episode", status)
    assert all(word in found.found for word in words), found
    assert (found.remedy is None) == (status == "ok")


def test_tested_commit_is_the_one_with_recorded_flags() -> None:
    recorded = json.loads((REPOSITORY / "strands_rollout" / "data" / "slime_flags.json").read_text())
    assert recorded["sources"]["slime"]["version"] == f"commit {TESTED_COMMIT}"
