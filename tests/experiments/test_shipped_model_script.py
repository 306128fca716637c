"""The script that trains the shipped model: its episodes, training and evaluation."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from strands_rollout.code_tool.tool import code_tool

REPOSITORY = Path(__file__).parents[2]
CHECKPOINT = REPOSITORY / "strands_rollout/engine/checkpoint"


def facts(name: str, folder: Path = CHECKPOINT) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / name).read_text())
    return value


@pytest.fixture(scope="module")
def episodes(shipped_model: Any) -> Any:
    problems = shipped_model("problems").split_problems(5, 0, 0, 150).training
    return shipped_model("episodes").write_episodes(problems, Random(3))


def test_training_episode_equals_rollout_conversation(shipped_tokenizer: Any, shipped_model: Any) -> None:
    conversation, task = shipped_model("conversation"), shipped_model("word_problems").WORD_PROBLEMS
    tokenize = conversation.EpisodeTokenizer(shipped_tokenizer, task.prompt).tokenize
    problems = task.split(5, 0, 0, 150).training
    for episode, answer in zip(task.write_episodes(problems, Random(3)), task.answers_of(problems), strict=True):
        assert episode.turns[-1].text.endswith(f"The answer is \\boxed{{{answer}}}.")
        tokenized = tokenize(episode)
        if episode.enable_thinking:
            whole = conversation.whole_text(shipped_tokenizer, task.prompt, episode).removesuffix("\n")
            assert shipped_tokenizer.decode(tokenized.token_ids) == whole
            assert list(tokenized.token_ids) == shipped_tokenizer.encode(whole, add_special_tokens=False)
        assert len(tokenized.is_learned) == len(tokenized.token_ids)
        pairs = zip(tokenized.token_ids, tokenized.is_learned, strict=True)
        learned = shipped_tokenizer.decode([token_id for token_id, is_learned in pairs if is_learned])
        assert learned == "".join(f"{turn.text}<|im_end|>" for turn in episode.turns if turn.is_learned)


async def test_training_tool_results_are_real(episodes: Any, shipped_model: Any) -> None:
    from strands_rollout.code_tool import SubprocessExecutor
    from strands_rollout.tool_parsers import ToolCall, get_parser

    turns = [turn for episode in episodes for turn in episode.turns if turn.tool_answer is not None]
    mistakes = [turn for turn in turns if not turn.is_learned]
    assert len(mistakes) > 3
    async with SubprocessExecutor() as executor:
        tool = code_tool(executor)
        for turn in turns[:8] + mistakes[:4]:
            (call,) = get_parser("hermes").parse(turn.text)
            if isinstance(call, ToolCall):
                assert await tool(call.arguments["code"]) == turn.tool_answer
            else:
                assert call.reason in turn.tool_answer


@pytest.mark.torch
@pytest.mark.slow
def test_shipped_model_script_writes_loadable_folder(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, data = tmp_path / "model", tmp_path / "data"
    command = [sys.executable, "-m", "experiments.shipped_model", "--tiny", "--threads", "1", "--steps", "3"]
    command += ["--out", str(folder), "--data", str(data)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == facts("training.json", folder)["held_out"]
    assert {path.name for path in folder.iterdir()} == {path.name for path in CHECKPOINT.iterdir()}
    assert {path.name for path in data.iterdir()} == {"train.jsonl", "demo.jsonl"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("What is 12 percent of 300?", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    assert facts("config.json", folder).keys() == facts("config.json").keys()


@pytest.mark.torch
def test_shipped_model_calls_tool_and_answers(monkeypatch, capsys, tmp_path) -> None:
    pytest.importorskip("torch")
    demo = REPOSITORY / "strands_rollout/data/demo.jsonl"
    (tmp_path / "demo.jsonl").write_text("".join(demo.read_text().splitlines(keepends=True)[:24]))
    main = importlib.import_module("experiments.shipped_model.__main__").main
    main(out=CHECKPOINT, data=tmp_path, seed=1, samples_per_row=1, threads=1, eval_only=True)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["episodes"] == 24
    assert report["accuracy"] >= 0.3
    assert report["tool_calls_per_episode"] >= 0.4
