"""The shipped model in double precision and without a cache: the reference for both engines.

It shares no code with the embedded engine except the reading of the configuration and the weights.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from strands_rollout.engine import SHIPPED_MODEL_DIR
from strands_rollout.engine.qwen3 import read_model_config, read_tensors

Doubles = np.ndarray


class ReferenceQwen3:
    def __init__(self, folder) -> None:
        self._config = read_model_config(folder)
        self._tensors = {name: tensor.astype(np.float64) for name, tensor in read_tensors(folder).items()}

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def logits(self, ids: Sequence[int] | Sequence[Sequence[int]]) -> Doubles:
        """Return [tokens, vocabulary]; row i holds the logits of the token that follows ids[: i + 1].

        For several sequences of one length, return [sequences, tokens, vocabulary].
        """
        x = self._tensors["model.embed_tokens.weight"][np.asarray(ids)]
        rotations = self._rotations(x.shape[-2])
        for layer in range(self._config.layers):
            x = x + self._attention(f"model.layers.{layer}.", x, rotations)
            x = x + self._feed_forward(f"model.layers.{layer}.", x)
        head = "model.embed_tokens" if self._config.tied_embeddings else "lm_head"
        return self._linear(head, self._rms_norm("model.norm.weight", x))

    def _attention(self, layer: str, x: Doubles, rotations: Doubles) -> Doubles:
        c, count = self._config, x.shape[-2]
        normed = self._rms_norm(layer + "input_layernorm.weight", x)
        q, k, v = (self._linear(f"{layer}self_attn.{name}_proj", normed) for name in "qkv")
        q, k, v = (np.swapaxes(heads.reshape(*heads.shape[:-1], -1, c.head_dim), -3, -2) for heads in (q, k, v))
        q, k = (
            _rotated(self._rms_norm(f"{layer}self_attn.{name}_norm.weight", heads), rotations)
            for name, heads in (("q", q), ("k", k))
        )
        k, v = (np.repeat(heads, c.heads // c.kv_heads, axis=-3) for heads in (k, v))
        scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(c.head_dim)
        scores += np.triu(np.full((count, count), -np.inf), 1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.swapaxes(weights @ v, -3, -2)
        return self._linear(layer + "self_attn.o_proj", mixed.reshape(*x.shape[:-1], -1))

    def _feed_forward(self, layer: str, x: Doubles) -> Doubles:
        normed = self._rms_norm(layer + "post_attention_layernorm.weight", x)
        gate, up = (self._linear(f"{layer}mlp.{name}_proj", normed) for name in ("gate", "up"))
        return self._linear(layer + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def _linear(self, name: str, x: Doubles) -> Doubles:
        # one product for all sequences is faster than many small ones
        rows = x.reshape(-1, x.shape[-1]) @ self._tensors[name + ".weight"].T
        return rows.reshape(*x.shape[:-1], -1)

    def _rms_norm(self, name: str, x: Doubles) -> Doubles:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self._config.rms_norm_eps) * self._tensors[name]

    def _rotations(self, count: int) -> Doubles:
        """Return [positions, head_dim / 2] rotations as complex numbers."""
        half = self._config.head_dim // 2
        frequencies = self._config.rope_theta ** -(np.arange(half) / half)
        return np.exp(1j * np.outer(np.arange(count), frequencies))


def _rotated(heads: Doubles, rotations: Doubles) -> Doubles:
    """Apply RoPE like Hugging Face's Qwen3: dimension i rotates together with i + head_dim / 2."""
    first, second = np.split(heads, 2, axis=-1)
    rotated = (first + 1j * second) * rotations
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def log_softmax(logits: Doubles) -> Doubles:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@cache
def shipped_reference() -> ReferenceQwen3:
    return ReferenceQwen3(SHIPPED_MODEL_DIR)
