"""Continuous batching: `Scheduler` decides which generations are queued, prefilled and decoded in the next step.

Generations join the batch between steps. Prompts are prefilled in chunks, so that a long prompt doesn't stall other
generations. If a prompt begins like an earlier sequence, a prefix cache has the keys and values of the common prefix.
Once the worker has started, all code here except `Scheduler.counts` runs in the worker's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from strands_rollout.engine.generation import (
    ABORTED_IN_QUEUE,
    DecodeBatch,
    InFlightGeneration,
    abort_finish,
    length_finish,
)
from strands_rollout.engine.qwen3 import Floats, Ints, KvRows, ModelWeights, Qwen3

PauseMode = Literal["abort", "retract", "in_place"]
# When the cache overflows, it shrinks to this share of its capacity, so that not every insertion has to evict.
_EVICTION_TARGET_SHARE = 0.9


@dataclass(slots=True, eq=False)
class _CacheNode:
    tokens: Ints
    block: Floats  # the tokens' keys and values: [2, layers, kv_heads, head_dim, tokens]
    parent: _CacheNode | None
    last_used: int = 0
    children: dict[int, _CacheNode] = field(default_factory=dict)


class PrefixCache:
    """Keys and values of token sequences, for at most `capacity_tokens` tokens.

    A radix tree: each node holds a run of tokens, so that shared prefixes are stored once. The least recently used runs
    are evicted first, leaves before their parents.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.clear()

    def clear(self) -> None:
        """Remove all entries."""
        self._root = _CacheNode(np.empty(0, np.int64), np.empty(0, np.float32), None)
        self.size_tokens = 0
        self._clock = 0

    def match(self, tokens: Ints) -> list[Floats]:
        """Return the blocks of the longest cached prefix of `tokens`, in order; callers must not write to them."""
        return [node.block[..., :count] for node, count in self._walk(tokens)]

    def insert(self, tokens: Ints, copy_out: Callable[[int, int], Floats]) -> None:
        """Add `tokens`, a whole sequence from position 0; evict other runs if needed.

        A sequence that exceeds the capacity is not added. `copy_out` returns the block of tokens start..stop-1; it is
        called at most once, for the tokens not cached yet.
        """
        path = self._walk(tokens)
        known = sum(count for _, count in path)
        if known == len(tokens) or len(tokens) > self.capacity_tokens:
            return
        parent = self._root
        if path:
            last, count = path[-1]
            parent = last if count == len(last.tokens) else self._split(last, count)
        node = _CacheNode(tokens[known:].copy(), copy_out(known, len(tokens)), parent, self._clock)
        parent.children[int(node.tokens[0])] = node
        self.size_tokens += len(node.tokens)
        if self.size_tokens > self.capacity_tokens:
            self._evict(int(self.capacity_tokens * _EVICTION_TARGET_SHARE))

    def _walk(self, tokens: Ints) -> list[tuple[_CacheNode, int]]:
        """Return the nodes along `tokens` and how many tokens match in each; only the last node may match in part."""
        self._clock += 1
        path: list[tuple[_CacheNode, int]] = []
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

    def _split(self, node: _CacheNode, count: int) -> _CacheNode:
        # Make copies: views would keep the whole block in memory, even after one part is evicted.
        upper = _CacheNode(node.tokens[:count].copy(), node.block[..., :count].copy(), node.parent, self._clock)
        (node.parent or self._root).children[int(upper.tokens[0])] = upper
        node.tokens, node.block = node.tokens[count:].copy(), node.block[..., count:].copy()
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _evict(self, target_tokens: int) -> None:
        while self.size_tokens > target_tokens:
            # Nodes used by the current insertion must stay.
            leaves = [leaf for leaf in self._leaves() if leaf.last_used != self._clock]
            if not leaves:
                return
            for leaf in sorted(leaves, key=lambda leaf: leaf.last_used):
                if self.size_tokens <= target_tokens:
                    return
                del (leaf.parent or self._root).children[int(leaf.tokens[0])]
                self.size_tokens -= len(leaf.tokens)

    def _leaves(self) -> list[_CacheNode]:
        leaves, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children:
                leaves.append(node)
        return leaves


class _Prefill:
    """The generation whose prompt is being computed in KV row `row`; the first `done` of `tokens` are computed."""

    __slots__ = ("done", "generation", "row", "tokens")

    def __init__(self, generation: InFlightGeneration, row: int) -> None:
        self.generation = generation
        self.row = row
        self.tokens: Ints = np.array([*generation.request.input_ids, *generation.output_ids], np.int64)
        self.done = 0


