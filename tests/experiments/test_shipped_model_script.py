"""The script that makes the shipped model: its episodes, its training, its evaluation, its command line."""

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
from strands_rollout.template.chat_template import ChatTemplate

REPOSITORY = Path(__file__).parents[2]
CHECKPOINT = REPOSITORY / "strands_rollout/engine/checkpoint"


def facts(name: str, folder: Path = CHECKPOINT) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / name).read_text())
    return value


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "experiments.shipped_model", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def episodes(shipped_model: Any) -> Any:
    problems = shipped_model("problems").split_problems(5, 0, 0, 150).training
    return shipped_model("episodes").write_episodes(problems, Random(3))


@pytest.fixture(scope="module")
def task(shipped_model: Any) -> Any:
    return shipped_model("word_problems").WORD_PROBLEMS


def test_a_training_episode_is_the_conversation_that_a_rollout_has(
    task: Any, shipped_tokenizer: Any, shipped_model: Any
) -> None:
    conversation = shipped_model("conversation")
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


def test_a_share_of_the_episodes_are_wrong_guesses_without_a_tool(episodes: Any, shipped_model: Any) -> None:
    guesses, mixed = shipped_model("guesses"), shipped_model("guesses").with_guesses(episodes, 0.3, Random(1))
    pairs = [(old, new) for old, new in zip(episodes, mixed, strict=True) if new != old]
    assert 0.2 < len(pairs) / len(episodes) < 0.4
    for old, new in pairs:
        (turn,) = new.turns
        assert (new.question, new.enable_thinking, turn.tool_answer) == (old.question, old.enable_thinking, None)
        assert turn.is_learned
        assert (guesses.REASONING in turn.text) == new.enable_thinking
        assert _boxed(turn.text) != _boxed(old.turns[-1].text)
    assert guesses.with_guesses(episodes, 0.0, Random(1)) == episodes
    module = shipped_model("episode")
    strange = module.Episode("Why?", enable_thinking=True, turns=(module.Turn("So be it.", True, None),))
    with pytest.raises(ValueError, match="integer in a box; got 'So be it.'"):
        guesses.with_guesses([strange], 1.0, Random(0))


def _boxed(text: str) -> int:
    return int(text.partition("boxed{")[2].partition("}")[0])


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_respelled_turns_are_the_same_text_in_other_tokens(
    shipped_tokenizer: Any, episodes: Any, shipped_model: Any, share: float
) -> None:
    conversation, prompt = shipped_model("conversation"), shipped_model("word_problems").CODE_AGENT
    respell = shipped_model("spelling").Respeller(shipped_tokenizer, share, Random(2))
    one = conversation.EpisodeTokenizer(shipped_tokenizer, prompt)
    other = conversation.EpisodeTokenizer(shipped_tokenizer, prompt, respell)
    templates = {thinking: ChatTemplate(shipped_tokenizer, enable_thinking=thinking) for thinking in (True, False)}
    learned, more = 0, 0
    for episode in episodes[:40]:
        plain, respelled = one.tokenize(episode), other.tokenize(episode)
        assert shipped_tokenizer.decode(respelled.token_ids) == shipped_tokenizer.decode(plain.token_ids)
        # prompts are spelled by the template alone
        begin = len(prompt.prompt_ids(templates[episode.enable_thinking], episode.question))
        assert respelled.token_ids[:begin] == plain.token_ids[:begin]
        assert respelled.is_learned.count(True) >= plain.is_learned.count(True)
        learned += plain.is_learned.count(True)
        more += len(respelled.token_ids) - len(plain.token_ids)
    assert (more == 0) == (share == 0.0)
    assert more < share * learned or share == 0.0


async def test_tool_answers_in_training_are_what_the_tool_says(episodes: Any, shipped_model: Any) -> None:
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


def test_episodes_have_variety_and_mistakes_are_not_learned(episodes: Any) -> None:
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all("Error" in turn.tool_answer for turn in turns if not turn.is_learned)
    assert not any("Error" in (turn.tool_answer or "") for turn in turns if turn.is_learned)
    assert any("\n" in turn.tool_answer for turn in turns if turn.is_learned and turn.tool_answer)
    assert any(sum(turn.is_learned for turn in episode.turns) == 3 for episode in episodes)
    assert {episode.enable_thinking for episode in episodes} == {True, False}


