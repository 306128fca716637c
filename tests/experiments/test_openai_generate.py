"""`openai_generate`, which trains on text: without drift, the same sample as `generate`; drift is counted."""

import json
from collections.abc import Sequence
from typing import Any

from harness import args_for, call_text
from harness import run as run_by_tokens
from scripted_chat import ChatAnswer, ScriptedChat

from experiments.openai_generate import TEXT_ENDPOINT_KEY, generate
from strands_rollout import Sample, reward_func

CODE = "print(17 * 2)"
CALL = ("execute_python_code", json.dumps({"code": CODE}))
REASONED = "<think>\nIt is 34.\n</think>\n\n"
ANSWER = "The answer is \\boxed{34}."
LOCAL = {"executor": {"name": "local", "isolation": "rlimits"}}
Status = Sample.Status


def words(tokenizer: Any, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]


async def play(tokenizer: Any, script: Sequence[ChatAnswer]) -> tuple[Sample, list[dict[str, Any]]]:
    async with ScriptedChat(script) as server:
        args = args_for(server.base_url, tokenizer, strands_rollout=LOCAL)
        sample = Sample(prompt="What is 17 * 2?", label="34", index=0)
        done = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4096})
    assert done is sample
    return sample, server.requests


def facts(sample: Sample) -> dict[str, Any]:
    return dict(sample.metadata["strands_rollout"])


def drift_counts(sample: Sample) -> dict[str, Any]:
    return dict(facts(sample)[TEXT_ENDPOINT_KEY])


async def test_openai_generate_equals_token_sample_without_drift(shipped_tokenizer: Any) -> None:
    script = [ChatAnswer(calls=[CALL]), ChatAnswer(ANSWER, reasoning="It is 34.")]
    sample, _ = await play(shipped_tokenizer, script)
    exact = await run_by_tokens(shipped_tokenizer, [call_text(CODE), f"{REASONED}{ANSWER}<|im_end|>"], settings=LOCAL)
    for name in ("tokens", "response_length", "loss_mask", "response", "status", "remove_sample"):
        assert getattr(sample, name) == getattr(exact.sample, name), name
    assert sample.rollout_log_probs is None
    # facts that do not depend on times or on the engine
    same = ("stop_reason", "error", "final_text", "final_in_reasoning", "turns", "tool_calls", "tool_errors", "aborts")
    assert {name: facts(sample)[name] for name in same} == {name: exact.facts[name] for name in same}
    assert [span[:3] for span in facts(sample)["spans"]] == [span[:3] for span in exact.facts["spans"]]
    # `generate` has these additional facts, which text does not give; all other facts have the same names
    own = {"budgets", "dropped_sampled_tokens", "requests", "template_kwargs", "tool_parser", "transient_texts"}
    own |= {"version_numberings"}
    assert exact.facts.keys() - facts(sample).keys() == own
    assert (facts(sample)["code"].keys(), drift_counts(sample)["reread_turns"]) == (exact.facts["code"].keys(), 0)
    args = args_for(exact.fake.base_url, shipped_tokenizer)
    assert await reward_func(args, sample) == await reward_func(args, exact.sample)


async def test_openai_generate_counts_drifted_tokens(shipped_tokenizer: Any) -> None:
    answered = words(shipped_tokenizer, f"{REASONED}{ANSWER}<|im_end|>")
    at = answered.index(" answer")
    spelled = [*answered[:at], *" answer", *answered[at + 1 :]]
    exact, _ = await play(shipped_tokenizer, [ChatAnswer(ANSWER, reasoning="It is 34.", sampled=answered)])
    assert (drift_counts(exact)["unmatched_sampled"], drift_counts(exact)["unmatched_trained"]) == (0, 0)
    assert facts(exact)["sampled_tokens"] == drift_counts(exact)["trained_tokens"] == len(answered)
    sample, _ = await play(shipped_tokenizer, [ChatAnswer(ANSWER, reasoning="It is 34.", sampled=spelled)])
    assert (drift_counts(sample)["unmatched_sampled"], drift_counts(sample)["unmatched_trained"]) == (len(" answer"), 1)
