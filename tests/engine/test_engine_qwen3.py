"""Reading model folders: formats, and the errors of unreadable folders at the start and at a weight update."""

import asyncio
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from tiny_qwen3 import END_IDS, TinyQwen3

from strands_rollout.engine import EngineSettings
from strands_rollout.engine.engine import load_engine
from strands_rollout.engine.qwen3 import read_model_config, read_tensors
from strands_rollout.errors import ConfigError


def _edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return folder


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0), ("float16", 1e-3), ("bfloat16", 1e-2)])
def test_read_tensors_gives_fp32_for_every_precision(tmp_path, dtype, tolerance):
    exact = read_tensors(TinyQwen3().write(tmp_path / "exact"))
    read = read_tensors(TinyQwen3(dtype=dtype).write(tmp_path / "read"))
    for name, tensor in exact.items():
        assert read[name].dtype == np.float32
        np.testing.assert_allclose(read[name], tensor, rtol=tolerance, atol=tolerance)


def test_read_tensors_from_shards_and_a_transformers_5_config(tmp_path):
    old, new = TinyQwen3().write(tmp_path / "old"), TinyQwen3(shards=3, rope_in_parameters=True).write(tmp_path / "new")
    single, sharded = read_tensors(old), read_tensors(new)
    assert single.keys() == sharded.keys()
    assert all(np.array_equal(single[name], sharded[name]) for name in single)
    assert read_model_config(old) == read_model_config(new)
    assert (read_model_config(old).rope_theta, read_model_config(old).eos_token_ids) == (10000.0, set(END_IDS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "the embedded engine runs Qwen3ForCausalLM only"),
        ({"attention_bias": True}, "does not support attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "does not support rope type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "does not support quantization_config"),
        ({"hidden_size": "absent"}, "missing or invalid Qwen3 setting: KeyError('hidden_size')"),
        ({"intermediate_size": 50}, "mlp.gate_proj.weight has the shape (48, 32); expected (50, 32), as in config"),
        ({"num_hidden_layers": 3}, "the weights lack the tensor model.layers.2.self_attn.q_proj.weight"),
    ],
)
def test_load_engine_refuses_an_unsupported_model(tmp_path, changes, words):
    folder = _edit_config(TinyQwen3().write(tmp_path / "m"), **changes)
    with pytest.raises(ConfigError) as caught:
        load_engine(EngineSettings(model_dir=folder))
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"[]", "contains a list; expected a JSON object"),
        ("model.safetensors", None, "weights not found"),
        ("model.safetensors", b"\xff" * 8, "is not a readable safetensors file"),
        ("model.safetensors.index.json", b"{}", "can't read"),
        ("tokenizer.json", b"{}", "can't read the tokenizer"),
    ],
)
def test_load_engine_names_a_missing_or_broken_file(tmp_path, file, content, words):
    folder = TinyQwen3().write(tmp_path / "m")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=r".*") as caught:
        load_engine(EngineSettings(model_dir=folder))
    assert words in str(caught.value)


def test_load_engine_context_can_only_be_shortened(tiny_dir):
    assert load_engine(EngineSettings(model_dir=tiny_dir, context_length=100)).limits.context_length == 100
    with pytest.raises(ConfigError, match="got context_length 513; expected at most 512"):
        load_engine(EngineSettings(model_dir=tiny_dir, context_length=513))


@pytest.mark.parametrize("name", ["max_running_requests", "prefill_chunk_tokens", "prefix_cache_mb", "context_length"])
def test_engine_settings_refuse_values_out_of_range(name):
    with pytest.raises(ConfigError, match=f"got {name}=.*; expected at least"):
        EngineSettings(**{name: 0})


SPOILT = [
    *itertools.product(
        ("pipe", "device", "sparse", "nested", "foreign"),
        ("config.json", "generation_config.json", "model.safetensors"),
    ),
    ("missing", ""),
    ("of another shape", ""),
]


def _spoil(folder: Path, kind: str, name: str) -> None:
    """Write a model folder that cannot be loaded: `name` replaced as `kind` says, another shape, or nothing at all."""
    if kind == "missing":
        return
    path = TinyQwen3(hidden=64 if kind == "of another shape" else 32).write(folder) / name
    if name:
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}})
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header.encode())
            file.truncate(8 + len(header) + 2**40)
    elif name:
        path.write_bytes(b"[" * 100_000 if kind == "nested" else b"\x10\0\0\0\0\0\0\0 garbage")


@pytest.mark.parametrize(("kind", "name"), SPOILT)
async def test_update_weights_from_a_bad_folder_keeps_the_old_weights(embedded, tmp_path, kind, name):
    _spoil(tmp_path / "new", kind, name)
    before = await embedded.generate(max_new_tokens=10, temperature=0)
    asked = {"model_path": f"{tmp_path}/new", "weight_version": "v2"}
    answer = await asyncio.wait_for(embedded.post("/update_weights_from_disk", asked), 30)
    assert (answer.status, answer.body["success"]) == (400, False)
    assert str(tmp_path) in answer.body["message"]
    after = await embedded.generate(max_new_tokens=10, temperature=0)
    assert (after["output_ids"], after["meta_info"]["weight_version"]) == (before["output_ids"], "default")


async def test_update_weights_out_of_memory_keeps_the_engine_alive(embedded, tmp_path, monkeypatch):
    def refuse(_: Path) -> bool:
        raise MemoryError("no memory")

    monkeypatch.setattr(Path, "is_dir", refuse)
    answer = await embedded.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert (answer.status, answer.body["success"]) == (400, False)
    assert "no memory" in answer.body["message"]
    assert len((await embedded.generate(max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2
