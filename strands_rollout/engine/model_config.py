"""The shape of a Qwen3 model, read from a Hugging Face folder.

Knows config.json and generation_config.json; refuses what the forward pass can't compute. Knows nothing of weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURE = "Qwen3ForCausalLM"
SAMPLING_DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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

    def kv_bytes_per_token(self) -> int:
        """Bytes that the keys and values of one token take, over all layers."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim

    def weight_shape_fields(self) -> tuple[int, ...]:
        """The fields that two checkpoints must share for one to replace the other in a running engine."""
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.layers)
        return (*sizes, self.heads, self.kv_heads, self.head_dim)


def read_model_config(folder: Path) -> ModelConfig:
    """Read and check the configuration of the model in `folder`.

    Raises:
        ConfigError: The folder or config.json is missing or unreadable, the model is not a Qwen3 causal LM, or it uses
            a feature that this engine doesn't compute.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder not found: {folder}. Give a folder with config.json and model.safetensors")
    raw = _read_json(folder / "config.json")
    _refuse_unsupported(raw, folder)
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    try:
        return _model_config(raw, generation)
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"{folder / 'config.json'}: missing or wrong Qwen3 setting: {e!r}") from e


def _model_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    defaults = {key: float(generation[key]) for key in SAMPLING_DEFAULT_KEYS if generation.get(key) is not None}
    return ModelConfig(
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden_size // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(raw),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        context_length=int(raw["max_position_embeddings"]),
        eos_token_ids=_token_ids(raw.get("eos_token_id")) | _token_ids(generation.get("eos_token_id")),
        sampling_defaults=defaults,
    )


def _rope_theta(raw: dict[str, Any]) -> float:
    # transformers 5 writes rope_theta inside rope_parameters, transformers 4 beside it.
    parameters = raw.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _refuse_unsupported(raw: dict[str, Any], folder: Path) -> None:
    architectures = raw.get("architectures") or []
    if ARCHITECTURE not in architectures:
        raise ConfigError(f"{folder}: architectures is {architectures}; this engine runs {ARCHITECTURE} only")
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
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ConfigError(f"{path.parent} is not a model folder: it has no {path.name}") from e
    except (OSError, ValueError) as e:
        raise ConfigError(f"can't read {path}: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value
