"""Write a tiny Qwen3 folder: seeded random weights with the shipped model's tokenizer and chat template.

The model's text is meaningless, but the same in every implementation.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strands_rollout.engine import SHIPPED_MODEL_DIR

VOCAB_SIZE = 1200
END_IDS = [1193, 1191]  # <|im_end|>, <|endoftext|>
_HEADER_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class TinyQwen3:
    """Shape of a tiny model; `write` creates its folder."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 48
    context_length: int = 512
    tied: bool = True
    dtype: str = "float32"
    shards: int = 1
    rope_in_parameters: bool = False

    def write(self, folder: Path) -> Path:
        self._write_configs(folder)
        shapes, weight_map = self._shapes(), {}
        rng = np.random.default_rng(0)
        tensors = {name: _random_tensor(rng, name, shapes[name]) for name in sorted(shapes)}
        for shard in range(self.shards):
            file = f"model-{shard}.safetensors" if self.shards > 1 else "model.safetensors"
            part = {name: tensors[name] for name in sorted(shapes)[shard :: self.shards]}
            _save_tensors(part, folder / file, self.dtype)
            weight_map |= dict.fromkeys(part, file)
        if self.shards > 1:
            _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        return folder

    def _write_configs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(SHIPPED_MODEL_DIR / name, folder)
        rope = {"rope_theta": 10000.0}
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context_length,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "use_sliding_window": False,
            "eos_token_id": END_IDS[0],
            "torch_dtype": self.dtype,
            **({"rope_parameters": {"rope_type": "default", **rope}} if self.rope_in_parameters else rope),
        }
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", {"eos_token_id": END_IDS, "do_sample": True})

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (VOCAB_SIZE, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (VOCAB_SIZE, self.hidden)
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_proj": (q_dim, self.hidden),
            "self_attn.k_proj": (kv_dim, self.hidden),
            "self_attn.v_proj": (kv_dim, self.hidden),
            "self_attn.o_proj": (self.hidden, q_dim),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
        return shapes


def _random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return 0.6 * noise
    return noise * (1.4 / np.sqrt(shape[-1])).astype(np.float32)


def _save_tensors(tensors: Mapping[str, np.ndarray], path: Path, dtype: str) -> None:
    """Write a safetensors file by hand: NumPy has no bfloat16, which the library's function would need."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, tensor in tensors.items():
        if dtype == "bfloat16":
            bits = tensor.astype(np.float32).view(np.uint32)
            blobs.append(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes())
        else:
            blobs.append(tensor.astype(dtype).tobytes())
        offsets = [offset, offset := offset + len(blobs[-1])]
        header[name] = {"dtype": _HEADER_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(blobs))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
