"""The doctor on Python and its packages: too old, missing, unreadable, another package of the same name."""

from __future__ import annotations

import json
import subprocess
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest
from stand_in_machine import REPOSITORY, assert_fault, installed, only, program, question

from strands_rollout.doctor.python_packages import check_packages, check_python
from strands_rollout.doctor.slime_checkout import TESTED_COMMIT, check_megatron, check_slime

OURS = "strands-rollout"


def slime_in(folder: Path) -> Path:
    """A folder with the files of THUDM's slime that matter, not under git."""
    for name in ("train.py", "scripts/models/qwen3-8B.sh", "slime/rollout/sglang_rollout.py", "slime/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "slime" / "utils").mkdir()
    (folder / "slime" / "utils" / "types.py").write_text("@dataclass\nclass Sample:\n    pass\n")
    (folder / "setup.py").write_text('setup(\n    name="slime",\n    version="0.3.1",\n)\n')
    return folder


def nowhere(_name: str) -> ModuleSpec | None:
    return None


def test_this_environment_is_as_required() -> None:
    assert [finding.status for finding in check_python()] == ["ok"]
    packages = check_packages()
    assert packages[0].status == "ok"
    assert packages[0].facts["versions"][OURS]
    assert not [finding for finding in packages if finding.status == "error"]


def test_a_python_that_is_too_old_is_an_error(tmp_path: Path) -> None:
    installed(tmp_path, OURS, "0.1.0")
    assert_fault(check_python("3.10.4", [str(tmp_path)]), "python", "error", "3.10.4", ">=3.11", remedy=">=3.11")


@pytest.mark.parametrize(
    ("version", "status", "word"),
    [("1.50.0", "error", "too old"), ("2.1.0", "warning", "newer"), ("one", "error", "can't be read")],
)
def test_a_required_package_of_another_version_is_named_with_what_installs_it(
    version: str, status: str, word: str, tmp_path: Path
) -> None:
    installed(tmp_path, OURS, "0.1.0", ["strands-agents<2,>=1.51"])
    installed(tmp_path, "strands-agents", version)
    found = check_packages([str(tmp_path)])
    assert_fault(found, "package strands-agents", status, version, word, remedy="pip install")


def test_a_missing_required_package_is_an_error(tmp_path: Path) -> None:
    installed(tmp_path, OURS, "0.1.0", ["httpx<1,>=0.28.1"])
    found = check_packages([str(tmp_path)])
    assert_fault(found, "package httpx", "error", "not installed", ">=0.28.1", remedy="pip install 'httpx<1,>=0.28.1'")


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


def test_the_slime_of_pypi_is_told_from_thudms(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "slime").mkdir(parents=True)
    (site / "slime" / "__init__.py").touch()
    found = check_slime(question(tmp_path), lambda name: PathFinder.find_spec(name, [str(site)]))
    assert_fault(found, "slime package", "error", "not THUDM's", str(site), remedy="pip uninstall slime")


def test_a_folder_that_happens_to_be_called_slime_is_not_taken_for_a_package(tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    found = check_slime(question(tmp_path), lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    assert_fault(found, "slime", "warning", "no slime here", remedy="git clone")


def test_the_tested_slime_is_known_by_its_version_where_there_is_no_git(tmp_path: Path) -> None:
    folder = slime_in(tmp_path / "checkout")
    named = check_slime(question(tmp_path, slime_dir=folder), nowhere)
    in_environment = check_slime(question(tmp_path, {"SLIME_DIR": str(folder)}), nowhere)
    importable = check_slime(question(tmp_path), lambda name: PathFinder.find_spec(name, [str(folder)]))
    assert named == in_environment == importable
    assert only(named, "slime").status == "ok"
    assert "0.3.1" in only(named, "slime").found


def test_another_commit_of_slime_is_a_warning_that_names_both(tmp_path: Path) -> None:
    folder = slime_in(tmp_path / "checkout")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "other"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    found = check_slime(question(tmp_path, slime_dir=folder), nowhere)
    assert_fault(found, "slime", "warning", commit[:8], TESTED_COMMIT[:8], remedy=f"checkout {TESTED_COMMIT[:8]}")


def test_a_git_that_hangs_does_not_hang_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_rollout.doctor.slime_checkout._GIT_S", 0.1)
    folder = slime_in(tmp_path / "checkout")
    (folder / ".git").mkdir()
    (folder / "setup.py").write_text('version="0.4.0"')
    env = program(tmp_path / "bin", "git", "sleep 60")
    found = check_slime(question(tmp_path, env, slime_dir=folder), nowhere)
    assert_fault(found, "slime", "warning", "0.4.0", "did not answer", remedy="checkout")


def test_missing_files_of_slime_are_named(tmp_path: Path) -> None:
    folder = slime_in(tmp_path / "checkout")
    (folder / "train.py").unlink()
    found = check_slime(question(tmp_path, slime_dir=folder), nowhere)
    assert_fault(found, "slime files", "error", "train.py", remedy="git clone")
    (tmp_path / "empty").mkdir()
    found = check_slime(question(tmp_path, slime_dir=tmp_path / "empty"), nowhere)
    assert_fault(found, "slime", "error", "not a checkout", remedy="git clone")


def test_megatron_is_found_where_the_scripts_find_it(tmp_path: Path) -> None:
    core = tmp_path / "Megatron-LM" / "megatron" / "core"
    core.mkdir(parents=True)
    slime = slime_in(tmp_path / "slime")
    beside = check_megatron(question(tmp_path, slime_dir=slime), nowhere)
    named = check_megatron(question(tmp_path, {"MEGATRON_DIR": str(tmp_path / "Megatron-LM")}), nowhere)
    assert only(beside, "megatron").status == only(named, "megatron").status == "ok"
    found = check_megatron(question(tmp_path, megatron_dir=slime), nowhere)
    assert_fault(found, "megatron", "error", str(slime), "megatron/core", remedy="MEGATRON_DIR")
    assert_fault(check_megatron(question(tmp_path), nowhere), "megatron", "warning", remedy="MEGATRON_DIR")


def test_the_tested_slime_is_the_one_whose_flags_are_recorded() -> None:
    recorded = json.loads((REPOSITORY / "strands_rollout" / "data" / "slime_flags.json").read_text())
    assert recorded["sources"]["slime"]["version"] == f"commit {TESTED_COMMIT}"
