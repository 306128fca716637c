"""`write_episode` and `reset_sample`: samples that keep slime's contract, for every stop reason."""

import copy
import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from harness import run

from strands_rollout import EpisodeLimits, Sample, SGLangModel, StopReason
from strands_rollout.agent.run import Episode
from strands_rollout.agent.tool_call import ToolStats
from strands_rollout.errors import EngineUnavailableError
from strands_rollout.record.saved import EpisodeProgress
from strands_rollout.slime_plugin.resume import reset_sample
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.slime_plugin.sample_writer import EndedEpisode, WritingRules, write_episode

ARGS = SimpleNamespace()
MESSAGES = [{"role": "user", "content": [{"text": "What is 17 * 2?"}]}]
PROMPT = "<|im_start|>user\nWhat is 17 * 2?<|im_end|>\n<|im_start|>assistant\n"
CALLS = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 2}}\n</tool_call><|im_end|>'
RESULT = "\n<|im_start|>user\n<tool_response>\n34\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
ANSWER = "It is \\boxed{34}.<|im_end|>"

TRUNCATED = (
    "turn_length response_length context_length prompt_too_long max_tool_iterations max_tool_calls max_user_turns "
    "team_limit environment_limit unsendable_text episode_timeout"
)
TRAINED = {StopReason.COMPLETED: "completed", **dict.fromkeys(map(StopReason, TRUNCATED.split()), "truncated")}
NEVER_TRAINED = sorted(set(StopReason) - set(TRAINED) - {StopReason.ABORTED})


@pytest.fixture
def model(shipped_tokenizer: Any) -> SGLangModel:
    """A model that has sent no request."""
    return SGLangModel(tokenizer=shipped_tokenizer, base_url="http://127.0.0.1:9")


def ids_of(model: SGLangModel, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False))


def append_turn(model: SGLangModel, context: str, sampled: str, finish: str = "stop", **meta: Any) -> int:
    """Append a turn to the model's trajectory, each token with a different logprob; return its length."""
    ids = ids_of(model, sampled)
    start = len(model.trajectory.token_ids)
    meta_info = {"finish_reason": {"type": finish}, "prompt_tokens": 10, "cached_tokens": 4, **meta}
    model.trajectory.append_turn(
        ids_of(model, context),
        ids,
        [-0.001 * (start + position + 1) for position in range(len(ids))],
        finish_reason=finish,
        rid="r",
        latency_s=0.25,
        meta_info=meta_info,
    )
    return len(ids)


def make_episode(reason: StopReason, error: BaseException | None = None) -> Episode:
    tools, progress = ToolStats(seconds=1.5, errors=1, waited_s=1.25), EpisodeProgress(MESSAGES, 1)
    return Episode(reason, error, 1, 2, tools, 4.0, EpisodeLimits(), progress)


def write_sample(
    model: SGLangModel, reason: StopReason, *, may_abort: bool = False, sample: Sample | None = None
) -> Sample:
    sample = sample or Sample(prompt="What is 17 * 2?", label="34", index=5)
    write_episode(ARGS, sample, EndedEpisode(model, make_episode(reason)), WritingRules(may_abort=may_abort))
    return sample


def violations(sample: Sample, model: SGLangModel, **options: Any) -> list[str]:
    """Return the sample's violations of slime's contract, with a reward added, which `generate` leaves to slime."""
    assert sample.reward is None
    rewarded = copy.copy(sample)
    rewarded.reward = {"score": 1.0}
    return contract_violations(rewarded, decode=model.template.encoder.decode, reward_key="score", **options)


@pytest.mark.parametrize(("reason", "status"), TRAINED.items())
def test_write_episode_trains_each_sampled_token(model: SGLangModel, reason: StopReason, status: str) -> None:
    sampled = [
        append_turn(model, PROMPT, CALLS, weight_version="v1"),
        append_turn(model, RESULT, ANSWER, weight_version="v2"),
    ]
    sample = write_sample(model, reason)
    assert (sample.status.value, sample.remove_sample) == (status, False)
    prompt_length = len(ids_of(model, PROMPT))
    assert (sample.tokens, sample.response_length) == (model.trajectory.token_ids, len(sample.tokens) - prompt_length)
    assert (sample.loss_mask, sum(sample.loss_mask)) == (model.trajectory.loss_mask[prompt_length:], sum(sampled))
    assert sample.rollout_log_probs == model.trajectory.logprobs[prompt_length:]
    assert (sample.response, violations(sample, model)) == (CALLS + RESULT + ANSWER, [])
    assert sample.weight_versions == ["v1", "v2"]
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (8, 20)
    assert sample.non_generation_time == 1.25
    assert copy.deepcopy(sample) == sample == pickle.loads(pickle.dumps(sample))  # noqa: S301 - our own bytes
    assert Sample.from_dict(sample.to_dict()) == sample


