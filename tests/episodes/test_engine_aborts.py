"""Engine aborts, as for a weight update: the episode continues the turn from its own tokens."""

import time
from typing import Any

import pytest
from fake_sglang import Reply
from harness import ANSWER, call_text, ids_of, run

from strands_rollout import Sample
from strands_rollout.model.sampling import turn_seed


async def test_generate_continues_a_turn_after_an_engine_abort(shipped_tokenizer: Any) -> None:
    turn = ids_of(shipped_tokenizer, ANSWER)
    script = [
        Reply.abort(turn[:3], weight_version="1"),
        Reply.abort(weight_version="1"),
        Reply.tokens(turn[3:], weight_version="2"),
    ]
    done = await run(shipped_tokenizer, script, params={"max_new_tokens": 50})
    assert done.sample.status is Sample.Status.COMPLETED
    assert done.sample.tokens[-len(turn) :] == turn
    prompt = done.fake.requests[0].input_ids
    assert [request.input_ids for request in done.fake.requests] == [prompt, prompt + turn[:3], prompt + turn[:3]]
    assert [request.body["sampling_params"]["max_new_tokens"] for request in done.fake.requests] == [50, 47, 47]
    assert done.fake.violations == []
    start = len(prompt)
    assert done.facts["spans"] == [[0, start, start + 3, "1"], [0, start + 3, start + len(turn), "2"]]
    assert (done.facts["turns"], done.facts["engine_aborts"], done.facts["aborts"]) == (1, 2, 0)
    assert done.sample.weight_versions == ["1", "2"]


@pytest.mark.parametrize("aborted", [0, 3], ids=["whole turn", "rest of an aborted turn"])
async def test_generate_cut_prompt_is_an_engine_error(shipped_tokenizer: Any, aborted: int) -> None:
    turn = ids_of(shipped_tokenizer, ANSWER)
    first = [Reply.abort(turn[:aborted])] if aborted else []
    done = await run(shipped_tokenizer, [*first, Reply.tokens(turn[aborted:], prompt_tokens=5), ANSWER])
    assert (done.sample.status, done.facts["stop_reason"]) == (Sample.Status.FAILED, "engine_error")
    assert "the engine read 5 prompt tokens; expected" in done.facts["error"]
    assert not any(done.sample.loss_mask)
    assert done.sample.remove_sample
    assert len(done.fake.requests) == len(first) + 1


async def test_generate_turn_aborted_at_its_end_is_complete(shipped_tokenizer: Any) -> None:
    call, answer = (ids_of(shipped_tokenizer, text) for text in (call_text(), ANSWER))
    done = await run(shipped_tokenizer, [Reply.abort(call), Reply.abort(answer)])
    assert len(done.fake.requests) == 2
    assert (done.sample.status, done.facts["stop_reason"]) == (Sample.Status.COMPLETED, "completed")
    assert (done.facts["tool_calls"], done.facts["engine_aborts"]) == (1, 0)
    assert done.sample.tokens[-len(answer) :] == answer


@pytest.mark.parametrize("stop", ["its last token", "is 34", ["no", "is 34"]], ids=str)
async def test_generate_stop_params_end_an_aborted_turn(shipped_tokenizer: Any, stop: Any) -> None:
    ids = ids_of(shipped_tokenizer, "It is 34")
    params = {"stop_token_ids": ids[-1:]} if stop == "its last token" else {"stop": stop}
    done = await run(shipped_tokenizer, [Reply.abort(ids)], params=params)
    assert (done.sample.status, len(done.fake.requests)) == (Sample.Status.COMPLETED, 1)


async def test_generate_ignore_eos_continues_an_aborted_turn(shipped_tokenizer: Any) -> None:
    ids, rest = (ids_of(shipped_tokenizer, text) for text in (ANSWER, "And that is all of it."))
    script = [Reply.abort(ids), Reply.tokens(rest, "length")]
    done = await run(
        shipped_tokenizer, script, params={"ignore_eos": True}, settings={"max_turn_tokens": len(ids + rest)}
    )
    assert (done.sample.status, done.facts["stop_reason"]) == (Sample.Status.TRUNCATED, "turn_length")
    assert done.sample.tokens[-len(ids + rest) :] == ids + rest


async def test_facts_spans_split_at_a_weight_update_in_a_request(shipped_tokenizer: Any) -> None:
    turn = ids_of(shipped_tokenizer, ANSWER)
    spans = [{"version": "1", "start": 0, "end": 4}, {"version": "2", "start": 4, "end": len(turn)}]
    done = await run(shipped_tokenizer, [Reply.tokens(turn, weight_version="2", weight_versions=spans)])
    start = done.prompt_length
    assert done.facts["spans"] == [[0, start, start + 4, "1"], [0, start + 4, start + len(turn), "2"]]
    assert done.facts["weight_versions"] == ["1", "2"]


async def test_on_engine_abort_return_gives_the_sample_back(shipped_tokenizer: Any) -> None:
    turn = ids_of(shipped_tokenizer, ANSWER)
    settings = {"on_engine_abort": "return"}
    done = await run(shipped_tokenizer, [Reply.abort(turn[:3])], settings=settings)
    assert done.sample.status is Sample.Status.ABORTED
    again = await run(shipped_tokenizer, [Reply.tokens(turn[3:])], settings=settings, sample=done.sample)
    assert (again.sample.tokens[-len(turn) :], again.facts["resumes"]) == (turn, 1)


