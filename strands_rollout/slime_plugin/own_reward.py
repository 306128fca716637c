"""The user's own reward: a function, one of Strands' evaluators, or a weighted sum of parts, which may also be judges.

`user_reward` takes a sample and the text of its answer, and returns a score with the values of its parts. An evaluator
reads more of an episode: the values that `values_for_evaluators` returns. The sample's metadata stores these values.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import itertools
import json
import os
import re
import reprlib
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol, cast

from strands import Agent
from strands.models import Model
from strands.types.exceptions import ModelThrottledException

from strands_rollout.agent.environment import call_user_code, user_code_location
from strands_rollout.agent.run import Episode
from strands_rollout.agent.tool_loading import load_function, load_model
from strands_rollout.client.chat_api import ChatApi
from strands_rollout.errors import (
    ConfigError,
    EngineAbortedError,
    EngineError,
    EngineRejectedError,
    EnvironmentFaultError,
    RolloutError,
)
from strands_rollout.exits import exits_as_errors
from strands_rollout.files.json_codec import Json
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.own_thread import in_own_thread
from strands_rollout.record.record import Head
from strands_rollout.record.saved import saved_message
from strands_rollout.samples import (
    METADATA_KEY,
    facts_of,
    question_of,
    usable_number,
)
from strands_rollout.settings import Judge, RewardPart, RewardSettings
from strands_rollout.slime_plugin.slime_adapter import rollout_control
from strands_rollout.user_code import resolve

_PLACEHOLDERS: Final = re.compile(r"\{(question|response|label)\}")
# "score: NUMBER", unless the number is part of a fraction or percentage, or has a decimal comma: its value is then
# unclear
_SCORE: Final = re.compile(r"score[\s*_]*[:=][\s*_]*(-?\d*\.?\d+)(?!\d|[.,]\d|\s*[/%])", re.IGNORECASE)
_NUMBER: Final = re.compile(r"-?\d*\.?\d+")


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The result of a reward: its score; `acc` and `pred`, if the reward gives them; and its other numbers by name."""

    score: float
    acc: float | None = None
    pred: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnswerToGrade:
    """An answer to grade.

    Attributes:
        args: slime's args.
        response: The text of the answer, as `reward.answer_text` returns it.
        label: The row's label.
    """

    args: object
    sample: Any
    response: str
    label: Any


async def user_reward(
    settings: RewardSettings, answer: AnswerToGrade, built_in: Callable[[], Awaitable[RewardResult]]
) -> RewardResult:
    """Return the user's reward: the result of a function or an evaluator, or a weighted sum of parts.

    Parts are scored concurrently. `built_in` scores a part that has no function, judge or evaluator.

    Raises:
        EnvironmentFaultError: A judge failed or gave no number; an evaluator with a judge raised; an evaluator had
            nothing to judge; a part with a judge took too long; or the rollout was aborted.
        RolloutError: A function or an evaluator can't be loaded, or returned no finite number; a function, or an
            evaluator without a judge, raised or took too long; an evaluator reads a value that the episode lacks; or
            `built_in` raised a RolloutError or took too long.
    """

    async def score_part(part: RewardPart) -> RewardResult:
        name, error_class = ("the reward", RolloutError) if part.judge is None else ("the judge", EnvironmentFaultError)
        async with _within_limits(settings.timeout_s, part.judge):
            with exits_as_errors(name, error_class):  # SystemExit in this task would end the event loop
                if part.evaluator is not None:
                    return await _run_evaluator(part.evaluator, part.judge, answer)
                if part.judge is not None:
                    return await _ask_judge(part.judge, answer)
                return await (built_in() if part.function is None else _call_function(part.function, answer))

    parts, run_settings = settings.all_parts, getattr(answer.args, "strands_rollout", None)
    should_abort = run_settings.get("should_abort") if isinstance(run_settings, Mapping) else None
    try:
        async with rollout_control(answer.args, answer.sample, should_abort).deadline():
            results = await asyncio.gather(*map(score_part, parts.values()), return_exceptions=True)
    except EngineAbortedError as e:
        raise EnvironmentFaultError("the rollout was aborted before the reward was computed") from e
    if error := next((result for result in results if isinstance(result, BaseException)), None):
        raise error
    results_by_part = dict(zip(parts, cast("list[RewardResult]", results), strict=True))
    return _weighted_sum(parts, results_by_part) if settings.parts else next(iter(results_by_part.values()))


