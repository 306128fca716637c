"""Clients that rewrite their history in each request without changing its meaning: the episode stays one trajectory."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import TOOL_CALL, ids_of
from test_matching import ASK

PATHS = ("chat", "responses", "messages")
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = {
    "chat": [{"type": "function", "function": TOOL}],
    "responses": [{"type": "function", **TOOL}],
    "messages": [{"name": "add", "input_schema": TOOL["parameters"]}],
}


@dataclass
class Turn:
    """A turn of the policy, and what the client adds after it."""

    reasoning: str
    text: str
    calls: list[dict[str, Any]]  # arguments of each call
    sent_ids: list[str] = field(default_factory=list)
    said: str = ""  # the user's text after a turn without calls

    @property
    def written(self) -> str:
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = "".join(TOOL_CALL.format(name="add", arguments=json.dumps(one)) for one in self.calls)
        return f"{thought}{self.text}{calls}".replace("<|im_end|>", "") + "<|im_end|>"

    def results(self) -> list[str]:
        return [f"34 for {one['a']}" for one in self.calls]


def random_turn(rng: random.Random, number: int, *, is_last: bool) -> Turn:
    calls = [] if is_last else [{"a": f"{number}.{at}", "n": 10**30} for at in range(rng.choice((0, 1, 2, 3)))]
    reasoning = rng.choice(("", "Hm, hm."))
    return Turn(
        reasoning, rng.choice(("" if calls or reasoning else "So.", f"Turn {number}.")), calls, said=f"On {number}."
    )


def spelled(rng: random.Random, text: str) -> str:
    return rng.choice((text, f" {text}\n", text.replace(" ", "  ")))


def shown_ids(rng: random.Random, turn: Turn, number: int) -> tuple[list[str], bool]:
    """Return ids for the calls, and whether they are distinct."""
    count = len(turn.calls)
    return rng.choice(
        (
            (turn.sent_ids, True),
            ([f"own-{number}-{at}" for at in range(count)], True),
            ([f"own-{at}" for at in range(count)], True),
            (["add"] * count, False),
            ([turn.sent_ids[0]] * count, False),
        )
    )


Told = tuple[str, str, list[tuple[str, dict[str, Any]]], list[tuple[str, str]], str]
"""An assistant's message and what follows it: reasoning, text, calls, results, and the user's text."""


def told_turn(rng: random.Random, turn: Turn, number: int) -> list[Told]:
    """Return a turn as a client sends it back: in one message, or one for each call."""
    reasoning = spelled(rng, turn.reasoning) if rng.random() < 0.5 else ""
    text = spelled(rng, turn.text) if not turn.calls or rng.random() < 0.5 else ""
    if not turn.calls:
        return [(reasoning, text, [], [], turn.said)]
    ids, are_distinct = shown_ids(rng, turn, number)
    calls = list(zip(ids, (dict(reversed(one.items())) for one in turn.calls), strict=True))
    results = list(zip(ids, turn.results(), strict=True))
    if rng.random() < 0.3:
        each = [("", "", [call], [result], "") for call, result in zip(calls, results, strict=True)]
        return [(reasoning, text, *each[0][2:]), *each[1:]]
    return [(reasoning, text, calls, rng.sample(results, len(results)) if are_distinct else results, "")]


def items_of(rng: random.Random, api: str, told: Told) -> list[dict[str, Any]]:
    reasoning, text, calls, results, said = told
    user = [{"role": "user", "content": said}] if said else []
    if not (reasoning or text or calls) and rng.random() < 0.5:
        return user
    if api == "chat":
        functions = [
            {
                "id": use_id,
                "type": "function",
                "function": {"name": "add", "arguments": json.dumps(arguments, indent=1)},
            }
            for use_id, arguments in calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": text or rng.choice(("", None, []))}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": functions} if functions else {}
        return [message, *({"role": "tool", "tool_call_id": i, "content": t} for i, t in results), *user]
    if api == "responses":
        thought = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}]}]
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        asked = [
            {"type": "function_call", "call_id": i, "name": "add", "arguments": json.dumps(arguments)}
            for i, arguments in calls
        ]
        answers = [{"type": "function_call_output", "call_id": i, "output": t} for i, t in results]
        return [*thought * bool(reasoning), *[message] * bool(text or not calls), *asked, *answers, *user]
    blocks: list[Any] = [{"type": "thinking", "thinking": reasoning, "signature": "none"}] if reasoning else []
    blocks += [{"type": "text", "text": text}] if text else []
    blocks += [{"type": "tool_use", "id": i, "name": "add", "input": arguments} for i, arguments in calls]
    answers = [{"type": "tool_result", "tool_use_id": i, "content": t} for i, t in results]
    after = [{"role": "user", "content": answers}] if answers else user
    return [{"role": "assistant", "content": blocks or rng.choice(("", []))}, *after]


def sent_ids(api: str, answer: dict[str, Any]) -> list[str]:
    if api == "chat":
        return [call["id"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]
    if api == "responses":
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]


async def check(stage: Any, seed: int, api: str) -> None:
    rng = random.Random(seed)
    turns = [random_turn(rng, number, is_last=number == 5) for number in range(6)]
    async with stage([turn.written for turn in turns]) as made:
        for at, turn in enumerate(turns):
            told = [one for number, earlier in enumerate(turns[:at]) for one in told_turn(rng, earlier, number)]
            history = [ASK, *(item for one in told for item in items_of(rng, api, one))]
            body = {"input" if api == "responses" else "messages": history, "tools": TOOLS[api]}
            status, answer = await made.post(api, body)
            assert status == 200, answer
            turn.sent_ids = sent_ids(api, answer)
            assert len(turn.sent_ids) == len(turn.calls)
        trajectory, facts = made.session.model.trajectory, made.session.facts
    assert (facts.differences, facts.forks, facts.changed_calls, facts.repeats) == ([], 0, 0, 0)
    assert sum(trajectory.loss_mask) == sum(len(ids_of(made.tokenizer, turn.written)) for turn in turns)
    shown = [part.partition("\n")[0] for part in made.text.split("<tool_response>\n")[1:]]
    assert shown == [text for turn in turns for text in turn.results()]


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("seed", range(12))
async def test_respelled_history_is_one_trajectory(stage, seed, api):
    await check(stage, seed, api)


@pytest.mark.slow
@pytest.mark.parametrize("api", PATHS)
async def test_any_respelled_history_is_one_trajectory(stage, api):
    for seed in range(12, 300):
        await check(stage, seed, api)
