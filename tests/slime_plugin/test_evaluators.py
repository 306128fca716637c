"""Evaluators of strands-agents-evals as rewards: inputs from the episode, judges, and samples without a verdict."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiohttp import web
from harness import ANSWER, TOOL_CALL, run

from strands_rollout import Sample, current_task, reward_func
from strands_rollout.settings import RolloutSettings

evals = pytest.importorskip("strands_evals")
from strands import tool  # noqa: E402
from strands.agent.conversation_manager import ConversationManager  # noqa: E402
from strands.hooks import BeforeModelCallEvent  # noqa: E402
from strands_evals.evaluators import (  # noqa: E402
    Contains,
    Equals,
    Evaluator,
    GoalSuccessRateEvaluator,
    OutputEvaluator,
    StateEquals,
    ToolCalled,
    ToolSelectionAccuracyEvaluator,
)
from strands_evals.types.evaluation import NOT_APPLICABLE, EvaluationOutput  # noqa: E402

HERE = __name__
BUY_TURN = TOOL_CALL.format(name="buy", arguments=json.dumps({"item": "apple"}))


class Shop:
    """Environment whose state the evaluators compare."""

    def __init__(self, task: Any) -> None:
        self.cart: list[str] = []
        self.tools = [buy]

    def state(self) -> dict[str, Any]:
        return {"cart": self.cart}


@tool
def buy(item: str) -> str:
    """Buy an item."""
    current_task().environment.cart.append(item)
    return f"bought {item}"


async def shop_by_chat(task: Any, endpoint: Any) -> None:
    """Agent program that answers a call of the tool `buy`."""
    schema = {"type": "object", "properties": {"item": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "buy", "parameters": schema}}]
    messages = [{"role": "user", "content": task.text}]
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as client:
        while len(messages) < 4:
            body = {"messages": messages, "tools": tools}
            answer = await client.post(f"{endpoint.base_url}/chat/completions", json=body)
            messages.append(message := answer.json()["choices"][0]["message"])
            calls = message.get("tool_calls") or ()
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "bought"} for call in calls]


called = ToolCalled("buy")
not_called = ToolCalled("sell")
contains_34 = Contains("34", name="contains")
equals = Equals()
misspelled_state = StateEquals("carts", ["apple"])


def cart(value: Any = None) -> StateEquals:
    return StateEquals("cart", value)


def rubric(model: Any = None) -> OutputEvaluator:
    return OutputEvaluator(rubric="Is it right?", model=model)


request_cancelled = asyncio.Event()
"""Set when a request to the judge is cancelled."""
waiting = threading.Event()
"""Set when an evaluator waits; also used as the abort flag."""


class MetadataEvaluator(Evaluator):
    """An evaluator that returns the outputs in the row's metadata, or waits, or exits."""

    async def evaluate_async(self, case: Any) -> list[EvaluationOutput]:
        outputs = case.metadata["outputs"]
        if outputs == "exit":
            raise SystemExit("no key")
        if outputs == "wait":
            waiting.set()
            await asyncio.sleep(60)
        return [EvaluationOutput(score=score, test_pass=score > 0, label=label) for score, label in outputs]


class SyncEvaluator(Evaluator):
    """An evaluator that returns the score in the row's metadata, as pydantic parses it."""

    def evaluate(self, case: Any) -> list[EvaluationOutput]:
        return [EvaluationOutput(score=case.metadata["score"], test_pass=True)]


class SameCalls(Evaluator):
    """An evaluator that compares the names of calls, as strands_evals' trajectory scorers do."""

    def evaluate(self, case: Any) -> list[EvaluationOutput]:
        is_same = case.actual_trajectory == case.expected_trajectory
        return [EvaluationOutput(score=float(is_same), test_pass=is_same)]


class DropFirstCall(ConversationManager):
    """Conversation manager that drops the first call and its result before the second."""

    def apply_management(self, agent: Any, **kwargs: Any) -> None:
        pass

    reduce_context = apply_management

    def register_hooks(self, registry: Any, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, self.drop_first_call)

    def drop_first_call(self, event: Any) -> None:
        if len(event.agent.messages) > 3:
            del event.agent.messages[1:3]


def needs_model(model: Any) -> OutputEvaluator:
    return rubric(model)


class InteractionsEvaluator(Evaluator):
    """An evaluator that reads `actual_interactions`, which an episode of one agent lacks."""

    def evaluate(self, case: Any) -> list[EvaluationOutput]:
        return [EvaluationOutput(score=float(bool(case.actual_interactions)), test_pass=False)]


def raise_lookup_error() -> Evaluator:
    raise LookupError("no key")