@asynccontextmanager
async def _within_limits(timeout_s: float, judge: Judge | None) -> AsyncIterator[None]:
    """Run the block within a time limit; if there is a judge, first wait for one of its `max_concurrency` slots.

    The wait has no time limit, and the limit of the block does not include it.
    """
    slot: AbstractAsyncContextManager[object] = nullcontext()
    if judge is not None:
        slots = _JUDGE_SLOTS.setdefault(asyncio.get_running_loop(), {})
        slot = slots.setdefault(judge.model_dump_json(), asyncio.Semaphore(judge.max_concurrency))
    limit = asyncio.timeout(timeout_s)
    try:
        async with slot, limit:
            yield
    except TimeoutError as e:
        if not limit.expired():
            raise
        error_class = RolloutError if judge is None else EnvironmentFaultError
        raise error_class(f"the reward, or a part of it, took longer than reward.timeout_s={timeout_s:g}") from e


def _weighted_sum(parts: Mapping[str, RewardPart], results_by_part: Mapping[str, RewardResult]) -> RewardResult:
    values = {name: result.score for name, result in results_by_part.items()}
    nested = {f"{name}/{key}": value for name, result in results_by_part.items() for key, value in result.parts.items()}
    # parts without an evaluator come first: the first `acc` is used, and an evaluator's only if there is no other
    by_rank = sorted(results_by_part.items(), key=lambda item: parts[item[0]].evaluator is not None)
    return RewardResult(
        sum(parts[name].weight * value for name, value in values.items()),
        next((result.acc for _, result in by_rank if result.acc is not None), None),
        next((result.pred for result in results_by_part.values() if result.pred), ""),
        values | nested,
    )


def parse_score(value: object, name: str) -> RewardResult:
    """Convert a number or a mapping to a result. In a mapping, numbers other than `score` and `acc` become parts.

    Raises:
        RolloutError: The value is neither a finite number nor a mapping with a finite `score`, or its `acc` is not
            finite; `name` is the value's name in the message.
    """
    entries = value if isinstance(value, Mapping) else {"score": value}
    numbers = {str(key): number for key, entry in entries.items() if (number := usable_number(entry)) is not None}
    if "score" not in numbers or ("acc" in entries and "acc" not in numbers):
        raise RolloutError(
            f"{name} is {reprlib.repr(value):.80}; expected a finite `score`: a number, or a mapping with a finite "
            "number under the key `score` and, if it has the key `acc`, under that key too"
        )
    pred = entries.get("pred")
    return RewardResult(numbers.pop("score"), numbers.pop("acc", None), pred if isinstance(pred, str) else "", numbers)


def takes_args_and_sample(function: Callable[..., object]) -> bool:
    """Return whether a reward has slime's own signature, `reward(args, sample)`."""
    first, second, *_ = [*_positional_parameters(function), "", ""]
    return bool(second) and (first.strip("_") == "args" or second.strip("_").startswith("sample"))


