"""The engine's logprobs equal those of transformers' Qwen3 to 1e-4: in batches, in chunks and after cache hits."""

import asyncio
import random

import pytest
from tiny_qwen3 import TinyQwen3

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

SHAPES = {
    "grouped-tied": TinyQwen3(),
    "grouped-untied-bf16-sharded": TinyQwen3(tied=False, dtype="bfloat16", shards=3, rope_in_parameters=True),
    "one-kv-head-fp16": TinyQwen3(kv_heads=1, dtype="float16", layers=3),
    "no-groups-wide-heads": TinyQwen3(kv_heads=4, head_dim=24, hidden=40),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def folder(request, tmp_path_factory):
    return SHAPES[request.param].write(tmp_path_factory.mktemp("shape"))


@pytest.fixture(scope="module")
def check(folder):
    """Return a function that compares an answer with transformers' Qwen3ForCausalLM on the same folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def compare(prompt, answer, temperature):
        output = answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits / temperature, dim=-1)
        expected = rows[torch.arange(len(output)), torch.tensor(output)].tolist()
        triples = answer["meta_info"]["output_token_logprobs"]
        assert [entry[0] for entry in triples] == pytest.approx(expected, abs=1e-4)

    return compare


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_engine_logprobs_equal_transformers(start, folder, check, temperature):
    api = await start(folder, prefill_chunk_tokens=48)
    rng = random.Random(3)
    prompts = [[rng.randrange(360) for _ in range(length)] for length in (1, 7, 48, 130, 301)]
    fields = {"max_new_tokens": 20, "temperature": temperature, "ignore_eos": True, "return_logprob": True}
    answers = await asyncio.gather(*(api.generate(prompt, **fields) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        check(prompt, answer, temperature)
    for prompt, answer in zip(prompts[1:], answers[1:], strict=True):
        continued = [*prompt, *answer["output_ids"], 5, 6, 7]
        again = await api.generate(continued, **fields)
        assert again["meta_info"]["cached_tokens"] == len(prompt) + 19
        check(continued, again, temperature)
