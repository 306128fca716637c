"""A Qwen3 causal LM in NumPy, fp32: config and weights of a Hugging Face folder, forward pass, keys and values.

The module has its own parser of safetensors files (https://github.com/huggingface/safetensors#format) with fp32, fp16
and bf16, since NumPy has no bf16.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from strands_rollout.errors import ConfigError
from strands_rollout.files.safe_files import open_regular, read_regular

_ARCHITECTURE = "Qwen3ForCausalLM"
MAX_CONFIG_BYTES = 16_000_000
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Complexes = npt.NDArray[np.complex64]
Ints = npt.NDArray[np.int64]
_DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
# Far more than the headers of real checkpoints (a few hundred bytes per tensor). A limit is needed because parsing JSON
# holds the GIL.
_MAX_HEADER_BYTES = 16_000_000
Number = TypeVar("Number", bound=np.generic)
# A function that stores a layer's keys and values, and computes attention:
# (layer, q, k, v) -> [tokens, heads * head_dim].
Attend: TypeAlias = Callable[[int, Floats, Floats, Floats], Floats]
# BLAS chooses a kernel by the number of rows, and kernels differ in the last bits. All products with weights have this
# many rows, so that a token's logits don't depend on the other tokens of a step.
_TILE_ROWS = 4


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The part of a checkpoint's configuration that the engine needs.

    Attributes:
        context_length: Maximum tokens of a sequence (max_position_embeddings).
        eos_token_ids: Token ids that end a generation, from config.json and generation_config.json.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    context_length: int
    eos_token_ids: frozenset[int]

    def weight_shape_fields(self) -> tuple[int, ...]:
        """Return the fields that must be equal for a weight update in a running engine."""
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.layers)
        return (*sizes, self.heads, self.kv_heads, self.head_dim)


def read_model_config(folder: Path) -> ModelConfig:
    """Read and check the configuration of the model in `folder`.

    Raises:
        ConfigError: A file is missing or unreadable, or the model is not a Qwen3 causal LM that this engine supports.
    """
    try:
        is_folder = folder.is_dir()
    except OSError as e:
        raise ConfigError(f"can't read the model folder {str(folder)!r:.500}: {e.strerror}") from e
    if not is_folder:
        raise ConfigError(f"model folder not found: {folder}; pass a folder with config.json and model.safetensors")
    raw = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    try:
        _refuse_unsupported(raw, folder)
        return _model_config(raw, generation)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise ConfigError(f"{folder / 'config.json'}: missing or invalid Qwen3 setting: {e!r}") from e


def _model_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    # transformers 5 writes rope_theta inside rope_parameters, transformers 4 at the top level.
    rope_theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta", 10000.0))
    return ModelConfig(
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden_size // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope_theta),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        context_length=int(raw["max_position_embeddings"]),
        eos_token_ids=_token_ids(raw.get("eos_token_id")) | _token_ids(generation.get("eos_token_id")),
    )


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value or ())


def _refuse_unsupported(raw: dict[str, Any], folder: Path) -> None:
    architectures = raw.get("architectures") or []
    if _ARCHITECTURE not in architectures:
        raise ConfigError(f"{folder}: architectures is {architectures}; the embedded engine runs {_ARCHITECTURE} only")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    unsupported = {
        "attention_bias": bool(raw.get("attention_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "quantization_config": raw.get("quantization_config") is not None,
        f"rope type {rope_type!r}": rope_type != "default",
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
    }
    found = [name for name, present in unsupported.items() if present]
    if found:
        raise ConfigError(f"{folder}: the embedded engine does not support {', '.join(found)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, MAX_CONFIG_BYTES))
    except FileNotFoundError as e:
        raise ConfigError(f"{path.parent} is not a model folder: it has no {path.name}") from e
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"can't read {path}: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} contains a {type(value).__name__}; expected a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer. Matrices are [in, out], and include the weights of an RMSNorm before them.

    Attributes:
        qkv: Queries, keys and values, concatenated. The dimensions of each query and key head are interleaved, so that
            RoPE rotates dimensions 2i and 2i + 1 as a pair.
        qk_norm: [heads + kv_heads, head_dim] weights of the per-head norms, interleaved as in `qkv`; the queries' rows
            include the attention scale.
        out: The output projection.
        gate_up: Gate and up projections, concatenated. The gate is negated, which saves a pass over its product:
            silu(g) is g / (1 + exp(-g)).
        minus_down: The negated down projection: the negated gate negates this projection's input.
    """

    qkv: Floats
    qk_norm: Floats
    out: Floats
    gate_up: Floats
    minus_down: Floats


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model; `head` is multiplied by the final norm's weights."""

    embedding: Floats
    layers: tuple[LayerWeights, ...]
    head: Floats


