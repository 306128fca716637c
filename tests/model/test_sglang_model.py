"""SGLangModel as any Strands user meets it: an agent, its tools, and the trajectory afterwards."""

import asyncio
import gc
import re
from typing import Any, cast

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, call_text, ids_of
from pydantic import BaseModel
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.types.exceptions import (
    ContextWindowOverflowException,
    MaxTokensReachedException,
    StructuredOutputException,
)

from strands_rollout import SGLangClient, SGLangModel, TokenLimits, create_client
from strands_rollout.control import Control
from strands_rollout.errors import BudgetExhaustedError, ConfigError, PromptError, TrajectoryError
from strands_rollout.record.record import Conversation


@tool
async def execute_python_code(code: str) -> str:
    """Run code.

    Args:
        code: The code.
    """
    return f"ran {code}"


def agent_on(model: SGLangModel, **kwargs: Any) -> Agent:
    return Agent(model=model, callback_handler=None, retry_strategy=None, **kwargs)


def turn(tokenizer: Any, text: str, **meta: Any) -> Reply:
    return Reply.tokens(ids_of(tokenizer, text), **meta)


async def test_sglang_model_records_an_agents_run_exactly(shipped_tokenizer: Any) -> None:
    script = [turn(shipped_tokenizer, call_text("1"), weight_version="v1"), turn(shipped_tokenizer, ANSWER)]
    async with FakeSGLang(script) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        result = await agent_on(model, tools=[execute_python_code]).invoke_async("What is 17 * 2?")
    trajectory = model.trajectory
    assert "\\boxed{34}" in str(result)
    assert trajectory.token_ids == fake.requests[1].input_ids + ids_of(shipped_tokenizer, ANSWER)
    assert len(trajectory.token_ids) == len(trajectory.loss_mask) == len(trajectory.logprobs)
    assert trajectory.prompt_length == len(fake.requests[0].input_ids)
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop", "stop"]
    assert trajectory.turns[0].weight_version == "v1"
    for entry in trajectory.turns:
        assert trajectory.loss_mask[entry.start : entry.end] == [1] * (entry.end - entry.start)
    assert sum(trajectory.loss_mask) == trajectory.sampled_length


