"""Keys and values: of the sequences in work, one row each, with attention over them; and of those seen before."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from strands_rollout.engine.qwen3 import Floats, Ints, ModelConfig

_TOGETHER = 4
_HEADS = 2
_LONGEST_TRIED = 2048
_MASKED = np.float32(-1e30)
_FIRST_CAPACITY = 512
# A token attends alike to the last bit in any batch and chunk, so that a seed gives the same tokens whatever else runs.
# BLAS orders its sums by the shapes that it is given: therefore each token has products of its own, over runs of tokens
# that end at a multiple of _TOKEN_STEP, and values are mixed _MIX_TOKENS at a time.
_TOKEN_STEP = 64
_MIX_TOKENS = 256
# A stride of a power of two would map all dimensions of a token to the same few cache sets.
_STRIDE_PAD = 16
_CHUNK_TILE_TOKENS = 32
_RAGGED_BLOCK_ROWS = 8
_RAGGED_WASTE = 1.25
# After an overflow the cache shrinks to this share of its capacity, so that not every insertion has to evict.
_KEPT_SHARE = 0.9


def tokens_at_once(group: int, head_dim: int) -> int:
    """How many tokens' queries this machine's BLAS may multiply at once without changing the last bit of any.

    Some of its kernels sum a row's products in an order that depends on how many rows there are, some don't; which one
    runs is BLAS's own choice. So it is tried, on the shapes that attention has: `group` queries of `head_dim`
    dimensions per key and token.
    """
    random = np.random.default_rng(0)
    queries = random.standard_normal((_HEADS, _TOGETHER, group, head_dim), np.float32)
    stored = random.standard_normal((_HEADS, 1, head_dim, _LONGEST_TRIED + _STRIDE_PAD), np.float32)
    scores = random.random((_HEADS, _TOGETHER, group, _MIX_TOKENS), np.float32)
    keys = [stored[..., :stop] for stop in range(_TOKEN_STEP, _LONGEST_TRIED + 1, _TOKEN_STEP)]
    values = [stored[..., :stop].swapaxes(-1, -2) for stop in range(_TOKEN_STEP, _MIX_TOKENS + 1, _TOKEN_STEP)]
    products = [(queries, some) for some in keys] + [(scores[..., : some.shape[-2]], some) for some in values]

    def is_same(left: Floats, right: Floats) -> bool:
        together = left.reshape(_HEADS, 1, _TOGETHER * group, -1) @ right
        return np.array_equal(together.reshape(_HEADS, _TOGETHER, group, -1), left @ right)

    return _TOGETHER if all(is_same(left, right) for left, right in products) else 1


class KvRows:
    """`rows` sequences of up to `context_length` tokens.

    Memory is taken as sequences grow: the token capacity doubles when one needs more. Rows 0..n-1 decode together, so
    their owner keeps the decoding ones at the front (`move`). Tokens are the last axis of everything stored:
    a decode step then multiplies few queries by long contiguous runs, which BLAS does three times faster.
    """

    def __init__(self, config: ModelConfig, rows: int, context_length: int) -> None:
        self._context_length = context_length
        self._capacity = 0
        # [keys and values, layer, row, head, dimension, token]
        self._cache: Floats = np.zeros((2, config.layers, rows, config.kv_heads, config.head_dim, 0), np.float32)
        self._bias: Floats = np.zeros((rows, 0), np.float32)
        self._index: Ints = np.arange(0)
        self._blocks: list[tuple[slice, int, int]] = []
        # lets query i of a tile see keys 0..i from the tile's first on: [queries, keys up to the end of a step]
        seen = np.arange(_CHUNK_TILE_TOKENS + _TOKEN_STEP) <= np.arange(_CHUNK_TILE_TOKENS)[:, None]
        self._causal_bias = np.where(seen, np.float32(0), _MASKED)
        self._scratch: Floats = np.empty(0, np.float32)
        self._together = tokens_at_once(config.heads // config.kv_heads, config.head_dim)
        # Rows beyond these were never written: their memory is not there yet, and growing must not touch it.
        self._written_rows = 0
        self.reserve(min(_FIRST_CAPACITY, context_length))

    def reserve(self, tokens: int) -> None:
        """Make room for sequences of `tokens` tokens."""
        if tokens <= self._capacity:
            return
        old = self._capacity
        self._capacity = _rounded_up(min(self._context_length, max(tokens, 2 * old)))
        cache = np.zeros((*self._cache.shape[:-1], self._capacity + _STRIDE_PAD), np.float32)
        rows = slice(0, self._written_rows)
        cache[:, :, rows, ..., :old] = self._cache[:, :, rows, ..., :old]
        bias = np.full((len(self._bias), self._capacity), _MASKED, np.float32)
        bias[:, :old] = self._bias
        self._cache, self._bias = cache, bias

    def load(self, row: int, start: int, block: Floats) -> None:
        """Write a `copy_out` block as tokens start, start + 1, ... of `row`."""
        self._written_rows = max(self._written_rows, row + 1)
        self._cache[:, :, row, :, :, start : start + block.shape[-1]] = block

    def copy_out(self, row: int, start: int, stop: int) -> Floats:
        """Keys and values of tokens start..stop-1 of `row`: [2, layers, kv_heads, head_dim, tokens]."""
        return self._cache[:, :, row, :, :, start:stop].copy()

    def move(self, source: int, target: int, length: int) -> None:
        """Make `target` hold the first `length` tokens of `source`, ready to decode."""
        self._written_rows = max(self._written_rows, target + 1)
        if source != target:
            self._cache[:, :, target, :, :, :length] = self._cache[:, :, source, :, :, :length]
        self._bias[target, :length] = 0
        self._bias[target, length:] = _MASKED

    def attend_chunk(self, row: int, start: int, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """Store a chunk of one sequence and attend causally: [tokens, heads, head_dim] -> [tokens, ...]."""
        tokens, heads, head_dim = q.shape
        stop = start + tokens
        self._written_rows = max(self._written_rows, row + 1)
        keys, values = self._cache[:, layer, row]
        keys[:, :, start:stop] = k.transpose(1, 2, 0)
        values[:, :, start:stop] = v.transpose(1, 2, 0)
        queries = self._side_by_side(q, len(keys))
        mixed = np.empty_like(queries)
        for first in range(0, tokens, _CHUNK_TILE_TOKENS):
            seen, end = start + first, _rounded_up(start + min(first + _CHUNK_TILE_TOKENS, tokens))
            tile = slice(first // self._together, (first + _CHUNK_TILE_TOKENS) // self._together)
            shape = (*queries[:, tile].shape[:-1], end)
            size = math.prod(shape)
            if size > len(self._scratch):  # fresh memory would cost as much as the products
                self._scratch = np.empty(size, np.float32)
            scores = self._scratch[:size].reshape(shape)
            np.matmul(queries[:, tile], keys[:, None, :, :end], out=scores)
            by_token = scores.reshape(len(keys), -1, heads // len(keys), end)
            by_token[..., seen:] += self._causal_bias[: by_token.shape[1], None, : end - seen]
            mixed[:, tile] = _softmax_mix(scores, values[:, None, :, :end])
        by_head = mixed.reshape(len(keys), -1, heads // len(keys) * head_dim)
        return by_head.swapaxes(0, 1)[:tokens].reshape(tokens, heads * head_dim)

    def _side_by_side(self, q: Floats, kv_heads: int) -> Floats:
        """[tokens, heads, head_dim] to [kv_heads, products, rows, head_dim]: `_together` tokens in each product.

        The last product is filled up with zeros.
        """
        tokens, heads, head_dim = q.shape
        group = heads // kv_heads
        products = -(-tokens // self._together)
        queries = np.zeros((kv_heads, products * self._together, group, head_dim), np.float32)
        queries[:, :tokens] = q.reshape(tokens, kv_heads, group, head_dim).swapaxes(0, 1)
        return queries.reshape(kv_heads, products, self._together * group, head_dim)

    def begin_step(self, lengths: Ints) -> None:
        """Prepare the `attend_step` calls of one step: rows 0..n-1 each get a token at position `lengths`."""
        rows = len(lengths)
        self._index = np.arange(rows)
        self._bias[self._index, lengths] = 0
        ragged = rows * (lengths.max() + 1) > _RAGGED_WASTE * (lengths.sum() + rows)
        size = _RAGGED_BLOCK_ROWS if ragged else rows
        blocks = [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
        self._blocks = [
            (block, int(lengths[block].min()) + 1, _rounded_up(int(lengths[block].max()) + 1)) for block in blocks
        ]

    def attend_step(self, lengths: Ints, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """Store one token of each row at position `lengths` and attend: [rows, heads, head_dim] -> [rows, ...]."""
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
    """Softmax over the last axis of `scores` (overwritten), then the mean of `values` [..., head_dim, tokens] by it."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed: Floats = scores[..., :_MIX_TOKENS] @ values[..., :_MIX_TOKENS].swapaxes(-1, -2)
    for first in range(_MIX_TOKENS, scores.shape[-1], _MIX_TOKENS):
        run = slice(first, first + _MIX_TOKENS)
        mixed += scores[..., run] @ values[..., run].swapaxes(-1, -2)
    step_totals = np.einsum("...t->...", scores.reshape(*scores.shape[:-1], -1, _TOKEN_STEP))
    mixed /= np.add.accumulate(step_totals, axis=-1)[..., -1:]
    return mixed


