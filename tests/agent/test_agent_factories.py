"""Agent factories: exact recording of users' agents and teams, limits, and errors that name the user's line."""

import asyncio
import inspect
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import user_agents
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, TOOL_CALL, args_for, ids_of, run
from processes import wait_until

import strands_rollout.agent.multi_agent
from strands_rollout import Sample, generate
from strands_rollout.slime_plugin.sample_contract import contract_violations

HANDOFF = {"agent_name": "speaker", "message": "It is 34."}


def call(name: str, **arguments: object) -> str:
    return TOOL_CALL.format(name=name, arguments=json.dumps(arguments))


def factory(name: str, **more: Any) -> dict[str, Any]:
    return {"agent_factory": f"user_agents.{name}", "tools": [], **more}


@pytest.fixture(autouse=True)
def _nothing_built() -> Iterator[None]:
    user_agents.built.clear()
    yield
    user_agents.built.clear()


@pytest.mark.parametrize("name", ["plain", "async_factory"])
async def test_agent_factory_plays_an_episode(
    shipped_tokenizer: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    played = await run(shipped_tokenizer, [call("double", number=17), ANSWER], settings=factory(name))
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.COMPLETED, "completed")
    assert played.facts["tool_calls"] == 1
    assert "34" in played.context_after(0)
    assert sum(played.sample.loss_mask) == sum(len(reply.ids) for reply in played.replied)
    assert capsys.readouterr().out == ""


async def test_agent_factory_sample_equals_the_built_in_agents(shipped_tokenizer: Any) -> None:
    turns = [call("double", number=17), ANSWER]
    tools = {"tools": ["user_agents.double"], "system_prompt": "Be brief."}
    ours = await run(shipped_tokenizer, turns, settings=tools)
    theirs = await run(shipped_tokenizer, turns, settings=tools | factory("with_tools_of_the_task", **tools))
    assert theirs.sample.tokens == ours.sample.tokens
    assert theirs.sample.loss_mask == ours.sample.loss_mask
    assert theirs.sample.rollout_log_probs == ours.sample.rollout_log_probs


async def test_agent_factory_uses_the_rows_system_message(shipped_tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 17 * 2?"}]
    played = await run(shipped_tokenizer, [ANSWER], settings=factory("plain"), prompt=chat)
    assert "Be kind." in played.decode(played.sample.tokens)
    default = await run(shipped_tokenizer, [ANSWER], settings=factory("plain"))
    assert "execute_python_code" not in default.decode(default.sample.tokens)


async def test_agent_factory_keeps_episode_limits(shipped_tokenizer: Any) -> None:
    turns = [call("double", number=17)] * 3
    played = await run(shipped_tokenizer, turns, settings=factory("plain", max_tool_iterations=2))
    assert played.facts["stop_reason"] == "max_tool_iterations"
    slow = await run(shipped_tokenizer, [call("sleep"), ANSWER], settings=factory("plain", tool_timeout_s=0.05))
    assert (slow.facts["tool_timeouts"], slow.facts["stop_reason"]) == (1, "completed")


async def test_agent_factory_error_names_its_line_and_sample(shipped_tokenizer: Any) -> None:
    sample = Sample(prompt="What?", index=7)
    played = await run(shipped_tokenizer, [], settings=factory("broken"), sample=sample)
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "setup_error")
    source = inspect.getsource(user_agents).splitlines()
    line = next(number for number, text in enumerate(source, start=1) if '["the agent"]' in text)
    assert "agent_factory 'user_agents.broken' raised KeyError: 'the agent'" in played.facts["error"]
    assert f"{user_agents.__file__}, line {line}, in broken), for the sample of index 7" in played.facts["error"]


async def test_agent_factory_that_hangs_blocks_no_other_episode(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strands_rollout.agent.multi_agent, "_LOCK_TIMEOUT_S", 0.02)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    ids = ids_of(shipped_tokenizer, ANSWER)
    async with FakeSGLang(lambda _body, _number: Reply.tokens(ids), context_length=8192) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=factory("hanging_for_some_rows"))
        rows = [Sample(prompt="?", index=n, metadata={"hangs": n < 2}) for n in range(4)]
        hung = [asyncio.ensure_future(generate(args, row, {"max_new_tokens": 512})) for row in rows[:2]]
        try:
            await wait_until(user_agents.factory_is_hanging.is_set)
            async with asyncio.timeout(20):
                done = [await generate(args, row, {"max_new_tokens": 512}) for row in rows[2:]]
        finally:
            user_agents.factory_may_return.set()
            await asyncio.gather(*hung)
    assert {sample.status for sample in done} == {Sample.Status.COMPLETED}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "has no attribute 'nothing'"),
        ("built", "expected a class or function that makes an agent"),
        ("with_summarizing_manager", "SummarizingConversationManager, which blocks the event loop"),
        ("not_an_agent", "returned a str; expected a Strands Agent, Swarm or Graph"),
        ("on_another_model", "gave the model to these agents: none; expected it to give the model to the returned"),
    ],
)
async def test_agent_factory_refuses_unusable_results(shipped_tokenizer: Any, name: str, words: str) -> None:
    played = await run(shipped_tokenizer, [], settings=factory(name))
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "setup_error")
    assert words in played.facts["error"]