async def scored(
    tokenizer: Any,
    reward: Any,
    *,
    metadata: Any = None,
    turns: Any = (BUY_TURN, ANSWER),
    label: Any = "\\boxed{34}",
    **more: Any,
) -> tuple[dict[str, Any], Any]:
    """Return the reward and sample of an episode that buys an apple and answers; only settings in `more` are used."""
    settings = {name: value for name, value in more.items() if name in RolloutSettings.model_fields}
    sample = Sample(prompt="What is 17 * 2?", label=label, index=0, metadata=dict(metadata or {}))
    options = {"tools": [], "environment": f"{HERE}.Shop", "reward": reward, **settings}
    played = await run(tokenizer, list(turns), settings=options, sample=sample)
    assert played.facts["stop_reason"] == "completed", played.facts["error"]
    args = SimpleNamespace(strands_rollout=options)
    return dict(await reward_func(args, played.sample)), played.sample  # type: ignore[call-overload]


EVALS_FORM = [{"name": "cart", "state": ["apple"]}]
INPUTS: dict[str, tuple[str, dict[str, Any], float]] = {
    "the output": ("contains_34", {}, 1.0),
    "output and label": ("equals", {}, 0.0),
    "a label that is a number": ("equals", {"label": 34, "turns": ["34<|im_end|>"]}, 1.0),
    "the trajectory": ("called", {}, 1.0),
    "the names of the trajectory's calls": ("SameCalls", {"expected_trajectory": ["buy"]}, 1.0),
    "another tool": ("not_called", {}, 0.0),
    "the environment's state": ("cart", {"expected_environment_state": {"cart": ["apple"]}}, 1.0),
    "a state in strands_evals' form": ("cart", {"expected_environment_state": EVALS_FORM}, 1.0),
    "another state": ("cart", {"expected_environment_state": {"cart": []}}, 0.0),
    "several outputs": ("MetadataEvaluator", {"outputs": [[1.0, None], [0.5, None]]}, 0.75),
    "an output that does not apply": ("MetadataEvaluator", {"outputs": [[1.0, None], [0.0, NOT_APPLICABLE]]}, 1.0),
}


@pytest.mark.parametrize(("name", "metadata", "score"), INPUTS.values(), ids=INPUTS)
async def test_evaluator_scores_the_episode(shipped_tokenizer: Any, name: str, metadata: Any, score: float) -> None:
    found, sample = await scored(shipped_tokenizer, {"evaluator": f"{HERE}:{name}"}, metadata=metadata, **metadata)
    assert (found["score"], found["method"], found["error"]) == (score, "evaluator", "")
    assert not sample.remove_sample
    json.dumps(sample.metadata)


async def test_evaluator_reads_the_calls_of_a_program(shipped_tokenizer: Any) -> None:
    options = {"agent_program": f"{HERE}.shop_by_chat", "reward": {"evaluator": f"{HERE}:called"}}
    played = await run(shipped_tokenizer, [BUY_TURN, ANSWER], settings=options)
    found: Any = await reward_func(SimpleNamespace(strands_rollout=options), played.sample)
    assert (found["score"], found["error"]) == (1.0, "")


async def test_evaluators_are_weighted_parts_of_a_reward(shipped_tokenizer: Any) -> None:
    parts = {
        "called": {"evaluator": f"{HERE}.called", "weight": 2},
        "state": {"evaluator": f"{HERE}.cart"},
        "right": {"weight": 0.5},
    }
    metadata = {"expected_environment_state": {"cart": ["apple"]}}
    found, _ = await scored(shipped_tokenizer, {"parts": parts}, metadata=metadata)
    assert (found["score"], found["parts/called"], found["parts/state"], found["parts/right"]) == (3.5, 1.0, 1.0, 1.0)


async def test_accuracy_of_parts_prefers_grading_to_evaluators(shipped_tokenizer: Any) -> None:
    parts = {"sold": {"evaluator": f"{HERE}.not_called"}, "right": {}}
    found, _ = await scored(shipped_tokenizer, {"parts": parts})
    assert (found["score"], found["acc"]) == (1.0, 1.0)