def _positional_parameters(function: Callable[..., object]) -> dict[str, bool]:
    """Map the name of each positional parameter to whether it is required; {} if the signature can't be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except Exception:  # a callable without a signature raises errors of many types
        return {}
    # the kinds are ordered: positional-only, positional-or-keyword, *args, ...
    return {item.name: item.default is item.empty for item in parameters if item.kind < item.VAR_POSITIONAL}


async def _call_function(path: str, answer: AnswerToGrade) -> RewardResult:
    function = load_function(path)
    arguments = _choose_arguments(function, path, answer)
    try:
        result = await call_user_code(function, *arguments)
    except Exception as e:  # a user's reward may raise anything
        raise RolloutError(f"{path} raised {type(e).__name__}: {e}{user_code_location(e)}") from e
    return parse_score(result, f"the reward of {path}")


def _choose_arguments(function: Callable[..., object], path: str, answer: AnswerToGrade) -> tuple[Any, ...]:
    """Return the arguments to call a reward function with, chosen by the number and the names of its parameters."""
    parameters = _positional_parameters(function)
    required = sum(parameters.values())
    if required <= 2 and takes_args_and_sample(function):
        return answer.args, answer.sample
    if required == 2 or (required < 2 and list(parameters)[1:2] == ["label"]):
        return answer.response, answer.label
    if parameters and required < 2:
        return (answer.response,) if next(iter(parameters)) == "response" else (answer.sample,)
    got = f"{path}({', '.join(parameters)})"
    raise ConfigError(
        f"got the reward {got}; expected {path}(response, label) or {path}(sample), or slime's {path}(args, sample)"
    )


def check_reward(settings: RewardSettings) -> None:
    """Load and check all functions, judges and evaluators that the settings of the reward name.

    Raises:
        RolloutError: Some code can't be loaded or used, or a judge's environment variable is not set.
    """
    for part in settings.all_parts.values():
        if (path := part.function) is not None:
            if hasattr(resolve(path), "evaluate_async"):
                raise ConfigError(f"{path} is an evaluator, not a function; set it as reward.evaluator")
            _choose_arguments(load_function(path), path, AnswerToGrade(None, None, "", None))
        if part.evaluator is not None:
            _load_evaluator(part.evaluator, part.judge)
        if (judge := part.judge) is None:
            continue
        if judge.strands_model is not None:
            load_model(judge.strands_model)
        if missing := re.search(r"\$\{\w+\}", os.path.expandvars(f"{judge.base_url} {judge.api_key}")):
            raise ConfigError(
                f"a judge uses the environment variable {missing[0]}, which is not set in this process; export it "
                "before you run this command or, if a job runs on an existing Ray cluster, before you start the cluster"
            )


async def _ask_judge(judge: Judge, answer: AnswerToGrade) -> RewardResult:
    question = facts_of(answer.sample).question or question_of(getattr(answer.sample, "prompt", ""))
    texts = {"question": str(question), "response": answer.response, "label": str(answer.label)}
    prompt = _PLACEHOLDERS.sub(lambda placeholder: texts[placeholder[1]], judge.prompt)
    reply = await (_ask_strands_model if judge.strands_model else _ask_api)(judge, prompt)
    text = reply.rpartition("</think>")[2].strip()
    scores = _SCORE.findall(text) or ([text] if _NUMBER.fullmatch(text) else [])
    if not scores:
        got = f"a judge replied {text[-200:]!r}"
        raise EnvironmentFaultError(f"{got}; expected a line like `Score: 0.5`; judge.prompt must ask for it")
    return RewardResult(float(scores[-1]))


async def _ask_strands_model(judge: Judge, prompt: str) -> str:
    path, limit = str(judge.strands_model), asyncio.timeout(judge.timeout_s)
    try:
        async with limit:
            agent = Agent(model=load_model(path), callback_handler=None, load_tools_from_directory=False)
            return str(await agent.invoke_async(prompt))
    except Exception as e:  # a Strands model may raise anything
        if limit.expired():
            raise EnvironmentFaultError(f"the judge {path} took longer than judge.timeout_s={judge.timeout_s:g}") from e
        raise EnvironmentFaultError(f"the judge {path} raised {type(e).__name__}: {e}") from e


async def _ask_api(judge: Judge, prompt: str) -> str:
    api = ChatApi(
        os.path.expandvars(str(judge.base_url)),
        str(judge.model),
        os.path.expandvars(judge.api_key or ""),
        judge.params,
        judge.timeout_s,
        judge.retries,
    )
    try:
        message = await api.complete([{"role": "user", "content": prompt}])
    except EngineRejectedError as e:
        raise EnvironmentFaultError(f"the judge refused the request: {e}; check its base_url, model and api_key") from e
    except EngineError as e:
        raise EnvironmentFaultError(f"the judge failed: {e}; check its base_url, and that it is up") from e
    return str(message.get("content"))


# semaphores by event loop, then by the judge's settings as JSON
_JUDGE_SLOTS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]]] = (
    weakref.WeakKeyDictionary()
)
_EVALUATORS: Final[dict[tuple[str, str], _Evaluator]] = {}


def values_for_evaluators(model: SGLangModel, episode: Episode, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values that an evaluator judges later, as plain JSON.

    These are the main agent's messages, tools and system prompt, the environment's state, and whether the messages
    contain all tool calls of the main agent.
    """
    head = model.conversation.branch.head or Head()
    messages = [saved_message(message) for message in episode.messages]
    blocks = [block for message in messages for block in message["content"]]
    calls_in_messages = {block["toolUse"]["toolUseId"] for block in blocks if "toolUse" in block}
    main_calls = [str(call["id"]) for call in episode.tools.calls if str(call["id"]).startswith("call_")]
    # the messages lack calls if the history was rewritten, and in a swarm or graph: each agent has its own history
    is_whole = episode.is_single_agent and calls_in_messages.issuperset(main_calls)
    values = {
        "messages": messages,
        "tools": [*head.tools],
        "system_prompt": head.system,
        "state": state,
        "is_whole": is_whole,
    }
    return dict(json.loads(json.dumps(values, default=lambda value: str(value)[:100])))


