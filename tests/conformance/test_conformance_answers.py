"""Responses of `/generate`: ids, text, meta_info and finish reason."""

import pytest
from prompts import turn_prompts
from served_engine import LOGPROB_KEYS, META_KEYS
from tokenizers import Tokenizer

from strands_rollout.engine import SHIPPED_MODEL_DIR

TURN = turn_prompts()[0]
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return the shipped tokenizer as the tokenizers library reads it."""
    return Tokenizer.from_file(str(SHIPPED_MODEL_DIR / "tokenizer.json"))


async def test_generate_response_fields(engine):
    await engine.flush()
    answer = await engine.generate(temperature=1.0, max_new_tokens=4, top_p=1.0, top_k=-1, ignore_eos=True, rid="r1")
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert (set(meta), meta["id"], meta["finish_reason"]) == (META_KEYS, "r1", {"type": "length", "length": 4})
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (40, 4, 0)
    assert len(answer["output_ids"]) == 4
    assert (meta["num_retractions"], meta["reasoning_tokens"], meta["dp_rank"]) == (0, 0, None)
    assert 0 < meta["e2e_latency"] < 100


async def test_generate_return_logprob_gives_one_logprob_per_id(engine):
    plain = await engine.generate(max_new_tokens=3, ignore_eos=True)
    assert not LOGPROB_KEYS & set(plain["meta_info"])
    answer = await engine.generate(max_new_tokens=3, ignore_eos=True, return_logprob=True)
    meta = answer["meta_info"]
    assert set(meta) == META_KEYS | LOGPROB_KEYS
    assert (meta["input_token_logprobs"], meta["output_token_logprobs_length"]) == ([], 3)
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in answer["output_ids"]]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])


async def test_generate_keeps_end_token_in_output_ids(shipped, tokenizer):
    end = tokenizer.token_to_id(END)
    answer = await shipped.generate(TURN, temperature=0, return_logprob=True)
    ids, meta = answer["output_ids"], answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": end}
    assert ids.index(end) == len(ids) - 1 == meta["completion_tokens"] - 1
    assert (meta["output_token_logprobs"][-1][1], answer["text"]) == (end, tokenizer.decode(ids[:-1]))
    assert answer["text"].endswith("</tool_call>")


async def test_generate_stop_token_ids_stay_in_ids_not_in_text(shipped, tokenizer):
    free = (await shipped.generate(TURN, max_new_tokens=8, temperature=0))["output_ids"]
    stop, where = free[4], free.index(free[4])
    stopped = await shipped.generate(TURN, max_new_tokens=8, temperature=0, stop_token_ids=[stop])
    assert stopped["output_ids"] == free[: where + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == tokenizer.decode(free[:where])
    kept = await shipped.generate(TURN, max_new_tokens=8, temperature=0, stop_token_ids=[stop], no_stop_trim=True)
    assert kept["text"] == tokenizer.decode(free[: where + 1])


async def test_generate_stop_string_stays_in_ids_not_in_text(shipped, tokenizer):
    free = await shipped.generate(TURN, temperature=0)
    params = {"temperature": 0, "stop": ["never", "</think>"], "return_logprob": True}
    stopped = await shipped.generate(TURN, **params)
    ids = stopped["output_ids"]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "</think>"}
    assert (stopped["text"], ids) == (free["text"].partition("</think>")[0], free["output_ids"][: len(ids)])
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("</think>")
    assert [entry[1] for entry in stopped["meta_info"]["output_token_logprobs"]] == ids
    kept = await shipped.generate(TURN, temperature=0, stop="</think>", no_stop_trim=True)
    assert kept["text"] == stopped["text"] + "</think>"
