"""Conversation managers that rewrite the history: each history is a segment with exact tokens and its own sample."""

import contextlib
import copy
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, args_for, call_text, ids_of
from strands.agent.conversation_manager import SlidingWindowConversationManager, SummarizingConversationManager
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry

from strands_rollout import EpisodeLimits, Sample, SGLangModel, StopReason, execute_python_code, generate
from strands_rollout.agent.episode import EpisodeSetup, run_episode
from strands_rollout.errors import EngineAbortedError, TrajectoryError
from strands_rollout.slime_plugin.sample_contract import contract_violations


def keep_three() -> SlidingWindowConversationManager:
    """Return a manager that keeps the last three messages before each model call."""
    return SlidingWindowConversationManager(window_size=3, per_turn=True)


def drop_on_overflow() -> SlidingWindowConversationManager:
    """Return a manager that, during an invocation of the agent, drops messages only if the context is full."""
    return SlidingWindowConversationManager(window_size=3)


def not_a_manager() -> str:
    return "no"


class Script:
    """Script for `FakeSGLang`: samples `turns` in order, and records the sampled ids."""

    def __init__(self, tokenizer: Any, turns: list[str]) -> None:
        self._tokenizer = tokenizer
        self._turns = turns
        self.sampled: list[int] = []

    def __call__(self, _body: dict[str, Any], number: int) -> Reply:
        ids = ids_of(self._tokenizer, self._turns[number])
        self.sampled += ids
        return Reply.tokens(ids)


TURNS = [call_text(f"print({number})") for number in range(3)] + [ANSWER]


async def episode(
    tokenizer: Any, manager: str, *, fan_out: bool = True, turns: list[str] | None = None, **args: Any
) -> tuple[Any, FakeSGLang, Script]:
    script = Script(tokenizer, turns or TURNS)
    settings = {
        "conversation_manager": f"{__name__}.{manager}",
        "fan_out": fan_out,
        "executor": {"name": "subprocess"},
    }
    async with FakeSGLang(script, context_length=4096, episode_of=lambda received: received.rid) as fake:
        namespace = args_for(fake.base_url, tokenizer, strands_rollout=settings, **args)
        sample = Sample(prompt="What is 17 * 2?", label="34", index=4)
        return await generate(namespace, sample, {"max_new_tokens": 1024}), fake, script


async def test_conversation_manager_histories_are_samples(shipped_tokenizer: Any) -> None:
    samples, fake, script = await episode(shipped_tokenizer, "keep_three")
    kinds = [sample.metadata["strands_rollout"]["fan_out"]["kind"] for sample in samples]
    assert kinds == ["main", "segment", "segment"]
    in_order = [*samples[1:], samples[0]]
    trained = [
        token
        for sample in in_order
        for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
        if mask
    ]
    assert trained == script.sampled
    requests = [request.input_ids for request in fake.requests]
    for sample in samples:
        assert {sample.rollout_id, sample.index} == {4}
        # the sample's tokens begin with one request and its answer
        assert any(sample.tokens[: len(sent)] == sent for sent in requests)
        sample.reward = 1.0
        assert contract_violations(sample, decode=shipped_tokenizer.decode) == []
    facts = samples[0].metadata["strands_rollout"]
    assert (facts["segments"], facts["stop_reason"], facts["tool_calls"]) == (3, "completed", 3)


async def test_conversation_manager_reduces_a_full_context(shipped_tokenizer: Any) -> None:
    samples, fake, _ = await episode(shipped_tokenizer, "drop_on_overflow", rollout_max_context_len=345)
    assert [sample.status for sample in samples] == [Sample.Status.COMPLETED] * len(samples)
    assert len(samples) > 1
    for request in fake.requests:
        assert len(request.input_ids) + request.body["sampling_params"]["max_new_tokens"] <= 345