class _Evaluator(Protocol):
    """The part of strands_evals' Evaluator that is used here."""

    aggregator: Callable[[list[Any]], tuple[float, bool, str]]

    def evaluate(self, case: object) -> list[Any]: ...
    async def evaluate_async(self, case: object) -> list[Any]: ...


# The event is set when no one awaits the reward any more. Model calls in an evaluator's thread then end, too
_REWARD_ENDED: Final[ContextVar[threading.Event]] = ContextVar("reward_ended")


async def _run_evaluator(path: str, judge: Judge | None, answer: AnswerToGrade) -> RewardResult:
    from strands_evals.evaluators import Evaluator

    evaluator = _load_evaluator(path, judge)
    # the base class's evaluate_async runs in the event loop's thread pool, which tools may occupy for long
    is_sync = type(evaluator).evaluate_async is Evaluator.evaluate_async
    evaluate = in_own_thread(evaluator.evaluate, has_grace_period=False) if is_sync else evaluator.evaluate_async
    ended = threading.Event()
    try:
        case = _build_case(answer, reads_session=getattr(evaluator, "evaluation_level", None) is not None)
        _check_comparable(evaluator, path, answer)
        _REWARD_ENDED.set(ended)
        try:
            outputs = list(await evaluate(case))
        finally:  # the evaluator's thread can't be stopped, but its model calls can
            ended.set()
        judged = [output for output in outputs if not output.not_applicable]
        score, passed, reason = evaluator.aggregator(judged or outputs)
        name = f"the result of the evaluator {path}"
        result = parse_score({"score": score, "acc": float(passed)}, name) if judged else None
    except Exception as e:  # an evaluator may raise anything
        cause = getattr(e, "original_exception", e)  # Strands wraps some errors
        if isinstance(cause, RolloutError):
            raise cause from e.__cause__
        error_class = RolloutError if judge is None else EnvironmentFaultError
        raise error_class(f"the evaluator {path} raised {type(cause).__name__}: {cause}") from e
    if result is None:
        raise EnvironmentFaultError(f"the evaluator {path} had nothing to judge: {reason}")
    return result


def _check_comparable(evaluator: object, path: str, answer: AnswerToGrade) -> None:
    """Raise ConfigError if the episode lacks the values that an evaluator compares: the evaluator would return 0."""
    from strands_evals.evaluators import Equals, StateEquals

    states = (facts_of(answer.sample).evaluated or {}).get("state") or {}
    if isinstance(evaluator, StateEquals) and evaluator.name not in states:
        got = ", ".join(states) or "none: give the environment a method `state()`"
        raise ConfigError(f"{path} compares the state {evaluator.name!r}, which this episode lacks; it has {got}")
    if isinstance(evaluator, Equals) and evaluator.value is None and answer.label is None:
        raise ConfigError(
            f"{path} compares with the row's label, but the row has none; give the row a label, or the evaluator a "
            "`value`"
        )


def _load_evaluator(path: str, judge: Judge | None) -> _Evaluator:
    key = path, "" if judge is None else judge.model_dump_json()
    if key not in _EVALUATORS:
        _EVALUATORS[key] = cast("_Evaluator", _build_evaluator(path, judge))
    return _EVALUATORS[key]


_JUDGE_REMEDY: Final = "give it a judge with base_url and model, or with strands_model"


