"""The user's own reward in `reward_func`: functions in each form, weighted parts, judges, and failures."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from strands.models import Model
from typer.testing import CliRunner

from strands_rollout import Sample, reward_func
from strands_rollout.cli.commands import app
from strands_rollout.secret_mask import MASK

HERE = "test_own_reward"
JUDGE_KEY = "sk-s3cret-of-the-judge"


def text_reward(response: str, label: str) -> float:
    return float(response == f"\\boxed{{{label}}}") / 2


async def sample_reward(sample: Sample) -> dict[str, Any]:
    return {"score": 2, "length": len(sample.response), "note": "not in the result", "pred": "42"}


def response_reward(response: str, *, scale: float = 3.0) -> float:
    return scale


def slime_style_reward(args: Any, sample: Sample, **kwargs: object) -> bool:
    return args.is_slime


def thread_reward(response: str, label: str = "") -> dict[str, float]:
    return {"score": threading.current_thread() is not threading.main_thread(), "acc": 0.25}


def raising_reward(response: str, label: str) -> float:
    raise KeyError("no such word")


def none_reward(sample: Sample) -> None:
    return None


def three_argument_reward(a: str, b: str, c: str) -> float:
    return 1.0


async def slow_reward(sample: Sample) -> float:
    await asyncio.sleep(60)
    return 1.0


class JudgeModel(Model):
    """A Strands model that answers with a score."""

    def update_config(self, **config: Any) -> None: ...

    def get_config(self) -> dict[str, Any]:
        return {}

    def structured_output(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockDelta": {"delta": {"text": "<think>Score: 9</think>Score: 0.25"}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn"}}


release_events: list[asyncio.Event] = []


class HeldJudgeModel(JudgeModel):
    """A judge that answers after the last event in `release_events` is set."""

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await release_events[-1].wait()
        async for event in super().stream():
            yield event


class ExitingJudgeModel(JudgeModel):
    """A judge whose client raises SystemExit."""

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise SystemExit("no key")
        yield {}


class CancelledJudgeModel(JudgeModel):
    """A judge that its own code cancels."""

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise asyncio.CancelledError
        yield {}


async def scored(reward: Any, sample: Sample | None = None) -> dict[str, Any]:
    sample = sample or Sample(prompt="What is {label}?", response="<think>so</think>\\boxed{42}", label="42")
    args = SimpleNamespace(strands_rollout={"reward": reward}, is_slime=True)
    return dict(await reward_func(args, sample))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("reward", "score", "acc", "details"),
    [
        (f"{HERE}.text_reward", 0.5, 0.0, {"pred": "", "label": "42", "method": "function"}),
        ({"function": f"{HERE}.text_reward", "correct": 0.5}, 0.5, 1.0, {}),
        (f"{HERE}:sample_reward", 2.0, 1.0, {"pred": "42", "parts/length": 27.0}),
        (f"{HERE}.response_reward", 3.0, 1.0, {}),
        (f"{HERE}.slime_style_reward", 1.0, 1.0, {}),
        (f"{HERE}.thread_reward", 1.0, 0.25, {}),
        (
            {
                "parts": {"right": {"weight": 2}, "long": {"function": f"{HERE}.sample_reward", "weight": 0.5}},
                "wrong": 0,
            },
            *(3.0, 1.0, {"method": "parts", "parts/right": 1.0, "parts/long": 2.0, "parts/long/length": 27.0}),
        ),
        ({"parts": {"tone": {"judge": f"{HERE}.JudgeModel"}}}, 0.25, 0.0, {"parts/tone": 0.25}),
    ],
)
async def test_reward_func_accepts_each_form_of_reward(
    reward: Any, score: float, acc: float, details: dict[str, Any]
) -> None:
    found = await scored(reward)
    assert (found["score"], found["acc"], found["error"]) == (score, acc, "")
    assert {name: found[name] for name in details} == details


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        (
            f"{HERE}.raising_reward",
            rf"{HERE}.raising_reward raised KeyError: 'no such word' \(.*test_own_reward.py, line \d+, in",
        ),
        (f"{HERE}.none_reward", "the reward of test_own_reward.none_reward is None; expected a finite `score`"),
        (
            f"{HERE}.three_argument_reward",
            r"got the reward test_own_reward.three_argument_reward\(a, b, c\); expected .*\(response, label\) or",
        ),
        ({"function": f"{HERE}.slow_reward", "timeout_s": 0.01}, "took longer than reward.timeout_s=0.01"),
        ({"parts": {"right": {}, "no": f"{HERE}.gone"}}, "has no attribute 'gone'"),
        (
            {"functoin": f"{HERE}.text_reward"},
            "unknown setting strands_rollout.reward.functoin; did you mean 'function'",
        ),
        ({"function": f"{HERE}.slow_reward", "parts": {"a": {}}}, "expected: only one of function and parts"),
        ({"parts": {"a": {"judge": {"model": "m"}}}}, "a judge with either base_url and model, or strands_model"),
    ],
)
async def test_reward_func_logs_failing_reward_once(reward: Any, error: str, caplog: pytest.LogCaptureFixture) -> None:
    sample = Sample(prompt="?", response="\\boxed{42}", label="42")
    found = [await scored(reward, sample) for _ in range(2)][-1]
    assert (found["score"], found["acc"], found["method"], found["label"]) == (-1.0, 0.0, "error", "42")
    assert sample.remove_sample  # the policy is not at fault
    (logged,) = [record for record in caplog.records if "reward_failed" in record.message]
    assert (bool(re.search(error, logged.getMessage())), logged.exc_info) == (True, None)


both_started: list[asyncio.Event] = []


async def meeting_reward(sample: Sample) -> float:
    """Return once both parts that use this reward have started."""
    both_started.append(asyncio.Event())
    if len(both_started) == 2:
        both_started[0].set()
    await both_started[0].wait()
    return 1.0


@asynccontextmanager
async def serve_judge(*replies: str | int) -> AsyncIterator[tuple[dict[str, Any], list[Any]]]:
    """Serve a judge with these replies, or HTTP statuses, in order; yield its settings and the requests it received."""
    left, requests = list(replies), []

    async def chat(request: web.Request) -> web.Response:
        requests.append((request.headers.get("Authorization"), await request.json()))
        reply = left.pop(0)
        message = {"choices": [{"message": {"content": reply}}]}
        return web.Response(status=reply) if isinstance(reply, int) else web.json_response(message)

    server = web.Application()
    server.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield {"base_url": url, "model": "m", "api_key": "${JUDGE_API_KEY}", "retries": 1}, requests
    finally:
        await runner.cleanup()


async def test_judge_retries_until_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", JUDGE_KEY)
    async with serve_judge(503, "Not bad.\n**Score:** 0.75.") as (judge, requests):
        judge["prompt"] = "{question} {response} {label}"
        found = await scored({"parts": {"tone": {"judge": judge, "weight": 2}}})
    assert (found["score"], found["parts/tone"]) == (1.5, 0.75)
    content = "What is {label}? \\boxed{42} 42"  # inserted text is not a template
    body = {"temperature": 0, "model": "m", "messages": [{"role": "user", "content": content}]}
    assert requests == [(f"Bearer {JUDGE_KEY}", body)] * 2


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        ((503, 429), "no chat completion in 2 attempts; the last failed with: HTTP 429"),
        ((401,), "HTTP 401; check its base_url, model and api_key"),
        (("Score: 7/10",), "a judge replied 'Score: 7/10'; expected a line like `Score: 0.5`"),
        (("Score: 0,5",), "a judge replied 'Score: 0,5'; expected a line like `Score: 0.5`"),
    ],
)
async def test_judge_failure_removes_the_sample(replies: tuple[Any, ...], error: str) -> None:
    sample = Sample(prompt="?", response="4")
    async with serve_judge(*replies) as (judge, _):
        found = await scored({"parts": {"tone": {"judge": judge}}}, sample)
    assert (found["method"], error in found["error"]) == ("no_judge", True)
    assert sample.remove_sample


async def test_judge_over_reward_timeout_is_no_judge() -> None:
    release_events.append(asyncio.Event())
    found = await scored({"timeout_s": 0.01, "parts": {"a": {"judge": f"{HERE}.HeldJudgeModel"}}})
    assert (found["method"], "timeout_s=0.01" in found["error"]) == ("no_judge", True)


@pytest.mark.parametrize(
    ("judge", "error"),
    [
        ({"strands_model": f"{HERE}.ExitingJudgeModel"}, "the judge raised SystemExit('no key')"),
        ({"strands_model": f"{HERE}.CancelledJudgeModel"}, "the judge was cancelled by its own code"),
        (
            {"strands_model": f"{HERE}.HeldJudgeModel", "timeout_s": 0.01},
            "HeldJudgeModel took longer than judge.timeout_s=0.01",
        ),
    ],
)
async def test_judge_strands_model_failure_is_no_judge(judge: Any, error: str) -> None:
    release_events.append(asyncio.Event())
    found = await asyncio.create_task(scored({"parts": {"right": {}, "a": {"judge": judge}}}))
    assert (found["method"], error in found["error"]) == ("no_judge", True), found["error"]


async def test_judge_queue_time_is_outside_reward_timeout() -> None:
    release_events.append(asyncio.Event())
    parts = {"a": {"judge": {"strands_model": f"{HERE}.HeldJudgeModel", "max_concurrency": 1}}}
    scoring = [asyncio.ensure_future(scored({"timeout_s": limit_s, "parts": parts})) for limit_s in (60, 0.5)]
    await asyncio.sleep(0.6)
    release_events[-1].set()
    assert [found["error"] for found in await asyncio.gather(*scoring)] == ["", ""]


async def test_reward_parts_are_scored_concurrently() -> None:
    async with serve_judge("Score: .5", ".25") as (judge, requests):
        parts = {"meeting": {"function": f"{HERE}.meeting_reward"}, "a": {"judge": judge}, "b": {"judge": judge}}
        both_started.clear()
        found = await scored({"parts": {**parts, "last": {"function": f"{HERE}.meeting_reward"}}})
    assert (found["score"], found["error"], len(requests)) == (2.75, "", 2)


def test_config_command_checks_reward_and_masks_secrets(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rollout.yaml"
    parts = f"a: {HERE}.gone, b: {{judge: {{base_url: http://a/v1, model: m, api_key: {JUDGE_KEY}}}}}"
    file.write_text(f"strands_rollout:\n  tools: []\n  reward: {{parts: {{{parts}}}}}\n")
    result = CliRunner().invoke(app, ["config", str(file)])
    assert "reward: can't load 'test_own_reward.gone'" in str(result.exception)
    assert (JUDGE_KEY in result.output, MASK in result.output) == (False, True)
    file.write_text("strands_rollout:\n  reward: {parts: {a: {judge: {url: http://a}}}}\n")
    result = CliRunner().invoke(app, ["config", str(file)])
    assert "unknown setting strands_rollout.reward.parts.a.judge.url; did you mean 'base_url'?" in str(result.exception)