@pytest.mark.parametrize("reason", NEVER_TRAINED)
def test_write_episode_masks_infrastructure_faults(model: SGLangModel, reason: StopReason) -> None:
    append_turn(model, PROMPT, CALLS)
    sample = write_sample(model, reason)
    assert (sample.status.value, sample.remove_sample, set(sample.loss_mask or [])) == ("failed", True, {0})
    assert (set(sample.rollout_log_probs or []), violations(sample, model)) == ({0.0}, [])


@pytest.mark.parametrize("reason", StopReason)
@pytest.mark.parametrize("may_abort", [False, True])
def test_write_episode_without_sampled_tokens_is_valid(model, reason, may_abort) -> None:
    model.conversation.branch.prompt_ids = ids_of(model, PROMPT)
    sample = write_sample(model, reason, may_abort=may_abort)
    assert sample.tokens == [*ids_of(model, PROMPT), model.template.end_of_turn_id]
    assert (sample.response, sample.response_length, sample.loss_mask, sample.rollout_log_probs) == ("", 1, [0], [0.0])
    assert sample.remove_sample
    assert sample.status is not Sample.Status.PENDING
    if reason is not StopReason.COMPLETED:
        assert violations(sample, model, may_abort=may_abort) == []


@pytest.mark.parametrize(("may_abort", "status"), [(True, "aborted"), (False, "failed")])
def test_write_episode_returns_aborted_only_if_may_abort(model: SGLangModel, may_abort: bool, status: str) -> None:
    sampled = append_turn(model, PROMPT, "Let me th", "abort")
    sample = write_sample(model, StopReason.ABORTED, may_abort=may_abort)
    assert (sample.status.value, sample.response) == (status, "Let me th")
    assert sum(sample.loss_mask or []) == (sampled if may_abort else 0)
    assert violations(sample, model, may_abort=may_abort) == []


def test_write_episode_writes_json_facts_beside_metadata(model: SGLangModel) -> None:
    sampled = append_turn(model, PROMPT, ANSWER)
    sample = Sample(prompt="What is 17 * 2?", metadata={"source_name": "dapo"})
    error = EngineUnavailableError("gone " * 1000)
    write_episode(ARGS, sample, EndedEpisode(model, make_episode(StopReason.ENGINE_ERROR, error)), WritingRules())
    assert sample.metadata["source_name"] == "dapo"
    facts = sample.metadata["strands_rollout"]
    assert (json.loads(json.dumps(facts)), facts["stop_reason"]) == (facts, "engine_error")
    assert facts["error"].startswith("EngineUnavailableError: gone ")
    assert len(facts["error"]) <= 2000
    assert (facts["tool_iterations"], facts["tool_calls"], facts["sampled_tokens"]) == (1, 2, sampled)


@pytest.mark.parametrize("status", Sample.Status)
def test_reset_sample_restores_the_row(model: SGLangModel, status: Sample.Status) -> None:
    append_turn(model, PROMPT, CALLS, weight_version="v1")
    row: dict[str, Any] = {"prompt": "What is 17 * 2?", "label": "34", "index": 3, "group_index": 1, "session_id": "s"}
    sample = write_sample(model, StopReason.ENGINE_ERROR, sample=Sample(**row, metadata={"source_name": "dapo"}))
    sample.reward, sample.status, sample.teacher_log_probs = {"score": -1.0}, status, [-0.1]
    sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [1], [0, 1]
    sample.rollout_routed_experts = [[[0]]]
    reset_sample(sample)
    assert sample == Sample(**row, metadata={"source_name": "dapo"})


@pytest.mark.parametrize(("settings", "rounds"), [({"tools": []}, 1), ({"tools": ["no.such.tool"]}, 0)])
@pytest.mark.parametrize("log_multi_turn", [True, False])
async def test_generate_writes_round_number_for_log_multi_turn(shipped_tokenizer, settings, rounds, log_multi_turn):
    """Every sample has `round_number`: slime reads it from all samples of a batch if the first sample has it."""
    sample = (await run(shipped_tokenizer, [ANSWER], settings=settings, args={"log_multi_turn": log_multi_turn})).sample
    assert sample.metadata.get("round_number") == (rounds if log_multi_turn else None)
