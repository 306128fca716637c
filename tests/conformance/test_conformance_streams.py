"""Streams: server-sent events, each of which repeats the answer so far."""

import json

from engine_api import IDS
from served_engine import LOGPROB_KEYS, META_KEYS

LAST_ONLY = {"weight_versions", "e2e_latency"}
FIRST_ONLY = {"response_sent_to_client_ts"}


async def _states(engine, **fields) -> list[dict]:
    """The events of a stream, which ends as it must."""
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": IDS, "sampling_params": params, "stream": True, **fields}
    events = [event async for event in engine.events("/generate", body)]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def test_a_stream_repeats_the_growing_answer_and_ends_with_done(engine):
    whole = await engine.generate(max_new_tokens=20, temperature=0, ignore_eos=True)
    states = await _states(engine, return_logprob=True)
    for state in states:
        count = state["meta_info"]["completion_tokens"]
        assert state["output_ids"] == whole["output_ids"][:count]
        assert len(state["meta_info"]["output_token_logprobs"]) == count
        assert whole["text"].startswith(state["text"])
    assert [state["meta_info"]["finish_reason"] is None for state in states] == [True] * (len(states) - 1) + [False]
    assert (states[-1]["text"], states[-1]["output_ids"]) == (whole["text"], whole["output_ids"])


async def test_the_events_of_a_stream_have_the_keys_of_an_answer(engine):
    first, *middle, last = await _states(engine, return_logprob=True)
    keys = META_KEYS | LOGPROB_KEYS
    assert set(first["meta_info"]) == keys - LAST_ONLY
    assert set(last["meta_info"]) == keys - FIRST_ONLY
    assert middle
    assert all(set(state["meta_info"]) == keys - FIRST_ONLY - LAST_ONLY for state in middle)