def by_system_prompt(tokenizer: Any, said: dict[str, list[str]], sampled: list[int]) -> Any:
    """Return a reply function that picks each agent's turns by its system prompt, and adds their ids to `sampled`."""

    def reply(body: dict[str, Any], _number: int) -> Reply:
        text = tokenizer.decode(body["input_ids"])
        ids = ids_of(tokenizer, next(turns for words, turns in said.items() if words in text).pop(0))
        sampled.extend(ids)
        return Reply.tokens(ids)

    return reply


async def team_samples(tokenizer: Any, name: str, said: dict[str, list[str]], **more: Any) -> tuple[Any, list[int]]:
    sampled: list[int] = []
    async with FakeSGLang(by_system_prompt(tokenizer, said, sampled), context_length=8192) as fake:
        args = args_for(fake.base_url, tokenizer, strands_rollout=factory(name, **{"fan_out": True, **more}))
        sample = Sample(prompt="What is 17 * 2?", label="34", index=0, group_index=0)
        return await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 2048}), sampled


def trained_ids(samples: list[Any]) -> list[int]:
    found: list[int] = []
    for sample in samples:
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        found += [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]
    return found


async def test_swarm_trains_every_sampled_token_once(shipped_tokenizer: Any) -> None:
    said = {
        "You help.": [call("double", number=17), call("handoff_to_agent", **HANDOFF), "Done.<|im_end|>"],
        "You answer.": [ANSWER],
    }
    samples, sampled = await team_samples(shipped_tokenizer, "swarm", said)
    assert [sample.status for sample in samples] == [Sample.Status.COMPLETED] * 2
    assert samples[0].metadata["strands_rollout"]["final_text"].startswith("The answer is")
    assert sorted(trained_ids(samples)) == sorted(sampled)
    for sample in samples:
        sample.reward = {"score": 1.0}
        assert contract_violations(sample, decode=shipped_tokenizer.decode, reward_key="score") == []


async def test_graph_with_parallel_agents_gives_a_sample_each(shipped_tokenizer: Any) -> None:
    said = {"You are left.": ["L<|im_end|>"], "You are right.": ["R<|im_end|>"], "You are last.": [ANSWER]}
    samples, sampled = await team_samples(shipped_tokenizer, "graph", said)
    assert len(samples) == 3
    assert sorted(trained_ids(samples)) == sorted(sampled)
    alone, _ = await team_samples(
        shipped_tokenizer,
        "graph",
        {"You are left.": ["L<|im_end|>"], "You are right.": ["R<|im_end|>"], "You are last.": [ANSWER]},
        fan_out=False,
    )
    assert alone.metadata["strands_rollout"]["final_text"].startswith("The answer is")


async def test_swarm_at_its_own_limit_is_truncated(shipped_tokenizer: Any) -> None:
    back = {"agent_name": "helper", "message": "No, you."}
    over = [call("handoff_to_agent", **HANDOFF), "Over.<|im_end|>"] * 4
    returned = [call("handoff_to_agent", **back), "Back.<|im_end|>"] * 4
    samples, _ = await team_samples(shipped_tokenizer, "swarm", {"You help.": over, "You answer.": returned})
    facts = samples[0].metadata["strands_rollout"]
    assert (samples[0].status, facts["stop_reason"]) == (Sample.Status.TRUNCATED, "team_limit")


async def test_graph_ends_on_abort(shipped_tokenizer: Any) -> None:
    asked = asyncio.Event()

    async def hang(_body: dict[str, Any], _number: int) -> Reply:
        asked.set()
        return Reply.hang()

    is_aborted = False
    async with FakeSGLang(hang, context_length=8192) as fake:
        settings = factory("graph", should_abort=lambda: is_aborted)
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        running = asyncio.ensure_future(generate(args, Sample(prompt="What?", index=0), {"max_new_tokens": 2048}))
        await asked.wait()
        is_aborted = True
        sample = await running
    assert (sample.status, sample.remove_sample) == (Sample.Status.ABORTED, True)


async def test_hidden_agent_on_the_same_model_gets_its_own_sample(shipped_tokenizer: Any) -> None:
    said = {
        "You are hidden.": [call("double", number=17), "34<|im_end|>"],
        "What is 17 * 2?": [call("ask", question="Double 17!"), ANSWER],
    }
    samples, sampled = await team_samples(shipped_tokenizer, "with_a_hidden_agent", said)
    assert len(samples) == 2
    assert sorted(trained_ids(samples)) == sorted(sampled)
    hidden = samples[1]
    assert sum(hidden.loss_mask) == len(ids_of(shipped_tokenizer, call("double", number=17) + "34<|im_end|>"))


