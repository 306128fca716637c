"""Sampling: tokens follow the distribution that the parameters describe, and logprobs are correct."""

from dataclasses import dataclass

import numpy as np
import pytest
from engine_api import IDS
from prompts import random_prompt
from reference_qwen3 import Doubles, shipped_reference
from sampled_distribution import Sampling, chance_of_being_uniform

# probability of a false alarm
ALPHA = 1e-6
TOLERANCE = 1e-3
PROMPT_TOKENS, TOKENS = 6, 50
MANY, FEW = 10, 4
END_IDS = (1191, 1193)
WAYS = {
    "as it is": {},
    "cold": {"temperature": 0.7},
    "hot": {"temperature": 1.5},
    "top k": {"temperature": 1.3, "top_k": 4},
    "top p": {"temperature": 1.3, "top_p": 0.7},
    "min p": {"temperature": 1.3, "min_p": 0.15},
    "all three": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    # the penalties have two cases: without overlapped scheduling, SGLang applies them in the order of a set
    "subtracted penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.4},
    "factor as penalty": {"temperature": 0.7, "repetition_penalty": 0.8},
    "no end yet": {"temperature": 1.3, "min_new_tokens": TOKENS},
    "greedy": {"temperature": 0},
}
# with these parameters, a slightly wrong temperature shows only in the frequencies of tokens
OFTEN = ("as it is", "cold", "hot")


@dataclass(frozen=True, slots=True)
class Draw:
    ids: list[int]
    reported: list[float]
    logprobs: Doubles


@pytest.fixture(scope="module")
def drawn_before() -> dict[tuple[str, str], list[Draw]]:
    """Return the cache of draws by engine and key of `WAYS`; an engine makes the draws for all keys in one batch."""
    return {}


@pytest.fixture(params=WAYS)
async def draws(shipped, request, drawn_before) -> tuple[Sampling, list[Draw]]:
    """Return the parameters of one key of `WAYS`, and an engine's draws with them."""
    if (shipped.base_url, request.param) not in drawn_before:
        for way, found in (await _drawn(shipped)).items():
            drawn_before[shipped.base_url, way] = found
    return Sampling(WAYS[request.param], END_IDS), drawn_before[shipped.base_url, request.param]


async def _drawn(engine) -> dict[str, list[Draw]]:
    plan = [(way, random_prompt(PROMPT_TOKENS, seed)) for way in WAYS for seed in range(MANY if way in OFTEN else FEW)]
    fixed = {"max_new_tokens": TOKENS}
    body = {
        "input_ids": [prompt for _, prompt in plan],
        "sampling_params": [{"ignore_eos": "min_new_tokens" not in WAYS[way], **fixed, **WAYS[way]} for way, _ in plan],
        "return_logprob": True,
    }
    answer = await engine.post("/generate", body)
    assert answer.status == 200, answer
    ids = [one["output_ids"] for one in answer.body]
    sequences = [[*prompt, *output] for (_, prompt), output in zip(plan, ids, strict=True)]
    logits = shipped_reference().logits(sequences)[:, PROMPT_TOKENS - 1 : -1]
    found: dict[str, list[Draw]] = {way: [] for way in WAYS}
    for (way, _), one, rows in zip(plan, answer.body, logits, strict=True):
        output = one["output_ids"]
        reported = [entry[0] for entry in one["meta_info"]["output_token_logprobs"]]
        found[way].append(Draw(output, reported, Sampling(WAYS[way], END_IDS).logprobs(rows, output)))
    return found


async def test_logprobs_are_of_full_distribution_at_temperature(draws):
    for draw in draws[1]:
        assert draw.reported == pytest.approx(draw.logprobs[range(TOKENS), draw.ids], abs=TOLERANCE)


async def test_sampling_never_draws_excluded_tokens(draws):
    sampling, found = draws
    for draw in found:
        left_out = [
            token for row, token in zip(draw.logprobs, draw.ids, strict=True) if not sampling.is_possible(row, token)
        ]
        assert left_out == []


async def test_sampling_frequencies_match_distribution(draws):
    sampling, found = draws
    rng = np.random.default_rng(0)
    places = np.concatenate([sampling.places(draw.logprobs, draw.ids, rng) for draw in found])
    assert chance_of_being_uniform(places) > ALPHA


async def test_sampling_seed_repeats_tokens(engine):
    fields = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 4.0}
    samples = [await engine.generate(IDS, sampling_seed=seed, **fields) for seed in (5, 5, 6)]
    first, again, other = (sample["output_ids"] for sample in samples)
    assert (first == again) is engine.facts.heeds_seeds
    assert first != other
