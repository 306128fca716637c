"""Ids of calls in clients' requests: each result is matched to its call, whatever ids the client uses."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from clients import CHAT, RESPONSES, Api, ask
from harness import TOOL_CALL
from test_call_values import APIS
from test_matching import ASK, END

Call = tuple[str, str]
"""The call's id and its argument."""


def turn(*arguments: str) -> str:
    calls = (TOOL_CALL.format(name="add", arguments=json.dumps({"a": one})) for one in arguments)
    return "".join(calls).replace("<|im_end|>", "") + "<|im_end|>"


def calls_of(api: Api, answer: Any) -> list[Call]:
    if api is CHAT:
        calls = [(one.id, one.function.arguments) for one in answer.choices[0].message.tool_calls]
    elif api is RESPONSES:
        calls = [(one.call_id, one.arguments) for one in answer.output if one.type == "function_call"]
    else:
        calls = [(one.id, json.dumps(one.input)) for one in answer.content if one.type == "tool_use"]
    return [(use_id, json.loads(arguments)["a"]) for use_id, arguments in calls]


def said(api: Api, calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return a turn with these calls as a client sends it back."""
    texts = [(use_id, json.dumps({"a": argument})) for use_id, argument in calls]
    if api is CHAT:
        functions = [
            {"id": use_id, "type": "function", "function": {"name": "add", "arguments": text}} for use_id, text in texts
        ]
        return [{"role": "assistant", "content": None, "tool_calls": functions}]
    if api is RESPONSES:
        return [
            {"type": "function_call", "call_id": use_id, "name": "add", "arguments": text} for use_id, text in texts
        ]
    uses = [{"type": "tool_use", "id": use_id, "name": "add", "input": json.loads(text)} for use_id, text in texts]
    return [{"role": "assistant", "content": uses}]


def results(api: Api, told: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return results, given as pairs of call id and text, in the form of an API."""
    if api is CHAT:
        return [{"role": "tool", "tool_call_id": use_id, "content": text} for use_id, text in told]
    if api is RESPONSES:
        return [{"type": "function_call_output", "call_id": use_id, "output": text} for use_id, text in told]
    return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": t} for i, t in told]}]


Change = Callable[[int, list[Call]], list[str]]

RENAMED: dict[str, tuple[Change, bool]] = {
    "named by tool": (lambda _turn, calls: ["add"] * len(calls), False),
    "own ids": (lambda turn, calls: [f"own-{turn}-{at}" for at in range(len(calls))], True),
    "own ids, repeated in each turn": (lambda _turn, calls: [f"own-{at}" for at in range(len(calls))], True),
    "the first call's id": (lambda _turn, calls: [calls[0][0]] * len(calls), False),
    "one id for two of three calls": (lambda _turn, calls: ["x", *["y"] * (len(calls) - 1)], False),
    "as sent": (lambda _turn, calls: [use_id for use_id, _ in calls], True),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("change", "are_distinct"), RENAMED.values(), ids=RENAMED)
async def test_results_are_matched_to_calls_under_any_ids(stage, api, change, are_distinct):
    """Results with distinct ids may come in any order; otherwise results are matched in order."""
    turns = [["a1", "a2"], ["b1", "b2", "b3"], ["c1"]]
    async with stage([*(turn(*one) for one in turns), END]) as made, made.client(api) as client:
        history: list[Any] = [ASK]
        for number, arguments in enumerate(turns):
            calls = calls_of(api, await ask(api, client, history))
            ids = change(number, calls)
            told = [(use_id, f"34 for {argument}") for use_id, (_, argument) in zip(ids, calls, strict=True)]
            history += said(api, [(use_id, argument) for use_id, (_, argument) in zip(ids, calls, strict=True)])
            history += results(api, told[::-1] if are_distinct else told)
            assert [argument for _, argument in calls] == arguments
        await ask(api, client, history)
        text, facts = made.text, made.session.facts
    assert (facts.forks, facts.changed_calls, len(made.session.model.trajectory.turns)) == (0, 0, 4)
    shown = [part.partition("\n")[0] for part in text.split("<tool_response>\n")[1:]]
    assert shown == [f"34 for {argument}" for one in turns for argument in one]


@pytest.mark.parametrize("api", APIS)
async def test_changed_history_keeps_its_own_call_ids(stage, api):
    """If the client reuses ids after the change, they refer to the new calls, not to the earlier ones."""
    async with stage([turn("a1", "a2"), END, END], branches=True) as made, made.client(api) as client:
        calls = calls_of(api, await ask(api, client, [ASK]))
        first = said(api, [("x", calls[0][1]), ("y", calls[1][1])])
        history = [ASK, *first, *results(api, [("y", "34 for a2"), ("x", "34 for a1")])]
        await ask(api, client, history)
        history += [*said(api, [("y", "c1"), ("x", "c2")]), *results(api, [("x", "34 for c2"), ("y", "34 for c1")])]
        await ask(api, client, history)
        text = made.tokenizer.decode(made.fake.requests[-1].input_ids)
    shown = [part.partition("\n")[0] for part in text.split("<tool_response>\n")[1:]]
    assert shown == ["34 for a1", "34 for a2", "34 for c1", "34 for c2"]
    assert made.session.facts.forks == 1


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("ids", [None, ["x", "y", "z"]], ids=["as sent", "own ids"])
async def test_calls_sent_back_one_by_one_are_read_once(stage, api, ids):
    """Some clients keep the calls of one turn as call, result, call, result, and repeat this in each request."""
    async with stage([turn("a1", "a2", "a3"), END, END]) as made, made.client(api) as client:
        calls = calls_of(api, await ask(api, client, [ASK]))
        named = list(zip(ids or [use_id for use_id, _ in calls], [argument for _, argument in calls], strict=True))
        history: list[Any] = [ASK]
        for use_id, argument in named:
            history += [*said(api, [(use_id, argument)]), *results(api, [(use_id, f"34 for {argument}")])]
        for _ in range(2):
            await ask(api, client, history)
            history += [{"role": "assistant", "content": "It is 34."}, ASK]
        text, facts = made.text, made.session.facts
    assert (facts.forks, facts.changed_calls, facts.repeats) == (0, 0, 0)
    assert [text.count(f'"a": "{argument}"') for _, argument in named] == [1, 1, 1]
    assert [text.count(f"34 for {argument}") for _, argument in named] == [1, 1, 1]


@pytest.mark.parametrize("api", APIS)
async def test_call_sent_back_without_its_siblings_forks(stage, api):
    """If a client runs one of two calls, a call of the next turn does not count as the missing one."""
    async with stage([turn("a1", "a2"), turn("a2"), END]) as made, made.client(api) as client:
        calls = calls_of(api, await ask(api, client, [ASK]))
        history = [ASK, *said(api, calls[:1]), *results(api, [(calls[0][0], "34 for a1")])]
        again = calls_of(api, await ask(api, client, history))
        history += [*said(api, again), *results(api, [(again[0][0], "34 for a2")])]
        await ask(api, client, history)
        facts = made.session.facts
    assert (facts.forks, facts.changed_calls, len(made.session.model.trajectory.turns)) == (0, 1, 3)
