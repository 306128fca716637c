"""The radix tree finds exactly what it was given, within its bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_rollout.engine.prefix_cache import PrefixCache

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def _ints(tokens) -> np.ndarray:
    return np.array(tokens, np.int64)


def _shared(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _insert(cache: PrefixCache, tokens: list[int]) -> None:
    """Insert with blocks whose one number per token is a digest of the prefix that it ends."""
    digests = np.array([hash(tuple(tokens[: end + 1])) % 10_000 for end in range(len(tokens))], np.float32)
    cache.insert(_ints(tokens), lambda start, stop: digests[start:stop].reshape(1, -1))


def _found(cache: PrefixCache, tokens: list[int]) -> list[float]:
    return [float(value) for block in cache.match(_ints(tokens)) for value in block[0]]


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=12))
@settings(deadline=None, max_examples=50)
def test_the_longest_known_prefix_is_found_with_its_own_values(sequences, query):
    cache = PrefixCache(1000)
    for tokens in sequences:
        _insert(cache, tokens)
    longest = max(_shared(tokens, query) for tokens in sequences)
    assert _found(cache, query) == [hash(tuple(query[: end + 1])) % 10_000 for end in range(longest)]


@given(SEQUENCES)
@settings(deadline=None, max_examples=50)
def test_shared_prefixes_are_stored_once(sequences):
    cache = PrefixCache(1000)
    for tokens in sequences:
        _insert(cache, tokens)
    prefixes = {tuple(tokens[:end]) for tokens in sequences for end in range(1, len(tokens) + 1)}
    assert cache.size_tokens == len(prefixes)


@given(SEQUENCES, st.integers(1, 20))
@settings(deadline=None, max_examples=50)
def test_the_capacity_holds_and_what_is_left_is_right(sequences, capacity):
    cache = PrefixCache(capacity)
    for tokens in sequences:
        _insert(cache, tokens)
        assert cache.size_tokens <= capacity
        if len(tokens) <= capacity:
            assert len(_found(cache, tokens)) == len(tokens)
    for tokens in sequences:
        found = _found(cache, tokens)
        assert found == [hash(tuple(tokens[: end + 1])) % 10_000 for end in range(len(found))]


def test_what_was_not_used_for_longest_is_forgotten_first():
    cache = PrefixCache(9)
    for tokens in ([0, 0, 0], [1, 1, 1], [2, 2, 2]):
        _insert(cache, tokens)
    _found(cache, [0, 0, 0])
    _insert(cache, [3, 3, 3])
    assert [len(_found(cache, [first] * 3)) for first in range(4)] == [3, 0, 0, 3]


def test_clearing_forgets_everything():
    cache = PrefixCache(9)
    _insert(cache, [1, 2])
    cache.clear()
    assert (_found(cache, [1, 2]), cache.size_tokens) == ([], 0)
