"""Streams of server-sent events, each of which repeats the answer so far."""

import json

from engine_api import IDS


async def _states(engine, **fields) -> list[dict]:
    """Return the events of a stream before its [DONE]."""
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": IDS, "sampling_params": params, "stream": True, **fields}
    events = [event async for event in engine.events("/generate", body)]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def test_stream_events_are_cumulative_and_end_with_done(engine):
    whole = await engine.generate(max_new_tokens=20, temperature=0, ignore_eos=True)
    states = await _states(engine, return_logprob=True)
    for state in states:
        count = state["meta_info"]["completion_tokens"]
        assert state["output_ids"] == whole["output_ids"][:count]
        assert len(state["meta_info"]["output_token_logprobs"]) == count
        assert whole["text"].startswith(state["text"])
    assert [state["meta_info"]["finish_reason"] is None for state in states] == [True] * (len(states) - 1) + [False]
    assert (states[-1]["text"], states[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