def load_weights(folder: Path, config: ModelConfig) -> ModelWeights:
    """Read the weights of the model in `folder`.

    Raises:
        ConfigError: A file is missing or broken, or a tensor is missing or has a different shape than in config.json.
    """
    tensors, c = _stored_tensors(folder), config

    def take(name: str, *shape: int) -> Floats:
        if name not in tensors:
            raise ConfigError(f"{folder}: the weights lack the tensor {name}")
        stored_shape, read = tensors[name]
        if stored_shape != shape:
            raise ConfigError(
                f"{folder}: tensor {name} has the shape {stored_shape}; expected {shape}, as in config.json"
            )
        return read()

    embedding = take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    head = embedding if c.tied_embeddings else take("lm_head.weight", c.vocab_size, c.hidden_size)
    final_norm = take("model.norm.weight", c.hidden_size)
    layers = tuple(_layer(take, c, f"model.layers.{index}.") for index in range(c.layers))
    return ModelWeights(embedding, layers, _transpose_scaled(head, final_norm))


def read_tensors(folder: Path) -> dict[str, Floats]:
    """Read all tensors of `folder`, single file or sharded, as fp32.

    Raises:
        ConfigError: A file is missing or broken.
    """
    return {name: read() for name, (_, read) in _stored_tensors(folder).items()}


# A stored tensor's shape, and a function that reads the tensor: the shape is checked before memory is allocated.
_StoredTensor: TypeAlias = tuple[tuple[int, ...], Callable[[], Floats]]


def _stored_tensors(folder: Path) -> dict[str, _StoredTensor]:
    index_path, names = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"can't read {index_path}: got weight_map {weight_map!r:.80}; expected a JSON object")
        names = set(map(str, weight_map.values()))
    return {key: tensor for name in sorted(names) for key, tensor in _tensors_of_file(folder / name).items()}


def _tensors_of_file(path: Path) -> dict[str, _StoredTensor]:
    try:
        with open_regular(path) as file:
            raw = np.memmap(file, dtype=np.uint8, mode="r")
        header_bytes = int.from_bytes(raw[:8].tobytes(), "little")
        # a longer header is cut off, and then is not valid JSON
        header = json.loads(raw[8 : 8 + min(header_bytes, _MAX_HEADER_BYTES)].tobytes())
        body = raw[8 + header_bytes :]
        return {name: _stored_tensor(body, spec, path) for name, spec in header.items() if name != "__metadata__"}
    except FileNotFoundError as e:
        raise ConfigError(f"weights not found: {path}") from e
    except OSError as e:
        raise ConfigError(f"can't read the weights {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{path} is not a readable safetensors file: {e!r:.200}") from e


def _stored_tensor(body: npt.NDArray[np.uint8], spec: dict[str, Any], path: Path) -> _StoredTensor:
    dtype, shape, (start, end) = spec["dtype"], spec["shape"], spec["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"tensor of dtype {dtype!r:.40}; expected one of {', '.join(_DTYPES)}")
    numbers = [*shape, start, end]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"tensor with the shape and offsets {numbers!r:.80}; expected integers of at least 0")
    stored_bytes = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if stored_bytes != end - start or end > len(body):
        raise ValueError(
            f"tensor of {stored_bytes} bytes at offsets {start} to {end} of {len(body)} bytes; is the file complete?"
        )

    def read() -> Floats:
        try:
            data = np.frombuffer(body[start:end].tobytes(), _DTYPES[dtype]).reshape(shape)
        except ValueError as e:  # too many dimensions, or (in an empty tensor) a dimension too large for NumPy
            raise ConfigError(f"{path} has a tensor of shape {shape!r:.80}: {e}") from e
        if dtype == "BF16":
            # bf16 is the upper half of an fp32.
            return (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float32)

    return tuple(shape), read


