"""Queries of several tokens share a product exactly where this machine's BLAS lets none of them notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tiny_qwen3 import TinyQwen3

from strands_rollout.engine.kv_rows import KvRows
from strands_rollout.engine.model_config import read_model_config

# Kernels of OpenBLAS that run on the processors of the last ten years; None: this machine's own.
KERNELS = [None, "Haswell", "Sandybridge"]
SHAPES = [(1, 24), (2, 32), (4, 16), (4, 128)]

PROBE = """
import json, sys
import numpy as np
from strands_rollout.engine.blas_rows import tokens_at_once

found = []
for group, head_dim in json.loads(sys.argv[1]):
    together = tokens_at_once(group, head_dim, token_step=64, mix_tokens=256, stride_pad=16)
    random = np.random.default_rng(1)
    queries = random.standard_normal((3, 8, group, head_dim), np.float32)
    keys = random.standard_normal((3, 1, head_dim, 1008), np.float32)[..., :960]
    same = np.array_equal(
        (queries.reshape(3, 8 // together, together * group, head_dim) @ keys).reshape(3, 8, group, 960),
        queries @ keys,
    )
    found.append([together, same])
print(json.dumps(found))
"""


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_multiplied_together_has_the_bits_that_it_has_alone(kernel):
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"} | ({"OPENBLAS_CORETYPE": kernel} if kernel else {})
    command = [sys.executable, "-c", PROBE, json.dumps(SHAPES)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found = json.loads(output)
    assert all(together in (1, 4) and same for together, same in found), found


@pytest.mark.parametrize("shape", [TinyQwen3(), TinyQwen3(heads=4, kv_heads=1), TinyQwen3(heads=2, kv_heads=2)])
@pytest.mark.parametrize("tokens", [1, 3, 31, 32, 33, 90])
def test_attention_is_the_same_with_one_token_per_product_and_with_several(shape, tokens, tmp_path, monkeypatch):
    config = read_model_config(shape.write(tmp_path))
    random = np.random.default_rng(2)
    heads = (config.heads, config.kv_heads, config.kv_heads)
    chunks = [
        [random.standard_normal((count, many, config.head_dim), np.float32) for many in heads] for count in (70, tokens)
    ]
    mixed = []
    for together in (1, 4):
        monkeypatch.setattr("strands_rollout.engine.kv_rows.tokens_at_once", lambda *_, n=together, **__: n)
        kv = KvRows(config, 1, 512)
        kv.attend_chunk(0, 0, 0, *chunks[0])
        mixed.append(kv.attend_chunk(0, 0, 70, *chunks[1]))
    assert mixed[0] == pytest.approx(mixed[1], abs=1e-5)