DROPPED_CALLS = {
    "conversation_manager": f"{HERE}.DropFirstCall",
    "turns": (BUY_TURN, BUY_TURN.replace("buy", "sell"), ANSWER),
}
GRAPH = {"agent_factory": "user_agents.graph", "environment": None, "turns": ("L<|im_end|>", "R<|im_end|>", ANSWER)}
NO_VERDICT: dict[str, tuple[str, Any, str]] = {
    "no output that applies": ("MetadataEvaluator", {"outputs": [[0.0, NOT_APPLICABLE]]}, "had nothing to judge"),
    "no output": ("MetadataEvaluator", {"outputs": []}, "had nothing to judge"),
    "an evaluator that exits": ("MetadataEvaluator", {"outputs": "exit"}, "raised SystemExit('no key')"),
    "an evaluator that raises": ("MetadataEvaluator", {}, "raised KeyError"),
    "a score that is not a number": ("SyncEvaluator", {"score": float("nan")}, "expected a finite `score`"),
    "a row that can't be parsed": ("SyncEvaluator", {"expected_trajectory": 1}, "raised ValidationError"),
    "an unknown state name": ("misspelled_state", {}, "the state 'carts', which this episode lacks; it has cart"),
    "a missing input": ("InteractionsEvaluator", {}, "reads actual_interactions, which this episode lacks"),
    "no label": ("equals", {"label": None}, "compares with the row's label, but the row has none"),
    "calls that the history has dropped": (
        "called",
        DROPPED_CALLS,
        "reads actual_trajectory, which this episode lacks: its",
    ),
    "calls of a graph's agents": ("called", GRAPH, "or a swarm or graph played it; use an evaluator of"),
}


@pytest.mark.parametrize(("name", "metadata", "message"), NO_VERDICT.values(), ids=NO_VERDICT)
async def test_evaluator_without_verdict_removes_the_sample(
    shipped_tokenizer: Any, name: str, metadata: Any, message: str
) -> None:
    found, sample = await scored(shipped_tokenizer, {"evaluator": f"{HERE}.{name}"}, metadata=metadata, **metadata)
    assert message in found["error"], found
    assert (found["method"] in ("no_judge", "error"), sample.remove_sample) == (True, True)


async def test_evaluator_refuses_sample_played_without_evaluator(shipped_tokenizer: Any) -> None:
    args = SimpleNamespace(strands_rollout={"reward": {"evaluator": f"{HERE}.called"}})
    found = await reward_func(args, Sample(prompt="?", response="34", label="34"))
    assert "played without reward.evaluator" in found["error"]  # type: ignore[index, operator, call-overload]


REFUSED = {
    "strands_evals.evaluators.GoalSuccessRateEvaluator": "would use Amazon Bedrock; give it a judge",
    f"{HERE}.needs_model": "takes a model; give it a judge with base_url",
    f"{HERE}.raise_lookup_error": "raise_lookup_error raised LookupError: no key",
    f"{HERE}.HERE": f"got a str from {HERE}.HERE; expected an evaluator of strands_evals",
    "strands_evals.evaluators.GoalSuccesRateEvaluator": "GoalSuccessRateEvaluator",
    "strands_evals.evaluators.ToolCalled": "for an evaluator with arguments, name a function that builds it",
}
PROMPT = {"base_url": "http://a", "model": "m", "prompt": "{response}?"}
MISPLACED: list[Any] = [
    (f"{HERE}.MetadataEvaluator", "is an evaluator, not a function; set it as reward.evaluator"),
    (f"{HERE}.called", "is an evaluator, not a function"),
    (
        {"evaluator": f"{HERE}.rubric", "judge": PROMPT},
        "test_evaluators.rubric has its own prompt; remove judge.prompt",
    ),
]


@pytest.mark.parametrize(
    ("reward", "message"),
    [*(({"evaluator": path}, message) for path, message in REFUSED.items()), *MISPLACED],
)
async def test_unusable_evaluator_is_a_setup_error(shipped_tokenizer: Any, reward: Any, message: str) -> None:
    settings = {"reward": reward, "tools": []}
    played = await run(shipped_tokenizer, [ANSWER], settings=settings)
    error = played.facts["error"]
    assert (played.facts["stop_reason"], message in error) == ("setup_error", True), error


