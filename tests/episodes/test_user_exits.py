"""User code that raises `SystemExit`, `KeyboardInterrupt` and the like: its call or episode ends, never the run."""

import asyncio
from typing import Any

import pytest
import user_exits
from harness import ANSWER, TOOL_CALL, run

from strands_rollout import Sample
from strands_rollout.agent.loop import HAS_MIDDLEWARE
from strands_rollout.slime_plugin.sample_contract import contract_violations

EXITS = {
    "SystemExit": SystemExit(2),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "CancelledError": asyncio.CancelledError(),
    "a custom BaseException": user_exits.CustomBaseException(),
}


def calls(*names: str) -> str:
    texts = [TOOL_CALL.format(name=name, arguments="{}").removesuffix("<|im_end|>") for name in names]
    return "\n".join(texts) + "<|im_end|>"


def path_of(name: str) -> str:
    return f"user_exits.{name}"


def tool_case(name: str, *calls_: str, **more: Any) -> tuple[Any, ...]:
    return [calls(*(calls_ or (name,))), ANSWER], {"tools": [path_of(name), path_of("fine")], **more}


def environment_case(where: str) -> tuple[Any, ...]:
    return [ANSWER], {"environment": path_of("Environment"), "tools": []}, {"where": where}


def factory_case(name: str, *turns: str, where: str = "") -> tuple[Any, ...]:
    return [*turns, ANSWER], {"agent_factory": path_of(name)}, {"where": where}


def middleware_case(where: str, *turns: str) -> tuple[Any, ...]:
    return factory_case("agent_with_middleware", *turns, where=where)


TWO_CALLS = ("fine", "fine")
CASES: dict[str, tuple[tuple[Any, ...], str]] = {
    "an async tool": (tool_case("async_tool"), "completed"),
    "a sync tool": (tool_case("sync_tool"), "completed"),
    "a streaming tool": (tool_case("streaming_tool"), "completed"),
    "a hook before a model call": (tool_case("fine", hooks=[path_of("BeforeModel")]), "internal_error"),
    "a hook after a tool": (tool_case("fine", hooks=[path_of("AfterTool")]), "internal_error"),
    "an async hook after two tools": (
        tool_case("fine", *TWO_CALLS, hooks=[path_of("AsyncAfterTool")]),
        "internal_error",
    ),
    "an unreadable exception": (tool_case("unreadable_tool"), "completed"),
    "middleware of model calls": (middleware_case("model"), "internal_error"),
    "a plugin provider at load": (factory_case("agent_with_provider", where="load"), "setup_error"),
    "a plugin provider at removal": (factory_case("agent_with_provider", where="remove"), "setup_error"),
    "a hook's constructor": (tool_case("fine", hooks=[path_of("BrokenConstructor")]), "setup_error"),
    "should_abort": (tool_case("fine", should_abort=path_of("should_abort")), "setup_error"),
    "a conversation manager": (tool_case("fine", conversation_manager=path_of("Manager")), "internal_error"),
    "a factory": (([ANSWER], {"agent_factory": path_of("factory")}), "setup_error"),
    "a hook of an agent": (
        ([calls(*TWO_CALLS), ANSWER], {"agent_factory": path_of("agent_with_hook")}),
        "internal_error",
    ),
    "a hook of a tool's agent": (
        ([calls("fine"), ANSWER], {"agent_factory": path_of("agent_with_agent")}),
        "completed",
    ),
    "a hook in a graph": (([ANSWER], {"agent_factory": path_of("graph")}), "internal_error"),
    "an environment's constructor": (environment_case("init"), "environment_error"),
    "an environment's answer": (environment_case("answer"), "environment_error"),
    "an environment's score": (environment_case("score"), "environment_error"),
    "an environment's exit": (environment_case("leave"), "completed"),
    "a resource's enter": (([ANSWER], {"resources": {"it": path_of("resource")}}), "environment_error"),
    "a resource's exit": (([ANSWER], {"resources": {"it": path_of("resource_not_closed")}}), "completed"),
}


SLOW = [pytest.param(exits, id=name, marks=pytest.mark.slow) for name, exits in EXITS.items() if name != "SystemExit"]


@pytest.mark.parametrize("exits", [pytest.param(EXITS["SystemExit"], id="SystemExit"), *SLOW])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_generate_survives_exits_in_user_code(shipped_tokenizer, monkeypatch, case, exits) -> None:
    monkeypatch.setattr(user_exits, "raises", exits)
    (script, settings, *metadata), expected = case
    if settings.get("agent_factory") == path_of("agent_with_middleware") and not HAS_MIDDLEWARE:
        pytest.skip("this Strands has no middleware")

    async def play() -> tuple[Any, bool]:
        sample = Sample(prompt="x", index=0, metadata=dict(*metadata))
        other_task = asyncio.create_task(asyncio.sleep(0, True))
        played = await run(shipped_tokenizer, script, settings=settings, sample=sample)
        return played.sample, await other_task

    try:
        sample, is_alive = asyncio.run(play())
    except BaseException as e:
        pytest.fail(f"the run was ended by {e!r}")
    facts = sample.metadata["strands_rollout"]
    assert is_alive
    sample.reward = 0.0
    assert contract_violations(sample) == []
    assert facts["stop_reason"] == expected, facts["error"]
    if expected != "completed":
        error = facts["error"].replace("was cancelled by its own code", "CancelledError")
        assert type(exits).__name__ in error