async def test_conversation_manager_without_fan_out_keeps_the_last(shipped_tokenizer: Any) -> None:
    sample, fake, _ = await episode(shipped_tokenizer, "keep_three", fan_out=False)
    assert sample.tokens == fake.requests[-1].input_ids + ids_of(shipped_tokenizer, ANSWER)
    assert sample.metadata["strands_rollout"]["segments"] == 3


@pytest.mark.parametrize(
    ("manager", "message"),
    [("no_such_name", "no_such_name"), ("not_a_manager", "expected a Strands ConversationManager")],
)
async def test_conversation_manager_refuses_other_objects(shipped_tokenizer: Any, manager: str, message: str) -> None:
    [sample], _, _ = await episode(shipped_tokenizer, manager)
    assert sample.status is Sample.Status.FAILED
    assert message in sample.metadata["strands_rollout"]["error"]


SPEC = {
    "name": "look",
    "description": "Look it up.",
    "inputSchema": {"json": {"type": "object", "properties": {"a": {"default": float("nan"), "enum": ["x"]}}}},
}
OTHER_TOOL = {**SPEC, "name": "find"}
REORDERED = {key: copy.deepcopy(SPEC[key]) for key in reversed(SPEC)}
OTHER_SCHEMA = {**SPEC, "inputSchema": {"json": {"type": "object", "properties": {"b": {}}}}}
PROMPT_CHANGES = {
    "unchanged": (None, {}),
    "equal text as blocks": (None, {"system_prompt_content": [{"text": "Be brief."}]}),
    "equal tools with another identity and key order": (None, {"tool_specs": [REORDERED]}),
    "no tools, as Strands sends fewer when it forces one": (None, {"tool_specs": None}),
    "another system prompt": ("the system prompt", {"system_prompt": "Be long."}),
    "an added tool": ("the tool 'find'", {"tool_specs": [SPEC, OTHER_TOOL]}),
    "another schema": ("the tool 'look'", {"tool_specs": [OTHER_SCHEMA]}),
    "another system prompt and tool": (
        "the system prompt, the tool 'find'",
        {"system_prompt": "", "tool_specs": [OTHER_TOOL]},
    ),
}


@pytest.mark.parametrize("is_open", [False, True], ids=["after a turn", "inside an aborted turn"])
@pytest.mark.parametrize(("named", "changes"), PROMPT_CHANGES.values(), ids=PROMPT_CHANGES)
async def test_on_rewritten_history_with_another_prompt_or_tool(
    shipped_tokenizer: Any, named: str | None, changes: dict[str, Any], is_open: bool
) -> None:
    answer = ids_of(shipped_tokenizer, ANSWER)
    first = Reply.abort(answer[:2]) if is_open else Reply.tokens(answer)
    for choice in ("error", "segment"):
        async with FakeSGLang([first, Reply.tokens(answer)], context_length=4096) as fake:
            model = SGLangModel(shipped_tokenizer, fake.base_url, on_rewritten_history=choice, continue_aborted=False)  # type: ignore[arg-type]
            messages: Any = [{"role": "user", "content": [{"text": "One"}]}]
            request: dict[str, Any] = {"tool_specs": [copy.deepcopy(SPEC)], "system_prompt": "Be brief."}
            with contextlib.suppress(EngineAbortedError):
                messages += [(await model.answer(messages, **request)).message]
                messages += [{"role": "user", "content": [{"text": "Two"}]}]
            before = copy.deepcopy(model.trajectory)
            if named and choice == "error":
                with pytest.raises(TrajectoryError, match=f"changes {named} in mid-conversation; expected .*fan_out"):
                    await model.answer(messages, **{**request, **changes})
                assert model.trajectory == before
            else:
                await model.answer(messages, **{**request, **changes})
                assert len(model.conversation.branches) - 1 == bool(named)


