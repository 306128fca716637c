"""Samples with the fields of verl's AgentLoopOutput."""

import ast
import os
from pathlib import Path
from typing import Any, Optional

import pytest
from finished import finished_sample, two_samples
from grouped_samples import sample_of
from harness import ANSWER
from pydantic import BaseModel

from strands_rollout.integrations.verl import to_agent_loop_outputs


async def test_an_output_holds_the_sample_token_for_token(shipped_tokenizer: Any) -> None:
    samples = await two_samples(shipped_tokenizer)
    outputs = to_agent_loop_outputs(samples)
    for sample, output in zip(samples, outputs, strict=True):
        assert output["prompt_ids"] + output["response_ids"] == sample.tokens
        assert output["response_mask"] == sample.loss_mask
        assert output["response_logprobs"] == sample.rollout_log_probs
        assert output["extra_fields"]["reward_extra_info"] == sample.reward
        assert output["extra_fields"]["strands_rollout"]["stop_reason"] == "completed"
    assert [output["reward_score"] for output in outputs] == [1.0, -1.0]
    assert [output["num_turns"] for output in outputs] == [4, 2], "user, assistant, tool, assistant; user, assistant"
    assert outputs[0]["metrics"]["tool_calls"] > 0 == outputs[1]["metrics"]["tool_calls"]


def test_samples_without_facts_have_the_turns_of_their_masks() -> None:
    sample = sample_of(1.0)
    sample.tokens, sample.response_length = [1, 2, 3, 4, 5], 4
    sample.loss_mask, sample.rollout_log_probs = [1, 0, 0, 1], [-1.0, 0.0, 0.0, -1.0]
    output, failed = to_agent_loop_outputs([sample, sample_of(-1.0, status="FAILED")])
    assert output["num_turns"] == 4
    assert (failed["reward_score"], failed["response_mask"]) == (1.0, [0, 0]), "it trains nothing and moves no mean"


@pytest.mark.skipif("VERL_PATH" not in os.environ, reason="needs VERL_PATH, a checkout of verl-project/verl")
async def test_verls_own_class_takes_the_fields_and_keeps_all_of_them(shipped_tokenizer: Any) -> None:
    source = (Path(os.environ["VERL_PATH"]) / "verl/experimental/agent_loop/agent_loop.py").read_text()
    wanted = ("AgentLoopMetrics", "AgentLoopOutput")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name in wanted]
    namespace: dict[str, Any] = {"BaseModel": BaseModel, "Optional": Optional, "Any": Any, "__name__": __name__}
    exec(compile(ast.Module(classes, []), "agent_loop.py", "exec", dont_inherit=True), namespace)
    (output,) = to_agent_loop_outputs([await finished_sample(shipped_tokenizer, [ANSWER])])
    read = namespace["AgentLoopOutput"](**output).model_dump()
    read["metrics"] = {name: read["metrics"][name] for name in output["metrics"]}
    assert {name: read[name] for name in output} == output
