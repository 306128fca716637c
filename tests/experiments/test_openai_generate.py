"""By way of text: the same sample where nothing is lost, and what is lost is counted; statuses and limits as ever."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from harness import args_for, call_text
from harness import run as run_by_tokens
from scripted_chat import Said, ScriptedChat

from experiments.openai_generate import TEXT_ENDPOINT_KEY, generate
from strands_rollout import Sample, reward_func
from strands_rollout.evaluation.options import slime_sampling_params
from strands_rollout.slime_plugin.sample_contract import contract_violations

CODE = "print(17 * 2)"
CALL = ("execute_python_code", json.dumps({"code": CODE}))
REASONED = "<think>\nIt is 34.\n</think>\n\n"
ANSWER = "The answer is \\boxed{34}."
LOCAL = {"executor": {"name": "local", "isolation": "rlimits"}}
Status = Sample.Status


def words(tokenizer: Any, text: str) -> list[str]:
    """Each token of the text as text."""
    return [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]


async def play(
    tokenizer: Any,
    script: Sequence[Said],
    *,
    params: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    sample: Sample | None = None,
    chat: ScriptedChat | None = None,
) -> tuple[Sample, list[dict[str, Any]]]:
    """A finished sample and the requests that made it."""
    async with chat or ScriptedChat(script) as server:
        args = args_for(server.base_url, tokenizer, strands_rollout={**LOCAL, **(settings or {})})
        sample = sample or Sample(prompt="What is 17 * 2?", label="34", index=0)
        done = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4096, **(params or {})})
    assert done is sample
    return sample, server.requests


def facts(sample: Sample) -> dict[str, Any]:
    return dict(sample.metadata["strands_rollout"])


def lost(sample: Sample) -> dict[str, Any]:
    return dict(facts(sample)[TEXT_ENDPOINT_KEY])


def trained_texts(tokenizer: Any, sample: Sample) -> list[str]:
    """The runs of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask or [], strict=True):
        if mask:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def wrong_with(sample: Sample, **more: Any) -> list[str]:
    """What a trainer would not take, but for the logprobs that a text endpoint has not."""
    found = contract_violations(sample, may_abort=True, reward_key="score", **more)
    return [words for words in found if "rollout_log_probs" not in words and "reward is" not in words]


async def test_where_nothing_is_lost_the_sample_is_that_of_tokens(shipped_tokenizer: Any) -> None:
    script = [Said(calls=[CALL]), Said(ANSWER, reasoning="It is 34.")]
    sample, _ = await play(shipped_tokenizer, script)
    exact = await run_by_tokens(shipped_tokenizer, [call_text(CODE), f"{REASONED}{ANSWER}<|im_end|>"], settings=LOCAL)
    for name in ("tokens", "response_length", "loss_mask", "response", "status", "remove_sample"):
        assert getattr(sample, name) == getattr(exact.sample, name), name
    assert sample.rollout_log_probs is None
    # what is not measured by seconds or by the engine
    same = ("stop_reason", "error", "final_text", "final_in_reasoning", "turns", "tool_calls", "tool_errors", "aborts")
    assert {name: facts(sample)[name] for name in same} == {name: exact.facts[name] for name in same}
    assert [span[:3] for span in facts(sample)["spans"]] == [span[:3] for span in exact.facts["spans"]]
    # the token's own way knows more facts than text allows, and no fact by another name
    own = {"budgets", "requests", "template_kwargs", "tool_parser"}
    assert exact.facts.keys() - facts(sample).keys() == own
    assert facts(sample)["code"].keys() == exact.facts["code"].keys()
    assert lost(sample)["reread_turns"] == 0
    args = args_for(exact.fake.base_url, shipped_tokenizer)
    assert await reward_func(args, sample) == await reward_func(args, exact.sample)