async def test_engine_abort_with_an_error_is_an_engine_error(shipped_tokenizer: Any) -> None:
    aborted = Reply.abort(ids_of(shipped_tokenizer, ANSWER)[:2])
    aborted.finish["status_code"], aborted.finish["message"] = 400, "it can't be served"
    done = await run(shipped_tokenizer, [aborted])
    assert (done.sample.status, done.facts["stop_reason"]) == (Sample.Status.FAILED, "engine_error")
    assert done.facts["error"] == (
        "EngineRejectedError: the engine aborted the request after 2 tokens with the error 400: it can't be served"
    )
    assert len(done.fake.requests) == 1


async def test_repeated_engine_aborts_are_an_engine_error(shipped_tokenizer: Any) -> None:
    """An ABORTED sample would be played again, without end if the engine aborts every request."""
    settings = {"engine_patience_s": 0.3}
    done = await run(shipped_tokenizer, lambda _body, _number: Reply.abort(), settings=settings)
    assert (done.sample.status, done.facts["stop_reason"]) == (Sample.Status.FAILED, "engine_error")
    assert "consecutive requests without a usable token" in done.facts["error"]
    assert len(done.fake.requests) >= 2


async def test_timeout_during_engine_aborts_is_engine_error(
    shipped_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"engine_patience_s": 1e6, "episode_timeout_s": 1.5}
    done = await run(shipped_tokenizer, lambda _body, _number: Reply.abort(), settings=settings)
    assert (done.sample.status, done.facts["stop_reason"]) == (Sample.Status.FAILED, "engine_error")
    assert "the engine aborts requests without a usable token" in done.facts["error"]
    assert "event=engine_aborts" in caplog.text


async def test_repeated_engine_aborts_with_tokens_continue_the_turn(shipped_tokenizer: Any) -> None:
    turn = ids_of(shipped_tokenizer, ANSWER)
    script = [reply for token in turn[:-1] for reply in (Reply.abort(), Reply.abort([token]))]
    settings = {"engine_patience_s": 0.001}
    done = await run(shipped_tokenizer, [*script, Reply.tokens(turn[-1:])], settings=settings)
    assert (done.sample.status, done.sample.tokens[-len(turn) :]) == (Sample.Status.COMPLETED, turn)


async def test_rollout_abort_ends_the_wait_after_engine_aborts(shipped_tokenizer: Any) -> None:
    asked: list[int] = []

    def abort(_body: dict[str, Any], number: int) -> Reply:
        asked.append(number)
        return Reply.abort()

    settings = {"should_abort": lambda: len(asked) > 1, "engine_patience_s": 1e6}
    done = await run(shipped_tokenizer, abort, settings=settings)
    assert done.sample.status is Sample.Status.ABORTED
    assert len(asked) == 2


async def test_sampling_seed_of_each_turn_derives_from_the_samples(shipped_tokenizer: Any) -> None:
    turn = ids_of(shipped_tokenizer, call_text())
    script = [Reply.abort(turn[:6]), Reply.tokens(turn[6:]), ANSWER]
    seeds: list[list[int]] = []
    for sample_seed in (7, 8):
        done = await run(shipped_tokenizer, script, params={"sampling_seed": sample_seed})
        seeds.append([request.body["sampling_params"]["sampling_seed"] for request in done.fake.requests])
    assert (seeds[0], seeds[1]) == ([7, 7, turn_seed(7, 1)], [8, 8, turn_seed(8, 1)])
    assert len({seed for group in seeds for seed in group}) == 4
    assert all(0 <= seed < 2**31 for group in seeds for seed in group)


async def test_min_new_tokens_is_capped_by_the_remaining_budget(shipped_tokenizer: Any) -> None:
    turn = ids_of(shipped_tokenizer, call_text())
    script = [Reply.abort(turn[:6]), Reply.tokens(turn[6:]), ANSWER]
    done = await run(shipped_tokenizer, script, params={"min_new_tokens": 90, "max_new_tokens": 100})
    asked = [request.body["sampling_params"] for request in done.fake.requests]
    assert [params["min_new_tokens"] for params in asked[:2]] == [90, 84]
    # SGLang refuses min_new_tokens above max_new_tokens
    assert asked[2]["min_new_tokens"] == asked[2]["max_new_tokens"] < 90


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
async def test_abort_grace_s_is_the_wait_for_a_silent_engine(shipped_tokenizer, grace_s) -> None:
    flagged: list[float] = []

    def hang(_body: dict[str, Any], _number: int) -> Reply:
        flagged.append(time.monotonic())
        return Reply.tokens([1]).after(60)

    settings = {"abort_grace_s": grace_s, "should_abort": lambda: bool(flagged)}
    done = await run(shipped_tokenizer, hang, settings=settings)
    assert done.sample.status is Sample.Status.ABORTED
    assert time.monotonic() - flagged[0] >= grace_s
