"""`fan_out`: one episode becomes several samples, and sub-agents' turns are trained."""

from types import SimpleNamespace
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, args_for, ids_of
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager

from strands_rollout import Sample, generate, reward_func, sub_agent_model
from strands_rollout.errors import ConfigError
from strands_rollout.slime_plugin.sample_contract import contract_violations

ASK_TURN = '<tool_call>\n{"name": "ask", "arguments": {"question": "How much?"}}\n</tool_call><|im_end|>'
EXPERT_TURN = "Thirty-four.<|im_end|>"


def _expert() -> Agent:
    return Agent(
        model=sub_agent_model(),
        system_prompt="You are an expert.",
        callback_handler=None,
        conversation_manager=NullConversationManager(),
    )


@tool
async def ask(question: str) -> str:
    """Ask an expert.

    Args:
        question: What to ask.
    """
    return str(await _expert().invoke_async(question))


@tool(name="ask")
def ask_in_a_thread(question: str) -> str:
    """Ask an expert, synchronously.

    Args:
        question: What to ask.
    """
    return str(_expert()(question))


def policy(tokenizer: Any) -> Any:
    """Return a script: the main agent asks the expert, the expert answers, the main agent answers."""

    def reply(body: dict[str, Any], _number: int) -> Reply:
        text = tokenizer.decode(body["input_ids"])
        turn = EXPERT_TURN if "You are an expert." in text else ANSWER if "Thirty-four" in text else ASK_TURN
        return Reply.tokens(ids_of(tokenizer, turn))

    return reply


async def episode(
    tokenizer: Any, settings: dict[str, Any] | None = None, script: Any = None, *, evaluation: bool = False, **args: Any
) -> tuple[Any, FakeSGLang, Any]:
    settings = {"tools": [f"{__name__}.ask"], "system_prompt": None, "fan_out": True, **(settings or {})}
    async with FakeSGLang(script or policy(tokenizer), context_length=4096) as fake:
        namespace = args_for(fake.base_url, tokenizer, strands_rollout=settings, **args)
        sample = Sample(prompt="What is 17 * 2?", label="34", index=5, group_index=2)
        params = {"temperature": 1.0, "max_new_tokens": 512}
        return await generate(namespace, sample, params, evaluation=evaluation), fake, namespace


@pytest.mark.parametrize(("max_staleness", "stale"), [(None, 0), (4, 0), (3, 3)])
async def test_max_staleness_applies_to_siblings(shipped_tokenizer: Any, max_staleness: int | None, stale: int) -> None:
    expert_ids = ids_of(shipped_tokenizer, EXPERT_TURN)
    answers = policy(shipped_tokenizer)

    def script(body: dict[str, Any], number: int) -> Reply:
        if number == 1:  # the expert's turn, which a weight update interrupts
            return Reply.abort(expert_ids[:3], weight_version="5")
        return Reply.tokens(expert_ids[3:], weight_version="9") if number == 2 else answers(body, number)

    settings = {"max_staleness": max_staleness}
    (main, expert), _, _ = await episode(shipped_tokenizer, settings, script)
    assert expert.weight_versions == ["5", "9"]
    assert expert.loss_mask == [0] * stale + [1] * (len(expert_ids) - stale)
    assert all(not logprob for logprob in expert.rollout_log_probs[:stale])
    assert [sample.metadata["strands_rollout"]["stale_tokens"] for sample in (main, expert)] == [0, stale]


@pytest.mark.parametrize("kind", ["ask", "ask_in_a_thread"])
async def test_fan_out_sub_agent_is_a_sample_of_the_same_rollout(shipped_tokenizer: Any, kind: str) -> None:
    samples, fake, args = await episode(shipped_tokenizer, {"tools": [f"{__name__}.{kind}"]})
    main, expert = samples
    assert [sample.rollout_id for sample in samples] == [5, 5]
    assert [sample.group_index for sample in samples] == [2, 2]
    assert [sample.metadata["strands_rollout"]["fan_out"]["kind"] for sample in samples] == ["main", "agent"]
    assert expert.tokens == fake.requests[1].input_ids + ids_of(shipped_tokenizer, EXPERT_TURN)
    assert expert.loss_mask == [1] * len(ids_of(shipped_tokenizer, EXPERT_TURN))
    assert sum(main.loss_mask) == len(ids_of(shipped_tokenizer, ASK_TURN)) + len(ids_of(shipped_tokenizer, ANSWER))
    assert expert.weight_versions == ["default"]
    rewards = await reward_func(args, samples)
    assert [reward["score"] for reward in rewards] == [1.0, 1.0]
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
        assert sample.status is Sample.Status.COMPLETED
        assert contract_violations(sample, decode=shipped_tokenizer.decode, reward_key="score") == []


