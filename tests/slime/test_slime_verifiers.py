"""A verifiers environment through slime's own loop: partial rollouts, with every token checked on the wire."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import recorded_tools
from interruptible_policy import call, turn
from slime_interruptions import Holds, facts_of, task_of, train_interrupted

pytest.importorskip("verifiers", reason="needs verifiers: pip install 'strands-rollout[verifiers]'")
from strands_rollout.environments.verifiers import task_rows

pytestmark = pytest.mark.slime

TASKSET = Path(__file__).parents[1] / "environments"
PLANS = {
    "slow": [
        turn("I count once.", call("words_count", text="a b c")),
        turn("And twice.", call("words_count", "a", text="a"), call("words_count", "b", text="b")),
        "It is 34.<|im_end|>",
    ],
    "quick": ["It is 34.<|im_end|>"],
}
CONFIG = """
[taskset]
id = "word-count"
names = {names}
[agent.harness]
id = "null"
[agent.runtime]
type = "subprocess"
"""


async def test_partial_rollouts_replay_verifiers_episodes_exactly(begin, tmp_path, monkeypatch) -> None:
    if shutil.which("uv") is None:
        pytest.skip("needs uv on the PATH")
    monkeypatch.syspath_prepend(TASKSET)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TASKSET), *filter(None, [os.environ.get("PYTHONPATH")])]))
    path = tmp_path / "env.toml"
    path.write_text(CONFIG.format(names=["slow", *["quick"] * 3]), encoding="utf-8")
    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in task_rows(path)]
    settings = {
        "agent_program": "strands_rollout.environments.verifiers.play",
        "environment_config": str(path),
        "resumable": "replay",
        "tools": [],
    }
    holds = Holds()
    given = {"partial_rollout": True, "rollout_batch_size": 1, "over_sampling_batch_size": 2, "rows": rows}
    scene = await begin(PLANS, (), holds, settings=settings, **given)
    samples = await train_interrupted(scene, holds, [(0, 4), (1, 6)])
    assert scene.problems(samples) == []
    slow = [sample for sample in samples if task_of(sample) == "slow/0"]
    assert (len(slow), len(samples)) == (2, 6)
    for sample in slow:
        facts = facts_of(sample)
        assert (sample.reward["score"], facts["aborts"], facts["resumes"], facts["turns"]) == (2.0, 2, 2, 3)
        assert facts["weight_versions"] == ["1", "2", "3"]
    # after the second abort, each sample's first tool call ran again, with the same result
    assert sorted(Counter(recorded_tools.ended_calls()).values()) == [1, 1, 1, 1, 2, 2]
