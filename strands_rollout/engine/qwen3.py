"""The forward pass of a Qwen3 causal LM in NumPy, fp32.

Knows arithmetic only: token ids and positions in, logits out. Knows nothing of requests, sampling or HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from strands_rollout.engine.kv_rows import KvRows
    from strands_rollout.engine.model_config import ModelConfig
    from strands_rollout.engine.weights import LayerWeights, ModelWeights

    # Stores a layer's queries, keys and values and mixes: (layer, q, k, v) -> [tokens, heads * head_dim].
    Attend: TypeAlias = Callable[[int, "Floats", "Floats", "Floats"], "Floats"]

Floats = npt.NDArray[np.float32]
Complexes = npt.NDArray[np.complex64]
Ints = npt.NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)

# BLAS computes a row by another kernel, with other last bits, according to how many there are. So that a token's logits
# don't depend on what else is computed, whatever is multiplied by weights is multiplied this many rows at a time.
_TILE_ROWS = 4
_ONE = np.float32(1)


class Qwen3:
    """A Qwen3 model with its weights; keys and values live in the `KvRows` that each call is given."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, context_length: int) -> None:
        self.config = config
        self.weights = weights
        self._rotations = _rotations(config, context_length)
        self._eps = np.float32(config.rms_norm_eps)

    def decode(self, kv: KvRows, tokens: Ints, lengths: Ints) -> Floats:
        """Extend rows 0..n-1 by one token each; a row's logits don't depend on the others.

        Args:
            kv: `lengths[i]` tokens of row i are in place.
            tokens: [n] ids of the new tokens.
            lengths: [n] their positions.

        Returns:
            [n, vocab_size] logits of the tokens that follow.
        """
        kv.begin_step(lengths)

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            return kv.attend_step(layer, lengths, q, k, v)

        return self._logits(self._forward(tokens, lengths, attend))

    def prefill(self, kv: KvRows, row: int, start: int, tokens: Ints) -> Floats:
        """Extend one row by a chunk of tokens whose first position is `start`.

        The results are those that `decode` would get token by token.

        Returns:
            [vocab_size] logits of the token that follows the chunk.
        """

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            return kv.attend_chunk(layer, row, start, q, k, v)

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
        divisor += _ONE
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
