"""A Qwen3 causal LM in NumPy, fp32: its shape, weights and tokenizer from a Hugging Face folder, and its forward pass.

fp32, fp16 and bf16 safetensors files are read here (https://github.com/huggingface/safetensors#format), because NumPy
has no bf16. The tokenizer is read without transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import jinja2.ext
import jinja2.sandbox
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from strands_rollout.engine.requests import RequestRefusedError
from strands_rollout.errors import ConfigError, foreign_code
from strands_rollout.files import open_regular, read_regular

if TYPE_CHECKING:
    from strands_rollout.engine.kv_cache import KvRows


_ARCHITECTURE = "Qwen3ForCausalLM"
MAX_CONFIG_BYTES = 16_000_000
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Complexes = npt.NDArray[np.complex64]
Ints = npt.NDArray[np.int64]
_DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
# Far above those of real checkpoints (a few hundred bytes per tensor): parsing one stops all other threads.
_MAX_HEADER_BYTES = 16_000_000
Number = TypeVar("Number", bound=np.generic)
# Stores a layer's queries, keys and values and mixes: (layer, q, k, v) -> [tokens, heads * head_dim].
Attend: TypeAlias = Callable[[int, Floats, Floats, Floats], Floats]
# BLAS computes a row by another kernel, with other last bits, according to how many there are. So that a token's logits
# don't depend on what else is computed, whatever is multiplied by weights is multiplied this many rows at a time.
_TILE_ROWS = 4


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass needs to know of a checkpoint.

    Attributes:
        context_length: The longest sequence in tokens (max_position_embeddings).
        eos_token_ids: Token ids that end a generation, of both config files.
        sampling_defaults: generation_config.json's sampling values; only chat completions use them, as in SGLang.
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
    sampling_defaults: dict[str, float]

    def weight_shape_fields(self) -> tuple[int, ...]:
        """The fields that two checkpoints must share for one to replace the other in a running engine."""
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.layers)
        return (*sizes, self.heads, self.kv_heads, self.head_dim)


def read_model_config(folder: Path) -> ModelConfig:
    """Read and check the configuration of the model in `folder`.

    ConfigError where it is missing or unreadable, or the model is not a Qwen3 causal LM that this engine computes.
    """
    try:
        is_folder = folder.is_dir()
    except OSError as e:
        raise ConfigError(f"can't read the model folder {str(folder)!r:.500}: {e.strerror}") from e
    if not is_folder:
        raise ConfigError(f"model folder not found: {folder}. Give a folder with config.json and model.safetensors")
    raw = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    try:
        _refuse_unsupported(raw, folder)
        return _model_config(raw, generation)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise ConfigError(f"{folder / 'config.json'}: missing or wrong Qwen3 setting: {e!r}") from e


def _model_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    # transformers 5 writes rope_theta inside rope_parameters, transformers 4 beside it.
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
        sampling_defaults={key: float(generation[key]) for key in _SAMPLING_KEYS if generation.get(key) is not None},
    )


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value or ())


def _refuse_unsupported(raw: dict[str, Any], folder: Path) -> None:
    architectures = raw.get("architectures") or []
    if _ARCHITECTURE not in architectures:
        raise ConfigError(f"{folder}: architectures is {architectures}; this engine runs {_ARCHITECTURE} only")
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
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


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

    ConfigError where a file is missing or broken, or a tensor is missing or has another shape than config.json says.
    """
    tensors, c = _stored_tensors(folder), config

    def take(name: str, *shape: int) -> Floats:
        if name not in tensors:
            raise ConfigError(f"{folder}: the weights have no tensor {name}")
        stored_shape, read = tensors[name]
        if stored_shape != shape:
            raise ConfigError(f"{folder}: tensor {name} has shape {stored_shape}, config.json says {shape}")
        return read()

    embedding = take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    head = embedding if c.tied_embeddings else take("lm_head.weight", c.vocab_size, c.hidden_size)
    final_norm = take("model.norm.weight", c.hidden_size)
    layers = tuple(_layer(take, c, f"model.layers.{index}.") for index in range(c.layers))
    return ModelWeights(embedding, layers, _in_out(head, final_norm))


def read_tensors(folder: Path) -> dict[str, Floats]:
    """Read every tensor of `folder`, single file or sharded, as fp32; ConfigError where one is missing or broken."""
    return {name: read() for name, (_, read) in _stored_tensors(folder).items()}


# The shape of a tensor of a file, and what reads it: that the shape fits must be known before memory is taken for it.
_StoredTensor: TypeAlias = tuple[tuple[int, ...], Callable[[], Floats]]


def _stored_tensors(folder: Path) -> dict[str, _StoredTensor]:
    index_path, names = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"can't read {index_path}: it has no weight_map")
        names = set(map(str, weight_map.values()))
    return {key: tensor for name in sorted(names) for key, tensor in _tensors_of_file(folder / name).items()}


