"""Samples with the fields of verl's AgentLoopOutput."""

from typing import Any

from finished import two_samples

from strands_rollout.integrations.verl import to_agent_loop_outputs


async def test_to_agent_loop_outputs_keeps_every_token(shipped_tokenizer: Any) -> None:
    samples = await two_samples(shipped_tokenizer)
    outputs = to_agent_loop_outputs(samples)
    for sample, output in zip(samples, outputs, strict=True):
        assert output["prompt_ids"] + output["response_ids"] == sample.tokens
        assert (output["response_mask"], output["response_logprobs"]) == (sample.loss_mask, sample.rollout_log_probs)
        assert output["extra_fields"]["reward_extra_info"] == sample.reward
        assert output["extra_fields"]["strands_rollout"]["stop_reason"] == "completed"
    assert [output["reward_score"] for output in outputs] == [1.0, -1.0]
    assert [output["num_turns"] for output in outputs] == [4, 2], "user, assistant, tool, assistant; user, assistant"
    assert outputs[0]["metrics"]["tool_calls"] > 0 == outputs[1]["metrics"]["tool_calls"]
