"""The shipped model folder: its files, tokenizer and chat format."""

import json
import struct
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.shipped_model.word_problems import prompts_sha256
from strands_rollout.code_tool.tool import execute_python_code
from strands_rollout.template.messages import to_chat_tools

REPOSITORY = Path(__file__).parents[2]
CHECKPOINT = REPOSITORY / "strands_rollout/engine/checkpoint"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
RETRAIN = "retrain with: python -m experiments.shipped_model"


def facts(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((CHECKPOINT / name).read_text())
    return value


def test_shipped_model_was_trained_on_package_prompts() -> None:
    assert facts("config.json")["prompts_sha256"] == prompts_sha256(), (
        f"the system prompt or the tool's description has changed since the shipped model was trained; {RETRAIN}"
    )


def test_shipped_model_was_trained_on_package_tool(shipped_model: Any) -> None:
    trained_on = list(shipped_model("word_problems").CODE_AGENT.tools)
    offered = to_chat_tools([execute_python_code.tool_spec])
    assert json.dumps(offered) == json.dumps(trained_on), f"{offered} is not {trained_on}; {RETRAIN}"


def test_shipped_model_accuracy_leaves_room_to_learn() -> None:
    held_out = facts("training.json")["held_out"]
    assert 0.5 <= held_out["accuracy"] <= 0.8
    assert held_out["mixed_problems"] > 0.3
    assert held_out["episodes"] >= 1024


def test_shipped_model_weights_fit_configuration(shipped_tokenizer: Any) -> None:
    data = (CHECKPOINT / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    weights = {name: entry for name, entry in header.items() if name != "__metadata__"}
    config = facts("config.json")
    assert {entry["dtype"] for entry in weights.values()} == {"F16"}
    assert weights["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert config["vocab_size"] == len(shipped_tokenizer)
    assert len(weights) == 2 + 11 * config["num_hidden_layers"]
    assert "lm_head.weight" not in weights
    assert config["tie_word_embeddings"]
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    end_ids = shipped_tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert facts("generation_config.json")["eos_token_id"] == end_ids
    assert [shipped_tokenizer.eos_token_id, shipped_tokenizer.pad_token_id] == end_ids
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) < 4_000_000
    source = REPOSITORY / "experiments/shipped_model/chat_template.jinja"
    assert (CHECKPOINT / "chat_template.jinja").read_text() == source.read_text()


def test_shipped_model_added_tokens_are_qwen3s(shipped_tokenizer: Any) -> None:
    added = sorted(shipped_tokenizer.added_tokens_decoder.items())
    assert [token.content for _, token in added] == SPECIAL + MARKUP
    assert [token_id for token_id, _ in added] == list(range(len(shipped_tokenizer) - 9, len(shipped_tokenizer)))
    assert [token.content for _, token in added if token.special] == SPECIAL
    assert shipped_tokenizer.is_fast


def test_shipped_model_tokenizer_splits_like_qwen3(shipped_tokenizer: Any, qwen3_tokenizer: Any) -> None:
    real = {token.content: token for token in qwen3_tokenizer.added_tokens_decoder.values()}
    for text in ["It's 3,120 apples\n\n  \tx=1; print(2**10)  ", "Zwölf Boxkämpfer 日本語 ½ '''"]:
        split = shipped_tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert split == qwen3_tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    for token in shipped_tokenizer.added_tokens_decoder.values():
        twin = real[token.content]
        assert (token.special, token.lstrip, token.rstrip, token.normalized, token.single_word) == (
            (twin.special, twin.lstrip, twin.rstrip, twin.normalized, twin.single_word)
        )


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
def test_shipped_model_chat_template_renders_like_qwen3_8b(
    shipped_tokenizer, qwen3_tokenizer, messages, tools, opens, data
) -> None:
    options = data.draw(st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]))
    arguments = {"tools": tools, "add_generation_prompt": opens, "tokenize": False, **options}
    rendered = shipped_tokenizer.apply_chat_template(messages, **arguments)
    assert rendered == qwen3_tokenizer.apply_chat_template(messages, **arguments)