async def test_fan_out_off_plays_sub_agents_untrained(shipped_tokenizer: Any) -> None:
    sample, fake, _ = await episode(shipped_tokenizer, {"fan_out": False})
    assert isinstance(sample, Sample)
    assert (sample.status, len(fake.requests)) == (Sample.Status.COMPLETED, 3)
    assert sample.rollout_id is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"partial_rollout": True}, "--partial-rollout"),
        ({"rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async"}, "fully-async"),
        ({"group_rm": True}, "--group-rm"),
    ],
)
async def test_fan_out_warns_where_slime_takes_no_lists(
    shipped_tokenizer: Any, caplog: pytest.LogCaptureFixture, args: Any, message: str
) -> None:
    for _ in range(2):
        sample, _, _ = await episode(shipped_tokenizer, **args)
        assert isinstance(sample, Sample)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    warning, dropped = warnings  # the second warning counts sampled tokens of the first episode that are in no sample
    assert message in warning
    assert dropped.startswith("event=sampled_tokens_dropped")


async def test_fan_out_warns_of_slimes_normalization(shipped_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    await episode(shipped_tokenizer, advantage_estimator="grpo", custom_reward_post_process_path=None)
    assert "--custom-reward-post-process-path strands_rollout.normalize_rewards" in caplog.text


async def test_fan_out_evaluation_has_one_sample_per_episode(shipped_tokenizer: Any) -> None:
    sample, _, _ = await episode(shipped_tokenizer, evaluation=True)
    assert isinstance(sample, Sample)


@pytest.mark.parametrize("settings", [{"tools": ["no.such.tool"]}, {}])
async def test_fan_out_failed_episode_is_a_list_of_one(shipped_tokenizer: Any, settings: dict[str, Any]) -> None:
    script = None if settings else lambda _body, _number: Reply.status(422, "no")
    [sample], _, _ = await episode(shipped_tokenizer, settings, script)
    assert (sample.status, sample.remove_sample, sample.rollout_id) == (Sample.Status.FAILED, True, 5)


@pytest.mark.parametrize("row", [{"fan_out": False}, {"no_such_setting": 1}, {"tools": ["unknown"]}, "no mapping"])
@pytest.mark.parametrize(("job", "is_list"), [({}, True), ({"fan_out": False}, False), ({"no_such_setting": 1}, False)])
async def test_fan_out_result_type_ignores_invalid_row_settings(row: Any, job: dict[str, Any], is_list: bool) -> None:
    args = SimpleNamespace(strands_rollout={"fan_out": True, **job})
    for metadata in ({"strands_rollout_settings": row}, {}):
        sample = Sample(prompt="2+2?", index=0, metadata=metadata)
        result = await generate(args, sample, {"max_new_tokens": 8})
        assert result == ([sample] if is_list else sample)
        assert sample.status is Sample.Status.FAILED


async def test_fan_out_failed_episode_trains_no_sub_agent(shipped_tokenizer: Any) -> None:
    answers = policy(shipped_tokenizer)

    def script(body: dict[str, Any], number: int) -> Reply:
        return answers(body, number) if number < 2 else Reply.status(422, "no")

    [sample], _, _ = await episode(shipped_tokenizer, script=script)
    assert (sample.status, set(sample.loss_mask)) == (Sample.Status.FAILED, {0})


async def test_sub_agent_model_needs_an_episode() -> None:
    with pytest.raises(ConfigError, match=r"sub_agent_model\(\) was called outside of an episode"):
        sub_agent_model()


async def test_fan_out_agents_have_distinct_seeds(shipped_tokenizer: Any) -> None:
    settings = {"tools": [f"{__name__}.ask"], "fan_out": True}
    async with FakeSGLang(policy(shipped_tokenizer), context_length=4096) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        params = {"max_new_tokens": 512, "sampling_seed": 3}
        await generate(args, Sample(prompt="What is 17 * 2?", label="34", index=5), params)
    seeds = [request.body["sampling_params"]["sampling_seed"] for request in fake.requests]
    assert len(set(seeds)) == 3
