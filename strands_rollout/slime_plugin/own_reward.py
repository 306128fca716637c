"""The user's own reward: a function, or several parts with weights, judges and Strands' evaluators among them.

A sample and the text of its answer in, a score and the values of its parts out. An evaluator reads more of an episode,
which `record_for_evaluators` keeps in the sample's metadata.
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
from strands_rollout.agent.episode import Episode
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
from strands_rollout.record.branch import Head
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

_PLACES: Final = re.compile(r"\{(question|response|label)\}")
# a number that is not part of a fraction, a percentage or one with a decimal comma, whose scale is unknown
_SCORE: Final = re.compile(r"score[\s*_]*[:=][\s*_]*(-?\d*\.?\d+)(?!\d|[.,]\d|\s*[/%])", re.IGNORECASE)
_NUMBER: Final = re.compile(r"-?\d*\.?\d+")


@dataclass(frozen=True, slots=True)
class Scored:
    """What a reward gave: its number, `acc` and `pred` where it names them, and further numbers by name."""

    score: float
    acc: float | None = None
    pred: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """What is rewarded: the text of a sample's last assistant message, with slime's args."""

    args: object
    sample: Any
    response: str
    label: Any


async def own_reward(
    settings: RewardSettings, answer: GradedAnswer, built_in: Callable[[], Awaitable[Scored]]
) -> Scored:
    """The score of the user's function, or the weighted sum of parts, which are asked for all at once.

    `built_in` scores a part that has neither function, judge nor evaluator.

    Raises:
        EnvironmentFaultError: A judge gave no number, parts with judges took too long, or the rollout was aborted.
        RolloutError: A function can't be loaded, raised, took too long, or gave no finite number.
    """

    async def part(one: RewardPart) -> Scored:
        what, kind = ("the reward", RolloutError) if one.judge is None else ("the judge", EnvironmentFaultError)
        async with _limits(settings.timeout_s, one.judge):
            with exits_as_errors(what, kind):  # in a task of its own, which must not end the loop
                if one.evaluator is not None:
                    return await _evaluated(one.evaluator, one.judge, answer)
                if one.judge is not None:
                    return await _judged(one.judge, answer)
                return await (built_in() if one.function is None else _called(one.function, answer))

    parts, ours = settings.all_parts, getattr(answer.args, "strands_rollout", None)
    asked = ours.get("should_abort") if isinstance(ours, Mapping) else None
    try:
        async with rollout_control(answer.args, answer.sample, asked).deadline():
            found = await asyncio.gather(*map(part, parts.values()), return_exceptions=True)
    except EngineAbortedError as e:
        raise EnvironmentFaultError("the rollout was aborted while the reward was waited for") from e
    if error := next((one for one in found if isinstance(one, BaseException)), None):
        raise error
    scored = dict(zip(parts, cast("list[Scored]", found), strict=True))
    return _summed(parts, scored) if settings.parts else next(iter(scored.values()))


@asynccontextmanager
async def _limits(timeout_s: float, judge: Judge | None) -> AsyncIterator[None]:
    """One of the judge's places, the wait for which is no time of the reward's, and the time."""
    place: AbstractAsyncContextManager[object] = nullcontext()
    if judge is not None:
        places = _PLACES_OF.setdefault(asyncio.get_running_loop(), {})
        place = places.setdefault(judge.model_dump_json(), asyncio.Semaphore(judge.max_concurrency))
    limit = asyncio.timeout(timeout_s)
    try:
        async with place, limit:
            yield
    except TimeoutError as e:
        if not limit.expired():
            raise
        kind = RolloutError if judge is None else EnvironmentFaultError
        raise kind(f"the reward took longer than reward.timeout_s={timeout_s:g}") from e


def _summed(parts: Mapping[str, RewardPart], scored: Mapping[str, Scored]) -> Scored:
    values = {name: one.score for name, one in scored.items()}
    inner = {f"{name}/{key}": value for name, one in scored.items() for key, value in one.parts.items()}
    by_rank = sorted(scored.items(), key=lambda one: parts[one[0]].evaluator is not None)  # the grading's own before
    return Scored(
        sum(parts[name].weight * value for name, value in values.items()),
        next((one.acc for _, one in by_rank if one.acc is not None), None),
        next((one.pred for one in scored.values() if one.pred), ""),
        values | inner,
    )


def parse_score(found: object, what: str) -> Scored:
    """A number, or a mapping with one as `score`, whose further numbers are parts; RolloutError for anything else."""
    entries = found if isinstance(found, Mapping) else {"score": found}
    numbers = {str(name): number for name, value in entries.items() if (number := usable_number(value)) is not None}
    if "score" not in numbers or ("acc" in entries and "acc" not in numbers):
        raise RolloutError(
            f"{what} is {reprlib.repr(found):.80}; expected a finite `score`, alone or in a mapping, there with a "
            "finite `acc` if any"
        )
    pred = entries.get("pred")
    return Scored(numbers.pop("score"), numbers.pop("acc", None), pred if isinstance(pred, str) else "", numbers)


def takes_args_and_sample(function: Callable[..., object]) -> bool:
    """Whether a reward has slime's own signature, `reward(args, sample)`."""
    first, second, *_ = [*_positional(function), "", ""]
    return bool(second) and (first.strip("_") == "args" or second.strip("_").startswith("sample"))


