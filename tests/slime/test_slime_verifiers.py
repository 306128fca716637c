"""A verifiers environment through slime's own loop: partial rollouts, with the wire's audit of every token."""

import os
import shutil
from pathlib import Path

import pytest
from interruptible_policy import call, turn
from slime_interruptions import facts_of
from test_slime_partial import Cuts, last_rollout, one_rollout

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


async def test_partial_rollout_resumes_verifiers_episodes(begin, tmp_path, monkeypatch) -> None:
    if shutil.which("uv") is None:
        pytest.skip("needs uv on the PATH")
    monkeypatch.syspath_prepend(TASKSET)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TASKSET), *filter(None, [os.environ.get("PYTHONPATH")])]))
    path = tmp_path / "env.toml"
    path.write_text(CONFIG.format(names=["slow", *["quick"] * 5]), encoding="utf-8")
    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in task_rows(path)]
    settings = {
        "agent_program": "strands_rollout.environments.verifiers.play",
        "environment_config": str(path),
        "resumable": "replay",
        "tools": [],
    }
    cuts = Cuts(quick_s=45.0)  # until the slow episodes have asked for their second turn
    given = {"partial_rollout": True, "rollout_batch_size": 1, "over_sampling_batch_size": 2, "rows": rows}
    scene = await begin(PLANS, (), cuts, settings=settings, **given)
    for number, cuts.at in enumerate(({0: 4}, {1: 6})):
        await one_rollout(scene, number)
        [group] = scene.buffer
        assert [sample.status.value for sample in group] == ["aborted"] * 2
    samples, trained = await last_rollout(scene, 2)
    assert scene.problems(samples) == []
    for sample in samples:
        facts = facts_of(sample)
        assert (sample.status.value, sample.reward["score"], facts["turns"]) == ("completed", 2.0, 3)
        assert scene.sampled_ids(sample) == scene.planned_ids(sample)
        assert sum(sample.loss_mask) == facts["sampled_tokens"]
    assert trained == sum(facts_of(sample)["sampled_tokens"] for sample in samples)
