"""`strands-rollout init` and the commands of docs/tutorial.md, from a new project to a reward that rises."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from strands_rollout.cli import commands
from strands_rollout.cli.commands import Kind, app
from strands_rollout.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("WANDB")},
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
}
SHELL = f"""\
set -e -o pipefail
strands-rollout() {{ {shlex.quote(sys.executable)} -m strands_rollout.cli "$@"; }}
pytest() {{ {shlex.quote(sys.executable)} -m pytest -q -p no:cacheprovider "$@"; }}
"""
TRAINING = re.compile(r"strands-rollout train|run/weights")
ELSEWHERE = re.compile(r"pip install|strands-rollout view|bash scripts/")  # these need a network, a browser or a clone


def tutorial() -> list[str]:
    """Return the tutorial's commands that don't match `ELSEWHERE`, in order; the first ones make the project."""
    text = (REPOSITORY / "docs/tutorial.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [line for line in lines if not ELSEWHERE.search(line)]


def shell(*lines: str, cwd: Path) -> str:
    command = ["bash", "-c", SHELL + "\n".join(lines)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.end_to_end
def test_tutorial_commands_run_as_written(tmp_path: Path) -> None:
    walk = [line for line in tutorial() if not TRAINING.search(line)]
    assert [line.split()[0] for line in walk[:4]] == ["strands-rollout", "cd", "pytest", "strands-rollout"]
    shown = shell(*(re.sub(r"(.* eval .*)", r"\1 --samples-per-problem 1", line) for line in walk), cwd=tmp_path)
    transcript = re.search(r"```text\n(.*?)```", (REPOSITORY / "docs/tutorial.md").read_text(), re.DOTALL)[1]
    for words in ("next: cd my-agent && ", "3 passed", transcript, "mean reward", "all known"):
        assert words in shown, shown


@pytest.mark.end_to_end
def test_minimal_agent_of_the_overview_plays(tmp_path: Path) -> None:
    section = (REPOSITORY / "docs/index.md").read_text().partition("## A minimal agent")[2].partition("\n## ")[0]
    files = dict(re.findall(r"```\w+\n# (\w+\.\w+)\n(.*?)```", section, re.DOTALL))
    assert list(files) == ["tools.py", "reward.py", "rollout.yaml"]
    files["rows.jsonl"] = re.search(r"^\{.*\}\n", section, re.MULTILINE)[0]
    files["turns.yaml"] = "- calls: [{name: look_up_price, arguments: {item: cards}}]\n- They cost 138 dollars.\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = re.search(r"^strands-rollout try .*--you$", section, re.MULTILINE)[0]
    shown = shell(command.replace("--you", "--script turns.yaml"), cwd=tmp_path)
    assert "result | 46" in shown
    assert "score 1" in shown


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(900)
def test_tutorial_training_raises_the_reward(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    made, entered = tutorial()[:2]
    train, evaluate = (line for line in tutorial() if TRAINING.search(line))
    shell(made, entered, f"{train} --steps 4", evaluate, cwd=tmp_path)
    summary = json.loads((tmp_path / "my-agent/run/summary.json").read_text())
    assert summary["held_out_reward_end"] > summary["held_out_reward_start"] + 0.1


NEEDS = {"program": "openai", "harness": "strands_harness"}


@pytest.mark.end_to_end
@pytest.mark.parametrize("kind", [kind for kind in get_args(Kind) if kind != "tools"])  # the tutorial covers `tools`
def test_init_project_of_each_kind_plays_its_turns(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    monkeypatch.setattr(sys, "argv", ["init"])
    made = CliRunner().invoke(app, ["init", str(tmp_path / "it"), "--kind", kind])
    assert made.exit_code == 0, made.output
    assert "score 1" in shell(made.output.partition("next: ")[2], cwd=tmp_path)
    shown = shell("strands-rollout try it/rollout.yaml --script it/turns.yaml", cwd=tmp_path)
    assert "score 1" in shown
    assert "2506" in shown


def test_init_kinds_are_all_in_the_tutorial() -> None:
    text = (REPOSITORY / "docs/tutorial.md").read_text()
    table = text.partition("| `--kind` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(get_args(Kind))


@pytest.mark.parametrize(("kind", "extra"), [("program", "openai"), ("harness", "harness")])
def test_init_names_the_extra_that_a_kind_needs(kind, extra, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["init"])
    for is_installed in (True, False):
        monkeypatch.setattr(commands, "find_spec", lambda name, found=is_installed: found or None)
        made = CliRunner().invoke(app, ["init", str(tmp_path / f"it{is_installed}"), "--kind", kind])
        assert made.exit_code == 0
        assert (f"pip install 'strands-rollout[{extra}]'" in made.output) is not is_installed


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("full", "full is not empty (it contains notes.txt)"),
        ("a b", "such as a-b"),
        ("full/notes.txt/x", "can't write"),
    ],
)
def test_init_refuses_an_unusable_folder(folder, words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    done = CliRunner().invoke(app, ["init", folder])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]


def slime_flags(script: Path, *arguments: str) -> dict[str, str]:
    """Return slime's flags and values in a script's dry run; values that are paths become "", since paths differ."""
    environment = ENVIRONMENT | {"SLIME_DIR": "none"}
    done = subprocess.run(["bash", script, "--dry-run", *arguments], capture_output=True, text=True, env=environment)
    words = shlex.split(done.stdout.rpartition("train.py")[2].replace("\\\n", ""))
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    given = [words[start:end] for start, end in zip(starts, [*starts[1:], len(words)], strict=True)]
    return {flag: "" if "/" in " ".join(values) else " ".join(values) for flag, *values in given}


def test_project_run_slime_gives_the_launch_kits_flags() -> None:
    kit = slime_flags(
        REPOSITORY / "scripts/strands_qwen3_8b.sh",
        "--max-response-len",
        "4096",
        "--num-rollout",
        "300",
        "--eval-samples",
        "4",
    )
    assert len(kit) > 60
    assert slime_flags(REPOSITORY / "strands_rollout/data/project/run_slime.sh") == kit


def test_models_page_shows_the_4b_script_verbatim() -> None:
    script = (REPOSITORY / "scripts/strands_qwen3_4b.sh").read_text()
    assert f"```bash\n{script}```" in (REPOSITORY / "docs/training-models.md").read_text()
