"""`KvRows`: equal attention for any number of tokens per product. `PrefixCache`: exact hits, and its capacity."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_qwen3 import TinyQwen3

from strands_rollout.engine.qwen3 import KvRows, read_model_config
from strands_rollout.engine.scheduler import PrefixCache

AMPLE = 1000
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@pytest.mark.parametrize("shape", [TinyQwen3(), TinyQwen3(heads=4, kv_heads=1), TinyQwen3(heads=2, kv_heads=2)])
@pytest.mark.parametrize("tokens", [1, 3, 31, 32, 33, 90])
def test_kv_rows_attention_is_equal_for_any_product_size(shape, tokens, tmp_path, monkeypatch):
    config = read_model_config(shape.write(tmp_path))
    random = np.random.default_rng(2)
    heads = (config.heads, config.kv_heads, config.kv_heads)
    chunks = [
        [random.standard_normal((count, many, config.head_dim), np.float32) for many in heads] for count in (70, tokens)
    ]
    mixed = []
    for together in (1, 4):
        monkeypatch.setattr("strands_rollout.engine.qwen3.find_tokens_per_product", lambda *_, n=together, **__: n)
        kv = KvRows(config, 1, 512)
        kv.attend_chunk(0, 0, 0, *chunks[0])
        mixed.append(kv.attend_chunk(0, 70, 0, *chunks[1]))
    assert mixed[0] == pytest.approx(mixed[1], abs=1e-5)


def _ints(tokens) -> np.ndarray:
    return np.array(tokens, np.int64)


def _shared(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _digests(tokens: list[int]) -> list[float]:
    """Return a number per token that identifies the prefix ending there."""
    return [float(hash(tuple(tokens[: end + 1])) % 10_000) for end in range(len(tokens))]


def _insert(cache: PrefixCache, tokens: list[int]) -> None:
    digests = np.array(_digests(tokens), np.float32)
    cache.insert(_ints(tokens), lambda start, stop: digests[start:stop].reshape(1, -1))


def _found(cache: PrefixCache, tokens: list[int]) -> list[float]:
    return [float(value) for block in cache.match(_ints(tokens)) for value in block[0]]


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=12), st.just(AMPLE) | st.integers(1, 20))
@settings(deadline=None)
def test_prefix_cache_finds_the_longest_prefix_in_capacity(sequences, query, capacity):
    cache = PrefixCache(capacity)
    for tokens in sequences:
        _insert(cache, tokens)
        assert cache.size_tokens <= capacity
        assert len(tokens) > capacity or len(_found(cache, tokens)) == len(tokens)
    for tokens in (*sequences, query):
        found = _found(cache, tokens)
        assert found == _digests(tokens)[: len(found)]
        assert capacity != AMPLE or len(found) == max(_shared(one, tokens) for one in sequences)
    prefixes = {tuple(tokens[:end]) for tokens in sequences for end in range(1, len(tokens) + 1)}
    assert capacity != AMPLE or cache.size_tokens == len(prefixes)