async def test_conversation_manager_histories_share_the_budget(shipped_tokenizer: Any) -> None:
    max_new_tokens = 190
    script = Script(shipped_tokenizer, TURNS)
    settings = {"conversation_manager": f"{__name__}.keep_three", "fan_out": True, "executor": "subprocess"}
    async with FakeSGLang(script, context_length=4096, episode_of=lambda received: received.rid) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        params = {"max_new_tokens": max_new_tokens, "sampling_seed": 7}
        samples = await generate(args, Sample(prompt="What is 17 * 2?", label="34", index=4), params)
    asked = [request.body["sampling_params"]["max_new_tokens"] for request in fake.requests]
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] < max_new_tokens - sum(sum(sample.loss_mask) for sample in samples[1:])
    seeds = [request.body["sampling_params"]["sampling_seed"] for request in fake.requests]
    assert len(set(seeds)) == len(seeds)


class SummarizingHook(HookProvider):
    """Replace the history by the policy's summary before the third model call, on the event loop."""

    def register_hooks(self, registry: HookRegistry, **_more: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, self._summarize)

    async def _summarize(self, event: BeforeModelCallEvent) -> None:
        messages = event.agent.messages
        if len(messages) != 5:
            return
        question: Any = [*messages, {"role": "user", "content": [{"text": "Sum up."}]}]
        chunks = [chunk async for chunk in event.agent.model.stream(question)]
        summary = "".join(
            chunk["contentBlockDelta"]["delta"].get("text", "") for chunk in chunks if "contentBlockDelta" in chunk
        )
        messages[:] = [{"role": "user", "content": [{"text": summary}]}]


async def test_conversation_manager_request_is_a_side_conversation(shipped_tokenizer: Any) -> None:
    turns = [call_text("print(1)"), call_text("print(2)"), "So far: 2.<|im_end|>", ANSWER]
    script = Script(shipped_tokenizer, turns)
    async with FakeSGLang(script, context_length=4096, episode_of=lambda received: received.rid) as fake:
        choices: Any = {"on_rewritten_history": "segment", "conversations": "many"}
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url, **choices)
        done = await run_episode(
            model,
            [{"role": "user", "content": [{"text": "What is 17 * 2?"}]}],
            EpisodeSetup(
                system_prompt=None, tools=[execute_python_code], limits=EpisodeLimits(), hooks=[SummarizingHook()]
            ),
        )
    assert done.stop_reason is StopReason.COMPLETED, done.error
    others = [*model.conversation.branches[:-1], *list(model.record)[1]]
    assert [conversation.kind for conversation in model.record] == ["main", "aside"]
    assert "So far: 2." in shipped_tokenizer.decode(others[1].trajectory.token_ids)
    assert model.final_text == ANSWER.removesuffix("<|im_end|>")
    sampled = [
        token
        for trajectory in [*(segment.trajectory for segment in others), model.trajectory]
        for turn in trajectory.turns
        for token in trajectory.token_ids[turn.start : turn.end]
    ]
    assert sorted(sampled) == sorted(script.sampled)


def summarizing_manager() -> SummarizingConversationManager:
    return SummarizingConversationManager()


async def test_conversation_manager_that_blocks_the_loop_is_refused(shipped_tokenizer: Any) -> None:
    [sample], _, _ = await episode(shipped_tokenizer, "summarizing_manager")
    assert "blocks the event loop" in sample.metadata["strands_rollout"]["error"]


async def test_generate_restarts_with_several_histories(
    shipped_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    aborting = False

    def script(_body: dict[str, Any], number: int) -> Reply:
        nonlocal aborting
        aborting = number == 3
        return Reply.abort() if aborting else Reply.tokens(ids_of(shipped_tokenizer, TURNS[number]))

    settings = {
        "conversation_manager": f"{__name__}.keep_three",
        "executor": "subprocess",
        "should_abort": lambda: aborting,
    }
    async with FakeSGLang(script, context_length=4096, episode_of=lambda received: received.rid) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        sample = await generate(args, Sample(prompt="What is 17 * 2?", index=4), {"max_new_tokens": 1024})
    assert sample.status is Sample.Status.ABORTED
    assert "resume" not in sample.metadata["strands_rollout"]
    assert "aborted sample will start from scratch index=4" in caplog.text
