"""What /generate answers: ids, text, meta_info and why it ended."""

import pytest
from engine_api import IDS
from prompts import turn_prompts
from served_engine import LOGPROB_KEYS, META_KEYS
from tokenizers import Tokenizer

from strands_rollout.engine.serving import SHIPPED_MODEL_DIR

TURN = turn_prompts()[0]
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The shipped model's, as its publisher's library reads it."""
    return Tokenizer.from_file(str(SHIPPED_MODEL_DIR / "tokenizer.json"))


async def test_an_answer_has_ids_and_text_and_meta_info_and_nothing_else(engine):
    await engine.flush()
    answer = await engine.generate(temperature=1.0, max_new_tokens=4, top_p=1.0, top_k=-1, ignore_eos=True, rid="r1")
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert set(meta) == META_KEYS
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (40, 4, 0)
    assert len(answer["output_ids"]) == 4
    assert (meta["num_retractions"], meta["reasoning_tokens"], meta["dp_rank"]) == (0, 0, None)
    assert 0 < meta["e2e_latency"] < 100


async def test_an_answer_names_the_version_of_the_weights(engine):
    meta = (await engine.generate(max_new_tokens=3, ignore_eos=True))["meta_info"]
    version = (await engine.get("/model_info")).body["weight_version"]
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 3}]


async def test_logprobs_come_only_if_asked_for_one_for_each_id(engine):
    plain = await engine.generate(max_new_tokens=3, ignore_eos=True)
    assert not LOGPROB_KEYS & set(plain["meta_info"])
    answer = await engine.generate(max_new_tokens=3, ignore_eos=True, return_logprob=True)
    meta = answer["meta_info"]
    assert set(meta) == META_KEYS | LOGPROB_KEYS
    assert (meta["input_token_logprobs"], meta["output_token_logprobs_length"]) == ([], 3)
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in answer["output_ids"]]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])


async def test_logprobs_come_with_texts_if_asked_for(shipped, tokenizer):
    answer = await shipped.generate(
        max_new_tokens=3, temperature=0, return_logprob=True, return_text_in_logprobs=True, ignore_eos=True
    )
    texts = [entry[2] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert texts == [tokenizer.decode([token]) for token in answer["output_ids"]]


async def test_the_models_end_token_ends_a_turn_and_stays_in_the_ids(shipped, tokenizer):
    end = tokenizer.token_to_id(END)
    answer = await shipped.generate(TURN, temperature=0, return_logprob=True)
    ids, meta = answer["output_ids"], answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": end}
    assert ids.index(end) == len(ids) - 1 == meta["completion_tokens"] - 1
    assert meta["output_token_logprobs"][-1][1] == end
    assert answer["text"] == tokenizer.decode(ids[:-1])
    assert answer["text"].endswith("</tool_call>")


async def test_ignore_eos_ignores_the_models_end_tokens_and_the_requests(shipped, tokenizer):
    stopped = (await shipped.generate(TURN, temperature=0))["output_ids"]
    params = {"ignore_eos": True, "stop_token_ids": stopped[:2], "max_new_tokens": len(stopped) + 4}
    ignored = await shipped.generate(TURN, temperature=0, **params)
    assert ignored["output_ids"][: len(stopped)] == stopped
    assert ignored["meta_info"]["finish_reason"] == {"type": "length", "length": len(stopped) + 4}


async def test_a_stop_token_of_the_request_stays_in_the_ids_and_leaves_the_text(shipped, tokenizer):
    free = (await shipped.generate(TURN, max_new_tokens=8, temperature=0))["output_ids"]
    stop, where = free[4], free.index(free[4])
    stopped = await shipped.generate(TURN, max_new_tokens=8, temperature=0, stop_token_ids=[stop])
    assert stopped["output_ids"] == free[: where + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == tokenizer.decode(free[:where])
    kept = await shipped.generate(TURN, max_new_tokens=8, temperature=0, stop_token_ids=[stop], no_stop_trim=True)
    assert kept["text"] == tokenizer.decode(free[: where + 1])


async def test_a_stop_string_leaves_the_text_and_its_tokens_stay(shipped, tokenizer):
    free = await shipped.generate(TURN, temperature=0)
    params = {"temperature": 0, "stop": ["never", "</think>"], "return_logprob": True}
    stopped = await shipped.generate(TURN, **params)
    ids = stopped["output_ids"]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "</think>"}
    assert stopped["text"] == free["text"].partition("</think>")[0]
    assert ids == free["output_ids"][: len(ids)]
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("</think>")
    assert [entry[1] for entry in stopped["meta_info"]["output_token_logprobs"]] == ids
    kept = await shipped.generate(TURN, temperature=0, stop="</think>", no_stop_trim=True)
    assert kept["text"] == stopped["text"] + "</think>"


async def test_special_tokens_are_in_the_text_only_if_asked_for(shipped):
    whole = await shipped.generate(TURN, temperature=0, no_stop_trim=True, skip_special_tokens=False)
    assert whole["text"].endswith(f"</tool_call>{END}")
    assert (await shipped.generate(TURN, temperature=0, no_stop_trim=True))["text"] == whole["text"][: -len(END)]


async def test_min_new_tokens_keeps_the_end_away_so_long(shipped):
    stopped = (await shipped.generate(TURN, temperature=0))["output_ids"]
    longer = await shipped.generate(TURN, temperature=0, min_new_tokens=len(stopped) + 3, max_new_tokens=300)
    assert longer["output_ids"][: len(stopped) - 1] == stopped[:-1]
    assert len(longer["output_ids"]) >= len(stopped) + 3
    assert stopped[-1] not in longer["output_ids"][: len(stopped) + 3]


async def test_text_input_is_tokenized(shipped, tokenizer):
    text = "What is 17 * 2?\n<|im_start|>assistant"
    from_text = await shipped.generate(text=text, max_new_tokens=5, temperature=0)
    from_ids = await shipped.generate(tokenizer.encode(text).ids, max_new_tokens=5, temperature=0)
    assert from_text["output_ids"] == from_ids["output_ids"]
    assert from_text["meta_info"]["prompt_tokens"] == from_ids["meta_info"]["prompt_tokens"]


async def test_null_sampling_values_mean_their_defaults(engine):
    params = {"temperature": None, "top_p": None, "top_k": None, "stop": None, "custom_params": None}
    answer = await engine.post("/generate", {"input_ids": IDS, "sampling_params": {**params, "max_new_tokens": 1}})
    assert answer.status == 200


async def test_a_batch_is_answered_by_a_list_in_its_order(shipped):
    alone = [await shipped.generate(ids, max_new_tokens=n, temperature=0) for ids, n in ((IDS, 2), (IDS[:5], 3))]
    params = [{"max_new_tokens": 2, "temperature": 0}, {"max_new_tokens": 3, "temperature": 0}]
    body = {"input_ids": [IDS, IDS[:5]], "sampling_params": params, "rid": ["x", "y"]}
    answers = (await shipped.post("/generate", body)).body
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in alone]
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]


async def test_n_makes_several_samples_of_one_prompt(engine):
    params = {"max_new_tokens": 30, "n": 3, "ignore_eos": True, "temperature": 4.0}
    answers = (await engine.post("/generate", {"input_ids": IDS, "sampling_params": params})).body
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    assert len({answer["meta_info"]["id"] for answer in answers}) == 3


@pytest.mark.parametrize("n", [-1, 0, 1])
async def test_an_n_below_two_means_one(engine, n):
    assert len((await engine.generate(max_new_tokens=1, n=n))["output_ids"]) == 1


async def test_one_id_for_several_prompts_is_numbered(engine):
    body = {"input_ids": [IDS, IDS], "sampling_params": {"max_new_tokens": 1}, "rid": "x"}
    answers = (await engine.post("/generate", body)).body
    assert [answer["meta_info"]["id"] for answer in answers] == ["x_0", "x_1"]


async def test_a_request_without_an_id_gets_one_of_its_own(engine):
    ids = [(await engine.generate(max_new_tokens=1))["meta_info"]["id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert all(len(rid) == 32 for rid in ids)
