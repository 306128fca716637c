"""The shipped model folder: files, tokenizer and chat format, and the script that makes it."""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_rollout.chat_messages import to_chat_tools
from strands_rollout.chat_template import ChatTemplate
from strands_rollout.prompts import prompts_sha256
from strands_rollout.tools import code_tool, execute_python_code

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = REPOSITORY / "scripts"
CHECKPOINT = REPOSITORY / "strands_rollout/engine/checkpoint"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
RETRAIN = "retrain with: python scripts/train_shipped_model.py"


def facts(name: str, folder: Path = CHECKPOINT) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / name).read_text())
    return value


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture
def shipped_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of scripts/shipped_model."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return lambda name: importlib.import_module(f"shipped_model.{name}")


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(SCRIPTS / "train_shipped_model.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


def test_it_was_trained_on_the_prompts_that_the_package_uses() -> None:
    assert facts("config.json")["prompts_sha256"] == prompts_sha256(), (
        f"the system prompt or the tool's description has changed since the shipped model was trained; {RETRAIN}"
    )


def test_it_was_trained_on_the_tool_as_the_package_offers_it(shipped_model: Callable[[str], Any]) -> None:
    trained_on = [shipped_model("conversation").CODE_TOOL]
    offered = to_chat_tools([execute_python_code.tool_spec])
    assert json.dumps(offered) == json.dumps(trained_on), f"{offered} is not {trained_on}; {RETRAIN}"


def test_its_recorded_accuracy_leaves_room_to_learn() -> None:
    held_out = facts("training.json")["held_out"]
    assert 0.5 <= held_out["accuracy"] <= 0.8
    assert held_out["mixed_problems"] > 0.3
    assert held_out["episodes"] >= 1024


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) < 4_000_000


def test_its_weights_are_half_precision_and_fit_its_configuration(tokenizer: Any) -> None:
    data = (CHECKPOINT / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    weights = {name: entry for name, entry in header.items() if name != "__metadata__"}
    config = facts("config.json")
    assert {entry["dtype"] for entry in weights.values()} == {"F16"}
    assert weights["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert config["vocab_size"] == len(tokenizer)
    assert len(weights) == 2 + 11 * config["num_hidden_layers"]
    assert "lm_head.weight" not in weights
    assert config["tie_word_embeddings"]


def test_its_configuration_is_a_qwen3_that_transformers_loads() -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(CHECKPOINT)
    assert type(config).__name__ == "Qwen3Config"
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.rope_parameters["rope_theta"] == facts("config.json")["rope_theta"]


def test_generation_ends_at_both_end_tokens(tokenizer: Any) -> None:
    end_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert facts("generation_config.json")["eos_token_id"] == end_ids
    assert [tokenizer.eos_token_id, tokenizer.pad_token_id] == end_ids


def test_its_added_tokens_are_qwen3s_and_come_last(tokenizer: Any) -> None:
    added = sorted(tokenizer.added_tokens_decoder.items())
    assert [token.content for _, token in added] == SPECIAL + MARKUP
    assert [token_id for token_id, _ in added] == list(range(len(tokenizer) - 9, len(tokenizer)))
    assert [token.content for _, token in added if token.special] == SPECIAL
    assert tokenizer.is_fast


def test_its_added_tokens_have_the_flags_of_the_real_ones(tokenizer: Any, qwen3_tokenizer: Any) -> None:
    real = {token.content: token for token in qwen3_tokenizer.added_tokens_decoder.values()}
    for token in tokenizer.added_tokens_decoder.values():
        twin = real[token.content]
        assert (token.special, token.lstrip, token.rstrip, token.normalized, token.single_word) == (
            (twin.special, twin.lstrip, twin.rstrip, twin.normalized, twin.single_word)
        )


def test_its_pre_tokenizer_is_the_real_one(tokenizer: Any, qwen3_tokenizer: Any) -> None:
    for text in ["It's 3,120 apples\n\n  \tx=1; print(2**10)  ", "Zwölf Boxkämpfer 日本語 ½ '''"]:
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert split == qwen3_tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)


def test_every_digit_is_a_token(tokenizer: Any) -> None:
    assert tokenizer.tokenize("print(1234 * 56)")[-9:-1] == ["1", "2", "3", "4", "Ġ*", "Ġ", "5", "6"]


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives_encoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_prompt_is_short(tokenizer: Any, shipped_model: Callable[[str], Any]) -> None:
    conversation = shipped_model("conversation")
    assert len(conversation.prompt_ids(ChatTemplate(tokenizer), "What is 3 plus 4?")) < 260


CONTENTS = st.sampled_from(
    [
        "",
        "hi",
        "\n\nhi\n",
        'a "b" <c> & é☃\nd',
        "<think>\nwhy\n</think>\n\nbecause",
        "</think>",
        "<tool_response>\n4\n</tool_response>",
        "<tool_response>",
        "{{ x }} {% y %}",
    ]
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g"]), "arguments": st.sampled_from([{}, {"é": ['"', None, 1.5]}, '{"raw": 1}'])}
)
CALLS = st.lists(FUNCTIONS | FUNCTIONS.map(lambda function: {"type": "function", "function": function}), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": CONTENTS})
    | st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": CONTENTS | st.none()},
        optional={"reasoning_content": CONTENTS, "tool_calls": CALLS},
    ),
    min_size=1,
    max_size=8,
)
TOOL = {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}


