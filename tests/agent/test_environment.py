"""Resources and environments: opened before the episode, called during it, and closed however it ends."""

import asyncio
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import user_environments
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, TOOL_CALL, args_for, run
from user_environments import seen

from strands_rollout import Sample, Task, generate, reward_func
from strands_rollout.agent.environment import describe_failure
from strands_rollout.environments.strands_env import StrandsEnvironment
from strands_rollout.errors import ConfigError
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.tool_parsers import get_parser

READ = TOOL_CALL.format(name="read_database", arguments="{}")
TOLD = {"environment": "user_environments.PlannedEnvironment", "tools": []}


def resources(*names: str, **more: Any) -> dict[str, Any]:
    return {"resources": {name: f"user_environments.{name}" for name in names}, "tools": [], **more}


@pytest.mark.parametrize("text", ["{[1]: 2}", "start: 2024-99-99", "max_tool_iters: !!int four"])
def test_strands_environment_config_must_be_yaml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "env.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"environment_config \S*env.yaml can't be read as YAML: "):
        StrandsEnvironment(Task([], index=0), "an_env", str(path))


def nested(depth: int) -> list[Any]:
    held: list[Any] = []
    for _ in range(depth):
        held = [held]
    return held


def row(**plan: Any) -> Sample:
    return Sample(prompt="What is 17 * 2?", label="34", index=5, metadata=plan)


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    seen.clear()
    yield
    seen.clear()


async def test_resources_are_open_during_the_episode(shipped_tokenizer: Any) -> None:
    settings = resources("database", "second", tools=["user_environments.read_database"])
    played = await run(shipped_tokenizer, [READ, ANSWER], settings=settings, sample=row())
    assert "db" in played.context_after(0)
    assert seen == ["open 5", "second knows db", "second closed", "close 5"]


@pytest.mark.parametrize("script", [[Reply.status(400)], [ANSWER.removesuffix("<|im_end|>")]])
async def test_resources_close_at_every_end_of_the_episode(shipped_tokenizer: Any, script: Any) -> None:
    await run(shipped_tokenizer, script, settings=resources("database", "second"), sample=row())
    assert seen[-2:] == ["second closed", "close 5"]


def test_describe_failure_names_the_users_file() -> None:
    with pytest.raises(Exception, match="no_such") as caught:
        get_parser("no_such")
    assert f"({__file__}, line" in describe_failure("it", caught.value, Task([], index=1))


async def test_resources_close_when_a_later_one_fails_to_open(shipped_tokenizer: Any) -> None:
    played = await run(shipped_tokenizer, [], settings=resources("database", "fails_to_open"), sample=row())
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "environment_error")
    assert "the opening of resource 'fails_to_open'" in played.facts["error"]
    assert "raised OSError: no disk" in played.facts["error"]
    assert f"{user_environments.__file__}, line" in played.facts["error"]
    assert "in fails_to_open), for the sample of index 5" in played.facts["error"]
    assert seen == ["open 5", "close 5"]


async def test_resources_reopen_after_an_abort(shipped_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    is_aborted = False

    async def half(_body: dict[str, Any], number: int) -> Reply:
        nonlocal is_aborted
        if number == 0:
            return Reply.tokens(shipped_tokenizer.encode(READ, add_special_tokens=False))
        is_aborted = True
        return Reply.hang(shipped_tokenizer.encode("The answer"))

    settings = resources("database", tools=["user_environments.read_database"], should_abort=lambda: is_aborted)
    async with FakeSGLang(half, context_length=8192) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        sample = await generate(args, row(), {"max_new_tokens": 512})
        assert sample.status is Sample.Status.ABORTED
        assert seen == ["open 5", "close 5"]
        assert "its environment and resources were closed" in caplog.text
        is_aborted = False
        first = len(fake.requests)
        sample.label = "34"
        args.strands_rollout = settings | {"should_abort": lambda: len(fake.requests) > first}
        sample = await generate(args, sample, {"max_new_tokens": 512})
    assert seen == ["open 5", "close 5"] * 2
    assert sample.metadata["strands_rollout"]["resumes"] == 0


async def test_resources_abort_ends_the_opening(shipped_tokenizer: Any) -> None:
    settings = resources("database", "never_opens", should_abort=lambda: "opening" in seen)
    played = await run(shipped_tokenizer, [], settings=settings, sample=row())
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.ABORTED, "aborted")
    assert seen == ["open 5", "opening", "close 5"]


async def test_resources_close_when_generate_is_cancelled(shipped_tokenizer: Any) -> None:
    async with FakeSGLang(lambda _body, _number: Reply.hang(), context_length=8192) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=resources("database"))
        running = asyncio.ensure_future(generate(args, row(), {"max_new_tokens": 512}))
        await fake.arrived()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert seen == ["open 5", "close 5"]


async def test_resources_opening_timeout_fails_the_episode(shipped_tokenizer: Any) -> None:
    settings = resources("never_opens", environment_timeout_s=0.05)
    played = await run(shipped_tokenizer, [], settings=settings, sample=row())
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "environment_error")
    assert "took more than 0.05 s" in played.facts["error"]