@pytest.mark.parametrize("name", ["plain", "with_earlier_turns"])
async def test_agent_factory_resumes_after_abort(shipped_tokenizer: Any, name: str) -> None:
    whole = await run(shipped_tokenizer, [call("double", number=17), ANSWER], settings=factory(name))
    is_aborted = False

    def cut(_body: dict[str, Any], number: int) -> Reply:
        nonlocal is_aborted
        if number == 0:
            return Reply.tokens(ids_of(shipped_tokenizer, call("double", number=17)))
        is_aborted = number == 1
        ids = ids_of(shipped_tokenizer, ANSWER)
        return Reply.abort(ids[:2]) if number == 1 else Reply.tokens(ids[2:])

    async with FakeSGLang(cut, context_length=8192) as fake:
        settings = factory(name, should_abort=lambda: is_aborted)
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        params = {"temperature": 1.0, "max_new_tokens": 4096}
        sample = await generate(args, Sample(prompt="What is 17 * 2?", label="34", index=0), params)
        assert sample.status is Sample.Status.ABORTED
        is_aborted = False
        sample = await generate(args, sample, params)
    assert sample.status is Sample.Status.COMPLETED
    assert (sample.tokens, sample.loss_mask) == (whole.sample.tokens, whole.sample.loss_mask)
    assert sample.metadata["strands_rollout"]["tool_calls"] == 1


async def test_agent_factory_refuses_an_agent_it_returned_before(shipped_tokenizer: Any) -> None:
    first = await run(shipped_tokenizer, [ANSWER], settings=factory("shared_agent"))
    assert first.facts["stop_reason"] == "completed"
    second = await run(shipped_tokenizer, [ANSWER], settings=factory("shared_agent"))
    assert (second.facts["stop_reason"], second.fake.requests) == ("setup_error", [])
    assert "to more than one episode: Strands Agents; expected new agents for each" in second.facts["error"]


async def test_agent_as_tool_keeps_limits_and_prints_nothing(
    shipped_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"You help.": [call("double", number=1)] * 5, "You answer.": [call("expert", input="?"), ANSWER]}
    samples, sampled = await team_samples(shipped_tokenizer, "with_an_expert", said, max_tool_iterations=2)
    assert [len(left) for left in said.values()] == [2, 0]
    assert sorted(trained_ids(samples)) == sorted(sampled)
    assert capsys.readouterr().out == ""


async def test_graph_node_timeout_is_a_team_limit(shipped_tokenizer: Any) -> None:
    played = await run(shipped_tokenizer, [Reply.hang()], settings=factory("with_node_timeout"))
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.TRUNCATED, "team_limit")


async def test_swarm_that_ends_before_the_main_agent_is_truncated(shipped_tokenizer: Any) -> None:
    samples, sampled = await team_samples(shipped_tokenizer, "swarm", {"You help.": ["Done.<|im_end|>"]})
    facts = samples[0].metadata["strands_rollout"]
    assert (samples[0].status, facts["stop_reason"]) == (Sample.Status.TRUNCATED, "team_limit")
    assert "the Swarm ended before 'speaker' answered" in facts["error"]
    assert trained_ids(samples) == sampled
    for sample in samples:
        sample.reward = {"score": 1.0}
        assert contract_violations(sample, decode=shipped_tokenizer.decode, reward_key="score") == []


async def test_agent_as_tool_outage_ends_the_episode(shipped_tokenizer: Any) -> None:
    said = {"You help.": [call("raise_sandbox_error")], "You answer.": [call("expert", input="?")]}
    samples, _ = await team_samples(shipped_tokenizer, "with_an_expert", said)
    assert samples[0].metadata["strands_rollout"]["stop_reason"] == "sandbox_error"


@pytest.mark.parametrize("name", ["with_interrupt", "graph_with_interrupt"])
async def test_interrupt_for_a_person_is_a_setup_error(shipped_tokenizer: Any, name: str) -> None:
    played = await run(shipped_tokenizer, [call("ask_a_person", question="May I?"), ANSWER], settings=factory(name))
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "setup_error")
    assert "interrupt 'approval' (May I?)" in played.facts["error"]
    assert "nobody" in played.facts["error"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("with_changing_prompt", "You are tired."), ("with_tools_added_later", "row_label")],
)
async def test_changed_prompt_or_tools_begin_a_new_segment(shipped_tokenizer: Any, name: str, words: str) -> None:
    turns = [call("double", number=17), call("double", number=18), ANSWER]
    played = await run(shipped_tokenizer, turns, settings=factory(name, fan_out=True))
    main, first = played.sample
    assert words in played.decode(main.tokens[: len(main.tokens) - main.response_length])
    assert words not in played.decode(first.tokens)
    assert [sum(one.loss_mask) for one in (first, main)] == [
        len(played.replied[0].ids),
        len(played.replied[1].ids) + len(played.replied[2].ids),
    ]
