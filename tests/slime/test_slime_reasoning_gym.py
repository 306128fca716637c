"""reasoning-gym through slime's own loop: partial rollouts with the code tool, with every token checked on the wire."""

from typing import Any

import pytest
from interruptible_policy import turn
from slime_interruptions import Holds, facts_of, task_of, train_interrupted
from slime_policy import call

from strands_rollout.environments.reasoning_gym import reasoning_gym_row

pytestmark = pytest.mark.slime
reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs pip install 'strands-rollout[reasoning-gym]'")


def row_of(name: str, entry: Any, number: int) -> dict[str, Any]:
    """Return the row of an entry, with the mark of the scripted policy's task."""
    row = reasoning_gym_row(entry)
    row["prompt"][0]["content"] = f"[[{name}/{number}]] {entry['question']}"
    return row


async def test_partial_rollouts_train_reasoning_gym_exactly(begin) -> None:
    right, wrong = reasoning_gym.create_dataset("products", size=2, seed=3, min_digits=2, max_digits=2)
    product = right["metadata"]["expression"]
    plans = {
        "slow": [
            turn("I multiply.", call("execute_python_code", code=f"print({product})")),
            turn("And I check it.", call("execute_python_code", code=f"print({product} == {right['answer']})")),
            f"<answer>{right['answer']}</answer><|im_end|>",
        ],
        "quick": ["<answer>12</answer><|im_end|>"],
    }
    rows = [row_of("slow", right, 0), *[row_of("quick", wrong, number) for number in range(1, 5)]]
    settings = {
        "tools": ["strands_rollout.tools.execute_python_code"],
        "reward": "strands_rollout.environments.reasoning_gym.score",
    }
    holds = Holds()
    given = {"partial_rollout": True, "rollout_batch_size": 1, "over_sampling_batch_size": 2, "rows": rows}
    scene = await begin(plans, (), holds, settings=settings, **given)
    samples = await train_interrupted(scene, holds, [(0, 4), (1, 6), (2, 3)])
    assert scene.problems(samples) == []
    slow = [sample for sample in samples if task_of(sample) == "slow/0"]
    assert (len(slow), len(samples)) == (2, 8)
    for sample in slow:
        facts = facts_of(sample)
        assert (facts["aborts"], facts["resumes"], facts["turns"], facts["tool_calls"]) == (3, 3, 3, 2)
        assert facts["weight_versions"] == ["1", "2", "3", "4"]
        assert f"\n{right['answer']}\n" in scene.tokenizer.decode(sample.tokens)
        assert (sample.reward["score"], sample.reward["acc"]) == (1.0, 1.0)
    assert {sample.reward["acc"] for sample in samples if sample not in slow} == {0.0}