@asynccontextmanager
async def serve_judge(**rating: Any) -> AsyncIterator[tuple[dict[str, Any], list[Any]]]:
    """Serve a judge that calls the offered tool with `rating`; yield its settings and the requests it received."""
    requests: list[Any] = []
    concurrent = 0

    async def chat(request: web.Request) -> web.StreamResponse:
        nonlocal concurrent
        concurrent += 1
        body = await request.json()
        requests.append((json.dumps(body["messages"]), concurrent))
        try:
            await asyncio.sleep(rating.get("after_s", 0.05))
        except asyncio.CancelledError:
            request_cancelled.set()
            raise
        concurrent -= 1
        if "status" in rating:
            return web.Response(status=rating["status"])
        call = {"name": body["tools"][0]["function"]["name"], "arguments": json.dumps(rating)}
        delta = {"role": "assistant", "tool_calls": [{"index": 0, "id": "1", "type": "function", "function": call}]}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for choice in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": "tool_calls"}):
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
            await response.write(f"data: {json.dumps({**chunk, 'choices': [{'index': 0, **choice}]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    server = web.Application()
    server.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(server, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield {"base_url": f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "model": "m", "retries": 0}, requests
    finally:
        await runner.cleanup()


JUDGE_CASES: dict[str, tuple[str, dict[str, Any], float, list[str]]] = {
    "a goal, judged in a thread": (
        f"strands_evals.evaluators.{GoalSuccessRateEvaluator.__name__}",
        {"reasoning": "so", "score": "Yes"},
        *(1.0, ["What is 17 * 2?", "buy({'item': 'apple'})", "bought apple", "The answer is"]),
    ),
    "an output by a rubric": (f"{HERE}.rubric", {"score": 0.25, "test_pass": False}, 0.25, ["Is it right?"]),
    "each call": (
        f"strands_evals.evaluators.{ToolSelectionAccuracyEvaluator.__name__}",
        {"reasoning": "so", "score": "No"},
        *(0.0, ["Buy an item.", "buy({'item': 'apple'})"]),
    ),
}


@pytest.mark.parametrize(("path", "rating", "score", "read"), JUDGE_CASES.values(), ids=JUDGE_CASES)
async def test_evaluator_asks_judge_by_base_url(
    shipped_tokenizer: Any, path: str, rating: Any, score: float, read: list[str]
) -> None:
    pytest.importorskip("openai")
    async with serve_judge(**rating) as (judge, judge_requests):
        found, _ = await scored(shipped_tokenizer, {"evaluator": path, "judge": judge})
    assert (found["score"], found["error"]) == (score, "")
    assert all(text in judge_requests[0][0] for text in read), judge_requests


OUTAGES: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "down": ({"status": 503}, {}, 2, "503"),
    # Strands' own retries would make six requests, with waits
    "busy": ({"status": 429}, {}, 2, "the judge refused 2 requests"),
    "slow": ({"after_s": 60}, {"timeout_s": 2.0}, 1, "took longer than judge.timeout_s=2"),
}


@pytest.mark.parametrize("path", [f"{HERE}.rubric", f"strands_evals.evaluators.{GoalSuccessRateEvaluator.__name__}"])
@pytest.mark.parametrize(("rating", "judge_settings", "requests", "message"), OUTAGES.values(), ids=OUTAGES)
async def test_evaluator_judge_failure_is_no_judge(
    shipped_tokenizer: Any, path: str, rating: Any, judge_settings: Any, requests: int, message: str
) -> None:
    pytest.importorskip("openai")
    async with serve_judge(**rating) as (judge, judge_requests):
        reward = {"evaluator": path, "judge": {**judge, "retries": 1, **judge_settings}}
        found, sample = await scored(shipped_tokenizer, reward)
        assert (found["method"], sample.remove_sample, message in found["error"]) == ("no_judge", True, True), found
        assert len(judge_requests) == requests


async def test_evaluator_judge_keeps_max_concurrency(shipped_tokenizer: Any) -> None:
    pytest.importorskip("openai")
    async with serve_judge(score=1.0, test_pass=True) as (judge, judge_requests):
        reward = {"evaluator": f"{HERE}.rubric", "judge": {**judge, "max_concurrency": 2}}
        await asyncio.gather(*(scored(shipped_tokenizer, reward) for _ in range(6)))
    assert (len(judge_requests), max(concurrent for _, concurrent in judge_requests)) == (6, 2)


async def test_evaluator_is_cancelled_by_rollout_abort(shipped_tokenizer: Any) -> None:
    waiting.clear()
    reward, settings = {"evaluator": f"{HERE}.MetadataEvaluator"}, {"should_abort": waiting.is_set}
    async with asyncio.timeout(20):
        found, sample = await scored(shipped_tokenizer, reward, metadata={"outputs": "wait"}, **settings)
    assert ("the rollout was aborted before" in found["error"], sample.remove_sample) == (True, True)


async def test_evaluator_thread_request_ends_with_rollout_abort(shipped_tokenizer: Any) -> None:
    pytest.importorskip("openai")
    path = f"strands_evals.evaluators.{GoalSuccessRateEvaluator.__name__}"
    request_cancelled.clear()
    async with serve_judge(after_s=600) as (judge, judge_requests), asyncio.timeout(20):
        found, _ = await scored(
            shipped_tokenizer, {"evaluator": path, "judge": judge}, should_abort=lambda: bool(judge_requests)
        )
        assert "the rollout was aborted before" in found["error"]
        await request_cancelled.wait()
