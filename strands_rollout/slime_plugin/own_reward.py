"""The user's own reward: a function, or several parts with weights, judges among them.

A sample and the text of its answer in, a score and the values of its parts out.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import re
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from strands import Agent

from strands_rollout.agent.environment import place_in_users_code, result_of
from strands_rollout.agent.tool_loading import load_function, load_model
from strands_rollout.aio import LoopCache
from strands_rollout.client.transport import Fault, FaultKind, Outage, RetryPolicy, fault_of_status
from strands_rollout.errors import ConfigError, EngineError, EnvironmentFaultError, RolloutError, foreign_code
from strands_rollout.samples import QUESTION_KEY, episode_facts, question_of, usable_number
from strands_rollout.secret_mask import masked_text
from strands_rollout.settings import Judge, RewardPart, RewardSettings

_CLIENTS: LoopCache[httpx.AsyncClient] = LoopCache()
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
class Answer:
    """What is rewarded: the text of a sample's last assistant message, with slime's args."""

    args: object
    sample: Any
    response: str
    label: Any


async def own_reward(settings: RewardSettings, answer: Answer, built_in: Callable[[], Awaitable[Scored]]) -> Scored:
    """The score of the user's function, or the weighted sum of parts, which are asked for all at once.

    `built_in` scores a part that has neither function nor judge.

    Raises:
        EnvironmentFaultError: A judge gave no number, or parts with judges took too long.
        RolloutError: A function can't be loaded, raised, took too long, or gave no finite number.
    """

    async def part(one: RewardPart) -> Scored:
        if one.judge is not None:
            return await _judged(one.judge, answer)
        return await (built_in() if one.function is None else _called(one.function, answer))

    try:
        async with asyncio.timeout(settings.timeout_s):
            if settings.function is not None:
                return await _called(settings.function, answer)
            found = await asyncio.gather(*map(part, settings.parts.values()), return_exceptions=True)
    except TimeoutError as e:
        kind = EnvironmentFaultError if any(one.judge for one in settings.parts.values()) else RolloutError
        raise kind(f"the reward took longer than reward.timeout_s={settings.timeout_s:g}") from e
    scored = dict(zip(settings.parts, map(_raised_or_scored, found), strict=True))
    values = {name: one.score for name, one in scored.items()}
    inner = {f"{name}/{key}": value for name, one in scored.items() for key, value in one.parts.items()}
    return Scored(
        sum(settings.parts[name].weight * value for name, value in values.items()),
        next((one.acc for one in scored.values() if one.acc is not None), None),
        next((one.pred for one in scored.values() if one.pred), ""),
        values | inner,
    )


def _raised_or_scored(found: Scored | BaseException) -> Scored:
    if isinstance(found, BaseException):
        raise found
    return found


def scored_as(found: object, what: str) -> Scored:
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


def takes_sample_with_args(function: Callable[..., object]) -> bool:
    """Whether a reward has slime's own signature, `reward(args, sample)`."""
    first, second, *_ = [*_positional(function), "", ""]
    return bool(second) and (first.strip("_") == "args" or second.strip("_").startswith("sample"))


def _positional(function: Callable[..., object]) -> dict[str, bool]:
    """The names of the positional parameters, and whether each must be given."""
    with foreign_code("what has no signature raises many things"):
        known = inspect.signature(function).parameters.values()
        return {one.name: one.default is one.empty for one in known if one.kind < one.VAR_POSITIONAL}
    return {}


async def _called(path: str, answer: Answer) -> Scored:
    function = load_function(path)
    arguments = _arguments(function, path, answer)
    with foreign_code("a user's reward may raise anything") as outcome:
        found = await result_of(function, *arguments)
    if outcome.error is not None:
        e = outcome.error
        raise RolloutError(f"{path} raised {type(e).__name__}: {e}{place_in_users_code(e)}") from e
    return scored_as(found, f"the reward of {path}")


def _arguments(function: Callable[..., object], path: str, answer: Answer) -> tuple[Any, ...]:
    """What a reward takes, by the number and the names of its parameters."""
    names = _positional(function)
    needed = sum(names.values())
    if needed <= 2 and takes_sample_with_args(function):
        return answer.args, answer.sample
    if needed == 2 or (needed < 2 and list(names)[1:2] == ["label"]):
        return answer.response, answer.label
    if names and needed < 2:
        return (answer.response,) if next(iter(names)) == "response" else (answer.sample,)
    got = f"{path}({', '.join(names)})"
    raise ConfigError(f"got the reward {got}; expected {path}(response, label) or {path}(sample)")


def check_reward(settings: RewardSettings) -> None:
    """Raise RolloutError where something that the reward's settings name can't be used."""
    for path in filter(None, [settings.function, *(part.function for part in settings.parts.values())]):
        _arguments(load_function(path), path, Answer(None, None, "", None))
    for judge in (part.judge for part in settings.parts.values() if part.judge is not None):
        if judge.strands_model is not None:
            load_model(judge.strands_model)
        if missing := re.search(r"\$\{\w+\}", os.path.expandvars(f"{judge.base_url} {judge.api_key}")):
            raise ConfigError(f"a judge names the variable {missing[0]}, which is not set")


async def _judged(judge: Judge, answer: Answer) -> Scored:
    asked = episode_facts(answer.sample).get(QUESTION_KEY) or question_of(getattr(answer.sample, "prompt", ""))
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
    path = str(judge.strands_model)
    with foreign_code("a Strands model may raise anything") as outcome:
        async with asyncio.timeout(judge.timeout_s):
            agent = Agent(model=load_model(path), callback_handler=None, load_tools_from_directory=False)
            return str(await agent.invoke_async(prompt))
    e = outcome.error
    raise EnvironmentFaultError(f"the judge {path} raised {type(e).__name__}: {e}") from e


async def _api_reply(judge: Judge, prompt: str) -> str:
    """What the model behind an API says, after as many attempts as the settings allow."""
    url = os.path.expandvars(str(judge.base_url)).rstrip("/") + "/chat/completions"
    shown = masked_text(url)
    key = os.path.expandvars(judge.api_key or "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {**judge.params, "model": judge.model, "messages": [{"role": "user", "content": prompt}]}
    client = _CLIENTS.get("judge", lambda: httpx.AsyncClient(limits=httpx.Limits(max_connections=256)))
    limits = httpx.Timeout(judge.timeout_s, pool=None)
    outage = Outage(RetryPolicy(max_attempts=judge.retries + 1))
    while True:
        try:
            answer = await client.post(url, json=body, headers=headers, timeout=limits)
            if answer.status_code == httpx.codes.OK:
                return str(answer.json()["choices"][0]["message"]["content"])
            fault = fault_of_status(answer.status_code, answer.content, answer.headers, url=shown, endpoint="")
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            fault = Fault(FaultKind.UNREACHABLE, f"{type(e).__name__}: {masked_text(str(e))}")
        except (ValueError, LookupError, TypeError) as e:
            raise EnvironmentFaultError(f"the judge at {shown} gave no chat completion: {type(e).__name__}: {e}") from e
        except EngineError as e:
            raise EnvironmentFaultError(f"the judge refused: {e}; check its base_url, model and api_key") from e
        outage.add(fault, 0.0)
        if outage.gives_up():
            why = f"no answer in {len(outage.faults)} attempts, the last ended with: {fault.words}"
            raise EnvironmentFaultError(f"the judge at {shown} gave {why}; check its base_url, and that it is up")
        await asyncio.sleep(outage.next_wait_s(random.Random()))  # noqa: S311 - a wait, not a secret
