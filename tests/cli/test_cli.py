"""The command line: quick help, exit codes, error messages, and the demo's output."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from dumped_samples import sample_of_parts
from fake_sglang import FakeSGLang, Reply, dead_url
from harness import ANSWER, call_text, ids_of
from packaging.version import Version

from strands_rollout import cli
from strands_rollout.dump import write_dump

REPOSITORY = str(Path(__file__).parents[2])


def test_help_shows_examples_and_imports_nothing_heavy() -> None:
    """Show the help of all commands in one process. The doctor, too, must not import packages that may be broken."""
    code = """if True:
        import re, sys
        from typer.testing import CliRunner
        from strands_rollout import __version__
        from strands_rollout.cli.commands import app

        def imported(*heavy):
            return [name for name in heavy if name in sys.modules]

        def help_of(*arguments):
            done = CliRunner().invoke(app, [*arguments, "--help"], terminal_width=78)  # as in a terminal of 80 columns
            assert done.exit_code == 0, done.output
            lines = re.sub("(COMMAND .ARGS.| DUMP|.ARGUMENTS.)[.]{3}", "", done.stdout).splitlines()
            unfit = [line for line in lines if len(line) > 80 or line.endswith("...") or re.search("<[a-z]", line)]
            assert not unfit, unfit
            return done.stdout

        assert all(word in help_of() for word in ("serve", "demo", "--version", "--install-completion"))
        assert CliRunner().invoke(app, ["--version"]).stdout == f"strands-rollout {__version__}\\n"
        assert imported("numpy", "strands", "transformers", "httpx", "rich.table", "pydantic") == []
        for command in app.registered_commands:
            name = command.name or command.callback.__name__
            assert f"Example: strands-rollout {name} " in " ".join(help_of(name).split()), name
        evaluate = help_of("eval")
        for words in ("model:\\n  --base-url URL ", "\\nSampling:\\n", " --data FILE ", " --top-k N ", " --out DIR "):
            assert words in evaluate, words
        # typer itself imports pydantic when it reads a command's arguments
        assert imported("numpy", "strands", "transformers", "httpx", "rich.table") == []
        import strands_rollout.diagnostics.doctor
        assert imported("numpy", "packaging", "strands", "tokenizers") == []
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}
    )
    assert done.returncode == 0, done.stderr


AN_ENGINE = ["--base-url", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["demo", "--samples", "0"],
        ["demo", "--data", "/no/such/file"],
        ["demo", *AN_ENGINE, "--model", "."],
        ["demo", "--base-url", "ftp://somewhere"],
        ["serve", "--port", "65536"],
        ["eval", *AN_ENGINE],
        ["eval", "--k", "1,two"],
        ["eval", "--top-k", "0"],
    ],
    ids=" ".join,
)
def test_usage_error_exits_with_2_and_writes_nothing(arguments, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert "rror" in captured.err
    assert (captured.out, list(tmp_path.iterdir())) == ("", [])


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["strands-rollout", *arguments])
    try:
        cli.main()
    except SystemExit as e:
        return e.code
    raise AssertionError


