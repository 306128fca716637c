"""Reads safetensors files into fp32 arrays and arranges them for the forward pass.

Knows the file format (https://github.com/huggingface/safetensors#format) and Qwen3's tensor names. fp32, fp16 and bf16
are read here, because NumPy has no bf16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from strands_rollout.engine.model_config import ModelConfig

Floats = npt.NDArray[np.float32]

_DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, each matrix as [in, out], with the RMSNorm weights multiplied into the matrix that follows.

    Attributes:
        qkv: Queries, keys and values side by side. Within each query and key head the dimensions are interleaved, so
            that dimensions 2i and 2i + 1 are the pair that RoPE turns.
        qk_norm: [heads + kv_heads, head_dim] weights of the per-head norms, interleaved alike; the queries' rows also
            carry the attention scale.
        gate_up: The gate's part is negated, which spares a pass over its product: silu(g) is g / (1 + exp(-g)).
        minus_down: Negated likewise, so that the two signs cancel out exactly.
    """

    qkv: Floats
    qk_norm: Floats
    out: Floats
    gate_up: Floats
    minus_down: Floats


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model; `head` carries the final norm's weights."""

    embedding: Floats
    layers: tuple[LayerWeights, ...]
    head: Floats


def load_weights(folder: Path, config: ModelConfig) -> ModelWeights:
    """Read the weights of the model in `folder`.

    Raises:
        ConfigError: A file is missing or broken, or a tensor is missing or has another shape than config.json says.
    """
    tensors = _TensorReader(read_tensors(folder), folder)
    c = config
    embedding = tensors.take("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
    head = embedding if c.tied_embeddings else tensors.take("lm_head.weight", (c.vocab_size, c.hidden_size))
    final_norm = tensors.take("model.norm.weight", (c.hidden_size,))
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(tensors, c, f"model.layers.{index}.") for index in range(c.layers)),
        head=_in_out(head, final_norm),
    )


def read_tensors(folder: Path) -> dict[str, Floats]:
    """Read every tensor of `folder`, single file or sharded, as fp32."""
    tensors: dict[str, Floats] = {}
    for name in _file_names(folder):
        tensors |= _read_safetensors(folder / name)
    return tensors


def _file_names(folder: Path) -> list[str]:
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        return ["model.safetensors"]
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"can't read {index_path}: {e!r}") from e


def _read_safetensors(path: Path) -> dict[str, Floats]:
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        header_bytes = int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8 : 8 + min(header_bytes, _MAX_HEADER_BYTES)].tobytes())
        body = raw[8 + header_bytes :]
        return {name: _tensor(body, spec) for name, spec in header.items() if name != "__metadata__"}
    except FileNotFoundError as e:
        raise ConfigError(f"weights not found: {path}") from e
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is not a readable safetensors file: {e}") from e


def _tensor(body: npt.NDArray[np.uint8], spec: Mapping[str, object]) -> Floats:
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if dtype not in _DTYPES or not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError(f"tensor of dtype {dtype}; supported: {', '.join(_DTYPES)}")
    data = body[offsets[0] : offsets[1]].view(_DTYPES[str(dtype)]).reshape(shape)
    if dtype == "BF16":
        # bf16 is the upper half of an fp32.
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


class _TensorReader:
    """Hands out tensors by name with their shapes checked."""

    def __init__(self, tensors: dict[str, Floats], folder: Path) -> None:
        self._tensors = tensors
        self._folder = folder

    def take(self, name: str, shape: tuple[int, ...]) -> Floats:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self._folder}: the weights have no tensor {name}")
        if tensor.shape != shape:
            raise ConfigError(f"{self._folder}: tensor {name} has shape {tensor.shape}, config.json says {shape}")
        return tensor


def _layer(tensors: _TensorReader, c: ModelConfig, prefix: str) -> LayerWeights:
    q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = prefix + "self_attn."
    q = tensors.take(attention + "q_proj.weight", (q_dim, c.hidden_size))
    k = tensors.take(attention + "k_proj.weight", (kv_dim, c.hidden_size))
    v = tensors.take(attention + "v_proj.weight", (kv_dim, c.hidden_size))
    q_norm = tensors.take(attention + "q_norm.weight", (c.head_dim,)) * np.float32(c.head_dim**-0.5)
    k_norm = tensors.take(attention + "k_norm.weight", (c.head_dim,))
    gate = tensors.take(prefix + "mlp.gate_proj.weight", (c.intermediate_size, c.hidden_size))
    up = tensors.take(prefix + "mlp.up_proj.weight", (c.intermediate_size, c.hidden_size))
    qkv = np.concatenate([_interleave_rows(q, c.head_dim), _interleave_rows(k, c.head_dim), v])
    qk_norm = np.concatenate([np.tile(q_norm, (c.heads, 1)), np.tile(k_norm, (c.kv_heads, 1))])
    return LayerWeights(
        qkv=_in_out(qkv, tensors.take(prefix + "input_layernorm.weight", (c.hidden_size,))),
        qk_norm=np.ascontiguousarray(qk_norm[:, _interleaved(c.head_dim)]),
        out=_in_out(tensors.take(attention + "o_proj.weight", (c.hidden_size, q_dim))),
        gate_up=_in_out(
            np.concatenate([-gate, up]), tensors.take(prefix + "post_attention_layernorm.weight", (c.hidden_size,))
        ),
        minus_down=_in_out(-tensors.take(prefix + "mlp.down_proj.weight", (c.hidden_size, c.intermediate_size))),
    )


def _interleaved(head_dim: int) -> npt.NDArray[np.intp]:
    """Order of a head's dimensions that puts i and i + head_dim / 2 side by side."""
    return np.arange(head_dim).reshape(2, -1).T.ravel()


def _interleave_rows(weight: Floats, head_dim: int) -> Floats:
    heads = weight.reshape(-1, head_dim, weight.shape[1])
    return heads[:, _interleaved(head_dim)].reshape(weight.shape)


def _in_out(weight: Floats, norm: Floats | None = None) -> Floats:
    """[out, in] to contiguous [in, out], scaled per input by the norm that comes before."""
    return np.ascontiguousarray((weight if norm is None else weight * norm).T)
