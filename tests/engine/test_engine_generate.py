"""What /generate answers, statement by statement of SGLang's measured protocol."""

from __future__ import annotations

import asyncio
import json

import pytest
from engine_api import IDS


async def test_an_answer_has_the_ids_the_text_and_sglangs_meta_info(api, tokenizer):
    answer = await api.generate(temperature=1.0, max_new_tokens=4, top_p=1.0, top_k=-1, return_logprob=True, rid="r1")
    meta = answer["meta_info"]
    assert answer["text"] == tokenizer.decode(answer["output_ids"])
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (40, 4, 0)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert 0 < meta["e2e_latency"] < 60
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs_length"] == 4


async def test_logprob_entries_are_logprob_id_and_text_or_null(api, tokenizer):
    plain = await api.generate(max_new_tokens=3, temperature=0, return_logprob=True)
    texts = await api.generate(max_new_tokens=3, temperature=0, return_logprob=True, return_text_in_logprobs=True)
    ids = plain["output_ids"]
    assert [entry[1:] for entry in plain["meta_info"]["output_token_logprobs"]] == [[token, None] for token in ids]
    assert [entry[2] for entry in texts["meta_info"]["output_token_logprobs"]] == [tokenizer.decode([t]) for t in ids]
    assert all(entry[0] <= 0 for entry in plain["meta_info"]["output_token_logprobs"])


async def test_logprobs_are_absent_unless_asked_for(api):
    assert "output_token_logprobs" not in (await api.generate(max_new_tokens=1))["meta_info"]


async def test_a_stop_token_stays_in_the_ids_and_leaves_the_text(api, tokenizer):
    free = (await api.generate(max_new_tokens=8, temperature=0))["output_ids"]
    stop, where = free[4], free.index(free[4])
    stopped = await api.generate(max_new_tokens=8, temperature=0, stop_token_ids=[stop])
    assert stopped["output_ids"] == free[: where + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == tokenizer.decode(free[:where])
    kept = await api.generate(max_new_tokens=8, temperature=0, stop_token_ids=[stop], no_stop_trim=True)
    assert kept["text"] == tokenizer.decode(free[: where + 1])


async def test_the_models_own_end_tokens_stop_unless_ignored(start, scripted_dir, tokenizer):
    api = await start(scripted_dir)
    prompt = tokenizer.encode("<|im_start|>assistant\n").ids
    end = tokenizer.token_to_id("<|im_end|>")
    stopped = await api.generate(prompt, temperature=0)
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert stopped["output_ids"][-1] == end
    ignored = await api.generate(prompt, temperature=0, ignore_eos=True, stop_token_ids=[end], max_new_tokens=12)
    assert len(ignored["output_ids"]) == 12
    assert ignored["output_ids"][:10] == stopped["output_ids"]


async def test_a_stop_string_ends_the_text_before_it(start, scripted_dir, tokenizer):
    api = await start(scripted_dir)
    prompt = tokenizer.encode("<|im_start|>assistant\n").ids
    stopped = await api.generate(prompt, temperature=0, stop=["never", "see"])
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "see"}
    assert stopped["text"] == "<think>\nI add.\n</think>\n\nLet me "
    assert len(stopped["output_ids"]) == 4
    kept = await api.generate(prompt, temperature=0, stop="see", no_stop_trim=True)
    assert kept["text"].endswith("Let me see")


async def test_special_tokens_are_in_the_text_only_if_asked_for(start, scripted_dir, tokenizer):
    api = await start(scripted_dir)
    prompt = tokenizer.encode("<|im_start|>assistant\n").ids
    whole = await api.generate(prompt, temperature=0, no_stop_trim=True, skip_special_tokens=False)
    assert whole["text"].endswith("</tool_call><|im_end|>")
    assert (await api.generate(prompt, temperature=0, no_stop_trim=True))["text"].endswith("</tool_call>")


async def test_a_request_without_a_limit_gets_128_tokens(api):
    assert len((await api.generate(ignore_eos=True))["output_ids"]) == 128


async def test_no_new_tokens_is_an_empty_answer_of_type_length(api):
    answer = await api.generate(max_new_tokens=0, return_logprob=True)
    assert answer["output_ids"] == []
    assert answer["text"] == ""
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]
    assert answer["meta_info"]["output_token_logprobs"] == []


async def test_a_null_limit_generates_to_the_context_as_sglang_counts_it(api):
    answer = await api.generate([50] * 480, max_new_tokens=None, ignore_eos=True)
    assert len(answer["output_ids"]) == 512 - 480 - 2