def _tensors_of_file(path: Path) -> dict[str, _StoredTensor]:
    try:
        with open_regular(path) as file:
            raw = np.memmap(file, dtype=np.uint8, mode="r")
        header_bytes = int.from_bytes(raw[:8].tobytes(), "little")
        # cut short, it is not JSON
        header = json.loads(raw[8 : 8 + min(header_bytes, _MAX_HEADER_BYTES)].tobytes())
        body = raw[8 + header_bytes :]
        return {name: _stored(body, spec, path) for name, spec in header.items() if name != "__metadata__"}
    except FileNotFoundError as e:
        raise ConfigError(f"weights not found: {path}") from e
    except OSError as e:
        raise ConfigError(f"can't read the weights {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{path} is not a readable safetensors file: {e!r:.200}") from e


def _stored(body: npt.NDArray[np.uint8], spec: dict[str, Any], path: Path) -> _StoredTensor:
    dtype, shape, (start, end) = spec["dtype"], spec["shape"], spec["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"tensor of dtype {dtype!r:.40}; supported: {', '.join(_DTYPES)}")
    numbers = [*shape, start, end]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"tensor with the shape and offsets {numbers!r:.80}; expected whole numbers")
    stored_bytes = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if stored_bytes != end - start or end > len(body):
        raise ValueError(f"tensor of {stored_bytes} bytes at {start} to {end} of {len(body)}; is the file complete?")

    def read() -> Floats:
        try:
            data = np.frombuffer(body[start:end].tobytes(), _DTYPES[dtype]).reshape(shape)
        except ValueError as e:  # too many dimensions
            raise ConfigError(f"{path} holds a tensor of shape {shape!r:.80}: {e}") from e
        if dtype == "BF16":
            # bf16 is the upper half of an fp32.
            return (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float32)

    return tuple(shape), read


def _layer(take: Callable[..., Floats], c: ModelConfig, prefix: str) -> LayerWeights:
    q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = prefix + "self_attn."
    # the order of a head's dimensions that puts i and i + head_dim / 2 side by side
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
        qkv=_in_out(np.concatenate([q, k, v]), take(prefix + "input_layernorm.weight", c.hidden_size)),
        qk_norm=np.ascontiguousarray(qk_norm[:, interleaved]),
        out=_in_out(take(attention + "o_proj.weight", c.hidden_size, q_dim)),
        gate_up=_in_out(np.concatenate([-gate, up]), take(prefix + "post_attention_layernorm.weight", c.hidden_size)),
        minus_down=_in_out(-take(prefix + "mlp.down_proj.weight", c.hidden_size, c.intermediate_size)),
    )


def _in_out(weight: Floats, norm: Floats | None = None) -> Floats:
    """[out, in] to contiguous [in, out], scaled per input by the norm that comes before."""
    return np.ascontiguousarray((weight if norm is None else weight * norm).T)


class Qwen3:
    """A Qwen3 model with its weights; keys and values live in the `KvRows` that each call is given."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, context_length: int) -> None:
        self.config = config
        self.weights = weights
        self._rotations = _rotations(config, context_length)
        self._eps = np.float32(config.rms_norm_eps)

    def decode(self, kv: KvRows, tokens: Ints, lengths: Ints) -> Floats:
        """Extend rows 0..n-1 by one token each; a row's logits don't depend on the others.

        `lengths[i]` tokens of row i are in place in `kv`. Returns [n, vocab_size] logits of the tokens that follow.
        """
        kv.begin_step(lengths)
        return self._logits(self._forward(tokens, lengths, partial(kv.attend_step, lengths)))

    def prefill(self, kv: KvRows, row: int, start: int, tokens: Ints) -> Floats:
        """Extend one row by a chunk of tokens whose first position is `start`.

        Returns [vocab_size] logits of the token that follows the chunk, as `decode` would get them token by token.
        """
        attend = partial(kv.attend_chunk, row, start)
        hidden = self._forward(tokens, np.arange(start, start + len(tokens)), attend)
        logits: Floats = self._logits(hidden[-1:])[0]
        return logits

    def _forward(self, tokens: Ints, positions: Ints, attend: Attend) -> Floats:
        count = len(tokens)
        rotation = self._rotations[_filled(positions), None]
        x = self.weights.embedding[_filled(tokens)]
        mixed = np.zeros((len(x), self.config.heads * self.config.head_dim), np.float32)
        with np.errstate(over="ignore"):  # exp of a very negative gate is inf, and gate * up / inf is the right 0
            for index, layer in enumerate(self.weights.layers):
                q, k, v = self._attention_inputs(layer, x, rotation)
                mixed[:count] = attend(index, q[:count], k[:count], v[:count])
                x += _product(mixed, layer.out)
                x += self._feed_forward(layer, x)
        return x[:count]

    def _attention_inputs(self, layer: LayerWeights, x: Floats, rotation: Complexes) -> tuple[Floats, Floats, Floats]:
        """Queries, keys and values: [tokens, heads, head_dim] each, normed and turned."""
        c = self.config
        qkv = _product(self._normed(x), layer.qkv).reshape(len(x), -1, c.head_dim)
        qk = self._normed(qkv[:, : c.heads + c.kv_heads])
        qk *= layer.qk_norm
        turned = (qk.view(np.complex64) * rotation).view(np.float32)
        return turned[:, : c.heads], turned[:, c.heads :], qkv[:, c.heads + c.kv_heads :]

    def _feed_forward(self, layer: LayerWeights, x: Floats) -> Floats:
        gate_up = _product(self._normed(x), layer.gate_up)
        minus_gate, up = gate_up[:, : self.config.intermediate_size], gate_up[:, self.config.intermediate_size :]
        divisor = np.exp(minus_gate)
        divisor += np.float32(1)
        minus_gate *= up
        np.divide(minus_gate, divisor, out=divisor)
        return _product(divisor, layer.minus_down)

    def _normed(self, x: Floats) -> Floats:
        """Divide by the root mean square along the last axis; the norm's weights are in the matrix that follows."""
        mean_square = np.einsum("...i,...i->...", x, x)
        mean_square /= x.shape[-1]
        mean_square += self._eps
        np.sqrt(mean_square, out=mean_square)
        normed: Floats = x / mean_square[..., None]
        return normed

    def _logits(self, hidden: Floats) -> Floats:
        return _product(self._normed(_filled(hidden)), self.weights.head)[: len(hidden)]