class Scheduler:
    """The scheduler of one model.

    Args:
        model: The model.
        context_length: Maximum tokens of prompt plus output.
        max_running: Maximum generations that decode together.
        prefill_chunk: Maximum prompt tokens computed at once.
        cache_tokens: Capacity of the prefix cache.
        seeds: Returns a seed for a generation that has none of its own.
        decode: Returns the text of token ids, for stop strings.
    """

    def __init__(
        self,
        model: Qwen3,
        *,
        context_length: int,
        max_running: int,
        prefill_chunk: int,
        cache_tokens: int,
        seeds: Callable[[], int],
        decode: Callable[[list[int]], str],
    ) -> None:
        self._model = model
        self._prefill_chunk = prefill_chunk
        self._seeds = seeds
        # The additional row is for the generation that is being prefilled.
        self._kv = KvRows(model.config, max_running + 1, context_length)
        self._batch = DecodeBatch(model.config, max_running, context_length, decode)
        self._cache = PrefixCache(cache_tokens)
        self._waiting: deque[InFlightGeneration] = deque()
        # Generations held back by a pause or an update: SGLang keeps them in its front end, unseen by its scheduler.
        self._held: deque[InFlightGeneration] = deque()
        self._prefill: _Prefill | None = None
        self._aborted: set[InFlightGeneration] = set()
        self._when_idle: deque[Callable[[Scheduler], None]] = deque()
        self.paused = False
        self.weight_version = "default"

    def has_work(self) -> bool:
        """Return True if `step` would compute anything."""
        return not self.paused and (self.is_busy() or bool(self._waiting))

    def is_busy(self) -> bool:
        """Return True if a generation is being prefilled or decoded."""
        return bool(len(self._batch)) or self._prefill is not None

    def counts(self) -> tuple[int, int]:
        """Return the numbers of running and queued generations, without those held back by a pause or an update."""
        return len(self._running()), len(self._waiting)

    def in_flight(self) -> list[InFlightGeneration]:
        """Return all unfinished generations."""
        return [*self._running(), *self._waiting, *self._held]

    def submit(self, generation: InFlightGeneration) -> None:
        """Queue a generation; hold it back while the scheduler is paused or a `when_idle_or_paused` action waits."""
        seed = generation.request.sampling.sampling_seed
        generation.seed = self._seeds() if seed is None else seed % 2**64
        (self._held if self.paused or self._when_idle else self._waiting).append(generation)

    def when_idle_or_paused(self, action: Callable[[Scheduler], None]) -> None:
        """Run `action` once no generation runs or is queued; while paused, run it now.

        Until `action` has run, new requests are held back.
        """
        if self.paused:
            action(self)
            return
        self._when_idle.append(action)
        self.run_idle_actions()

    def run_idle_actions(self) -> None:
        """Run the actions of `when_idle_or_paused` if no generation runs or is queued; called between steps."""
        if self._when_idle and not (self.is_busy() or self._waiting):
            while self._when_idle:
                self._when_idle.popleft()(self)
            self._release_held()

    def pause(self, mode: PauseMode) -> None:
        """Stop computing until `resume`.

        "abort" ends running and queued generations. Decoding generations keep all of their output; prefilling and
        queued generations keep the tokens that SGLang would have sent (see `drop_unsent_tokens`). "retract" moves
        running generations to the end of the queue; they are prefilled again with their output. "in_place" freezes all
        generations.
        """
        if mode == "abort":
            self._abort_now([*self._running(), *self._waiting])
        elif mode == "retract":
            retracted = [self._remove(row) for row in reversed(range(len(self._batch)))][::-1] + self._prefilling()
            self._prefill = None
            for generation in retracted:
                generation.retractions += 1
            self._waiting.extend(retracted)
        self.paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self.paused = False
        self._release_held()

    def flush(self) -> bool:
        """Empty the prefix cache and return True.

        If a generation runs, or is queued while the scheduler is not paused, do nothing and return False.
        """
        if self.is_busy() or (self._waiting and not self.paused):
            return False
        self._cache.clear()
        return True

    def replace_weights(self, weights: ModelWeights, version: str | None) -> None:
        """Use other weights from the next step on, and report them as `version`, unless `version` is None."""
        self._model.weights = weights
        if version is not None:
            self.rename_weights(version)

    def rename_weights(self, version: str) -> None:
        """Report the weights as `version` from the next token on; close the version spans of all earlier output."""
        for row, generation in enumerate(self._batch.generations):
            generation.close_span(self.weight_version, self._batch.output_count(row))
        for generation in (*self._prefilling(), *self._waiting):
            if generation.output_ids:
                generation.close_span(self.weight_version, len(generation.output_ids))
        self.weight_version = version

    def abort(self, rid: str | None) -> None:
        """Abort each generation whose rid begins with `rid`, as SGLang does; None aborts all generations.

        Queued generations end immediately. Running generations end after their next token, or before the next chunk of
        their prompt; if the scheduler is paused, this happens only after `resume`. Generations held back by a pause or
        an update are not aborted.
        """
        self._abort_now([g for g in self._waiting if rid is None or g.request.rid.startswith(rid)])
        self._aborted.update(g for g in self._running() if rid is None or g.request.rid.startswith(rid))

    def cancel(self, generation: InFlightGeneration) -> None:
        """End a generation whose client has disconnected, immediately and in any state."""
        self._abort_now([generation])

    def abort_all(self) -> None:
        """End all generations immediately."""
        self._abort_now(self.in_flight())

    def step(self) -> None:
        """Decode a token of each generation of the batch, then prefill chunks of prompts.

        Chunks are prefilled until they have at least `prefill_chunk` tokens in total, or no prompt can be prefilled.
        """
        self._abort_now([generation for generation in self._prefilling() if generation in self._aborted])
        if len(self._batch):
            rows = slice(0, len(self._batch))
            lengths = self._batch.lengths[rows]
            self._kv.reserve(int(lengths.max()) + 1)
            logits = self._model.decode(self._kv, self._batch.last_tokens[rows], lengths)
            lengths += 1
            self._advance(rows, logits)
        spent = 0
        while spent < self._prefill_chunk and (prefill := self._next_prefill()) is not None:
            spent += self._compute_chunk(prefill)

    def _prefilling(self) -> list[InFlightGeneration]:
        return [self._prefill.generation] if self._prefill else []

    def _running(self) -> list[InFlightGeneration]:
        return [*self._batch.generations, *self._prefilling()]

    def _release_held(self) -> None:
        if not self.paused and not self._when_idle:
            self._waiting.extend(self._held)
            self._held.clear()

    def _next_prefill(self) -> _Prefill | None:
        if self._prefill is None and self._waiting and not self._batch.is_full():
            self._prefill = prefill = _Prefill(self._waiting.popleft(), len(self._batch))
            self._kv.reserve(len(prefill.tokens))
            # The last token is always computed, since its logits give the first new token.
            for block in self._cache.match(prefill.tokens[:-1]):
                self._kv.load(prefill.row, prefill.done, block)
                prefill.done += block.shape[-1]
            if prefill.generation.cached_tokens is None:
                prefill.generation.cached_tokens = prefill.done
        return self._prefill

    def _compute_chunk(self, prefill: _Prefill) -> int:
        """Compute a prompt's next chunk; return its length, which doesn't depend on other prompts of the step."""
        chunk = prefill.tokens[prefill.done : prefill.done + self._prefill_chunk]
        logits = self._model.prefill(self._kv, prefill.row, prefill.done, chunk)
        prefill.done += len(chunk)
        if prefill.done == len(prefill.tokens):
            self._prefill = None
            self._start_decoding(prefill, logits)
        return len(chunk)

    def _start_decoding(self, prefill: _Prefill, logits: Floats) -> None:
        """Add a prefilled generation to the batch, and sample its next token from the [vocab_size] logits."""
        generation, length = prefill.generation, len(prefill.tokens)
        self._cache.insert(prefill.tokens, partial(self._kv.copy_out, prefill.row))
        if generation.request.max_new_tokens == 0:
            self._finish(generation, length_finish(0))
            return
        row = self._batch.join(generation, length, generation.seed)
        self._kv.move(prefill.row, row, length)
        self._advance(slice(row, row + 1), logits[None])

    def _advance(self, rows: slice, logits: Floats) -> None:
        endings = dict(self._batch.advance(rows, logits))
        if self._aborted:
            last = [row for row in range(rows.start, rows.stop) if self._batch.generations[row] in self._aborted]
            endings |= dict.fromkeys(last, abort_finish())
        # Go in descending order: the batch's last row moves into the gap, and a row that has yet to end must not move.
        for row in sorted(endings, reverse=True):
            self._end_row(row, endings[row])

    def _abort_now(self, generations: list[InFlightGeneration]) -> None:
        for row in reversed(range(len(self._batch))):
            if self._batch.generations[row] in generations:
                self._end_row(row, abort_finish())
        for generation in [generation for generation in generations if generation.finish is None]:
            if self._prefill and generation is self._prefill.generation:
                self._prefill = None
            else:
                (self._held if generation in self._held else self._waiting).remove(generation)
            generation.drop_unsent_tokens()
            self._finish(generation, ABORTED_IN_QUEUE)

    def _end_row(self, row: int, finish: dict[str, Any]) -> None:
        tokens = self._batch.tokens(row)[: self._batch.lengths[row]]
        # A request that continues this generation will find these tokens in the cache.
        self._cache.insert(tokens, partial(self._kv.copy_out, row))
        self._finish(self._remove(row), finish)

    def _remove(self, row: int) -> InFlightGeneration:
        """Remove a row from the batch; return its generation, which then has the row's output."""
        generation = self._batch.generations[row]
        moved = self._batch.leave(row)
        if moved != row:
            self._kv.move(moved, row, int(self._batch.lengths[row]))
        return generation

    def _finish(self, generation: InFlightGeneration, finish: dict[str, Any]) -> None:
        self._aborted.discard(generation)
        generation.close_span(self.weight_version, len(generation.output_ids))
        # Set `finish` last: other threads take it as the sign that the generation is complete.
        generation.finish = finish
        generation.notify()