async def test_sglang_model_continues_with_a_second_question(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([turn(shipped_tokenizer, ANSWER)] * 2) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        agent = agent_on(model)
        await agent.invoke_async("one")
        await agent.invoke_async("two")
        assert fake.violations == []
    first, second = (request.input_ids for request in fake.requests)
    assert second[: len(first)] == first
    assert "<|im_start|>user\ntwo<|im_end|>" in shipped_tokenizer.decode(second)
    assert model.trajectory.prompt_length == len(first)


async def test_sglang_model_reset_starts_a_new_trajectory(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([turn(shipped_tokenizer, ANSWER)] * 2) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        await agent_on(model).invoke_async("one")
        first = model.trajectory
        model.reset()
        assert model.trajectory.token_ids == []
        await agent_on(model).invoke_async("one")
    assert model.trajectory.token_ids == first.token_ids
    assert model.trajectory is not first


async def test_sglang_model_refuses_another_conversation_without_reset(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([turn(shipped_tokenizer, ANSWER)] * 2) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        await agent_on(model).invoke_async("one")
        before = list(model.trajectory.token_ids)
        with pytest.raises(TrajectoryError, match=r"does not extend.*Call model.reset\(\)"):
            await agent_on(model).invoke_async("other")
    assert model.trajectory.token_ids == before
    assert len(fake.requests) == 1


async def test_sglang_model_refuses_concurrent_turns(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([Reply.hang()]) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        first = asyncio.create_task(agent_on(model).invoke_async("one"))
        await fake.arrived(1)
        with pytest.raises(TrajectoryError, match="second turn while one is running"):
            await agent_on(model).invoke_async("two")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_sglang_model_with_a_given_client(shipped_tokenizer: Any) -> None:
    async with (
        FakeSGLang([turn(shipped_tokenizer, ANSWER)] * 2) as fake,
        create_client(fake.base_url, max_connections=4) as http,
        SGLangClient(fake.base_url) as own,
    ):
        for client in (http, own):
            model = SGLangModel(tokenizer=shipped_tokenizer, client=client)
            await agent_on(model).invoke_async("one")
            assert model.trajectory.sampled_length


@pytest.mark.parametrize("both", [True, False])
def test_sglang_model_needs_either_base_url_or_client(shipped_tokenizer: Any, both: bool) -> None:
    client = create_client("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="expected exactly one"):
        SGLangModel(tokenizer=shipped_tokenizer, **({"base_url": "http://x", "client": client} if both else {}))


def test_sglang_model_refuses_should_abort_with_a_control(shipped_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"got both control and should_abort.*Control\(should_abort\)"):
        SGLangModel(shipped_tokenizer, "http://127.0.0.1:1", control=Control(), should_abort=lambda: False)


def test_sglang_model_in_a_synchronous_agent(shipped_tokenizer: Any) -> None:
    import threading

    ready, done = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with FakeSGLang([turn(shipped_tokenizer, ANSWER)] * 2) as fake:
            urls.append(fake.base_url)
            ready.set()
            await asyncio.to_thread(done.wait)

    server = threading.Thread(target=asyncio.run, args=(serve(),))
    server.start()
    ready.wait()
    try:
        agent = agent_on(SGLangModel(tokenizer=shipped_tokenizer, base_url=urls[0]))
        assert "34" in str(agent("one"))
        assert "34" in str(agent("two"))
    finally:
        done.set()
        server.join()


async def test_sglang_model_uses_sampling_and_template_arguments(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([turn(shipped_tokenizer, ANSWER)]) as fake:
        model = SGLangModel(
            tokenizer=shipped_tokenizer,
            base_url=fake.base_url,
            sampling_params={"temperature": 0.7, "max_new_tokens": 55},
            enable_thinking=False,
            headers={"X-SMG-Routing-Key": "abc"},
        )
        await agent_on(model).invoke_async("one")
    request = fake.requests[0]
    assert request.body["sampling_params"] == {"temperature": 0.7, "max_new_tokens": 55}
    assert request.headers["X-SMG-Routing-Key"] == "abc"
    assert shipped_tokenizer.decode(request.input_ids).endswith("<think>\n\n</think>\n\n")
    assert "logprob_start_len" not in request.body


async def test_sglang_model_without_logprobs_records_zeros(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([turn(shipped_tokenizer, ANSWER)]) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url, return_logprobs=False)
        await agent_on(model).invoke_async("one")
    assert fake.requests[0].body["return_logprob"] is False
    assert set(model.trajectory.logprobs) == {0.0}
    assert len(model.trajectory.logprobs) == len(model.trajectory.token_ids)


async def test_sglang_model_never_asks_for_the_servers_default_length(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([turn(shipped_tokenizer, ANSWER)] * 2, context_length=1000) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        await agent_on(model).invoke_async("one")
        asked = fake.requests[0].body["sampling_params"]["max_new_tokens"]
        assert asked == 1000 - 1 - len(fake.requests[0].input_ids)
        assert model.context_window_limit == 1000


async def test_learn_context_from_a_refusal(shipped_tokenizer: Any) -> None:
    words = "Requested token count exceeds the model's maximum context length of 300 tokens."
    script = [Reply.status(400, {"error": {"message": words}}), turn(shipped_tokenizer, ANSWER)]
    async with FakeSGLang(script, router=True) as fake:
        model = SGLangModel(
            tokenizer=shipped_tokenizer, base_url=fake.base_url, limits=TokenLimits(max_context_tokens=9000)
        )
        await agent_on(model).invoke_async("one")
    assert fake.requests[1].body["sampling_params"]["max_new_tokens"] == 300 - 1 - len(fake.requests[1].input_ids)
    assert model.context_window_limit == 300


async def test_learn_context_from_a_busy_server(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([turn(shipped_tokenizer, ANSWER)], context_length=1000) as first:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=first.base_url)
        await agent_on(model).invoke_async("one")
    script, port = [turn(shipped_tokenizer, ANSWER)], int(first.base_url.rpartition(":")[2])
    async with FakeSGLang(script, context_length=1000, port=port) as second:
        second.outage, generate = Reply.status(503), model.client().generate

        async def generate_when_it_is_back(*given: Any, **more: Any) -> Any:
            second.outage = None
            return await generate(*given, **more)

        model.client().generate = generate_when_it_is_back  # type: ignore[method-assign]
        await agent_on(SGLangModel(tokenizer=shipped_tokenizer, base_url=first.base_url)).invoke_async("another")
    asked = second.requests[0].body["sampling_params"]["max_new_tokens"]
    assert (asked, len(second.requests)) == (1000 - 1 - len(second.requests[0].input_ids), 1)


async def test_learn_context_outlasts_connections(shipped_tokenizer: Any) -> None:
    words = "Requested token count exceeds the model's maximum context length of 300 tokens."
    script = [Reply.status(400, {"error": {"message": words}}), turn(shipped_tokenizer, ANSWER)]
    async with FakeSGLang(script, router=True) as first:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=first.base_url)
        agent = agent_on(model)
        await agent.invoke_async("one")
    port = int(first.base_url.rpartition(":")[2])
    async with FakeSGLang([turn(shipped_tokenizer, ANSWER)], router=True, port=port) as second:
        await agent.invoke_async("two")
    asked = second.requests[0].body["sampling_params"]["max_new_tokens"]
    assert asked == 300 - 1 - len(second.requests[0].input_ids)


async def test_sglang_model_raises_strands_overflow_for_a_long_prompt(shipped_tokenizer: Any) -> None:
    words = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
    async with FakeSGLang([Reply.status(400, {"error": {"message": words}})] * 2, context_length=None) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url, context_window_limit=4096)
        with pytest.raises(ContextWindowOverflowException, match="4096"):
            await agent_on(model, conversation_manager=NullConversationManager()).invoke_async("one")
    assert model.trajectory.token_ids == []


async def test_sglang_model_length_stop_is_max_tokens(shipped_tokenizer: Any) -> None:
    ids = ids_of(shipped_tokenizer, "The answer is")
    async with FakeSGLang([Reply.tokens(ids, "length")]) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url, limits=TokenLimits(max_turn_tokens=3))
        with pytest.raises(MaxTokensReachedException):
            await agent_on(model).invoke_async("one")
    assert model.cut_by == "turn"
    assert model.trajectory.token_ids[-len(ids) :] == ids


async def test_sglang_model_raises_at_a_used_up_budget(shipped_tokenizer: Any) -> None:
    budget = len(ids_of(shipped_tokenizer, ANSWER)) + 1
    async with FakeSGLang([turn(shipped_tokenizer, ANSWER)]) as fake:
        limits = TokenLimits(max_response_tokens=budget)
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url, limits=limits)
        agent = agent_on(model)
        await agent.invoke_async("one")
        with pytest.raises(BudgetExhaustedError, match="no token of the response budget is left"):
            await agent.invoke_async("two")


async def test_sglang_model_refuses_documents(shipped_tokenizer: Any) -> None:
    model = SGLangModel(tokenizer=shipped_tokenizer, base_url="http://127.0.0.1:1")
    document = {"document": {"format": "txt", "name": "a", "source": {"bytes": b""}}}
    with pytest.raises(PromptError, match="content block with the keys.*document.*reads nothing else"):
        await model.count_tokens([{"role": "user", "content": [document]}])


class City(BaseModel):
    """A city."""

    name: str
    people: int


async def test_structured_output_leaves_the_trajectory_unchanged(shipped_tokenizer: Any) -> None:
    call = '<tool_call>\n{"name": "City", "arguments": {"name": "Ulm", "people": 126000}}\n</tool_call><|im_end|>'
    async with FakeSGLang([turn(shipped_tokenizer, call)]) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        prompt = [{"role": "user", "content": [{"text": "Ulm has 126000 people."}]}]
        events = [event async for event in model.structured_output(City, prompt)]
    assert events[-1] == {"output": City(name="Ulm", people=126000)}
    assert '"name": "City"' in shipped_tokenizer.decode(fake.requests[0].input_ids)
    assert model.trajectory.token_ids == []


async def test_structured_output_keeps_no_side_conversation(shipped_tokenizer: Any) -> None:
    def conversations() -> int:
        gc.collect()
        return sum(type(each) is Conversation for each in gc.get_objects())

    async with FakeSGLang(lambda _body, _number: turn(shipped_tokenizer, "no idea<|im_end|>")) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        before = conversations()
        for _ in range(3):
            with pytest.raises(StructuredOutputException):
                async for _ in model.structured_output(City, [{"role": "user", "content": [{"text": "Ulm"}]}]):
                    pass
    assert conversations() == before


@pytest.mark.parametrize("text", ["no idea", "[" * 3000, "9" * 4301])
async def test_structured_output_error_shows_the_answer(shipped_tokenizer: Any, text: str) -> None:
    async with FakeSGLang([turn(shipped_tokenizer, f"{text}<|im_end|>")], context_length=8192) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        shown = re.escape(repr(text[:200]))
        with pytest.raises(
            StructuredOutputException, match=f"got the text {shown}; expected a call of the tool 'City'"
        ):
            async for _ in model.structured_output(City, [{"role": "user", "content": [{"text": "Ulm"}]}]):
                pass


async def test_sglang_model_with_an_agents_structured_output_model(shipped_tokenizer: Any) -> None:
    call = '<tool_call>\n{"name": "City", "arguments": {"name": "Ulm", "people": 5}}\n</tool_call><|im_end|>'
    script = [turn(shipped_tokenizer, ANSWER), turn(shipped_tokenizer, call)]
    async with FakeSGLang(script) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        agent = agent_on(model, tools=[execute_python_code])
        result = await agent.invoke_async("Ulm", structured_output_model=City)
        assert fake.violations == []
    assert result.structured_output == City(name="Ulm", people=5)


async def test_count_tokens_is_exact(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([turn(shipped_tokenizer, call_text("1")), turn(shipped_tokenizer, ANSWER)]) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        agent = agent_on(model, tools=[execute_python_code], system_prompt="Be brief.")
        specs = agent.tool_registry.get_all_tool_specs()
        question = [{"role": "user", "content": [{"text": "one"}]}]
        counted = await model.count_tokens(question, specs, "Be brief.")
        await agent.invoke_async("one")
        result = agent.messages[2]
    assert counted == len(fake.requests[0].input_ids)
    new = len(fake.requests[1].input_ids) - counted - len(ids_of(shipped_tokenizer, call_text("1")))
    assert await model.count_tokens([result]) == new


async def test_update_config_changes_settings_by_name(shipped_tokenizer: Any) -> None:
    model = SGLangModel(
        tokenizer=shipped_tokenizer, base_url="http://127.0.0.1:1", model_id="qwen", context_window_limit=77
    )
    assert model.get_config()["model_id"] == "qwen"
    assert model.context_window_limit == 77
    model.update_config(sampling_params={"temperature": 0.1}, context_window_limit=50)
    assert model.get_config()["sampling_params"] == {"temperature": 0.1}
    assert model.context_window_limit == 50
    with pytest.raises(ConfigError, match="unknown setting 'temprature'.*expected one of"):
        model.update_config(temprature=1)
    with pytest.raises(ConfigError, match="Did you mean 'sampling_params'"):
        model.update_config(sampling_parms={})


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max_turn_tokens", "expected an integer of at least 1, or None for no limit"),
        ("min_turn_tokens", "at least 1$"),
    ],
)
def test_token_limits_refuse_other_values(limit: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"got {limit}=0; .*{expected}"):
        TokenLimits(**{limit: 0})


def test_token_limits_need_room_for_a_turn() -> None:
    with pytest.raises(ConfigError, match="got min_turn_tokens=None; expected an integer of at least 1$"):
        TokenLimits(min_turn_tokens=cast("Any", None))
