"""Keys and values of finished and running sequences, found again by their leading token ids.

A radix tree: each node holds a run of tokens and their keys and values, so that shared prefixes are stored once. Knows
nothing of requests. Bounded: the runs that were not used for longest are dropped first, leaves before their parents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# After an overflow the cache shrinks to this share of its capacity, so that not every insertion has to evict.
_KEPT_SHARE = 0.9


class _Node:
    """A run of tokens below its parent's; `block` is [2, layers, kv_heads, head_dim, tokens]."""

    __slots__ = ("block", "children", "last_used", "parent", "tokens")

    def __init__(self, tokens: Ints, block: Floats, parent: _Node | None) -> None:
        self.tokens = tokens
        self.block = block
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.last_used = 0


class PrefixCache:
    """Maps token sequences to their keys and values, for at most `capacity_tokens` tokens."""

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
        """Remember `tokens`.

        Args:
            tokens: The whole sequence from position 0.
            copy_out: Gives the block of tokens start..stop-1 to keep; called once, for what is not yet known.
        """
        path = self._walk(tokens)
        known = sum(count for _, count in path)
        if known == len(tokens) or len(tokens) > self.capacity_tokens:
            return
        parent = self._root
        if path:
            last, count = path[-1]
            parent = last if count == len(last.tokens) else self._split(last, count)
        node = _Node(tokens[known:].copy(), copy_out(known, len(tokens)), parent)
        node.last_used = self._clock
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
            count = _common_prefix(child.tokens, tokens[done:])
            path.append((child, count))
            if count < len(child.tokens):
                break
            child.last_used = self._clock
            node, done = child, done + count
        return path

    def _split(self, node: _Node, count: int) -> _Node:
        """Cut `node` after `count` tokens and return the new upper part."""
        # Copies, because a view would keep the whole block alive after one of the parts is evicted.
        upper = _Node(node.tokens[:count].copy(), node.block[..., :count].copy(), node.parent)
        upper.last_used = self._clock
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
                self._drop(leaf)

    def _drop(self, leaf: _Node) -> None:
        del (leaf.parent or self._root).children[int(leaf.tokens[0])]
        self.size_tokens -= len(leaf.tokens)

    def _leaves(self) -> list[_Node]:
        leaves, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                leaves.append(node)
        return leaves


def _common_prefix(left: Ints, right: Ints) -> int:
    count = min(len(left), len(right))
    differing = np.flatnonzero(left[:count] != right[:count])
    return int(differing[0]) if len(differing) else count