def _rounded_up(tokens: int) -> int:
    return -(-tokens // _TOKEN_STEP) * _TOKEN_STEP


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens below its parent's; `block` is [2, layers, kv_heads, head_dim, tokens]."""

    tokens: Ints
    block: Floats
    parent: _Node | None
    last_used: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixCache:
    """Maps token sequences to their keys and values, for at most `capacity_tokens` tokens.

    A radix tree: each node holds a run of tokens, so that shared prefixes are stored once. The runs that were not used
    for longest are dropped first, leaves before their parents.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._root = _Node(np.empty(0, np.int64), np.empty(0, np.float32), None)
        self.size_tokens = 0
        self._clock = 0

    def match(self, tokens: Ints) -> list[Floats]:
        """The blocks of the longest known prefix of `tokens`, in order; they must not be written to."""
        return [node.block[..., :count] for node, count in self._walk(tokens)]

    def insert(self, tokens: Ints, copy_out: Callable[[int, int], Floats]) -> None:
        """Remember `tokens`, a whole sequence from position 0.

        `copy_out` gives the block of tokens start..stop-1 to keep; it is called once, for what is not yet known.
        """
        path = self._walk(tokens)
        known = sum(count for _, count in path)
        if known == len(tokens) or len(tokens) > self.capacity_tokens:
            return
        parent = self._root
        if path:
            last, count = path[-1]
            parent = last if count == len(last.tokens) else self._split(last, count)
        node = _Node(tokens[known:].copy(), copy_out(known, len(tokens)), parent, self._clock)
        parent.children[int(node.tokens[0])] = node
        self.size_tokens += len(node.tokens)
        if self.size_tokens > self.capacity_tokens:
            self._evict(int(self.capacity_tokens * _KEPT_SHARE))

    def _walk(self, tokens: Ints) -> list[tuple[_Node, int]]:
        """The nodes along `tokens` with how many of each one's tokens match; all but the last match whole."""
        self._clock += 1
        path: list[tuple[_Node, int]] = []
        node, done = self._root, 0
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                break
            count = min(len(child.tokens), len(tokens) - done)
            differing = np.flatnonzero(child.tokens[:count] != tokens[done : done + count])
            count = int(differing[0]) if len(differing) else count
            path.append((child, count))
            if count < len(child.tokens):
                break
            child.last_used = self._clock
            node, done = child, done + count
        return path

    def _split(self, node: _Node, count: int) -> _Node:
        """Cut `node` after `count` tokens and return the new upper part."""
        # Copies, because a view would keep the whole block alive after one of the parts is evicted.
        upper = _Node(node.tokens[:count].copy(), node.block[..., :count].copy(), node.parent, self._clock)
        (node.parent or self._root).children[int(upper.tokens[0])] = upper
        node.tokens, node.block = node.tokens[count:].copy(), node.block[..., count:].copy()
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _evict(self, target_tokens: int) -> None:
        while self.size_tokens > target_tokens:
            # What this very insertion used must survive it.
            leaves = [leaf for leaf in self._leaves() if leaf.last_used != self._clock]
            if not leaves:
                return
            for leaf in sorted(leaves, key=lambda leaf: leaf.last_used):
                if self.size_tokens <= target_tokens:
                    return
                del (leaf.parent or self._root).children[int(leaf.tokens[0])]
                self.size_tokens -= len(leaf.tokens)

    def _leaves(self) -> list[_Node]:
        leaves, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children:
                leaves.append(node)
        return leaves
