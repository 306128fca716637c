"""slime's own training rollout takes `strands_rollout.generate` and `reward_func`, and trains on what they return."""

from __future__ import annotations

import pytest
from slime_policy import ANSWER, call, turn

pytestmark = pytest.mark.slime


async def test_a_rollout_of_tool_calls_becomes_training_data(start):
    plans = {"tool": [turn(call("multiply", a=17, b=2)), ANSWER]}
    stage = await start(plans, ["tool"] * 4)
    ranks = await stage.rollouts.train()
    assert stage.engine.violations == []
    assert [s.status.value for s in stage.rollouts.samples] == ["completed"] * 8
    print(stage.rollouts.seconds, stage.gateway.refused_paths, stage.rollouts.samples[0].reward, stage.rollouts.samples[0].metadata)
    assert ranks
