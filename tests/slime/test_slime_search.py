"""The search tool through slime's own loop: partial rollouts, with every token checked on the wire."""

import pytest
from interruptible_policy import prompt_of, turn
from search_server import retrieval_server
from slime_interruptions import Holds, facts_of, task_of, train_interrupted
from slime_policy import call
from slime_run import chat_row

pytestmark = pytest.mark.slime

PLANS = {
    "slow": [
        turn("I search.", call("search", query="inventor of dynamite")),
        turn("And his city.", call("search", query="Nobel's birthplace")),
        "<answer>In Stockholm.</answer><|im_end|>",
    ],
    "quick": ["<answer>Stockholm</answer><|im_end|>"],
}
TOOL = """
from strands_rollout.environments.search import search_tool

search = search_tool(url={url!r})
"""


async def test_partial_rollouts_train_searches_exactly(begin, tmp_path) -> None:
    question, label = "Where was the inventor of dynamite born?", ["Stockholm", "the city of Stockholm"]
    names = ["slow", *["quick"] * 4]
    rows = [chat_row(prompt_of(name, number, question), label) for number, name in enumerate(names)]
    async with retrieval_server() as (url, bodies):
        tool = tmp_path / "my_search.py"
        tool.write_text(TOOL.format(url=url), encoding="utf-8")
        settings = {
            "system_prompt": None,
            "tools": [f"{tool}:search"],
            "reward": "strands_rollout.environments.question_answering.f1",
        }
        holds = Holds()
        given = {"partial_rollout": True, "rollout_batch_size": 1, "over_sampling_batch_size": 2, "rows": rows}
        scene = await begin(PLANS, (), holds, settings=settings, **given)
        samples = await train_interrupted(scene, holds, [(0, 4), (1, 6), (2, 3)])
    assert scene.problems(samples) == []
    # a resumed sample keeps its results: each of the two samples searched twice in all
    queries = [query for body in bodies for query in body["queries"]]
    assert sorted(queries) == ["Nobel's birthplace"] * 2 + ["inventor of dynamite"] * 2
    slow = [sample for sample in samples if task_of(sample) == "slow/0"]
    assert (len(slow), len(samples)) == (2, 8)
    for sample in slow:
        facts = facts_of(sample)
        assert (facts["aborts"], facts["resumes"], facts["turns"], facts["tool_calls"]) == (3, 3, 3, 2)
        assert facts["weight_versions"] == ["1", "2", "3", "4"]
        assert scene.tokenizer.decode(sample.tokens).count("(title: Alfred Nobel): He was born in Stockholm.") == 2
        assert (sample.reward["parts/em"], sample.reward["score"]) == (0.0, pytest.approx(2 / 3))
    assert {sample.reward["score"] for sample in samples if sample not in slow} == {1.0}