def _filled(x: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """`x` with zeros after its rows, up to a multiple of _TILE_ROWS."""
    fill = -len(x) % _TILE_ROWS
    return np.concatenate([x, np.zeros((fill, *x.shape[1:]), x.dtype)]) if fill else x


def _product(x: Floats, weight: Floats) -> Floats:
    """[n, in] times [in, out], where n is a multiple of _TILE_ROWS."""
    if len(x) == _TILE_ROWS:
        product: Floats = x @ weight
        return product
    tiles: Floats = x.reshape(-1, _TILE_ROWS, x.shape[1]) @ weight
    return tiles.reshape(len(x), weight.shape[1])


def _rotations(config: ModelConfig, context_length: int) -> Complexes:
    """[positions, head_dim / 2] turns of RoPE as unit complex numbers, in fp32 as transformers computes them."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / np.float32(config.rope_theta) ** exponents
    angles = np.outer(np.arange(context_length, dtype=np.float32), frequencies)
    return (np.cos(angles) + 1j * np.sin(angles)).astype(np.complex64)


_LONG_TEXT_CHARS = 10_000
_MAX_TOKENIZER_BYTES = 200_000_000
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextCodec:
    """Encodes, decodes and renders with one model's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: dict[str, str], template: str | None) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._template = _compiled(template) if template else None

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's own end-of-sequence token, where it names one."""
        token = self._special_tokens.get("eos_token")
        found: int | None = self._tokenizer.token_to_id(token) if token else None
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; text that spells a special token becomes that token."""
        if len(text) < _LONG_TEXT_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # tokenizers releases Python's lock for batches only
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """The prompt of a chat, ending where the assistant's turn begins; RequestRefusedError where it has none."""
        if self._template is None:
            raise RequestRefusedError("this model folder has no chat template; use /generate")
        names = {"add_generation_prompt": True, **self._special_tokens, **options}
        with foreign_code("a template fails in any way on messages that it was not written for") as outcome:
            return self._template.render(messages=messages, tools=tools or None, **names)
        raise RequestRefusedError(f"the chat template refused the messages: {outcome.error!r:.300}") from outcome.error


def read_text_codec(folder: Path) -> TextCodec:
    """Read tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja, or raise ConfigError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no tokenizer.json; the embedded engine needs a fast tokenizer")
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config: dict[str, Any] = {}
    with foreign_code("tokenizers raises plain Exception for a broken file") as outcome:
        tokenizer = Tokenizer.from_buffer(read_regular(path, _MAX_TOKENIZER_BYTES))
        if config_path.exists():
            config = json.loads(read_regular(config_path, MAX_CONFIG_BYTES))
        template = config.get("chat_template")
        if template_path.exists():
            template = read_regular(template_path, MAX_CONFIG_BYTES).decode("utf-8")
        tokens = {key: config[key] for key in _SPECIAL_TOKEN_KEYS if config.get(key)}
        special_tokens = {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items()}
    if outcome.error is not None:
        raise ConfigError(f"can't read the tokenizer of {folder}: {outcome.error}") from outcome.error
    try:
        return TextCodec(tokenizer, special_tokens, template)
    except jinja2.TemplateError as e:
        raise ConfigError(f"the chat template of {folder} is not valid Jinja: {e}") from e


def _compiled(template: str) -> jinja2.Template:
    """`template` in the environment that transformers gives to chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    # Jinja's own filter escapes <, > and & for HTML, which a prompt must not do.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: datetime.now(tz=UTC).strftime(form)
    return environment.from_string(template)


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