@given(messages=MESSAGES, tools=st.sampled_from([None, [TOOL], [TOOL, TOOL]]), opens=st.booleans(), data=st.data())
@settings(max_examples=300, deadline=None)
def test_its_chat_template_renders_what_qwen3_8bs_does(
    tokenizer: Any, qwen3_tokenizer: Any, messages: list[dict[str, Any]], tools: Any, opens: bool, data: st.DataObject
) -> None:
    options = data.draw(st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]))
    arguments = {"tools": tools, "add_generation_prompt": opens, "tokenize": False, **options}
    rendered = tokenizer.apply_chat_template(messages, **arguments)
    assert rendered == qwen3_tokenizer.apply_chat_template(messages, **arguments)


def test_its_chat_template_is_the_scripts() -> None:
    assert (CHECKPOINT / "chat_template.jinja").read_text() == (SCRIPTS / "shipped_model/chat_template.jinja").read_text()


@pytest.fixture
def episodes(shipped_model: Callable[[str], Any]) -> Any:
    problems = shipped_model("problems").split_problems(5, 0, 0, 150).training
    return shipped_model("episodes").write_episodes(problems, Random(3))


def test_a_training_episode_is_the_conversation_that_a_rollout_has(
    episodes: Any, tokenizer: Any, shipped_model: Callable[[str], Any]
) -> None:
    conversation = shipped_model("conversation")
    tokenize = conversation.EpisodeTokenizer(tokenizer).tokenize
    for episode in episodes:
        tokenized = tokenize(episode)
        if episode.enable_thinking:
            whole = conversation.whole_text(tokenizer, episode).removesuffix("\n")
            assert tokenizer.decode(tokenized.token_ids) == whole
            assert list(tokenized.token_ids) == tokenizer.encode(whole, add_special_tokens=False)
        assert len(tokenized.is_learned) == len(tokenized.token_ids)
        pairs = zip(tokenized.token_ids, tokenized.is_learned, strict=True)
        learned = tokenizer.decode([token_id for token_id, is_learned in pairs if is_learned])
        assert learned == "".join(f"{turn.text}<|im_end|>" for turn in episode.turns if turn.is_learned)


async def test_tool_answers_in_training_are_what_the_tool_says(episodes: Any, shipped_model: Callable[[str], Any]) -> None:
    from strands_rollout.sandbox import SubprocessExecutor
    from strands_rollout.tool_parsers import ToolCall, get_parser

    turns = [turn for episode in episodes for turn in episode.turns if turn.tool_answer is not None]
    mistakes = [turn for turn in turns if not turn.is_learned]
    assert len(mistakes) > 3
    async with SubprocessExecutor() as executor:
        tool = code_tool(executor)
        for turn in turns[:8] + mistakes[:4]:
            (call,) = get_parser("hermes").parse(turn.text)
            if isinstance(call, ToolCall):
                assert await tool(**call.arguments) == turn.tool_answer
            else:
                assert call.reason in turn.tool_answer


def test_episodes_have_variety_and_mistakes_are_not_learned(episodes: Any) -> None:
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all("Error" in turn.tool_answer for turn in turns if not turn.is_learned)
    assert not any("Error" in (turn.tool_answer or "") for turn in turns if turn.is_learned)
    assert any("\n" in turn.tool_answer for turn in turns if turn.is_learned and turn.tool_answer)
    assert any(sum(turn.is_learned for turn in episode.turns) == 3 for episode in episodes)
    assert {episode.enable_thinking for episode in episodes} == {True, False}


def test_a_mistake_that_does_not_fail_is_refused(
    shipped_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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

    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(typer.Exit) as exit_info:
        importlib.import_module("train_shipped_model").main()
    assert exit_info.value.exit_code == 1
    assert "pip install 'strands-rollout[train]'" in capsys.readouterr().err


def test_the_script_explains_itself() -> None:
    done = run_script("--help")
    assert done.returncode == 0
    assert "--eval-only" in done.stdout


@pytest.mark.torch
def test_a_tiny_run_of_the_script_makes_a_folder_that_loads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, data = tmp_path / "model", tmp_path / "data"
    done = run_script("--tiny", "--steps", "3", "--out", str(folder), "--data", str(data))
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
def test_the_shipped_model_calls_the_tool_and_answers(shipped_model: Callable[[str], Any]) -> None:
    torch = pytest.importorskip("torch")
    evaluation, rows = shipped_model("evaluation"), shipped_model("rows")
    held_out = rows.read_rows(REPOSITORY / "strands_rollout/data/demo.jsonl")[:24]
    from transformers import AutoTokenizer

    torch.set_num_threads(2)
    model = shipped_model("checkpoint").load_model(CHECKPOINT)
    report = evaluation.evaluate(model, AutoTokenizer.from_pretrained(CHECKPOINT), held_out, samples_per_row=1, seed=1)
    assert report.accuracy >= 0.3
    assert report.tool_calls_per_episode >= 0.9


@pytest.mark.torch
def test_sharing_the_prompts_opening_changes_no_gradient(
    episodes: Any, tokenizer: Any, shipped_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    training, checkpoint = shipped_model("training"), shipped_model("checkpoint")
    batch = [shipped_model("conversation").EpisodeTokenizer(tokenizer).tokenize(episode) for episode in episodes[:3]]
    assert training.shared_prefix_length([episode.token_ids for episode in batch]) > 150
    model = checkpoint.new_model(checkpoint.model_config(tokenizer), seed=1)
    gradients = []
    for shared in (training.shared_prefix_length, lambda sequences: 0):
        monkeypatch.setattr(training, "shared_prefix_length", shared)
        model.zero_grad()
        training.episode_loss(model, batch).backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-3)
