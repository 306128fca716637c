"""The stand-in for slime's `Sample`: aligned tokens, conversion to dicts, and older versions of slime's class.

`tests/slime` compares it with slime's own class.
"""

import base64
import functools
import json
from dataclasses import field, fields, make_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import ANSWER, TOOL_CALL, run

from strands_rollout import Sample
from strands_rollout.model.replay_data import joined_experts
from strands_rollout.slime_plugin.reward_groups import rollouts_of

META = {"finish_reason": {"type": "stop"}, "prompt_tokens": 10, "cached_tokens": 4, "weight_version": "v1"}


def test_append_response_tokens_aligns_mask_and_logprobs() -> None:
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-1.0, -2.0])
    sample.append_response_tokens(tokens=[5], trainable=False)
    sample.append_response_tokens(tokens=[6], log_probs=[-3.0])
    assert (sample.tokens, sample.response_length) == ([1, 2, 3, 4, 5, 6], 4)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0, 1], [-1.0, -2.0, 0.0, -3.0])
    assert (sample.effective_response_length, Sample(response_length=7).effective_response_length) == (3, 7)
    bare = Sample(tokens=[1, 2], response_length=1)  # tokens without mask and logprobs are trained
    with pytest.raises(ValueError, match="after 1 response tokens without rollout_log_probs"):
        bare.append_response_tokens(tokens=[3], log_probs=[-1.0])
    bare.append_response_tokens(tokens=[3], trainable=False)
    assert (bare.loss_mask, bare.rollout_log_probs) == ([1, 0], [0.0, 0.0])


@pytest.mark.parametrize(("finish", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")])
def test_append_response_tokens_reads_meta_info(finish: str, status: str) -> None:
    sample = Sample(tokens=[1])
    args = SimpleNamespace(sglang_speculative_algorithm="EAGLE")
    counts = {"spec_accept_token_num": 4, "spec_draft_token_num": 6, "spec_verify_ct": 2, "completion_tokens": 5}
    sample.append_response_tokens(args, tokens=[2], log_probs=[-1.0], meta_info={**META, **counts})
    sample.append_response_tokens(meta_info={"finish_reason": {"type": finish}}, text="more")
    sample.append_response_tokens(tokens=[3], log_probs=[-1.0], meta_info=META, update_terminal_info=False)
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0], meta_info={"prompt_tokens": 10})
    assert (sample.status.value, sample.response, sample.weight_versions) == (status, "more", ["v1"])
    assert (sample.prefix_cache_info.prefix_cache_hit_rate, sample.spec_info) == (0.4, Sample.SpecInfo(4, 6, 2, 5))


def test_sample_round_trips_through_to_dict() -> None:
    sample = Sample(index=3, prompt=[{"role": "user", "content": "hi"}], tokens=[1], metadata={"source_name": "dapo"})
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0], meta_info=META)
    sample.reward = {"score": 1.0}
    sample.trace = {"events": []}  # type: ignore[attr-defined] # not a field: slime adds it
    data = json.loads(json.dumps(sample.to_dict()))
    assert (Sample.from_dict(data), vars(Sample.from_dict(data))["trace"]) == (sample, {"events": []})
    assert data["status"] == "completed"
    assert sample.get_reward_value(SimpleNamespace(reward_key="score")) == 1.0
    assert sample.get_reward_value(SimpleNamespace(reward_key=None)) == {"score": 1.0}


def older_sample(*new: str, **values: Any) -> Any:
    """Return a Sample of slime before 0.3.1: without `append_response_tokens`, with the fields `new`."""
    newer = {"rollout_id", "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "multimodal_train_input_id"}
    older_fields = [
        (each.name, each.type, field(default=each.default, default_factory=each.default_factory))  # type: ignore[call-overload]
        for each in fields(Sample)
        if each.name not in newer
    ]
    new_fields = [(name, "int | None", field(default=None)) for name in new]
    nested = {name: getattr(Sample, name) for name in ("Status", "SpecInfo", "PrefixCacheInfo", "get_reward_value")}
    return make_dataclass("Sample", [*older_fields, *new_fields], namespace=nested)(**values)


@pytest.mark.parametrize("new", [(), ("group_id",)], ids=["0.2.4", "0.3.0"])
async def test_generate_fills_older_sample_class(new: tuple[str, ...], shipped_tokenizer: Any) -> None:
    turns = [TOOL_CALL.format(name="calculate", arguments='{"expression": "17 * 2"}'), ANSWER]
    samples = []
    for kind in (Sample, functools.partial(older_sample, *new)):
        sample = kind(prompt="What is 17 * 2?", label="34", index=0)
        settings = {"tools": ["strands_rollout.examples.shop.calculate"]}
        samples.append((await run(shipped_tokenizer, turns, sample=sample, settings=settings)).sample)
    expected, older = samples
    assert older.status is Sample.Status.COMPLETED
    names = ("tokens", "loss_mask", "rollout_log_probs", "response", "response_length", "weight_versions")
    assert [getattr(older, name) for name in names] == [getattr(expected, name) for name in names]
    assert older.prefix_cache_info == expected.prefix_cache_info
    assert not hasattr(older, "rollout_id")


@pytest.mark.parametrize(("new", "lists"), [((), False), (("group_id",), True)], ids=["0.2.4", "0.3.0"])
async def test_fan_out_needs_rollout_field_of_sample(new, lists, shipped_tokenizer, caplog) -> None:
    sample = older_sample(*new, prompt="What is 17 * 2?", index=7)
    played = await run(shipped_tokenizer, [ANSWER], sample=sample, settings={"tools": [], "fan_out": True})
    assert isinstance(played.sample, list) is lists
    if lists:
        assert [sample.group_id for sample in played.sample] == [7]
        assert [rollout.group for rollout in rollouts_of(SimpleNamespace(reward_key=None), played.sample)] == [None]
    else:
        assert any("its Sample has no rollout_id" in message for message in caplog.messages)


def test_joined_experts_appends_rows_of_each_turn() -> None:
    def payload(*rows: int) -> str:
        return base64.b64encode(np.array(rows, dtype=np.int32).tobytes()).decode()

    shape = {"layers": 1, "top_k": 2}
    first = joined_experts({"routed_experts": payload(1, 2, 3, 4), "routed_experts_start_len": 0}, None, **shape)
    assert first.tolist() == [[[1, 2]], [[3, 4]]]
    second = {"routed_experts": payload(9, 9, 5, 6), "routed_experts_start_len": 1}
    assert joined_experts(second, first, **shape).tolist() == [[[1, 2]], [[9, 9]], [[5, 6]]]
    assert joined_experts({}, first, **shape) is first
