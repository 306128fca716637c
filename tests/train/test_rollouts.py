"""`RolloutCollector` and batches: order, seeds, aborted episodes. The player is scripted; no engine runs.

The later tests make training sequences of a step's samples: the tokens and the advantage of each kind of rollout.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from sequences import MODEL, options, sequence

from experiments.methods import retokenised_batch
from strands_rollout.errors import TrajectoryError
from strands_rollout.play.rows import Row
from strands_rollout.samples import Sample
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.train.rollouts import (
    AbortFlag,
    PromptOrder,
    RolloutCollector,
    TrainingMethod,
    check_gap,
    error_summary,
    held_out_metrics,
)

ROWS = [Row(f"question {number}", str(number)) for number in range(10)]

step_batch = TrainingMethod().batch


@dataclass
class ScriptedPlayer:
    """A player that ends each episode immediately, except in a held group: there, an abort of the rollout ends it."""

    abort_flag: AbortFlag
    held: set[int] = field(default_factory=set)
    seeds: dict[int, int] = field(default_factory=dict)
    starts: Counter[int] = field(default_factory=Counter)
    running: int = 0
    most_running: int = 0
    agents: int = 1

    async def play(self, sample: Sample, params: Any) -> Any:
        self.starts[sample.index] += 1
        self.seeds[sample.index] = params["sampling_seed"]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        sample.status = Sample.Status.COMPLETED
        await asyncio.sleep(0)
        if sample.group_index in self.held:
            while not self.abort_flag.is_set:  # noqa: ASYNC110 - the flag is no event
                await asyncio.sleep(0)
            sample.status = Sample.Status.ABORTED
        self.running -= 1
        siblings = [replace(sample, response=f"agent {number}") for number in range(1, self.agents)]
        return SimpleNamespace(sample=sample, siblings=siblings)


def collector_of(held: set[int] | None = None, **changed: Any) -> tuple[RolloutCollector, ScriptedPlayer]:
    """Return a collector and its player; by default three groups of two episodes, four at once."""
    abort_flag = AbortFlag()
    player = ScriptedPlayer(abort_flag, held or set())

    async def abort() -> None:
        assert abort_flag.is_set  # set first, so that episodes know of the abort when their requests end

    few = options(**{"prompts": 3, "samples_per_prompt": 2, "concurrency": 4, "seed": 5, **changed})
    return RolloutCollector(player, ROWS, few, abort, abort_flag), player  # type: ignore[arg-type]


def test_error_summary_leaves_out_samples_without_an_error() -> None:
    graded = Sample(reward={"score": 1.0, "error": ""}, metadata={"strands_rollout": {"error": None}})
    failed = Sample(metadata={"strands_rollout": {"error": "the engine is gone"}})
    assert error_summary([graded, failed, Sample()]) == "the engine is gone"
    assert error_summary([graded]) == "no episode reported an error"


def positions(groups: list[list[Sample]]) -> list[int]:
    return [group[0].group_index or 0 for group in groups]


def test_prompt_order_takes_every_row_once_per_pass() -> None:
    order = PromptOrder(ROWS, seed=1)
    first, second = ([order.row(at + start).label for at in range(10)] for start in (0, 10))
    assert sorted(first) == sorted(second) == sorted(row.label for row in ROWS)
    assert first != second
    assert [PromptOrder(ROWS, seed=1).row(at).label for at in (13, 2)] == [second[3], first[2]]
    assert [PromptOrder(ROWS, seed=2).row(at).label for at in range(10)] != first


async def test_collect_returns_groups_of_consecutive_prompts() -> None:
    collector, player = collector_of()
    (first, _), (second, _) = await collector.collect(), await collector.collect()
    assert positions(first) + positions(second) == [0, 1, 2, 3, 4, 5]
    for group in first:
        assert (len(group), len({str(sample.prompt) for sample in group})) == (2, 1)
    assert (sorted(player.seeds), len(set(player.seeds.values()))) == (list(range(12)), 12)
    assert player.most_running <= 4
    assert collector.waiting == []


async def test_collect_aborts_and_resumes_unfinished_episodes() -> None:
    collector, player = collector_of(extra_prompts=1, held={1})
    first, resumed = await collector.collect()
    assert (positions(first), resumed) == ([0, 2, 3], 0)
    assert [group.position for group in collector.waiting] == [1]
    player.held.clear()
    second, resumed = await collector.collect()
    assert resumed == 2
    assert 1 in positions(second)
    assert all(sample.status is Sample.Status.COMPLETED for group in second for sample in group)
    assert player.starts[2] == player.starts[3] == 2  # both samples of the held prompt, and no other sample
    assert sum(player.starts.values()) == 2 * 7 + 2  # a surplus finished prompt is kept, not played again


async def test_collect_counts_fan_out_as_one_episode() -> None:
    collector, player = collector_of()
    player.agents = 3
    first, _ = await collector.collect()
    assert positions(first) == [0, 1, 2]
    expected = [(index, name) for index in (0, 1) for name in ("", "agent 1", "agent 2")]
    assert [(one.index, one.response) for one in first[0]] == expected
    assert len(await collector.play_all(ROWS, "held out")) == len(ROWS)


async def test_cancelled_collect_leaves_no_episode_running() -> None:
    collector, player = collector_of(held={0})
    task = asyncio.create_task(collector.collect())
    async with asyncio.timeout(30):
        while not player.starts[0]:  # noqa: ASYNC110 - the player has no event
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while any(one is not asyncio.current_task() for one in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_play_all_keeps_metadata_and_seeds() -> None:
    row = Row("question", "1", metadata={"strands_rollout_settings": {"max_tool_calls": 1}})
    collector, player = collector_of()
    first = await collector.play_all([*ROWS, row], "held out")
    seeds = dict(player.seeds)
    await collector.collect()
    player.seeds.clear()
    await collector.play_all([*ROWS, row], "held out")
    assert player.seeds == seeds
    assert [sample.label for sample in first] == [one.label for one in [*ROWS, row]]
    assert first[-1].metadata["strands_rollout_settings"] == {"max_tool_calls": 1}
    assert first[-1].metadata is not row.metadata


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


def sample(tokenizer: Any, words: list[str], score: float, *, group: int = 0, tool: str = "", **values: Any) -> Sample:
    prompt = tokenizer.encode("What is 2 and 2?")
    sampled = [tokenizer.encode(word) for word in words]
    tool_ids = tokenizer.encode(tool) if tool else []
    response = [*sampled[0], *tool_ids, *(token for ids in sampled[1:] for token in ids)]
    mask = [1] * len(sampled[0]) + [0] * len(tool_ids) + [1] * sum(map(len, sampled[1:]))
    start, end = len(prompt), len(prompt) + len(response)
    middle = start + len(sampled[0])
    spans = [[0, start, middle, "3"], [1, middle + len(tool_ids), end, "4"]] if tool else [[0, start, end, "4"]]
    return Sample(
        prompt="",
        tokens=[*prompt, *response],
        response_length=len(response),
        loss_mask=mask,
        rollout_log_probs=[-0.125 * is_sampled for is_sampled in mask],
        reward={"score": score, "acc": float(score > 0)},
        group_index=group,
        status=Sample.Status.COMPLETED,
        metadata={"strands_rollout": {"spans": spans, "turns": len(spans), "sampled_tokens": sum(mask)}},
        **values,
    )


def test_step_metrics_leave_out_ungraded_episodes(tokenizer: Any) -> None:
    group = [sample(tokenizer, ["four"], score) for score in (1.0, -1.0, -1.0, -1.0)]
    group[1].reward |= {"method": "no_judge", "error": "no judge."}
    group[1].remove_sample = True
    group[2].status = Sample.Status.FAILED
    metrics = step_batch([group], tokenizer).metrics(4)
    assert (metrics["reward"], metrics["accuracy"], metrics["ungraded"], metrics["failed"]) == (0.0, 0.5, 1, 1)


def held_out(*methods: str) -> list[Sample]:
    graded = Sample.Status.COMPLETED
    samples = [Sample(reward={"score": 1.0, "acc": 1.0, "method": "exact"}, status=graded)]
    wrong = {"score": -1.0, "acc": 0.0, "error": "why."}
    return [*samples, *(Sample(reward={**wrong, "method": method}, status=graded) for method in methods)]


def test_held_out_metrics_leave_out_ungraded_answers() -> None:
    assert held_out_metrics(held_out("exact")) == {"held_out_accuracy": 0.5, "held_out_reward": 0.0}
    metrics = {"held_out_accuracy": 1.0, "held_out_reward": 1.0, "held_out_ungraded": 2.0}
    assert held_out_metrics(held_out("error", "error")) == metrics
    for lost in (held_out("no_judge", "exact"), held_out("error")[1:]):
        with pytest.raises(TrajectoryError, match=r"1 of . held-out episodes failed, .*: why\."):
            held_out_metrics(lost)


def test_batch_normalizes_rewards_by_group(tokenizer: Any) -> None:
    first = [sample(tokenizer, ["four"], score) for score in (1.0, -1.0, -1.0, -1.0)]
    second = [sample(tokenizer, ["five"], -1.0, group=1) for _ in range(4)]
    batch = step_batch([first, second], tokenizer)
    advantages = [one.advantage for one in batch.sequences]
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0], abs=1e-4)
    assert batch.dropped_groups == 1
    metrics = batch.metrics(4)
    assert (metrics["reward"], metrics["accuracy"], metrics["completed"]) == (-0.75, 0.125, 8)


def test_batch_trains_sampled_tokens(tokenizer: Any) -> None:
    one = sample(tokenizer, ["I add", "4"], 1.0, tool="\n4\n")
    (found,) = step_batch([[one, sample(tokenizer, ["5"], -1.0)]], tokenizer).sequences[:1]
    assert (found.tokens, found.loss_mask, found.log_probs) == (one.tokens, one.loss_mask, one.rollout_log_probs)
    assert (found.denominator, set(found.trained_log_probs or [])) == (sum(one.loss_mask or []), {-0.125})


def test_batch_leaves_out_untrained_samples(tokenizer: Any) -> None:
    failed = sample(tokenizer, ["none"], -1.0)
    failed.status, failed.loss_mask, failed.reward = Sample.Status.FAILED, [0] * failed.response_length, None
    group = [sample(tokenizer, ["four"], 1.0), sample(tokenizer, ["five"], -1.0), failed]
    batch = step_batch([group], tokenizer)
    assert [one.advantage for one in batch.sequences] == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert batch.metrics(4)["failed"] == 1


def test_step_metrics_count_siblings_as_one_episode(tokenizer: Any) -> None:
    pair = [sample(tokenizer, ["an", "sw", "er"], 1.0, rollout_id=1) for _ in range(2)]
    for part, one in enumerate(pair):
        one.metadata["strands_rollout"]["fan_out"] = {"part": part, "of": 2, "kind": "main" if part == 0 else "agent"}
    pair[1].status = Sample.Status.TRUNCATED
    other = sample(tokenizer, ["5"], -1.0, rollout_id=2)
    for make_batch in (step_batch, retokenised_batch):
        batch = make_batch([[*pair, other]], tokenizer)
        metrics = batch.metrics(4)
        assert (metrics["episodes"], metrics["samples"], metrics["reward"], metrics["accuracy"]) == (2, 3, 0.0, 0.5)
        assert (metrics["completed"], metrics["truncated"]) == (2, 0)
        sampled = [sum(one.loss_mask or []) for one in (*pair, other)]
        assert metrics["sampled_tokens"] == sum(sampled) / 2
        assert metrics["drift_tokens"] == 2 * 3 / sum(sampled)  # three of the four tokens of each sibling
        assert metrics["drift_episodes"] == 2 / 3  # a share of samples, of which only some are measured
        assert [one.advantage for one in batch.sequences] == pytest.approx([0.7071, 0.7071, -0.7071], abs=1e-3)
        trained = [sum(one.loss_mask) for one in batch.sequences]
        assert [one.denominator for one in batch.sequences] == [trained[0] + trained[1]] * 2 + [trained[2]]


def test_check_gap_shows_tokens_that_differ() -> None:
    one = sequence([7, 8, 9, 10, 11], [1, 0, 1], sampled_log_probs=[-1.0, 0.0, -2.0])
    trainer = [[-1.0, -3.5]]
    check_gap([one], [[-1.0005, -2.0]], 1e-3, str)
    with pytest.raises(TrajectoryError) as caught:
        check_gap([one], trainer, 1e-3, lambda ids: " ".join(f"t{one}" for one in ids))
    words = str(caught.value)
    assert "by up to 1.5 (mean 0.75), 1 of 2 trained tokens by more than 0.001" in words
    assert "sequence 0, token 4 of 5: 't11' after 't7 t8 t9 t10': rollout -2.0000, trainer -3.5000" in words
    assert "--gap-limit" in words
    with pytest.raises(TrajectoryError, match="no token has a known logprob and was sampled by the current weights"):
        check_gap([sequence([7, 8, 9], [1, 1])], [[-1.0, -1.0]], 1e-3, str)
