"""From a step's samples to sequences: what each kind of rollout trains on, and with which advantage."""

from typing import Any

import pytest
from sequences import MODEL, sequence

from experiments.methods import retokenised_batch
from strands_rollout.errors import TrajectoryError
from strands_rollout.samples import Sample
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.train.rollouts import TrainingMethod, batch_figures, check_gap

step_batch = TrainingMethod().batch


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


def sample(tokenizer: Any, words: list[str], score: float, *, group: int = 0, tool: str = "", **values: Any) -> Sample:
    """A prompt, words that were sampled each by itself, and between them a tool's answer."""
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


def test_rewards_are_compared_within_their_group(tokenizer: Any) -> None:
    first = [sample(tokenizer, ["four"], score) for score in (1.0, -1.0, -1.0, -1.0)]
    second = [sample(tokenizer, ["five"], -1.0, group=1) for _ in range(4)]
    batch = step_batch([first, second], tokenizer)
    advantages = [one.advantage for one in batch.sequences]
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0], abs=1e-4)
    assert batch.dropped_groups == 1
    figures = batch_figures(batch, 4)
    assert (figures["reward"], figures["accuracy"], figures["completed"]) == (-0.75, 0.125, 8)


def test_tito_trains_on_what_was_sampled(tokenizer: Any) -> None:
    one = sample(tokenizer, ["I add", "4"], 1.0, tool="\n4\n")
    (found,) = step_batch([[one, sample(tokenizer, ["5"], -1.0)]], tokenizer).sequences[:1]
    assert (found.tokens, found.loss_mask, found.log_probs) == (one.tokens, one.loss_mask, one.rollout_log_probs)
    assert found.denominator == sum(one.loss_mask or [])
    assert set(found.trained_log_probs or []) == {-0.125}


def test_samples_that_train_nothing_are_left_out_and_compared_with_nothing(tokenizer: Any) -> None:
    failed = sample(tokenizer, ["none"], -1.0)
    failed.status, failed.loss_mask, failed.reward = Sample.Status.FAILED, [0] * failed.response_length, None
    group = [sample(tokenizer, ["four"], 1.0), sample(tokenizer, ["five"], -1.0), failed]
    batch = step_batch([group], tokenizer)
    assert [one.advantage for one in batch.sequences] == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert batch_figures(batch, 4)["failed"] == 1


def test_siblings_are_one_episode_in_a_steps_figures(tokenizer: Any) -> None:
    pair = [sample(tokenizer, ["an", "sw", "er"], 1.0, rollout_id=1) for _ in range(2)]
    for part, one in enumerate(pair):
        one.metadata["strands_rollout"]["fan_out"] = {"part": part, "of": 2, "kind": "main" if part == 0 else "agent"}
    pair[1].status = Sample.Status.TRUNCATED
    other = sample(tokenizer, ["5"], -1.0, rollout_id=2)
    for make_batch in (step_batch, retokenised_batch):
        batch = make_batch([[*pair, other]], tokenizer)
        figures = batch_figures(batch, 4)
        assert (figures["episodes"], figures["samples"], figures["reward"], figures["accuracy"]) == (2, 3, 0.0, 0.5)
        assert (figures["completed"], figures["truncated"]) == (2, 0)
        sampled = [sum(one.loss_mask or []) for one in (*pair, other)]
        assert figures["sampled_tokens"] == sum(sampled) / 2
        assert figures["drift_tokens"] == 2 * 3 / sum(sampled)  # three of each sibling's four
        assert figures["drift_episodes"] == 2 / 3  # of samples, since some of a step's are measured
        assert [one.advantage for one in batch.sequences] == pytest.approx([0.7071, 0.7071, -0.7071], abs=1e-3)
        trained = [sum(one.loss_mask) for one in batch.sequences]
        assert [one.denominator for one in batch.sequences] == [trained[0] + trained[1]] * 2 + [trained[2]]


def test_a_larger_gap_is_refused_with_the_tokens_that_differ() -> None:
    one = sequence([7, 8, 9, 10, 11], [1, 0, 1], sampled_log_probs=[-1.0, 0.0, -2.0])
    trainer = [[-1.0, -3.5]]
    check_gap([one], [[-1.0005, -2.0]], 1e-3, str)
    with pytest.raises(TrajectoryError) as caught:
        check_gap([one], trainer, 1e-3, lambda ids: " ".join(f"t{one}" for one in ids))
    words = str(caught.value)
    assert "by up to 1.5 (mean 0.75), 1 of 2 trained tokens by more than 0.001" in words
    assert "sequence 0, token 4 of 5: 't11' after 't7 t8 t9 t10': rollout -2.0000, trainer -3.5000" in words
    assert "--gap-limit" in words
    with pytest.raises(TrajectoryError, match="no token whose logprob under these weights is known"):
        check_gap([sequence([7, 8, 9], [1, 1])], [[-1.0, -1.0]], 1e-3, str)