def _positional(function: Callable[..., object]) -> dict[str, bool]:
    """The names of the positional parameters, and whether each must be given."""
    try:
        known = inspect.signature(function).parameters.values()
    except Exception:  # what has no signature raises many things
        return {}
    return {one.name: one.default is one.empty for one in known if one.kind < one.VAR_POSITIONAL}


async def _called(path: str, answer: GradedAnswer) -> Scored:
    function = load_function(path)
    arguments = _arguments(function, path, answer)
    try:
        found = await call_user_code(function, *arguments)
    except Exception as e:  # a user's reward may raise anything
        raise RolloutError(f"{path} raised {type(e).__name__}: {e}{user_code_location(e)}") from e
    return parse_score(found, f"the reward of {path}")


def _arguments(function: Callable[..., object], path: str, answer: GradedAnswer) -> tuple[Any, ...]:
    """What a reward takes, by the number and the names of its parameters."""
    names = _positional(function)
    needed = sum(names.values())
    if needed <= 2 and takes_args_and_sample(function):
        return answer.args, answer.sample
    if needed == 2 or (needed < 2 and list(names)[1:2] == ["label"]):
        return answer.response, answer.label
    if names and needed < 2:
        return (answer.response,) if next(iter(names)) == "response" else (answer.sample,)
    got = f"{path}({', '.join(names)})"
    raise ConfigError(f"got the reward {got}; expected {path}(response, label) or {path}(sample)")


def check_reward(settings: RewardSettings) -> None:
    """Raise RolloutError where something that the reward's settings name can't be used."""
    for part in settings.all_parts.values():
        if (path := part.function) is not None:
            if hasattr(resolve(path), "evaluate_async"):
                raise ConfigError(f"{path} is an evaluator and no function; name it as reward.evaluator")
            _arguments(load_function(path), path, GradedAnswer(None, None, "", None))
        if part.evaluator is not None:
            _evaluator(part.evaluator, part.judge)
        if (judge := part.judge) is None:
            continue
        if judge.strands_model is not None:
            load_model(judge.strands_model)
        if missing := re.search(r"\$\{\w+\}", os.path.expandvars(f"{judge.base_url} {judge.api_key}")):
            raise ConfigError(f"a judge names the variable {missing[0]}, which is not set")


async def _judged(judge: Judge, answer: GradedAnswer) -> Scored:
    asked = facts_of(answer.sample).question or question_of(getattr(answer.sample, "prompt", ""))
    texts = {"question": str(asked), "response": answer.response, "label": str(answer.label)}
    prompt = _PLACES.sub(lambda place: texts[place[1]], judge.prompt)
    reply = await (_model_reply if judge.strands_model else _api_reply)(judge, prompt)
    said = reply.rpartition("</think>")[2].strip()
    found = _SCORE.findall(said) or ([said] if _NUMBER.fullmatch(said) else [])
    if not found:
        got = f"a judge replied {said[-200:]!r}"
        raise EnvironmentFaultError(f"{got}; expected a line like `Score: 0.5`, which its prompt must ask for")
    return Scored(float(found[-1]))


async def _model_reply(judge: Judge, prompt: str) -> str:
    path, limit = str(judge.strands_model), asyncio.timeout(judge.timeout_s)
    try:
        async with limit:
            agent = Agent(model=load_model(path), callback_handler=None, load_tools_from_directory=False)
            return str(await agent.invoke_async(prompt))
    except Exception as e:  # a Strands model may raise anything
        if limit.expired():
            raise EnvironmentFaultError(f"the judge {path} took longer than judge.timeout_s={judge.timeout_s:g}") from e
        raise EnvironmentFaultError(f"the judge {path} raised {type(e).__name__}: {e}") from e


