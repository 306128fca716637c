"""Unchanged environments of strands-env play whole episodes through `generate`."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_sglang import FakeSGLang, Reply
from harness import TOOL_CALL, Run, args_for, ids_of, run

from strands_rollout import Sample, generate, reward_func
from strands_rollout.errors import ConfigError
from strands_rollout.settings import validate_settings
from strands_rollout.slime_plugin.inputs import find_load_errors
from strands_rollout.slime_plugin.sample_contract import contract_violations

pytest.importorskip("strands_env", reason="needs strands-env, on Python 3.12 or newer")
hooks = pytest.importorskip("strands_env_hooks")

CONFIG = Path(__file__).parents[2] / "configs" / "strands_env.yaml"
CALL = TOOL_CALL.format(name="multiply", arguments='{"a": 17, "b": 2}')
RIGHT = "It is \\boxed{34}.<|im_end|>"
WRONG = "It is \\boxed{35}.<|im_end|>"


@pytest.fixture(autouse=True)
def _no_events() -> None:
    hooks.events.clear()


async def play(tokenizer: Any, script: Any, factory: str, **more: Any) -> Run:
    settings = {"environment": "strands_env", "environment_factory": factory, **more.pop("settings", {})}
    played = await run(tokenizer, script, settings=settings, **more)
    assert contract_violations(replace(played.sample, reward=1.0)) == []
    assert played.fake.violations == []
    return played


async def reward_of(played: Run) -> dict[str, Any]:
    reward: dict[str, Any] = await reward_func(args_for(played.fake.base_url, played.tokenizer), played.sample)
    return reward


def row(**fields: Any) -> Sample:
    return Sample(prompt="What is 17 * 2?", label="34", index=0, metadata={"difficulty": 2, **fields})


@pytest.mark.parametrize(("answer", "score"), [(RIGHT, 1.0), (WRONG, 0.0)])
async def test_math_environment_is_trained_exactly(shipped_tokenizer: Any, answer: str, score: float) -> None:
    settings = yaml.safe_load(CONFIG.read_text())["strands_rollout"]
    played = await run(shipped_tokenizer, [answer], settings=settings)
    sample, facts = played.sample, played.facts
    assert (sample.status.value, facts["stop_reason"], facts["turns"]) == ("completed", "completed", 1)
    assert sum(sample.loss_mask) == facts["sampled_tokens"] == len(ids_of(shipped_tokenizer, answer))
    assert facts["environment"]["termination_reason"] == "task_complete"
    assert facts["environment"]["reward_info"]["matched"] is bool(score)
    reward = await reward_of(played)
    assert (reward["score"], reward["acc"], reward["method"]) == (score, score, "environment")
    assert "boxed" in played.decode(sample.tokens[: played.prompt_length])  # the environment's prompt


async def test_hook_file_runs_with_its_tools_hooks_and_task(shipped_tokenizer: Any) -> None:
    played = await play(shipped_tokenizer, [CALL, RIGHT], "strands_env_hooks", sample=row())
    facts = played.facts
    assert hooks.events == ["create", "reset 2 34 0", "model call", "multiply 17 2", "model call", "cleanup"]
    assert (facts["turns"], facts["tool_iterations"], facts["tool_calls"]) == (2, 1, 1)
    assert [(call["tool"], call["status"]) for call in facts["calls"]] == [("multiply", "success")]
    assert sum(played.sample.loss_mask) == sum(len(reply.ids) for reply in played.replied) == facts["sampled_tokens"]
    assert facts["environment"]["metrics"]["tool_iters"] == 1
    assert (await reward_of(played))["score"] == 1.0


async def test_hook_file_is_called_once_for_all_episodes(shipped_tokenizer: Any) -> None:
    answers = [Reply.tokens(ids_of(shipped_tokenizer, RIGHT))] * 3
    settings = {"environment": "strands_env", "environment_factory": "strands_env_hooks.create_env_factory"}
    async with FakeSGLang(answers, context_length=8192) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        for _ in answers:
            sample = await generate(args, row(), {"temperature": 1.0})
            assert sample.status.value == "completed"
    assert [event for event in hooks.events if event in ("create", "cleanup")] == ["create", *["cleanup"] * 3]


@pytest.mark.parametrize(
    ("factory", "config"), [("create", {}), ("create_with", {"system_prompt": "Answer in a box."})]
)
async def test_function_that_returns_an_environment(shipped_tokenizer: Any, factory: str, config: Any) -> None:
    settings = {"environment_config": config}
    played = await play(shipped_tokenizer, [RIGHT], f"strands_env_hooks.{factory}", settings=settings)
    assert (played.sample.status.value, (await reward_of(played))["score"]) == ("completed", 1.0)
    shown = played.decode(played.sample.tokens[: played.prompt_length])
    assert config.get("system_prompt", "boxed") in shown


async def test_second_model_of_the_policy_is_recorded(shipped_tokenizer: Any) -> None:
    script = [RIGHT, "yes<|im_end|>"]
    settings = {"environment": "strands_env", "environment_factory": "strands_env_hooks.create_judged"}
    played = await run(shipped_tokenizer, script, settings=settings)
    reward = await reward_of(played)
    assert (played.sample.status.value, reward["score"], reward["parts/votes"]) == ("completed", 1.0, 1)
    fanned = await run(shipped_tokenizer, script, settings=settings | {"fan_out": True})
    assert [sum(one.loss_mask) for one in fanned.sample] == [len(reply.ids) for reply in fanned.replied]


async def test_chat_row_becomes_history_and_system_prompt(shipped_tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is 17 * 2?"},
    ]
    sample = Sample(prompt=chat, label="34", index=0, metadata={"difficulty": 1})
    played = await play(shipped_tokenizer, [RIGHT], "strands_env_hooks.CalculatorEnv", sample=sample)
    assert hooks.events[0] == "reset 1 34 2"
    shown = played.decode(played.sample.tokens[: played.prompt_length])
    assert [text in shown for text in ("Be brief.", "Hello!", "17 * 2")] == [True] * 3


@pytest.mark.parametrize(
    ("config", "settings", "script", "reason"),
    [
        ({"max_tool_iters": 1}, {}, [CALL], "max_tool_iterations"),
        ({"max_tool_calls": 1}, {}, [CALL], "max_tool_calls"),
        ({"max_messages": 3}, {}, [CALL], "environment_limit"),
        ({}, {"max_tool_iterations": 1}, [CALL, CALL], "max_tool_iterations"),
        ({}, {"max_turn_tokens": 4}, [Reply.tokens([5] * 4, "length")], "turn_length"),
        ({}, {"episode_timeout_s": 0.5}, [TOOL_CALL.format(name="hang", arguments="{}")], "episode_timeout"),
    ],
)
async def test_strands_env_episodes_cut_by_limits_are_trained(
    shipped_tokenizer: Any, config: Any, settings: Any, script: Any, reason: str
) -> None:
    given = {"environment_config": {"fault": "none", **config}, **settings}
    played = await play(shipped_tokenizer, script, "strands_env_hooks.FaultyEnv", settings=given)
    sampled = sum(len(reply.ids) for reply in played.replied)
    assert (played.sample.status.value, played.facts["stop_reason"]) == ("truncated", reason)
    assert sum(played.sample.loss_mask) == sampled > 0
    assert (await reward_of(played))["method"] == "environment"  # also if truncated
    assert hooks.events[-1] == "cleanup"


async def test_default_limits_are_the_environments(shipped_tokenizer: Any) -> None:
    played = await play(shipped_tokenizer, [*[CALL] * 7, RIGHT], "strands_env_hooks.CalculatorEnv", sample=row())
    assert (played.sample.status.value, played.facts["tool_iterations"]) == ("completed", 7)


async def test_tool_timeout_setting_applies(shipped_tokenizer: Any) -> None:
    script = [TOOL_CALL.format(name="hang", arguments="{}"), RIGHT]
    given = {"environment_config": {"fault": "none"}, "tool_timeout_s": 0.2}
    played = await play(shipped_tokenizer, script, "strands_env_hooks.FaultyEnv", settings=given)
    assert (played.sample.status.value, played.facts["tool_timeouts"]) == ("completed", 1)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("reset_raises", "no sandbox"),
        ("hook_raises", "a bug in a hook"),
        ("reward_raises", "no scorer"),
        ("reward_exits", "SystemExit"),
        ("reward_failed", "no key"),
        ("reward_nan", "finite number"),
        ("cleanup_raises", "the sandbox is gone"),
    ],
)
async def test_fault_of_the_environment_is_not_trained(shipped_tokenizer: Any, fault: str, error: str) -> None:
    settings = {"environment_config": {"fault": fault}}
    played = await play(shipped_tokenizer, [RIGHT], "strands_env_hooks.FaultyEnv", settings=settings)
    assert (played.sample.status.value, played.facts["stop_reason"]) == ("failed", "environment_error")
    assert error in played.facts["error"]
    assert sum(played.sample.loss_mask) == 0
    assert hooks.events == ["cleanup"]


@pytest.mark.parametrize(
    ("fault", "limit", "error"),
    [
        ("reset_hangs", "environment_timeout_s", "before its agent was asked"),
        ("reset_hangs", "episode_timeout_s", "before its agent was asked"),
        ("cleanup_hangs", "environment_timeout_s", "after its agent's answer"),
    ],
)
async def test_environment_that_hangs_is_not_the_policys_fault(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, fault: str, limit: str, error: str
) -> None:
    monkeypatch.setattr("strands_rollout.agent.environment_player.CLOSE_TIMEOUT_S", 0.1)
    settings = {"environment_config": {"fault": fault}, limit: 0.5}
    played = await play(shipped_tokenizer, [RIGHT], "strands_env_hooks.FaultyEnv", settings=settings)
    assert hooks.events == (["reset", "cleanup"] if fault == "reset_hangs" else ["cleanup", "hangs"])
    assert (played.sample.status.value, played.facts["stop_reason"]) == ("failed", "environment_error")
    remedy = "raise environment_timeout_s or episode_timeout_s"
    assert played.facts["error"].endswith(f"the environment took more than 0.5 s {error}; {remedy}")


async def test_engine_fault_is_not_trained(shipped_tokenizer: Any) -> None:
    script = [CALL, Reply.status(500)]
    played = await play(
        shipped_tokenizer,
        lambda _body, number: script[min(number, 1)],
        "strands_env_hooks.CalculatorEnv",
        sample=row(),
        settings={"engine_patience_s": 0},
    )
    assert (played.sample.status.value, played.facts["stop_reason"]) == ("failed", "engine_error")
    assert hooks.events[-1] == "cleanup"


async def test_environment_without_reward_is_graded_by_the_settings(shipped_tokenizer: Any) -> None:
    played = await play(shipped_tokenizer, [RIGHT], "strands_env_hooks.RewardlessEnv")
    assert (played.sample.status.value, (await reward_of(played))["score"]) == ("completed", 1.0)
    assert "environment_score" not in played.facts


@pytest.mark.parametrize(
    ("factory", "sample", "reason", "error"),
    [
        ("create_nothing", None, "setup_error", "made a str; expected an Environment of strands-env"),
        ("create_raises", None, "environment_error", "RuntimeError: no data set"),
        ("CalculatorEnv", None, "setup_error", "difficulty: Field required"),
        ("CalculatorEnv", row(difficulty="hard"), "setup_error", "difficulty: Input should be a valid integer"),
        ("FaultyEnv", None, "environment_error", "missing 1 required keyword-only argument: 'fault'"),
    ],
)
async def test_bad_factory_or_row_fails_the_sample(
    shipped_tokenizer: Any, factory: str, sample: Any, reason: str, error: str
) -> None:
    played = await play(shipped_tokenizer, [RIGHT], f"strands_env_hooks.{factory}", sample=sample)
    assert (played.sample.status.value, played.facts["stop_reason"]) == ("failed", reason)
    assert error in played.facts["error"]
    assert played.fake.requests == []


async def test_environment_shared_by_episodes_is_refused(shipped_tokenizer: Any) -> None:
    for status, error in (("completed", None), ("failed", "expected a new environment for each episode")):
        played = await play(shipped_tokenizer, [RIGHT], "strands_env_hooks.create_shared")
        assert played.sample.status.value == status
        assert error is None or error in played.facts["error"]


@pytest.mark.parametrize(
    ("factory", "error"),
    [
        ("strands_env_hooks.number", "is a int; expected a module with create_env_factory"),
        ("strands_env_hooks.creat", "did you mean 'create'"),
        ("no_such_module.create", "there is no module 'no_such_module'"),
    ],
)
async def test_bad_factory_path_is_found_before_the_run(factory: str, error: str) -> None:
    given = {"environment": "strands_env", "environment_factory": factory, "tools": []}
    [(name, found)] = await find_load_errors(validate_settings(given, "strands_rollout"))
    assert name == "environment"
    assert error in str(found)


def test_task_becomes_a_row_and_comes_back(shipped_tokenizer: Any) -> None:
    from strands_rollout.agent.environment import Task
    from strands_rollout.environments.strands_env import row_of, task_of

    task = hooks.CalculatorTask(id="t1", message="What is 17 * 2?", ground_truth="34", difficulty=3, source="mine")
    given = row_of(task)
    assert given == {
        "prompt": "What is 17 * 2?",
        "label": "34",
        "metadata": {
            "id": "t1",
            "message": "What is 17 * 2?",
            "conversation_history": [],
            "difficulty": 3,
            "source": "mine",
        },
    }
    messages = [{"role": "user", "content": [{"text": given["prompt"]}]}]
    back = task_of(Task(messages, label=given["label"], metadata=given["metadata"]), hooks.CalculatorTask)
    assert back == task


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"environment": "strands_env"}, "environment_factory, the dotted path of an environment"),
        ({"environment_factory": "a.b"}, "environment_factory only with environment: strands_env"),
        ({"agent_program": "a.b", "environment_config": {}}, "the path of a file as environment_config"),
        ({"environment": "strands_env", "environment_factory": "a.b", "agent_factory": "c.d"}, "no agent_factory with"),
        ({"environment": "strands_env", "environment_factory": "a.b", "tools": ["c.d"]}, "no tools with environment"),
    ],
)
def test_settings_that_contradict_are_refused(given: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        validate_settings(given, "strands_rollout")


def cut_after(tokenizer: Any, text: str, count: int) -> tuple[Reply, Reply]:
    """Return a turn that the engine aborts after `count` tokens, and its rest."""
    ids = ids_of(tokenizer, text)
    return Reply.abort(ids[:count]), Reply.tokens(ids[count:])


REPLAYED: dict[str, Any] = {
    "environment": "strands_env",
    "environment_factory": "strands_env_hooks.CalculatorEnv",
    "resumable": "replay",
    "on_engine_abort": "return",
}


async def resumed(tokenizer: Any, first: Run, script: Any, **settings: Any) -> Run:
    partial = {"partial_rollout": True}
    return await run(tokenizer, script, settings=REPLAYED | settings, sample=first.sample, args=partial)


@pytest.mark.parametrize("cut_turn", [0, 1])
async def test_aborted_episode_is_repeated_and_continued(shipped_tokenizer: Any, cut_turn: int) -> None:
    turns: list[Any] = [CALL, RIGHT]
    before, rest = cut_after(shipped_tokenizer, turns[cut_turn], 4)
    script = [*turns[:cut_turn], before]
    first = await run(shipped_tokenizer, script, settings=REPLAYED, sample=row(), args={"partial_rollout": True})
    assert (first.sample.status.value, hooks.events[-1]) == ("aborted", "cleanup")
    played = await resumed(shipped_tokenizer, first, [rest, *turns[cut_turn + 1 :]])
    sample, facts = played.sample, played.facts
    assert (sample.status.value, facts["turns"], facts["resumes"]) == ("completed", 2, 1)
    assert (facts["tool_calls"], len(facts["calls"]), facts["dropped_sampled_tokens"]) == (1, 1, 0)
    assert sum(sample.loss_mask) == sum(len(ids_of(shipped_tokenizer, text)) for text in turns)
    assert hooks.events.count("multiply 17 2") == cut_turn + 1
    assert (await reward_of(played))["score"] == 1.0
    assert contract_violations(replace(sample, reward=1.0)) == []


async def test_abort_before_the_record_is_repeated_keeps_it(shipped_tokenizer: Any) -> None:
    before, rest = cut_after(shipped_tokenizer, RIGHT, 4)
    partial = {"partial_rollout": True}
    first = await run(shipped_tokenizer, [CALL, before], settings=REPLAYED, sample=row(), args=partial)
    kept = list(first.sample.tokens)
    again = await resumed(shipped_tokenizer, first, [], should_abort=lambda: True)
    assert (again.sample.status.value, again.sample.tokens) == ("aborted", kept)
    played = await resumed(shipped_tokenizer, again, [rest])
    assert (played.sample.status.value, played.facts["resumes"]) == ("completed", 2)
    assert played.facts["dropped_sampled_tokens"] == 0


async def test_environment_that_does_not_repeat_starts_from_scratch(shipped_tokenizer: Any) -> None:
    before, _rest = cut_after(shipped_tokenizer, RIGHT, 4)
    partial = {"partial_rollout": True}
    first = await run(shipped_tokenizer, [CALL, before], settings=REPLAYED, sample=row(), args=partial)
    hooks.offset = 1
    try:
        played = await resumed(shipped_tokenizer, first, [CALL, RIGHT])
    finally:
        hooks.offset = 0
    sampled = sum(len(reply.ids) for reply in (*first.replied, *played.replied))
    assert (played.sample.status.value, played.facts["resumes"]) == ("completed", 1)
    assert played.facts["dropped_sampled_tokens"] == sum(len(reply.ids) for reply in first.replied)
    assert sum(played.sample.loss_mask) + played.facts["dropped_sampled_tokens"] == sampled
    assert contract_violations(replace(played.sample, reward=1.0)) == []


async def test_abort_without_replay_starts_from_scratch(shipped_tokenizer: Any) -> None:
    before, _rest = cut_after(shipped_tokenizer, RIGHT, 4)
    partial, settings = {"partial_rollout": True}, {**REPLAYED, "resumable": None}
    first = await run(shipped_tokenizer, [CALL, before], settings=settings, sample=row(), args=partial)
    assert first.sample.status.value == "aborted"
    played = await resumed(shipped_tokenizer, first, [CALL, RIGHT], resumable=None)
    assert (played.sample.status.value, played.facts["resumes"]) == ("completed", 0)
    assert played.facts["dropped_sampled_tokens"] == sum(len(reply.ids) for reply in first.replied)


def test_page_maps_every_import_and_option() -> None:
    import strands_sglang
    from strands_env import core
    from strands_env.core.environment import EnvironmentConfig
    from strands_sglang import tool_parsers

    page = (Path(__file__).parents[2] / "docs" / "strands-env.md").read_text()
    parameters = [
        name
        for function in (strands_sglang.LoopLimiter, strands_sglang.get_client, strands_sglang.SGLangModel)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    names = {
        *strands_sglang.__all__,
        *tool_parsers.__all__,
        *tool_parsers.TOOL_PARSER_REGISTRY,
        *core.__all__,
        *parameters,
        *strands_sglang.SGLangModel.SGLangConfig.__annotations__,
        *strands_sglang.Rollout.model_fields,
        *EnvironmentConfig.__annotations__,
        *core.RolloutResult.model_fields,
        *(reason.value for reason in core.TerminationReason),
        *(name for name in vars(core.models) if name.endswith("model_factory")),
    } - {"messages", "metrics"}  # common words
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", page)] == []


def test_page_names_what_this_package_has() -> None:
    import strands_rollout
    from strands_rollout import errors, tool_parsers
    from strands_rollout.agent.limits import StopReason

    page = (Path(__file__).parents[2] / "docs" / "strands-env.md").read_text()
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", page, re.MULTILINE)
    here = " ".join(right for _left, right in rows)
    assert set(re.findall(r"Engine\w*Error", here)) <= set(vars(errors))
    assert {"ToolLimiter", "TokenLimits", "SGLangModel"} <= set(re.findall(r"\w+", here)) & {*dir(strands_rollout)}
    parsers = {name for left, right in rows if "ToolParser`" in left for name in re.findall(r'"(\w+)"', right)}
    assert {"hermes", "kimi_k2"} <= parsers <= {*tool_parsers.parser_names()}
    stops = {
        name for name in re.findall(r"`(\w+)`", here) if name.endswith(("_error", "_limit", "_length", "completed"))
    }
    assert stops <= set(StopReason) | {"environment_error"}
