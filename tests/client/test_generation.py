"""`read_generation`: logprobs, counts and weight versions of an answer, and errors that name the faulty value."""

import math
from typing import Any

import numpy as np
import pytest

from strands_rollout import Sample
from strands_rollout.client.generate_api import EncodedIds, GenerateRequest, Generation, load_json, read_generation
from strands_rollout.errors import EngineResponseError


def read_answer(answer: object) -> Generation:
    more = {"image_data": ["image"]}  # so that the prompt's length is not checked
    request = GenerateRequest(EncodedIds([1]), {}, rid="r", return_logprob=True, extra=more)
    return read_generation(answer, request, vocab_size=None, latency_s=0.0, attempts=1)


def read(logprobs: list[Any]) -> Generation:
    entries = [[logprob, token, None] for token, logprob in enumerate(logprobs)]
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": entries}
    return read_answer({"output_ids": list(range(len(logprobs))), "meta_info": meta})


def answer_with(entries: Any, place: str) -> dict[str, Any]:
    """Return an answer with logprobs in one of the places where servers put them."""
    meta, top = {"finish_reason": {"type": "length"}}, {"output_ids": [5, 6]}
    name = place.removeprefix("meta_info.")
    (meta if place.startswith("meta_info.") else top)[name] = entries  # type: ignore[index]
    return {**top, "meta_info": meta}


PLACES = ["meta_info.output_token_logprobs", "output_token_logprobs", "meta_info.logprobs"]


@pytest.mark.parametrize("place", PLACES)
def test_read_generation_finds_and_checks_logprobs(place: str) -> None:
    assert read_answer(answer_with([[-0.5, 5, "a"], [-0.25, 6, "b"]], place)).logprobs == [-0.5, -0.25]
    with pytest.raises(EngineResponseError, match="output id 6 at position 1 comes with the logprob of token 7"):
        read_answer(answer_with([[-0.5, 5, "a"], [-0.25, 7, "b"]], place))
    with pytest.raises(EngineResponseError, match="expected a list of"):
        read_answer(answer_with([-0.5, -0.25], place))
    without_ids = {**answer_with([[-0.5, 5, "a"], [-0.25, 6, "b"]], place), "output_ids": None}
    assert read_answer(without_ids).output_ids == [5, 6]


@pytest.mark.parametrize("name", ["prompt_tokens", "cached_tokens", "completion_tokens", "spec_verify_ct"])
@pytest.mark.parametrize("value", [None, 3, 3.0, "3"])
def test_read_generation_drops_counts_that_are_not_ints(name: str, value: Any) -> None:
    answer = answer_with([[-0.5, 5, "a"], [-0.25, 6, "b"]], PLACES[0])
    answer["meta_info"][name] = 2 if name == "completion_tokens" and value is not None else value
    meta = read_answer(answer).meta_info
    sample = Sample()
    sample.append_response_tokens(None, tokens=[5, 6], log_probs=[-0.5, -0.25], meta_info=meta)
    summed = sample.prefix_cache_info
    assert (summed.total_prompt_tokens, summed.cached_tokens) in {(0, 0), (3, 0), (0, 3)}


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ([("1", 0, 1), ("2", 1, 3)], [("1", 0, 1), ("2", 1, 3)]),
        ([("1", 0, 1), ("2", 2, 3)], [("2", 0, 3)]),
        ([("1", 0, 2), ("2", 1, 3)], [("2", 0, 3)]),
        ([("1", 0, 1), ("2", 1, 2)], [("2", 0, 3)]),
        ([("1", 0, 0), ("2", 0, 3)], [("2", 0, 3)]),
        ([], [("2", 0, 3)]),
    ],
    ids=["complete", "with a gap", "overlapping", "too short", "an empty span", "none"],
)
def test_weight_versions_must_cover_the_output(spans: Any, found: Any) -> None:
    answer = read([-0.5] * 3)
    named = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    answer.meta_info.update(weight_version="2", weight_versions=named)
    assert answer.weight_versions == found


def test_read_generation_checks_logprobs_as_float32() -> None:
    lowest = float(np.finfo(np.float32).min)
    assert read([lowest, lowest]).logprobs == [lowest, lowest]  # SGLang's logprob of an impossible token
    for broken in (math.nextafter(lowest, -math.inf), -1.7e308, -(10**39)):
        with pytest.raises(EngineResponseError, match="finite number of at most 0, in float32"):
            read([-0.5, broken])


@pytest.mark.parametrize(("number", "shown"), [(f"-1{'0' * 400}", "-1"), ("NaN", "nan"), ("-Infinity", "-inf")])
def test_read_generation_rejects_logprobs_that_are_not_finite(number: str, shown: str) -> None:
    meta = f'{{"finish_reason":{{"type":"stop"}},"output_token_logprobs":[[{number},5]]}}'
    body = f'{{"output_ids":[5],"meta_info":{meta}}}'
    with pytest.raises(EngineResponseError, match=f"the logprob of output id 5 at position 0 is {shown}"):
        read_answer(load_json(body.encode()))