async def _api_reply(judge: Judge, prompt: str) -> str:
    """Ask the model behind an API, as often as the settings allow."""
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
        raise EnvironmentFaultError(f"the judge refused: {e}; check its base_url, model and api_key") from e
    except EngineError as e:
        raise EnvironmentFaultError(f"the judge failed: {e}; check its base_url, and that it is up") from e
    return str(message.get("content"))


# by running loop and judge
_PLACES_OF: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]]] = (
    weakref.WeakKeyDictionary()
)
_EVALUATORS: Final[dict[tuple[str, str], _Evaluator]] = {}


def record_for_evaluators(model: SGLangModel, episode: Episode, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """What evaluators read of an episode, as plain JSON: the main agent's part, and the environment's state."""
    head = model.conversation.branch.head or Head()
    messages = [saved_message(message) for message in episode.messages]
    used = {block["toolUse"]["toolUseId"] for one in messages for block in one["content"] if "toolUse" in block}
    own = [str(call["id"]) for call in episode.tools.calls if str(call["id"]).startswith("call_")]  # the main agent's
    is_whole = episode.is_resumable and used.issuperset(own)  # no swarm or graph, whose agents have a history each
    record = {
        "messages": messages,
        "tools": [*head.tools],
        "system_prompt": head.system,
        "state": state,
        "is_whole": is_whole,
    }
    return dict(json.loads(json.dumps(record, default=lambda held: str(held)[:100])))


class _Evaluator(Protocol):
    """What is used of an evaluator of strands_evals."""

    aggregator: Callable[[list[Any]], tuple[float, bool, str]]

    def evaluate(self, case: object) -> list[Any]: ...
    async def evaluate_async(self, case: object) -> list[Any]: ...


_GIVEN_UP: Final[ContextVar[threading.Event]] = ContextVar("given_up")


async def _evaluated(path: str, judge: Judge | None, answer: GradedAnswer) -> Scored:
    from strands_evals.evaluators import Evaluator

    evaluator = _evaluator(path, judge)
    # the class's own evaluate_async takes a thread of the loop's pool, which tools may hold for long
    is_sync = type(evaluator).evaluate_async is Evaluator.evaluate_async
    ask = in_own_thread(evaluator.evaluate, has_last_moment=False) if is_sync else evaluator.evaluate_async
    given_up = threading.Event()
    try:
        case = _case(answer, reads_session=getattr(evaluator, "evaluation_level", None) is not None)
        _refuse_nothing(evaluator, path, answer)
        _GIVEN_UP.set(given_up)
        try:
            outputs = list(await ask(case))
        finally:  # a thread goes on
            given_up.set()
        judged = [output for output in outputs if not output.not_applicable]
        score, passed, reason = evaluator.aggregator(judged or outputs)
        scored = (
            parse_score({"score": score, "acc": float(passed)}, f"what the evaluator {path} gave") if judged else None
        )
    except Exception as e:  # an evaluator may raise anything
        cause = getattr(e, "original_exception", e)  # of what Strands wraps
        if isinstance(cause, RolloutError):
            raise cause from e.__cause__
        kind = RolloutError if judge is None else EnvironmentFaultError
        raise kind(f"the evaluator {path} raised {type(cause).__name__}: {cause}") from e
    if scored is None:
        raise EnvironmentFaultError(f"the evaluator {path} had nothing to judge: {reason}")
    return scored


def _refuse_nothing(evaluator: object, path: str, answer: GradedAnswer) -> None:
    """Raise ConfigError where an evaluator would give 0 for what the episode lacks."""
    from strands_evals.evaluators import Equals, StateEquals

    states = (facts_of(answer.sample).evaluated or {}).get("state") or {}
    if isinstance(evaluator, StateEquals) and evaluator.name not in states:
        got = ", ".join(states) or "none: give the environment a method `state()`"
        raise ConfigError(f"{path} compares the state {evaluator.name!r}, which this episode has not; got {got}")
    if isinstance(evaluator, Equals) and evaluator.value is None and answer.label is None:
        raise ConfigError(f"{path} compares with the row's label, and there is none")


def _evaluator(path: str, judge: Judge | None) -> _Evaluator:
    """The evaluator at a path, made once for each judge; ConfigError where it can't be used."""
    key = path, "" if judge is None else judge.model_dump_json()
    if key not in _EVALUATORS:
        _EVALUATORS[key] = cast("_Evaluator", _made_evaluator(path, judge))
    return _EVALUATORS[key]


_ASKS_FOR_JUDGE: Final = "give it a judge with base_url and model, or with strands_model"


def _made_evaluator(path: str, judge: Judge | None) -> object:
    try:
        from strands_evals.evaluators import Evaluator
    except ImportError as e:
        raise ConfigError("reward.evaluator needs strands-agents-evals: pip install 'strands-rollout[evals]'") from e
    if judge is not None and judge.prompt != Judge.model_fields["prompt"].default:
        raise ConfigError(f"got judge.prompt for {path}, which asks in its own words; remove it")
    made = resolve(path)
    if callable(made) and not isinstance(made, Evaluator):
        model = inspect.signature(made).parameters.get("model")
        if judge is None and model is not None and model.default is model.empty:
            raise ConfigError(f"{path} takes a model; {_ASKS_FOR_JUDGE}")
        if judge is not None and model is None:
            raise ConfigError(f"got a judge for {path}, which takes no `model`; remove it")
        try:
            made = made(model=_limited(_model_of(judge), judge)) if judge is not None else made()
        except Exception as error:  # a user's evaluator may raise anything
            where = f"{path} raised {type(error).__name__}: {error}{user_code_location(error)}"
            raise ConfigError(f"{where}; make an evaluator that takes arguments in a function of yours") from error
    if not isinstance(made, Evaluator):
        raise ConfigError(
            f"{path} is a {type(made).__name__}; expected an evaluator of strands_evals, or what makes one"
        )
    if getattr(made, "model", "") is None:
        raise ConfigError(
            f"{path} asks a model and names none, so that Amazon Bedrock would be asked; {_ASKS_FOR_JUDGE}"
        )
    return made


def _model_of(judge: Judge) -> Model:
    """The judge as a Strands model."""
    if judge.strands_model is not None:
        return load_model(judge.strands_model)
    try:
        from strands.models.openai import OpenAIModel
    except ImportError as e:
        raise ConfigError("a judge's API needs openai here: pip install 'strands-rollout[openai]'") from e
    url, key = os.path.expandvars(str(judge.base_url)), os.path.expandvars(judge.api_key or "none")
    limits = {"timeout": judge.timeout_s, "max_retries": judge.retries}
    return OpenAIModel(
        client_args={"base_url": url, "api_key": key, **limits}, model_id=str(judge.model), params=dict(judge.params)
    )


def _limited(model: Model, judge: Judge) -> Model:
    """A copy whose replies have the judge's time, and end with the reward, also where a thread waits for them."""
    stream, limited = cast("Callable[..., AsyncIterator[Any]]", model.stream), copy.copy(model)

    async def asked(*args: object, **kwargs: object) -> AsyncIterator[Any]:
        async def whole() -> list[Any]:
            with exits_as_errors("the judge", EnvironmentFaultError):
                return [event async for event in stream(*args, **kwargs)]

        reply, given_up = asyncio.ensure_future(whole()), _GIVEN_UP.get()
        try:
            async with asyncio.timeout(judge.timeout_s):
                while not (await asyncio.wait({reply}, timeout=0.1))[0]:
                    if given_up.is_set():
                        raise EnvironmentFaultError("the judge's reply is not waited for any more")
            events = reply.result()
        except TimeoutError as e:
            raise EnvironmentFaultError(f"a judge's reply took longer than judge.timeout_s={judge.timeout_s:g}") from e
        except ModelThrottledException as e:
            if judge.strands_model is not None:
                raise  # Strands asks again
            raise EnvironmentFaultError(f"the judge refused {judge.retries + 1} times, the last with: {e}") from e
        finally:
            reply.cancel()
        for event in events:
            yield event

    vars(limited)["stream"] = asked
    return limited


_UNKNOWN: Final = {
    "actual_trajectory": "its history was rewritten and lacks calls, or is a swarm's or graph's; read answer or state",
    "actual_environment_state": "give the environment a method `state()`",
    "actual_interactions": "what a swarm's or graph's agents said is not kept; use what reads the answer",
}


@functools.cache
def _case_class() -> type[Any]:
    """strands_evals' EvaluationData that raises a ConfigError where what the episode lacks is read."""
    from strands_evals.types.evaluation import EvaluationData

    class Case(EvaluationData):  # type: ignore[misc] # an optional package's
        def __getattribute__(self, name: str) -> object:
            value = super().__getattribute__(name)
            if value is None and name in _UNKNOWN:
                raise ConfigError(f"an evaluator reads {name}, which this episode has not: {_UNKNOWN[name]}")
            return value

    return Case


def _case(answer: GradedAnswer, *, reads_session: bool) -> object:
    """The episode as evaluators read it; the trajectory as names of tools where the row expects those, or a Session."""
    facts, label = facts_of(answer.sample), answer.label
    held = facts.evaluated
    if held is None:
        raise ConfigError(
            "the sample has nothing for an evaluator: it failed or was played without reward.evaluator or --save-tokens"
        )
    row = {name: value for name, value in answer.sample.metadata.items() if name != METADATA_KEY}

    expected = row.get("expected_trajectory")
    by_name = isinstance(expected, list) and all(isinstance(name, str) for name in expected) and not reads_session
    trajectory: object = None
    if held.get("is_whole"):
        names = [call["name"] for call, _ in _executions(held["messages"])]
        trajectory = names if by_name else _session(held, answer.response)

    def states(given: Json) -> Json:
        named = isinstance(given, Mapping)
        return [{"name": name, "state": value} for name, value in given.items()] if named and given else given or None

    return _case_class()(
        input=str(facts.question or question_of(getattr(answer.sample, "prompt", ""))),
        name=str(getattr(answer.sample, "index", None)),
        actual_output=answer.response,
        expected_output=str(label) if isinstance(label, int | float) else label,  # as answers are text
        expected_assertion=row.get("expected_assertion"),
        expected_trajectory=expected,
        actual_trajectory=trajectory,
        actual_environment_state=states(held.get("state")),
        expected_environment_state=states(row.get("expected_environment_state")),
        metadata=row,
    )


def _session(held: Mapping[str, Json], response: str) -> object:
    """The messages as strands_evals' Session: a trace for each user's turn, with the calls before its answer."""
    from strands_evals.types import trace

    clock = itertools.count()
    specs = [(spec["name"], spec.get("description"), spec["inputSchema"]["json"]) for spec in held["tools"]]
    tools = [trace.ToolConfig(name=name, description=words, parameters=schema) for name, words, schema in specs]

    def span_info(trace_id: str, parent: str | None = None) -> object:
        number = next(clock)
        at = datetime.fromtimestamp(number, UTC)
        ids = {"trace_id": trace_id, "span_id": str(number), "parent_span_id": parent}
        return trace.SpanInfo(**ids, session_id="episode", start_time=at, end_time=at)

    turns: list[list[Mapping[str, Any]]] = []
    for message in held["messages"]:
        is_question = message["role"] == "user" and not any("toolResult" in block for block in message["content"])
        turns += [[]] if is_question or not turns else []
        turns[-1].append(message)
    traces: list[Any] = []
    for number, turn in enumerate(turns):
        info: Any = span_info(str(number))
        words = {
            "user_prompt": _text(turn[0]),
            "agent_response": response if turn is turns[-1] else _text(turn[-1]),
            "system_prompt": held["system_prompt"],
        }
        spans = [trace.AgentInvocationSpan(span_info=info, available_tools=tools, **words)]
        for call, result in _executions(turn):
            info_of_call = span_info(str(number), info.span_id)
            spans.append(trace.ToolExecutionSpan(span_info=info_of_call, tool_call=call, tool_result=result))
        traces.append(trace.Trace(spans=spans, trace_id=str(number), session_id="episode"))
    return trace.Session(traces=traces, session_id="episode")


def _executions(turn: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The calls of a turn with their results, as fields of strands_evals' ToolCall and ToolResult."""
    blocks = [block for message in turn for block in message["content"]]
    results = defaultdict[str, deque[dict[str, Any]]](deque)  # of calls under one id, in the order in which they came
    for result in (block["toolResult"] for block in blocks if "toolResult" in block):
        results[result["toolUseId"]].append(result)
    for use in (block["toolUse"] for block in blocks if "toolUse" in block):
        use_id, given = use["toolUseId"], use["input"]
        found = results[use_id]
        result = found.popleft() if found else {"status": "error", "content": [{"text": "not run"}]}
        words = _text(result)
        call = {"name": use["name"], "arguments": given if isinstance(given, dict) else {"input": given}}
        error = words if result["status"] == "error" else None
        yield {**call, "tool_call_id": use_id}, {"content": words, "error": error, "tool_call_id": use_id}


def _text(held: Mapping[str, Any]) -> str:
    return "\n".join(str(block["text"]) for block in held["content"] if "text" in block)