TOKENIZER = f"{REPOSITORY}/strands_rollout/engine/checkpoint"


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo"],
        ["demo", "--tokenizer", TOKENIZER],
        ["eval", "--data", "rows.jsonl"],
        ["try", "--data", "rows.jsonl", "--tokenizer", TOKENIZER],
        ["replay", "dump.jsonl", "--tokenizer", TOKENIZER],
    ],
    ids=" ".join,
)
def test_dead_engine_exits_with_1_and_names_the_remedy(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 17 * 2?", "label": "34"}\n')
    write_dump(Path("dump.jsonl"), [sample_of_parts([[1, 2], [3]])])
    url = dead_url()
    assert exit_code(monkeypatch, *arguments, "--base-url", url) == 1
    said = capsys.readouterr().err
    assert f"error: no engine answers at {url}: Connection refused; start one there (" in said
    assert "or correct --base-url" in said
    assert "engine at" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump.jsonl", "rows.jsonl"]


# older versions of typer have their own messages
by_pydantic = pytest.mark.skipif(Version(typer.__version__) < Version("0.29"), reason="this typer words it otherwise")


@by_pydantic
@pytest.mark.parametrize(
    "command",
    [
        ["scripts/train_tiny.py", "--steps", "few"],
        ["-m", "experiments", "train", "--steps", "few"],
        ["-m", "benchmarks", "client", "--episodes", "few"],
        ["data_prep/contamination.py", "x", "x", "--ngram-words", "few"],
    ],
    ids=lambda words: " ".join(words),
)
def test_scripts_usage_error_names_the_expected_type(command: list[str]) -> None:
    words = [sys.executable, *command]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "COLUMNS": "500"})
    assert done.returncode == 2
    assert "got 'few'; expected an integer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["demo", "--samples", "0"], "'--samples': got '0'; expected at least 1", marks=by_pydantic),
        pytest.param(["demo", "--samples", "few"], "'--samples': got 'few'; expected an integer", marks=by_pydantic),
        pytest.param(["eval", "--top-p", "2"], "'--top-p': got '2'; expected at most 1", marks=by_pydantic),
        (["init", "it", "--kind", "what"], "'--kind': 'what' is not one of"),
        (["demo", "--base-url", "ftp://x"], "'--base-url': got 'ftp://x'; expected http://host:port"),
        (
            ["gateway", "--base-url", "http://x/generate", "--tokenizer", "t"],
            "names the endpoint; remove '/generate'",
        ),
        (["doctor", "--base-url", "http://x?y"], "'--base-url': 'http://x' has a query"),
        (["replay", "dump.jsonl", "--sample", "99"], "got --sample 99; dump.jsonl has 1 samples, counted from 0"),
        (
            ["view", "dump.jsonl", "--text", "--sample", "99"],
            "got --sample 99; dump.jsonl has 1 samples, counted from 0",
        ),
        (["try", "--row", "999"], "got --row 999; "),
        (
            ["replay", "dump.jsonl", "--tokenizer", "."],
            "the tokenizer of '.' can't be loaded: it has no tokenizer.json",
        ),
        (["demo", "--tokenizer", "."], "the tokenizer of '.' can't be loaded"),
        (["gateway", *AN_ENGINE, "--tokenizer", "no/such/one"], "the tokenizer of 'no/such/one' can't be loaded"),
        (["check-template", "no/such/one"], "the tokenizer of 'no/such/one' can't be loaded"),
    ],
    ids=str,
)
def test_usage_error_quotes_the_input(arguments, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_dump(Path("dump.jsonl"), [sample_of_parts([[1, 2], [3]])])
    assert exit_code(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert not [raw for raw in ("Input should", "Value error", "hf_checkpoint") if raw in said]


@pytest.mark.parametrize("command", [["replay"], ["drift"], ["rescore", "--reward", "builtins.len"]], ids=" ".join)
@pytest.mark.parametrize("content", ["", "junk\n"], ids=["empty", "junk"])
def test_unreadable_dump_exits_with_1(command, content, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dump.jsonl").write_text(content)
    assert exit_code(monkeypatch, *command, "dump.jsonl") == 1
    assert "error: dump.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "following"),
    [
        (["validate", "rows.jsonl"], "eval --data rows.jsonl"),
        (["validate", "rows.jsonl", "--config", "it.yaml"], "eval --data rows.jsonl --config it.yaml"),
        (["validate", "rows.jsonl", "--json"], None),
        (["validate", "wrong.jsonl"], None),
        (["view", "dump.jsonl", "--text"], "view dump.jsonl"),
        (["view", "dump.jsonl", "--text", "--sample", "0"], "view dump.jsonl"),
        (["rescore", "dump.jsonl", "--reward", "it.score"], "rescore dump.jsonl --reward it.score --out FILE"),
        (["rescore", "dump.jsonl", "--reward", "it.score", "--out", "new.jsonl"], "view new.jsonl"),
    ],
    ids=str,
)
def test_commands_end_with_the_next_command(arguments, following, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_dump(
        Path("dump.jsonl"), [sample_of_parts([[1, 2], [3]], prompt="1 + 1?", label="2", response="2", reward=0.0)]
    )
    Path("rows.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    Path("wrong.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    Path("it.yaml").write_text("strands_rollout: {reward: {wrong: 0.0}}\n")
    Path("it.py").write_text("def score(response, label):\n    return 1.0\n")
    exit_code(monkeypatch, *arguments)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next: ")]
    assert said == ([] if following is None else [f"next: strands-rollout {following}"])


@pytest.mark.end_to_end
def test_demo_samples_can_be_replayed(tmp_path, monkeypatch, capsys) -> None:
    """Each sample has its own seed, even when no seed is given."""
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "demo", "--samples", "2", "--json") == 0
    assert exit_code(monkeypatch, "replay", "demo_dump", "--sample", "1") == 0, capsys.readouterr().out


@pytest.mark.end_to_end
async def test_demo_prints_table_transcript_and_one_json_line(shipped_tokenizer, tmp_path) -> None:
    def reply(request: dict[str, Any], number: int) -> Reply:
        seen = shipped_tokenizer.decode(request["input_ids"], skip_special_tokens=False)
        return Reply.tokens(ids_of(shipped_tokenizer, ANSWER if "<tool_response>" in seen else call_text()))

    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": [{"role": "user", "content": "What is 17 * 2?"}], "label": "34"}\n')
    async with FakeSGLang(reply, context_length=8192) as fake:
        given = ["--base-url", fake.base_url, "--tokenizer", shipped_tokenizer.name_or_path, "--data", str(data)]
        command = [sys.executable, "-m", "strands_rollout.cli", "demo", *given, "--samples", "2"]
        environment = {**os.environ, "PYTHONPATH": REPOSITORY, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
        options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        finished = await asyncio.to_thread(subprocess.run, command, **options)
    assert finished.returncode == 0, finished.stderr
    summary = {"samples": 2, "completed": 2, "mean_reward": 1.0, "accuracy": 1.0, "tool_calls": 2}
    summary |= {"tito_violations": 0, "contract_violations": 0}
    assert json.loads(finished.stdout.splitlines()[-1]) == summary
    assert sum(line.startswith("{") for line in finished.stdout.splitlines()) == 1
    assert re.search(r"0 +What is 17 \* 2\? +34 +34 +1 +completed +completed +2 +1 ", finished.stdout)
    assert "  trained | <tool_call>" in finished.stdout
    assert "  context | " in finished.stdout
    assert "accuracy 100%" in finished.stderr
    assert finished.stderr.endswith("\nnext: python -m strands_rollout.cli view demo_dump\n")
    assert len(list((tmp_path / "demo_dump").glob("*.jsonl"))) == 1
    for name, found in (("diagnostics", "context: equals the chat template"), ("viewer", "34")):
        page = (Path(REPOSITORY) / f"docs/{name}.md").read_text()
        (line,) = re.findall(r"^(?:\| `)?strands-rollout ((?:drift|view) demo_dump[^`\n]*)", page, re.MULTILINE)
        words = [*line.split(), *(["--text"] if name == "viewer" else [])]
        shown = await asyncio.to_thread(subprocess.run, [*command[:3], *words], **options)
        assert shown.returncode == 0, shown.stderr
        assert found in shown.stdout