async def test_a_limit_that_just_fits_the_context_loses_the_two_tokens_that_sglang_reserves(api):
    answer = await api.generate([50] * 500, max_new_tokens=12, ignore_eos=True)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 10}


async def test_text_input_is_tokenized(api, tokenizer):
    text = "Solve the problem"
    from_text = await api.generate(text=text, max_new_tokens=5, temperature=0)
    from_ids = await api.generate(tokenizer.encode(text).ids, max_new_tokens=5, temperature=0)
    assert from_text["output_ids"] == from_ids["output_ids"]


async def test_unknown_top_level_fields_are_ignored(api):
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}, "foo": 1}
    assert (await api.post("/generate", body)).status == 200


async def test_a_batch_is_answered_by_a_list_in_its_order(api):
    alone = [await api.generate(ids, max_new_tokens=n, temperature=0) for ids, n in ((IDS, 2), (IDS[:5], 3))]
    params = [{"max_new_tokens": 2, "temperature": 0}, {"max_new_tokens": 3, "temperature": 0}]
    body = {"input_ids": [IDS, IDS[:5]], "sampling_params": params, "rid": ["x", "y"]}
    answers = (await api.post("/generate", body)).body
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in alone]
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]


async def test_n_makes_several_samples_of_one_prompt(api):
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 30, "n": 3, "ignore_eos": True}}
    answers = (await api.post("/generate", body)).body
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3


async def test_a_stream_repeats_the_growing_answer_and_ends_with_done(api):
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}}
    whole = (await api.post("/generate", body)).body
    events = [event async for event in api.events("/generate", {**body, "stream": True, "return_logprob": True})]
    assert events[-1] == "[DONE]"
    states = [json.loads(event) for event in events[:-1]]
    for state in states:
        count = state["meta_info"]["completion_tokens"]
        assert state["output_ids"] == whole["output_ids"][:count]
        assert len(state["meta_info"]["output_token_logprobs"]) == count
        assert whole["text"].startswith(state["text"])
    assert [state["meta_info"]["finish_reason"] is None for state in states] == [True] * (len(states) - 1) + [False]
    assert states[-1]["text"] == whole["text"]


async def test_exact_repeats_and_extensions_report_what_was_cached(api):
    assert (await api.generate(max_new_tokens=4, temperature=0))["meta_info"]["cached_tokens"] == 0
    repeated = await api.generate(max_new_tokens=4, temperature=0)
    assert repeated["meta_info"]["cached_tokens"] == 39
    assert repeated["meta_info"]["cached_tokens_details"] == {"device": 39, "host": 0}
    extension = await api.generate([*IDS, 1, 2, 3], max_new_tokens=1)
    assert extension["meta_info"]["cached_tokens"] == 40
    continued = await api.generate([*IDS, *repeated["output_ids"], 7], max_new_tokens=1)
    assert continued["meta_info"]["cached_tokens"] == 43
    assert (await api.post("/flush_cache")).status == 200
    assert (await api.generate(max_new_tokens=1))["meta_info"]["cached_tokens"] == 0


async def test_samples_of_one_prompt_sent_together_share_its_prefill(api):
    answers = await asyncio.gather(*(api.generate(max_new_tokens=20) for _ in range(6)))
    assert sorted(answer["meta_info"]["cached_tokens"] for answer in answers) == [0, 39, 39, 39, 39, 39]


async def test_the_server_says_what_it_serves(embedded, tiny_dir):
    api = embedded
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        assert await api.get(path) == type(await api.get(path))(200, "")
    for path in ("/model_info", "/get_model_info"):
        info = (await api.get(path)).body
        assert info["model_path"] == info["tokenizer_path"] == str(tiny_dir)
        assert info["weight_version"] == "default"
        assert info["has_image_understanding"] is False
    for path in ("/server_info", "/get_server_info"):
        info = (await api.get(path)).body
        assert (info["context_length"], info["max_req_input_len"], info["max_running_requests"]) == (512, 506, 32)
        assert info["max_total_num_tokens"] == 32 * 512


async def test_the_load_is_told_per_rank_as_sglang_does(api):
    body = (await api.get("/v1/loads?include=core")).body
    [load] = body["loads"]
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    # slime takes a number under one of these names for the sum of the two above.
    assert not {"num_reqs", "num_total_reqs", "total_reqs"} & (set(load) | set(body))


@pytest.mark.parametrize("method", ["get", "post"])
async def test_the_cache_is_flushed_by_either_method(api, method):
    answer = await getattr(api, method)("/flush_cache")
    assert answer.status == 200
    assert answer.body.startswith("Cache flushed.")
