"""A request's result does not depend on the requests beside it; pauses of the embedded engine.

A token's random number depends only on the seed and the position, its logits only on the ids before it.
"""

import asyncio
import ctypes
import platform
import random
from functools import cache
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from engine_api import IDS, in_flight, wait_for_load
from tiny_qwen3 import TinyQwen3

from strands_rollout.engine.qwen3 import KvRows, Qwen3, load_weights, read_model_config

NARROWED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
SHAPES = {
    "grouped": TinyQwen3(),
    "ungrouped": TinyQwen3(kv_heads=4, head_dim=24, hidden=40),
    "one kv head": TinyQwen3(kv_heads=1, layers=3),
}
PROMPT_TOKENS, TOKENS = 290, 330
MODES = ["abort", "in_place", "retract"]


def _prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(360) for _ in range(rng.randrange(3, 300))] for _ in range(count)]


@pytest.mark.parametrize("max_running", [1, 5])
async def test_engine_rows_keep_their_tokens_in_any_order(start, tiny_dir, max_running):
    reference = await start(tiny_dir)
    api = await start(tiny_dir, max_running_requests=max_running, prefill_chunk_tokens=32)
    prompts = _prompts(12)
    lengths = [3 + 11 * index % 50 for index in range(12)]

    def call(to, index):
        fields = {"temperature": 0} if index % 2 else {"temperature": 1.5, "top_k": 20, "sampling_seed": index}
        return to.generate(prompts[index], max_new_tokens=lengths[index], ignore_eos=True, **fields)

    expected = [(await call(reference, index))["output_ids"] for index in range(12)]
    got = await asyncio.gather(*(call(api, index) for index in range(12)))
    assert [answer["output_ids"] for answer in got] == expected


async def test_engine_random_seed_repeats_results(start, tiny_dir):
    first, second = [await start(tiny_dir, random_seed=11) for _ in range(2)]
    samples = [await api.generate(max_new_tokens=30, ignore_eos=True) for api in (first, second, first)]
    assert samples[0]["output_ids"] == samples[1]["output_ids"] != samples[2]["output_ids"]


@cache
def _bits_are_promised() -> bool:
    """Return whether logits must match bit for bit: they do on x86-64 with OpenBLAS, where this was measured.

    Another BLAS may order its sums differently. So may an OpenBLAS older than the processor (as in NumPy 1.26), which
    falls back to Prescott kernels.
    """
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    return "openblas" in blas and platform.machine() == "x86_64" and _openblas_core() != "Prescott"


def _openblas_core() -> str:
    """Return the processor type that NumPy's OpenBLAS detected, or "" when it cannot be asked."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in {line.split()[-1] for line in lines if "numpy" in line and "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename"):
            if hasattr(library, name):
                function = getattr(library, name)
                function.restype = ctypes.c_char_p
                return str(function().decode())
    return ""


def _same(logits: np.ndarray, expected: np.ndarray) -> bool:
    return np.array_equal(logits, expected) if _bits_are_promised() else np.allclose(logits, expected, atol=1e-4)


def _decoded(model: Qwen3, ids: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Return row 0's logits after each token from PROMPT_TOKENS on, decoded beside rows of other lengths."""
    count, at = len(lengths), np.array(lengths)
    kv = KvRows(model.config, count + 1, ids.shape[1])
    kv.reserve(ids.shape[1])
    for row, length in enumerate(lengths):
        model.prefill(kv, count, 0, ids[row, :length])
        kv.move(count, row, length)
    steps = range(TOKENS - PROMPT_TOKENS)
    return np.stack([model.decode(kv, ids[np.arange(count), at + step], at + step)[0] for step in steps])


def _prefilled(model: Qwen3, ids: np.ndarray, chunk: int) -> np.ndarray:
    """Return the logits after the last token of `ids`, computed `chunk` tokens at a time."""
    kv = KvRows(model.config, 1, len(ids))
    kv.reserve(len(ids))
    return [model.prefill(kv, 0, first, ids[first : first + chunk]) for first in range(0, len(ids), chunk)][-1]


@pytest.mark.parametrize("shape", SHAPES)
def test_qwen3_logits_are_equal_in_any_batch_and_chunk(shape, tmp_path):
    config = read_model_config(SHAPES[shape].write(tmp_path))
    model = Qwen3(config, load_weights(tmp_path, config), 448)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (33, 448))
    alone = _decoded(model, ids, [PROMPT_TOKENS])
    for others in ([20], [100, 300, 7], [64] * 15, list(range(5, 325, 10))):
        assert _same(_decoded(model, ids, [PROMPT_TOKENS, *others]), alone), others
    for chunk in (7, 64, 100, 448):
        for step in (0, 17, 39):
            assert _same(_prefilled(model, ids[0, : PROMPT_TOKENS + step + 1], chunk), alone[step]), (chunk, step)


@pytest.mark.parametrize("fields", [{}, NARROWED])
@pytest.mark.parametrize("flush", [False, True])
async def test_engine_continues_a_request_from_its_own_output(embedded, fields, flush):
    fields = {"sampling_seed": 11, "ignore_eos": True, "return_logprob": True, **fields}
    whole = await embedded.generate(max_new_tokens=40, **fields)
    ids, triples = whole["output_ids"], whole["meta_info"]["output_token_logprobs"]
    for cut in range(1, 40, 3):
        if flush:
            await embedded.post("/flush_cache")
        rest = await embedded.generate([*IDS, *ids[:cut]], max_new_tokens=40 - cut, **fields)
        assert rest["output_ids"] == ids[cut:], cut
        logprobs = [triple[0] for triple in rest["meta_info"]["output_token_logprobs"]]
        assert logprobs == pytest.approx([triple[0] for triple in triples[cut:]], abs=1e-5)


async def _pause(api, mode: str) -> None:
    answer = await api.post("/pause_generation", {"mode": mode})
    assert (answer.status, answer.body["status"]) == (200, "ok")


async def _continue(api) -> None:
    assert (await api.post("/continue_generation", {})).status == 200


@pytest.mark.parametrize("mode", MODES)
async def test_pause_leaves_nothing_of_disconnected_clients(start, long_dir, mode):
    api = await start(long_dir)
    async with aiohttp.ClientSession() as session:
        async with in_flight(api, "running", disconnects=True):
            await wait_for_load(api, 1)
            await _pause(api, mode)
            assert (await api.get("/health")).status == 200
            body = {"input_ids": IDS, "rid": "held", "sampling_params": {"max_new_tokens": 15000, "ignore_eos": True}}
            held = asyncio.create_task(session.post(api.base_url + "/generate", json=body))
            await asyncio.sleep(0.02)
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
        await wait_for_load(api, 0)
    await _continue(api)
    for rid in ("running", "held"):
        assert (await api.generate(rid=rid, max_new_tokens=1))["meta_info"]["id"] == rid
    assert await api.load() == (0, 0)


async def test_pause_abort_ends_paused_generations(start, long_dir):
    api = await start(long_dir)
    async with in_flight(api, "r1") as [task]:
        await wait_for_load(api, 1)
        await _pause(api, "in_place")
        assert await api.load() == (1, 0)
        await _pause(api, "abort")
        assert (await task)["meta_info"]["finish_reason"]["message"] == "Aborted"