def _layer(take: Callable[..., Floats], c: ModelConfig, prefix: str) -> LayerWeights:
    q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = prefix + "self_attn."
    # Reorder a head's dimensions, so that i and i + head_dim / 2 are neighbors.
    interleaved = np.arange(c.head_dim).reshape(2, -1).T.ravel()

    def take_heads(name: str, rows: int) -> Floats:
        weight = take(attention + name, rows, c.hidden_size)
        return weight.reshape(-1, c.head_dim, c.hidden_size)[:, interleaved].reshape(weight.shape)

    q, k = take_heads("q_proj.weight", q_dim), take_heads("k_proj.weight", kv_dim)
    v = take(attention + "v_proj.weight", kv_dim, c.hidden_size)
    q_norm = take(attention + "q_norm.weight", c.head_dim) * np.float32(c.head_dim**-0.5)
    k_norm = take(attention + "k_norm.weight", c.head_dim)
    gate = take(prefix + "mlp.gate_proj.weight", c.intermediate_size, c.hidden_size)
    up = take(prefix + "mlp.up_proj.weight", c.intermediate_size, c.hidden_size)
    qk_norm = np.concatenate([np.tile(q_norm, (c.heads, 1)), np.tile(k_norm, (c.kv_heads, 1))])
    return LayerWeights(
        qkv=_transpose_scaled(np.concatenate([q, k, v]), take(prefix + "input_layernorm.weight", c.hidden_size)),
        qk_norm=np.ascontiguousarray(qk_norm[:, interleaved]),
        out=_transpose_scaled(take(attention + "o_proj.weight", c.hidden_size, q_dim)),
        gate_up=_transpose_scaled(
            np.concatenate([-gate, up]), take(prefix + "post_attention_layernorm.weight", c.hidden_size)
        ),
        minus_down=_transpose_scaled(-take(prefix + "mlp.down_proj.weight", c.hidden_size, c.intermediate_size)),
    )


def _transpose_scaled(weight: Floats, norm: Floats | None = None) -> Floats:
    """Return an [out, in] matrix as contiguous [in, out], scaled by the weights of the preceding norm."""
    return np.ascontiguousarray((weight if norm is None else weight * norm).T)


class Qwen3:
    """A Qwen3 model with its weights; the keys and values are in the `KvRows` that each call gets."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, context_length: int) -> None:
        self.config = config
        self.weights = weights
        self._rotations = _rotations(config, context_length)
        self._eps = np.float32(config.rms_norm_eps)

    def decode(self, kv: KvRows, tokens: Ints, lengths: Ints) -> Floats:
        """Extend rows 0..n-1 by one token each; a row's logits don't depend on the other rows.

        `kv` holds `lengths[i]` tokens of row i. Returns [n, vocab_size] logits of the next tokens.
        """
        kv.begin_step(lengths)
        return self._logits(self._forward(tokens, lengths, partial(kv.attend_step, lengths)))

    def prefill(self, kv: KvRows, row: int, start: int, tokens: Ints) -> Floats:
        """Extend one row by a chunk of tokens whose first position is `start`.

        Returns [vocab_size] logits of the token after the chunk, bit for bit as `decode` computes them token by token.
        """
        attend = partial(kv.attend_chunk, row, start)
        hidden = self._forward(tokens, np.arange(start, start + len(tokens)), attend)
        logits: Floats = self._logits(hidden[-1:])[0]
        return logits

    def _forward(self, tokens: Ints, positions: Ints, attend: Attend) -> Floats:
        count = len(tokens)
        rotation = self._rotations[_pad_rows(positions), None]
        x = self.weights.embedding[_pad_rows(tokens)]
        mixed = np.zeros((len(x), self.config.heads * self.config.head_dim), np.float32)
        with np.errstate(over="ignore"):  # exp(-gate) may be inf; gate * up / inf is then correctly 0
            for index, layer in enumerate(self.weights.layers):
                q, k, v = self._attention_inputs(layer, x, rotation)
                mixed[:count] = attend(index, q[:count], k[:count], v[:count])
                x += _multiply(mixed, layer.out)
                x += self._feed_forward(layer, x)
        return x[:count]

    def _attention_inputs(self, layer: LayerWeights, x: Floats, rotation: Complexes) -> tuple[Floats, Floats, Floats]:
        """Return queries, keys (both normalized and rotated) and values, [tokens, heads, head_dim] each."""
        c = self.config
        qkv = _multiply(self._rms_normalize(x), layer.qkv).reshape(len(x), -1, c.head_dim)
        qk = self._rms_normalize(qkv[:, : c.heads + c.kv_heads])
        qk *= layer.qk_norm
        turned = (qk.view(np.complex64) * rotation).view(np.float32)
        return turned[:, : c.heads], turned[:, c.heads :], qkv[:, c.heads + c.kv_heads :]

    def _feed_forward(self, layer: LayerWeights, x: Floats) -> Floats:
        gate_up = _multiply(self._rms_normalize(x), layer.gate_up)
        minus_gate, up = gate_up[:, : self.config.intermediate_size], gate_up[:, self.config.intermediate_size :]
        divisor = np.exp(minus_gate)
        divisor += np.float32(1)
        minus_gate *= up
        np.divide(minus_gate, divisor, out=divisor)
        return _multiply(divisor, layer.minus_down)

    def _rms_normalize(self, x: Floats) -> Floats:
        """Divide by the root mean square along the last axis; the norm's weights are applied elsewhere."""
        mean_square = np.einsum("...i,...i->...", x, x)
        mean_square /= x.shape[-1]
        mean_square += self._eps
        np.sqrt(mean_square, out=mean_square)
        normed: Floats = x / mean_square[..., None]
        return normed

    def _logits(self, hidden: Floats) -> Floats:
        return _multiply(self._rms_normalize(_pad_rows(hidden)), self.weights.head)[: len(hidden)]