def test_a_mistake_that_does_not_fail_is_refused(shipped_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = shipped_model("episodes")
    monkeypatch.setattr(module, "MISTAKE_SHARE", 1.0)
    monkeypatch.setattr(module, "_mistake", lambda code, rng: module.tool_call_text("print(1)"))
    problems = shipped_model("problems").split_problems(5, 0, 0, 1).training
    with pytest.raises(ValueError, match="to fail; got the answer '1'"):
        module.write_episodes(problems, Random(3))


def test_without_torch_the_script_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(typer.Exit) as exit_info:
        importlib.import_module("experiments.shipped_model.__main__").main()
    assert exit_info.value.exit_code == 1
    assert "pip install 'strands-rollout[train]'" in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.slow
def test_a_tiny_run_of_the_script_makes_a_folder_that_loads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, data = tmp_path / "model", tmp_path / "data"
    done = run_script("--tiny", "--threads", "1", "--steps", "3", "--out", str(folder), "--data", str(data))
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
def test_the_shipped_model_calls_the_tool_and_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    demo = REPOSITORY / "strands_rollout/data/demo.jsonl"
    (tmp_path / "demo.jsonl").write_text("".join(demo.read_text().splitlines(keepends=True)[:24]))
    main = importlib.import_module("experiments.shipped_model.__main__").main
    main(out=CHECKPOINT, data=tmp_path, seed=1, samples_per_row=1, threads=1, eval_only=True)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["episodes"] == 24
    assert report["accuracy"] >= 0.3
    assert report["tool_calls_per_episode"] >= 0.4


@pytest.mark.torch
@pytest.mark.parametrize(
    ("is_over", "last_turn", "is_correct"),
    [
        (True, "<think>\nThe result is 34.\n</think>\n\nThe answer is \\boxed{34}.<|im_end|>", True),
        (True, "The answer is \\boxed{ 34 }.", True),
        (True, "\\boxed{3} or \\boxed{34}", True),
        (True, "\\boxed{34} or \\boxed{3}", False),
        (True, "<think>\n\\boxed{34}\n</think>\n\nThe answer is 34.", False),
        (True, "34", False),
        (False, "The answer is \\boxed{34}.", False),
    ],
)
def test_an_episode_is_right_if_its_last_box_is(
    shipped_model: Any, is_over: bool, last_turn: str, is_correct: bool
) -> None:
    pytest.importorskip("torch")
    play = shipped_model("evaluation").Play("34", [], turns=["\\boxed{34}", last_turn], is_over=is_over)
    assert play.is_correct is is_correct


@pytest.mark.torch
@pytest.mark.parametrize(("target", "looks"), [(0.6, [4, 6]), (0.9, [4, 6, 8, 9])])
def test_training_stops_at_the_first_look_that_reaches_the_target(
    shipped_model: Any, monkeypatch: pytest.MonkeyPatch, target: float, looks: list[int]
) -> None:
    pytest.importorskip("torch")
    run, report = shipped_model("run"), shipped_model("evaluation").Report
    accuracies = iter([0.5, 0.7, 0.8, 0.85])
    monkeypatch.setattr(run, "training_steps", lambda *given, steps, **options: iter([0.5] * steps))
    monkeypatch.setattr(run, "evaluate", lambda *given, **options: report(1, next(accuracies), 0.0, 1.0, 1.0))
    plan = run.Plan(steps=9, target=target, evaluate_from=4, evaluate_every=2)
    history = run._train_until_good(plan, None, None, None, [], [], lambda *given: None)
    assert [look["step"] for look in history] == looks


@pytest.mark.torch
def test_the_learning_rate_rises_stays_and_falls(shipped_model: Any) -> None:
    pytest.importorskip("torch")
    factors = [shipped_model("training").learning_rate_factor(step, 400) for step in range(400)]
    assert factors[0] == pytest.approx(1 / 40)
    assert set(factors[39:201]) == {1.0}
    assert factors[200:] == sorted(factors[200:], reverse=True)
    assert factors[-1] == 0.05


@pytest.mark.torch
def test_sharing_the_prompts_opening_changes_no_gradient(
    episodes: Any, shipped_tokenizer: Any, shipped_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from strands_rollout.train import policy as forward

    torch.set_num_threads(1)
    training, checkpoint = shipped_model("training"), shipped_model("checkpoint")
    prompt = shipped_model("word_problems").CODE_AGENT
    tokenize = shipped_model("conversation").EpisodeTokenizer(shipped_tokenizer, prompt).tokenize
    batch = [tokenize(episode) for episode in episodes[:3]]
    assert forward.shared_prefix_length([list(episode.token_ids) for episode in batch]) > 150
    model = checkpoint.new_model(checkpoint.model_config(shipped_tokenizer), seed=1)
    gradients = []
    for shared in (forward.shared_prefix_length, lambda sequences: 0):
        monkeypatch.setattr(forward, "shared_prefix_length", shared)
        model.zero_grad()
        training.episode_loss(model, batch).backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-3)
