"""Limits of prompt and output, and requests that exceed the context."""

import pytest

# SGLang reserves this many tokens of the context
PROMPT_RESERVE = 6


async def _refusal(engine, count: int, **params) -> str:
    body = {"input_ids": [5] * count, "sampling_params": {"max_new_tokens": 1, **params}}
    answer = await engine.post("/generate", body)
    assert answer.status == 400, answer
    assert (set(answer.body), set(answer.body["error"])) == ({"error"}, {"message"})
    return answer.body["error"]["message"]


async def test_max_new_tokens_zero_returns_no_ids(engine):
    answer = await engine.generate(max_new_tokens=0, return_logprob=True)
    meta = answer["meta_info"]
    assert (answer["output_ids"], answer["text"]) == ([], "")
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert [(span["start"], span["end"]) for span in meta["weight_versions"]] == [(0, 0)]
    assert (meta["output_token_logprobs"], meta["prompt_tokens"], meta["completion_tokens"]) == ([], 40, 0)


async def test_max_new_tokens_beyond_context_is_refused(engine):
    context = engine.facts.context_length
    assert await _refusal(engine, context - 20, max_new_tokens=21) == (
        f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total "
        f"of {context + 1} tokens: {context - 20} tokens from the input messages and 21 tokens for the completion. "
        "Please reduce the number of tokens in the input messages or the completion to fit within the limit."
    )


async def test_max_new_tokens_up_to_context_is_accepted(engine):
    answer = await engine.generate([5] * (engine.facts.context_length - 20), max_new_tokens=20, ignore_eos=True)
    assert 0 < len(answer["output_ids"]) <= 20
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("beyond", [0, 100])
async def test_prompt_as_long_as_context_is_refused(engine, beyond):
    context = engine.facts.context_length
    assert await _refusal(engine, context + beyond) == (
        f"The input ({context + beyond} tokens) is longer than the model's context length ({context} tokens)."
    )


async def test_prompt_one_below_context_is_refused(engine):
    longest = engine.facts.context_length - PROMPT_RESERVE
    assert engine.facts.prompt_limit == longest
    message = await _refusal(engine, longest)
    assert message.startswith(
        f"Input length ({longest} tokens) exceeds the maximum allowed length ({longest} tokens). Use a shorter input"
    )
    assert len((await engine.generate([5] * (longest - 1), max_new_tokens=1))["output_ids"]) == 1