def _build_evaluator(path: str, judge: Judge | None) -> object:
    try:
        from strands_evals.evaluators import Evaluator
    except ImportError as e:
        raise ConfigError("an evaluator needs strands-agents-evals; run: pip install 'strands-rollout[evals]'") from e
    if judge is not None and judge.prompt != Judge.model_fields["prompt"].default:
        raise ConfigError(f"{path} has its own prompt; remove judge.prompt")
    evaluator = resolve(path)
    if callable(evaluator) and not isinstance(evaluator, Evaluator):
        model = inspect.signature(evaluator).parameters.get("model")
        if judge is None and model is not None and model.default is model.empty:
            raise ConfigError(f"{path} takes a model; {_JUDGE_REMEDY}")
        if judge is not None and model is None:
            raise ConfigError(f"{path} takes no `model`, so it can't use a judge; remove the judge")
        try:
            evaluator = evaluator(model=_limit_model(_judge_model(judge), judge)) if judge is not None else evaluator()
        except Exception as error:  # a user's evaluator may raise anything
            where = f"{path} raised {type(error).__name__}: {error}{user_code_location(error)}"
            raise ConfigError(f"{where}; for an evaluator with arguments, name a function that builds it") from error
    if not isinstance(evaluator, Evaluator):
        raise ConfigError(
            f"got a {type(evaluator).__name__} from {path}; expected an evaluator of strands_evals, an "
            "evaluator class, or a function that returns an evaluator"
        )
    if getattr(evaluator, "model", "") is None:
        raise ConfigError(f"{path} asks a model but names none, and would use Amazon Bedrock; {_JUDGE_REMEDY}")
    return evaluator


def _judge_model(judge: Judge) -> Model:
    if judge.strands_model is not None:
        return load_model(judge.strands_model)
    try:
        from strands.models.openai import OpenAIModel
    except ImportError as e:
        raise ConfigError(
            "an evaluator's judge with base_url needs openai; run: pip install 'strands-rollout[openai]'"
        ) from e
    url, key = os.path.expandvars(str(judge.base_url)), os.path.expandvars(judge.api_key or "none")
    limits = {"timeout": judge.timeout_s, "max_retries": judge.retries}
    return OpenAIModel(
        client_args={"base_url": url, "api_key": key, **limits}, model_id=str(judge.model), params=dict(judge.params)
    )


def _limit_model(model: Model, judge: Judge) -> Model:
    """Return a copy of a model that gives up on a reply after the judge's timeout, or once no one awaits the reward.

    This also ends the calls of an evaluator that runs in a thread; the thread itself can't be stopped.
    """
    stream, limited = cast("Callable[..., AsyncIterator[Any]]", model.stream), copy.copy(model)

    async def stream_with_limits(*args: object, **kwargs: object) -> AsyncIterator[Any]:
        async def read_all() -> list[Any]:
            with exits_as_errors("the judge", EnvironmentFaultError):
                return [event async for event in stream(*args, **kwargs)]

        reply, ended = asyncio.ensure_future(read_all()), _REWARD_ENDED.get()
        try:
            async with asyncio.timeout(judge.timeout_s):
                while not (await asyncio.wait({reply}, timeout=0.1))[0]:
                    if ended.is_set():
                        raise EnvironmentFaultError("the reward ended before the judge replied")
            events = reply.result()
        except TimeoutError as e:
            raise EnvironmentFaultError(f"a judge's reply took longer than judge.timeout_s={judge.timeout_s:g}") from e
        except ModelThrottledException as e:
            if judge.strands_model is not None:
                raise  # Strands retries a throttled request
            raise EnvironmentFaultError(f"the judge refused {judge.retries + 1} requests, the last with: {e}") from e
        finally:
            reply.cancel()
        for event in events:
            yield event

    vars(limited)["stream"] = stream_with_limits
    return limited


_MISSING_FIELD_REMEDIES: Final = {
    "actual_trajectory": "its history was rewritten and lacks calls, or a swarm or graph played it; use an evaluator "
    "of the answer or the state",
    "actual_environment_state": "give the environment a method `state()`",
    "actual_interactions": "the messages of a swarm's or graph's agents are not kept; use an evaluator of the answer",
}


@functools.cache
def _case_class() -> type[Any]:
    """Return a subclass of strands_evals' EvaluationData that raises ConfigError on reading a missing value."""
    from strands_evals.types.evaluation import EvaluationData

    class Case(EvaluationData):  # type: ignore[misc] # an optional package's
        def __getattribute__(self, name: str) -> object:
            value = super().__getattribute__(name)
            if value is None and name in _MISSING_FIELD_REMEDIES:
                remedy = _MISSING_FIELD_REMEDIES[name]
                raise ConfigError(f"an evaluator reads {name}, which this episode lacks: {remedy}")
            return value

    return Case