async def test_the_endpoint_is_asked_for_what_the_settings_say(shipped_tokenizer: Any) -> None:
    params = {**slime_sampling_params(0.7, 100), "sampling_seed": 5}
    sample = Sample(prompt="What is 17 * 2?", session_id="one")
    chat = ScriptedChat([Said(calls=[CALL], sampled=["x"]), Said(ANSWER, sampled=["y"])])
    _, requests = await play(
        shipped_tokenizer, [], params=params, chat=chat, sample=sample, settings={"enable_thinking": False}
    )
    first, second = requests
    assert (first["temperature"], first["top_p"], first["top_k"], first["logprobs"]) == (0.7, 1.0, -1, True)
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert (first["seed"], second["seed"] != 5) == (5, True)
    assert first["max_tokens"] == 100
    assert [tool["function"]["name"] for tool in first["tools"]] == ["execute_python_code"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool"]
    # neither the end token nor any other control token may get into a message's content
    assert not {"skip_special_tokens", "no_stop_trim"} & first.keys()
    assert {headers["X-SMG-Routing-Key"] for headers in chat.headers} == {"one"}


async def test_reasoning_is_trained_that_the_next_turn_did_not_read(shipped_tokenizer: Any) -> None:
    script = [Said(calls=[CALL], reasoning="Let me run it."), Said(ANSWER, reasoning="It is 34.")]
    sample, requests = await play(shipped_tokenizer, script)
    assert "Let me run it." not in json.dumps(requests[1]["messages"])
    assert trained_texts(shipped_tokenizer, sample)[0].startswith("<think>\nLet me run it.\n</think>\n\n<tool_call>")
    assert lost(sample)["reread_turns"] == 1


async def test_tokens_that_the_policy_spelled_otherwise_are_counted(shipped_tokenizer: Any) -> None:
    answered = words(shipped_tokenizer, f"{REASONED}{ANSWER}<|im_end|>")
    at = answered.index(" answer")
    spelled = [*answered[:at], *" answer", *answered[at + 1 :]]
    exact, _ = await play(shipped_tokenizer, [Said(ANSWER, reasoning="It is 34.", sampled=answered)])
    assert (lost(exact)["unmatched_sampled"], lost(exact)["unmatched_trained"]) == (0, 0)
    assert facts(exact)["sampled_tokens"] == lost(exact)["trained_tokens"] == len(answered)
    sample, _ = await play(shipped_tokenizer, [Said(ANSWER, reasoning="It is 34.", sampled=spelled)])
    assert lost(sample)["unmatched_sampled"] == len(" answer")
    assert lost(sample)["unmatched_trained"] == 1


BUSY = Said("busy", status=503, headers={"retry-after-ms": "1"})
LONG = Said("The input is longer than the model's context length (9 tokens).", status=400)
CUT = Said("The answer is", finish="length")


@pytest.mark.parametrize(
    ("script", "options", "status", "stop_reason", "requests"),
    [
        ([CUT], {"params": {"max_new_tokens": 20}}, "truncated", "response_length", 1),
        ([Said(calls=[CALL])] * 3, {"settings": {"max_tool_iterations": 1}}, "truncated", "max_tool_iterations", 2),
        ([LONG], {}, "truncated", "prompt_too_long", 1),
        ([Said(calls=[CALL]), Said("no", status=400)], {}, "failed", "engine_error", 2),
        ([BUSY, Said(ANSWER)], {}, "completed", "completed", 2),
        ([], {"settings": {"fan_out": True}}, "failed", "setup_error", 0),
    ],
)
async def test_limits_and_faults_end_an_episode_as_ever(
    shipped_tokenizer: Any,
    script: list[Said],
    options: dict[str, Any],
    status: str,
    stop_reason: str,
    requests: int,
) -> None:
    sample, asked = await play(shipped_tokenizer, script, **options)
    assert (sample.status.value, facts(sample)["stop_reason"]) == (status, stop_reason)
    assert requests == len(asked)
    assert wrong_with(sample) == []
    assert any(sample.loss_mask or []) == (stop_reason != "prompt_too_long" and status != "failed")
    if script[:1] == [CUT]:
        assert trained_texts(shipped_tokenizer, sample) == ["<think>\n\n</think>\n\nThe answer is"]


async def test_a_turn_that_the_engine_aborts_is_no_answer_and_the_sample_starts_afresh(shipped_tokenizer: Any) -> None:
    sample, _ = await play(shipped_tokenizer, [Said("The ans", finish="abort")])
    assert (sample.status, facts(sample)["stop_reason"]) == (Status.ABORTED, "aborted")
    again, requests = await play(shipped_tokenizer, [Said(ANSWER)], sample=sample)
    assert (again.status, facts(again)["aborts"], len(requests)) == (Status.COMPLETED, 1, 1)


async def test_an_abort_leaves_the_engine_at_once(shipped_tokenizer: Any) -> None:
    chat = ScriptedChat([Said(calls=[CALL])])
    settings = {"should_abort": lambda: chat.arrived.is_set()}
    sample, _ = await play(shipped_tokenizer, [], chat=chat, settings=settings)
    assert (sample.status, facts(sample)["turns"]) == (Status.ABORTED, 1)
    assert chat.gone.is_set()
