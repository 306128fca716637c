"""slime's abort during a rollout: samples come back ABORTED, immediately and valid."""

from typing import Any

import pytest
from fake_sglang import Reply
from slime_policy import ANSWER, call, turn
from slime_stage import Stage, Start

from strands_rollout.slime_plugin.sample_contract import contract_violations

pytestmark = pytest.mark.slime

MULTIPLY = turn(call("multiply", a=17, b=2))
PARTIAL = (40, 41, 42)
# the engine's replies to the episodes of surplus groups, by the episodes' state at the abort
CAUGHT = {
    "generating": [Reply.hang(PARTIAL)],
    "generatinglater": [MULTIPLY, Reply.hang(PARTIAL)],
    "queued": [Reply.hang()],
    "intool": [turn(call("wait", seconds=60)), ANSWER],
    "insynctool": [turn(call("block", seconds=20)), ANSWER],
    "inretry": [Reply.status(503, "busy")],
    # no abort reaches this reply
    "deaf": [Reply.tokens(PARTIAL).after(60)],
}
SAMPLED = {"generating": 3, "queued": 0, "inretry": 0, "deaf": 0}


async def started(start: Start, name: str, **more: Any) -> Stage:
    """Return a stage whose rollout begins two groups and needs one; the abort meets the other in the state `name`."""
    plans = {"answers": [turn(call("wait", seconds=0.5)), ANSWER], name: CAUGHT[name]}
    return await start(plans, ["answers", name], rollout_batch_size=1, over_sampling_batch_size=2, **more)


@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize("name", CAUGHT)
async def test_abort_returns_valid_samples_immediately(start: Start, name: str, partial_rollout: bool) -> None:
    stage = await started(start, name, partial_rollout=partial_rollout)
    await stage.rollouts.train()
    aborted = stage.rollouts.returned_as("aborted")
    assert len(aborted) == 2
    for sample in aborted:
        assert contract_violations(sample, decode=stage.tokenizer.decode, may_abort=True) == []
        if name in SAMPLED:
            assert sum(sample.loss_mask) == SAMPLED[name]
    assert stage.rollouts.raised == []