def _build_case(answer: AnswerToGrade, *, reads_session: bool) -> object:
    """Return the episode as strands_evals' EvaluationData.

    Usually, the trajectory is a Session. If the row's `expected_trajectory` is a list of tool names, the trajectory is
    such a list, too, except with `reads_session`. If the messages lack some of the episode's calls, the trajectory is
    None.
    """
    facts, label = facts_of(answer.sample), answer.label
    evaluated = facts.evaluated
    if evaluated is None:
        raise ConfigError(
            "the sample has no values for an evaluator: its episode failed or was played without reward.evaluator, or "
            "eval saved it without --save-tokens; set reward.evaluator, pass --save-tokens to `strands-rollout eval`, "
            "and play the episode again"
        )
    row = {name: value for name, value in answer.sample.metadata.items() if name != METADATA_KEY}

    expected = row.get("expected_trajectory")
    expects_names = isinstance(expected, list) and all(isinstance(name, str) for name in expected) and not reads_session
    trajectory: object = None
    if evaluated.get("is_whole"):
        names = [call["name"] for call, _ in _calls_with_results(evaluated["messages"])]
        trajectory = names if expects_names else _build_session(evaluated, answer.response)

    def named_states(states: Json) -> Json:
        if states and isinstance(states, Mapping):
            return [{"name": name, "state": value} for name, value in states.items()]
        return states or None

    return _case_class()(
        input=str(facts.question or question_of(getattr(answer.sample, "prompt", ""))),
        name=str(getattr(answer.sample, "index", None)),
        actual_output=answer.response,
        expected_output=str(label) if isinstance(label, int | float) else label,  # the answer is a text
        expected_assertion=row.get("expected_assertion"),
        expected_trajectory=expected,
        actual_trajectory=trajectory,
        actual_environment_state=named_states(evaluated.get("state")),
        expected_environment_state=named_states(row.get("expected_environment_state")),
        metadata=row,
    )


def _build_session(evaluated: Mapping[str, Json], response: str) -> object:
    """Return the messages as strands_evals' Session, with one trace for each user message and the calls after it."""
    from strands_evals.types import trace

    clock = itertools.count()  # only the order of the spans' start times matters
    specs = [(spec["name"], spec.get("description"), spec["inputSchema"]["json"]) for spec in evaluated["tools"]]
    tools = [trace.ToolConfig(name=name, description=text, parameters=schema) for name, text, schema in specs]

    def span_info(trace_id: str, parent: str | None = None) -> object:
        number = next(clock)
        at = datetime.fromtimestamp(number, UTC)
        ids = {"trace_id": trace_id, "span_id": str(number), "parent_span_id": parent}
        return trace.SpanInfo(**ids, session_id="episode", start_time=at, end_time=at)

    turns: list[list[Mapping[str, Any]]] = []
    for message in evaluated["messages"]:
        is_question = message["role"] == "user" and not any("toolResult" in block for block in message["content"])
        turns += [[]] if is_question or not turns else []
        turns[-1].append(message)
    traces: list[Any] = []
    for number, turn in enumerate(turns):
        info: Any = span_info(str(number))
        texts = {
            "user_prompt": _text(turn[0]),
            "agent_response": response if turn is turns[-1] else _text(turn[-1]),
            "system_prompt": evaluated["system_prompt"],
        }
        spans = [trace.AgentInvocationSpan(span_info=info, available_tools=tools, **texts)]
        for call, result in _calls_with_results(turn):
            call_info = span_info(str(number), info.span_id)
            spans.append(trace.ToolExecutionSpan(span_info=call_info, tool_call=call, tool_result=result))
        traces.append(trace.Trace(spans=spans, trace_id=str(number), session_id="episode"))
    return trace.Session(traces=traces, session_id="episode")


def _calls_with_results(turn: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the calls in messages with their results, as fields of strands_evals' ToolCall and ToolResult."""
    blocks = [block for message in turn for block in message["content"]]
    results = defaultdict[str, deque[dict[str, Any]]](deque)  # calls may share an id; their results are in order
    for result in (block["toolResult"] for block in blocks if "toolResult" in block):
        results[result["toolUseId"]].append(result)
    for use in (block["toolUse"] for block in blocks if "toolUse" in block):
        use_id, arguments = use["toolUseId"], use["input"]
        pending = results[use_id]
        result = pending.popleft() if pending else {"status": "error", "content": [{"text": "not run"}]}
        text = _text(result)
        call = {"name": use["name"], "arguments": arguments if isinstance(arguments, dict) else {"input": arguments}}
        error = text if result["status"] == "error" else None
        yield {**call, "tool_call_id": use_id}, {"content": text, "error": error, "tool_call_id": use_id}


def _text(message: Mapping[str, Any]) -> str:
    return "\n".join(str(block["text"]) for block in message["content"] if "text" in block)
