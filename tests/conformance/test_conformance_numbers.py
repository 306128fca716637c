"""Greedy tokens and their logprobs, compared with the model computed in double precision."""

import numpy as np
import pytest
from prompts import random_prompt, turn_prompts
from reference_qwen3 import log_softmax, shipped_reference
from served_engine import ServedEngine

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
LENGTHS = (1, 2, 17, 64, 65, 300)
LONG_LENGTHS = (700, 1300, 1900)
TOLERANCE = 1e-3


def _logprobs(answer) -> list[float]:
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    return [entry[0] for entry in entries]


def _prompts() -> list[list[int]]:
    return [*turn_prompts(), *map(random_prompt, LENGTHS)]


async def _greedy(engine: ServedEngine, prompts: list[list[int]]) -> list[dict]:
    body = {"input_ids": prompts, "sampling_params": GREEDY, "return_logprob": True}
    answer = await engine.post("/generate", body)
    assert answer.status == 200
    return answer.body


def _check_greedy(prompt: list[int], answer: dict) -> None:
    """Check that the tokens are the most likely ones, with the model's logprobs."""
    ids = answer["output_ids"]
    assert len(ids) == GREEDY["max_new_tokens"]
    rows = log_softmax(shipped_reference().logits([*prompt, *ids]))[len(prompt) - 1 : -1]
    assert ids == rows.argmax(axis=-1).tolist()
    assert _logprobs(answer) == pytest.approx(rows.max(axis=-1), abs=TOLERANCE)


async def test_greedy_batch_matches_reference_model(shipped):
    await shipped.flush()
    prompts = _prompts()
    for prompt, answer in zip(prompts, await _greedy(shipped, prompts), strict=True):
        _check_greedy(prompt, answer)


async def test_greedy_after_cached_prefix_matches_reference_model(shipped):
    prompts = _prompts()
    await shipped.flush()
    fresh = await _greedy(shipped, prompts)
    for prompt, first, again in zip(prompts, fresh, await _greedy(shipped, prompts), strict=True):
        assert (again["meta_info"]["cached_tokens"], again["output_ids"]) == (len(prompt) - 1, first["output_ids"])
        assert _logprobs(again) == pytest.approx(_logprobs(first), abs=TOLERANCE)
    # the second turn of a conversation after its first
    first, second = turn_prompts()[:2]
    await shipped.flush()
    await shipped.generate(first, **GREEDY)
    answer = await shipped.generate(second, **GREEDY, return_logprob=True)
    assert answer["meta_info"]["cached_tokens"] >= len(first)
    _check_greedy(second, answer)


@pytest.mark.real
async def test_greedy_tokens_are_equal_on_both_engines(both):
    prompts = [*_prompts(), *map(random_prompt, LONG_LENGTHS)]
    for engine in both:
        await engine.flush()
    embedded, real = [await _greedy(engine, prompts) for engine in both]
    worst = 0.0
    for ours, theirs in zip(embedded, real, strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        worst = max(worst, float(np.abs(np.subtract(_logprobs(ours), _logprobs(theirs))).max()))
        for name in ("prompt_tokens", "completion_tokens", "finish_reason"):
            assert ours["meta_info"][name] == theirs["meta_info"][name]
        assert ours["text"] == theirs["text"]
    assert worst < TOLERANCE