def _pad_rows(x: npt.NDArray[Number]) -> npt.NDArray[Number]:
    fill = -len(x) % _TILE_ROWS
    return np.concatenate([x, np.zeros((fill, *x.shape[1:]), x.dtype)]) if fill else x


def _multiply(x: Floats, weight: Floats) -> Floats:
    """Return [n, in] times [in, out], _TILE_ROWS rows at a time; n is a multiple of _TILE_ROWS."""
    if len(x) == _TILE_ROWS:
        product: Floats = x @ weight
        return product
    tiles: Floats = x.reshape(-1, _TILE_ROWS, x.shape[1]) @ weight
    return tiles.reshape(len(x), weight.shape[1])


def _rotations(config: ModelConfig, context_length: int) -> Complexes:
    """Return the [positions, head_dim / 2] rotations of RoPE as unit complex numbers, in fp32 as in transformers."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / np.float32(config.rope_theta) ** exponents
    angles = np.outer(np.arange(context_length, dtype=np.float32), frequencies)
    return (np.cos(angles) + 1j * np.sin(angles)).astype(np.complex64)


_TRIED_TOKENS = 4
_TRIED_HEADS = 2
_TRIED_LENGTH = 2048
_MASKED = np.float32(-1e30)
_FIRST_CAPACITY = 512
# A token's attention is bit for bit the same in any batch and chunk, so a seed samples the same tokens whatever else
# runs. BLAS orders its sums by the shapes of the operands. So each token has its own matrix products, unless
# `find_tokens_per_product` finds shared products with the same bits. A product extends over a run of tokens that ends
# at a multiple of _TOKEN_STEP, and values are mixed _MIX_TOKENS at a time.
_TOKEN_STEP = 64
_MIX_TOKENS = 256
# A stride of a power of two would map all dimensions of a token to the same few cache sets.
_STRIDE_PAD = 16
_CHUNK_TILE_TOKENS = 32
# A decode step pads rows to the longest row. If that multiplies the work by more than _RAGGED_WASTE, the step works on
# blocks of _RAGGED_BLOCK_ROWS rows.
_RAGGED_BLOCK_ROWS = 8
_RAGGED_WASTE = 1.25


def find_tokens_per_product(group: int, head_dim: int) -> int:
    """Return how many tokens (4 or 1) can share one matrix product of their queries without changing a bit of a result.

    Some BLAS kernels sum a row's products in an order that depends on the number of rows, and BLAS chooses the kernel.
    So this function tries products of attention's shapes: `group` queries of `head_dim` dimensions per key and token.
    """
    random = np.random.default_rng(0)
    queries = random.standard_normal((_TRIED_HEADS, _TRIED_TOKENS, group, head_dim), np.float32)
    stored = random.standard_normal((_TRIED_HEADS, 1, head_dim, _TRIED_LENGTH + _STRIDE_PAD), np.float32)
    scores = random.random((_TRIED_HEADS, _TRIED_TOKENS, group, _MIX_TOKENS), np.float32)
    keys = [stored[..., :stop] for stop in range(_TOKEN_STEP, _TRIED_LENGTH + 1, _TOKEN_STEP)]
    values = [stored[..., :stop].swapaxes(-1, -2) for stop in range(_TOKEN_STEP, _MIX_TOKENS + 1, _TOKEN_STEP)]
    products = [(queries, some) for some in keys] + [(scores[..., : some.shape[-2]], some) for some in values]

    def is_same(left: Floats, right: Floats) -> bool:
        together = left.reshape(_TRIED_HEADS, 1, _TRIED_TOKENS * group, -1) @ right
        return np.array_equal(together.reshape(_TRIED_HEADS, _TRIED_TOKENS, group, -1), left @ right)

    return _TRIED_TOKENS if all(is_same(left, right) for left, right in products) else 1


class KvRows:
    """Keys and values of `rows` sequences of up to `context_length` tokens.

    When a sequence needs more tokens than the capacity, the capacity at least doubles, up to `context_length`. Rows
    0..n-1 decode together, so the owner moves the decoding rows to the front (`move`). Tokens are the last axis of all
    arrays, so that a decode step multiplies few queries by long contiguous runs: BLAS is three times faster then.
    """

    def __init__(self, config: ModelConfig, rows: int, context_length: int) -> None:
        self._context_length = context_length
        self._capacity = 0
        # [keys and values, layer, row, head, dimension, token]
        self._cache: Floats = np.zeros((2, config.layers, rows, config.kv_heads, config.head_dim, 0), np.float32)
        self._bias: Floats = np.zeros((rows, 0), np.float32)
        self._index: Ints = np.arange(0)
        self._blocks: list[tuple[slice, int, int]] = []
        # query i of a tile sees the keys 0..i of the tile: [queries, keys up to the end of a step]
        is_visible = np.arange(_CHUNK_TILE_TOKENS + _TOKEN_STEP) <= np.arange(_CHUNK_TILE_TOKENS)[:, None]
        self._causal_bias = np.where(is_visible, np.float32(0), _MASKED)
        self._scratch: Floats = np.empty(0, np.float32)
        self._tokens_per_product = find_tokens_per_product(config.heads // config.kv_heads, config.head_dim)
        # Rows from this index on were never written. Their memory is not allocated yet; `reserve` must not touch it.
        self._written_rows = 0
        self.reserve(min(_FIRST_CAPACITY, context_length))

    def reserve(self, tokens: int) -> None:
        """Grow the capacity, if needed, to hold `tokens` tokens of each sequence."""
        if tokens <= self._capacity:
            return
        old = self._capacity
        self._capacity = _round_up(min(self._context_length, max(tokens, 2 * old)))
        cache = np.zeros((*self._cache.shape[:-1], self._capacity + _STRIDE_PAD), np.float32)
        rows = slice(0, self._written_rows)
        cache[:, :, rows, ..., :old] = self._cache[:, :, rows, ..., :old]
        bias = np.full((len(self._bias), self._capacity), _MASKED, np.float32)
        bias[:, :old] = self._bias
        self._cache, self._bias = cache, bias

    def load(self, row: int, start: int, block: Floats) -> None:
        """Write a block from `copy_out` to `row`, from the token `start` on."""
        self._written_rows = max(self._written_rows, row + 1)
        self._cache[:, :, row, :, :, start : start + block.shape[-1]] = block

    def copy_out(self, row: int, start: int, stop: int) -> Floats:
        """Return keys and values of the tokens start..stop-1 of `row`: [2, layers, kv_heads, head_dim, tokens]."""
        return self._cache[:, :, row, :, :, start:stop].copy()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`, and mask the other tokens of `target`."""
        self._written_rows = max(self._written_rows, target + 1)
        if source != target:
            self._cache[:, :, target, :, :, :length] = self._cache[:, :, source, :, :, :length]
        self._bias[target, :length] = 0
        self._bias[target, length:] = _MASKED

    def attend_chunk(self, row: int, start: int, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """Store a chunk's keys and values, and compute its causal attention: [tokens, heads * head_dim]."""
        tokens, heads, head_dim = q.shape
        stop = start + tokens
        self._written_rows = max(self._written_rows, row + 1)
        keys, values = self._cache[:, layer, row]
        keys[:, :, start:stop] = k.transpose(1, 2, 0)
        values[:, :, start:stop] = v.transpose(1, 2, 0)
        queries = self._group_tokens(q, len(keys))
        mixed = np.empty_like(queries)
        for first in range(0, tokens, _CHUNK_TILE_TOKENS):
            seen, end = start + first, _round_up(start + min(first + _CHUNK_TILE_TOKENS, tokens))
            tile = slice(first // self._tokens_per_product, (first + _CHUNK_TILE_TOKENS) // self._tokens_per_product)
            shape = (*queries[:, tile].shape[:-1], end)
            size = math.prod(shape)
            if size > len(self._scratch):  # allocating each time would cost as much as the products
                self._scratch = np.empty(size, np.float32)
            scores = self._scratch[:size].reshape(shape)
            np.matmul(queries[:, tile], keys[:, None, :, :end], out=scores)
            by_token = scores.reshape(len(keys), -1, heads // len(keys), end)
            by_token[..., seen:] += self._causal_bias[: by_token.shape[1], None, : end - seen]
            mixed[:, tile] = _softmax_mix(scores, values[:, None, :, :end])
        by_head = mixed.reshape(len(keys), -1, heads // len(keys) * head_dim)
        return by_head.swapaxes(0, 1)[:tokens].reshape(tokens, heads * head_dim)

    def _group_tokens(self, q: Floats, kv_heads: int) -> Floats:
        """Arrange [tokens, heads, head_dim] as [kv_heads, products, rows, head_dim].

        Each product has the queries of `_tokens_per_product` tokens; the last product is padded with zeros.
        """
        tokens, heads, head_dim = q.shape
        group = heads // kv_heads
        products = -(-tokens // self._tokens_per_product)
        queries = np.zeros((kv_heads, products * self._tokens_per_product, group, head_dim), np.float32)
        queries[:, :tokens] = q.reshape(tokens, kv_heads, group, head_dim).swapaxes(0, 1)
        return queries.reshape(kv_heads, products, self._tokens_per_product * group, head_dim)

    def begin_step(self, lengths: Ints) -> None:
        """Prepare the `attend_step` calls of a step that adds a token to row i at position `lengths[i]`."""
        rows = len(lengths)
        self._index = np.arange(rows)
        self._bias[self._index, lengths] = 0
        ragged = rows * (lengths.max() + 1) > _RAGGED_WASTE * (lengths.sum() + rows)
        size = _RAGGED_BLOCK_ROWS if ragged else rows
        blocks = [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
        self._blocks = [
            (block, int(lengths[block].min()) + 1, _round_up(int(lengths[block].max()) + 1)) for block in blocks
        ]

    def attend_step(self, lengths: Ints, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """Store k and v of row i's token at `lengths[i]`, and compute its attention: [rows, heads * head_dim]."""
        rows, heads, head_dim = q.shape
        keys, values = self._cache[:, layer]
        keys[self._index, :, :, lengths] = k
        values[self._index, :, :, lengths] = v
        queries = q.reshape(rows, keys.shape[1], -1, head_dim)
        mixed = []
        for block, first_masked, stop in self._blocks:
            scores = queries[block] @ keys[block, ..., :stop]
            scores[..., first_masked:] += self._bias[block, None, None, first_masked:stop]
            mixed.append(_softmax_mix(scores, values[block, ..., :stop]))
        together = mixed[0] if len(mixed) == 1 else np.concatenate(mixed)
        return together.reshape(rows, heads * head_dim)


def _softmax_mix(scores: Floats, values: Floats) -> Floats:
    """Return the mean of `values` [..., head_dim, tokens], weighted by softmax(`scores`); overwrite `scores`."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed: Floats = scores[..., :_MIX_TOKENS] @ values[..., :_MIX_TOKENS].swapaxes(-1, -2)
    for first in range(_MIX_TOKENS, scores.shape[-1], _MIX_TOKENS):
        run = slice(first, first + _MIX_TOKENS)
        mixed += scores[..., run] @ values[..., run].swapaxes(-1, -2)
    step_totals = np.einsum("...t->...", scores.reshape(*scores.shape[:-1], -1, _TOKEN_STEP))
    mixed /= np.add.accumulate(step_totals, axis=-1)[..., -1:]
    return mixed


def _round_up(tokens: int) -> int:
    return -(-tokens // _TOKEN_STEP) * _TOKEN_STEP