async def test_resources_closing_error_leaves_the_sample_unchanged(
    shipped_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    played = await run(shipped_tokenizer, [ANSWER], settings=resources("fails_to_close"), sample=row())
    assert played.sample.status is Sample.Status.COMPLETED
    assert "still in use" in caplog.text


async def test_resources_refuse_other_than_async_context_managers(shipped_tokenizer: Any) -> None:
    played = await run(shipped_tokenizer, [], settings=resources("not_async"), sample=row())
    assert "expected an async context manager" in played.facts["error"]


async def test_environment_prepares_answers_and_scores(shipped_tokenizer: Any) -> None:
    turns = ["Thirty.<|im_end|>", "<think>\nhm\n</think>\n\nThirty-three.<|im_end|>", ANSWER]
    sample = row(first="What is 2 * 17?", answers=["More.", "A little more."], score={"score": 0.5, "acc": 1})
    played = await run(shipped_tokenizer, turns, settings=TOLD, sample=sample)
    assert seen == [
        "enter",
        "prepare",
        "heard Thirty.",
        "heard Thirty-three.",
        "heard The answer is \\boxed{34}.",
        "score",
        "leave",
    ]
    text = played.decode(played.sample.tokens)
    assert "What is 2 * 17?" in text
    assert "What is 17 * 2?" not in text
    assert "A little more." in played.context_after(1)
    assert sum(played.sample.loss_mask) == sum(len(reply.ids) for reply in played.replied)
    assert (played.facts["stop_reason"], played.facts["user_turns"]) == ("completed", 2)
    played.sample.reward = await reward_func(None, played.sample)
    assert played.sample.reward == {
        "score": 0.5,
        "acc": 1.0,
        "pred": "",
        "label": "34",
        "method": "environment",
        "error": "",
    }
    assert contract_violations(played.sample, decode=played.decode, reward_key="score") == []


@pytest.mark.parametrize(("score", "acc"), [(1.0, 1.0), (0.99, 0.0), (np.float32(0.5), 0.0), (Decimal("1.5"), 1.0)])
async def test_environment_score_as_a_number_sets_acc(shipped_tokenizer: Any, score: Any, acc: float) -> None:
    played = await run(shipped_tokenizer, [ANSWER], settings=TOLD, sample=row(score=score))
    reward: Any = await reward_func(None, played.sample)
    assert (reward["score"], reward["acc"]) == (float(score), acc)


async def test_environment_answers_up_to_max_user_turns(shipped_tokenizer: Any) -> None:
    sample = row(answers=["More."] * 5)
    played = await run(
        shipped_tokenizer, ["Thirty.<|im_end|>"] * 6, settings=TOLD | {"max_user_turns": 2}, sample=sample
    )
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.TRUNCATED, "max_user_turns")
    assert (played.facts["turns"], played.facts["user_turns"]) == (3, 2)
    assert "score" in seen


@pytest.mark.parametrize("step", ["prepare", "answer", "score"])
async def test_environment_error_fails_the_episode(shipped_tokenizer: Any, step: str) -> None:
    played = await run(shipped_tokenizer, [ANSWER], settings=TOLD, sample=row(fails_to=step))
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "environment_error")
    assert f"environment.{step} raised ValueError: nothing" in played.facts["error"]
    assert f"in {step}), for the sample of index 5" in played.facts["error"]
    assert set(played.sample.loss_mask) == {0}
    assert seen[-1] == "leave"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"score": float("nan")}, "environment.score returned nan; expected a finite number"),
        ({"score": {"acc": 1}}, "expected a finite number, or a mapping with a finite number as `score`"),
        ({"score": {"score": 1, "left": object()}}, "plain JSON"),
        ({"score": "0.5"}, "environment.score returned '0.5'; expected a finite number"),
        ({"score": {"score": 1, "left": nested(5000)}}, "[...]]]]]], 'score': 1}; expected plain JSON"),
        ({"score": {"score": 1, "left": nested(300)}}, "at most 20 nested levels"),
        ({"answers": [" "]}, "environment.answer returned ' '; expected text"),
        ({"first": ["a"]}, "environment.prepare returned ['a']; expected text that is not blank"),
    ],
)
async def test_environment_refuses_unusable_results(shipped_tokenizer: Any, plan: Any, words: str) -> None:
    played = await run(shipped_tokenizer, [ANSWER], settings=TOLD, sample=row(**plan))
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "environment_error")
    assert words in played.facts["error"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OneTool", "environment.tools is a DecoratedFunctionTool; expected a list of Strands tools"),
        ("PlainTools", "environment.tools contains the plain function PlainTools.look; decorate it with @strands.tool"),
        ("NoTools", "raised OSError: no tools today"),
    ],
)
async def test_environment_checks_its_tools(shipped_tokenizer: Any, name: str, words: str) -> None:
    settings = {"environment": f"user_environments.{name}", "tools": []}
    played = await run(shipped_tokenizer, [], settings=settings, sample=row())
    assert played.facts["stop_reason"] == "environment_error"
    assert words in played.facts["error"]


async def test_environment_prepared_prompt_is_visible_to_tools(shipped_tokenizer: Any) -> None:
    read = TOOL_CALL.format(name="read_task", arguments="{}")
    settings = TOLD | {"tools": ["user_environments.read_task"]}
    played = await run(shipped_tokenizer, [read, ANSWER], settings=settings, sample=row(first="Guess!"))
    assert "The task is: Guess!" in played.context_after(0)


async def test_environment_without_any_method_is_refused(shipped_tokenizer: Any) -> None:
    settings = {"environment": "user_environments.Empty", "tools": []}
    played = await run(shipped_tokenizer, [], settings=settings, sample=row())
    assert "has none of tools, prepare, answer, score and play" in played.facts["error"]
