"""Reading model folders: formats, and what is wrong with those that can't be read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tiny_qwen3 import TinyQwen3

from strands_rollout.engine.engine import load_engine
from strands_rollout.engine.qwen3 import read_model_config, read_tensors
from strands_rollout.engine.serving import EngineSettings
from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def _edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return folder


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0), ("float16", 1e-3), ("bfloat16", 1e-2)])
def test_every_precision_is_read_as_fp32(tmp_path, dtype, tolerance):
    exact = read_tensors(TinyQwen3().write(tmp_path / "exact"))
    read = read_tensors(TinyQwen3(dtype=dtype).write(tmp_path / "read"))
    for name, tensor in exact.items():
        assert read[name].dtype == np.float32
        np.testing.assert_allclose(read[name], tensor, rtol=tolerance, atol=tolerance)


def test_sharded_weights_are_read_whole(tmp_path):
    single = read_tensors(TinyQwen3().write(tmp_path / "single"))
    sharded = read_tensors(TinyQwen3(shards=3).write(tmp_path / "sharded"))
    assert single.keys() == sharded.keys()
    assert all(np.array_equal(single[name], sharded[name]) for name in single)


def test_rope_theta_and_end_tokens_are_found_where_either_transformers_writes_them(tmp_path):
    old = read_model_config(TinyQwen3().write(tmp_path / "old"))
    new = read_model_config(TinyQwen3(rope_in_parameters=True).write(tmp_path / "new"))
    assert old.rope_theta == new.rope_theta == 10000.0
    assert old.eos_token_ids == {360, 362}


def test_what_the_config_leaves_out_is_derived(tmp_path):
    folder = TinyQwen3(hidden=64, heads=4, kv_heads=4, head_dim=16).write(tmp_path / "m")
    config = read_model_config(_edit_config(folder, head_dim="absent", num_key_value_heads="absent"))
    assert (config.head_dim, config.kv_heads) == (16, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "this engine runs Qwen3ForCausalLM only"),
        ({"attention_bias": True}, "does not support attention_bias"),
        ({"use_sliding_window": True}, "does not support use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "does not support rope type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "does not support quantization_config"),
        ({"hidden_act": "gelu"}, "does not support hidden_act 'gelu'"),
        ({"hidden_size": "absent"}, "missing or wrong Qwen3 setting: KeyError('hidden_size')"),
        ({"num_hidden_layers": 3}, "the weights have no tensor model.layers.2.self_attn.q_proj.weight"),
        ({"intermediate_size": 50}, "mlp.gate_proj.weight has shape (48, 32), config.json says (50, 32)"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_with_the_reason(tmp_path, changes, words):
    folder = _edit_config(TinyQwen3().write(tmp_path / "m"), **changes)
    with pytest.raises(ConfigError) as caught:
        load_engine(EngineSettings(model_dir=folder))
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "can't read"),
        ("config.json", b"[]", "holds a list, expected a JSON object"),
        ("model.safetensors", None, "weights not found"),
        ("model.safetensors", b"\xff" * 8, "is not a readable safetensors file"),
        ("model.safetensors", b"", "is not a readable safetensors file"),
        ("model.safetensors.index.json", b"{}", "can't read"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b"{}", "can't read the tokenizer"),
        ("chat_template.jinja", b"{% if %}", "is not valid Jinja"),
    ],
)
def test_a_missing_or_broken_file_is_named(tmp_path, file, content, words):
    folder = TinyQwen3().write(tmp_path / "m")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=r".*") as caught:
        load_engine(EngineSettings(model_dir=folder))
    assert words in str(caught.value)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="model folder not found: .*nowhere"):
        load_engine(EngineSettings(model_dir=tmp_path / "nowhere"))


def test_the_context_can_be_shortened_but_not_extended(tiny_dir):
    assert load_engine(EngineSettings(model_dir=tiny_dir, context_length=100)).limits.context_length == 100
    with pytest.raises(ConfigError, match="context_length 513 is longer than the 512 tokens"):
        load_engine(EngineSettings(model_dir=tiny_dir, context_length=513))


@pytest.mark.parametrize("name", ["max_running_requests", "prefill_chunk_tokens", "prefix_cache_mb", "context_length"])
def test_settings_out_of_range_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        EngineSettings(**{name: 0})
