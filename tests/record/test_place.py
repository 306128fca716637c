"""Random clients and agents on one record: the record has exactly the tokens that crossed the wire, each once."""

import asyncio
import random
import re
from collections import Counter
from typing import Any

import pytest
from fake_sglang import FakeSGLang
from recording_policy import RecordingPolicy, tool_call

from strands_rollout import SGLangModel
from strands_rollout.gateway.protocols import TurnRequest
from strands_rollout.gateway.session import Session
from strands_rollout.record.client_request import ClientRequest
from strands_rollout.record.record import BeginBranch, ClientView, Head

# few texts, so that histories of different agents are often equal
WORDS = ("Hi", "Go on.", "So.")
TOOL = {"name": "add", "description": "Add.", "inputSchema": {"json": {"type": "object", "properties": {}}}}
REMINDER = "Mind the time."
MANY: Any = {"conversations": "many", "on_rewritten_history": "segment"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"text": text}]}


def followed(message: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return the message after an answer: results of its calls, or a user's text."""
    calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
    results = [
        {"toolResult": {"toolUseId": one["toolUseId"], "status": "success", "content": [{"text": chance.choice("12")}]}}
        for one in calls
    ]
    return {"role": "user", "content": results} if results else user(chance.choice(WORDS))


def rewritten(messages: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    """Return the history with one message replaced, and often without the messages after it."""
    at = chance.randrange(0, len(messages), 2)
    return [*messages[:at], user(chance.choice(WORDS)), *messages[at + 1 :][: chance.choice((0, 0, len(messages)))]]


def words_of_user(messages: list[dict[str, Any]]) -> list[list[str]]:
    """Return the words of each user message, tool results included, without reminders."""
    said = []
    for content in (message["content"] for message in messages if message["role"] == "user"):
        parts = [part for block in content for part in block.get("toolResult", {"content": [block]})["content"]]
        said.append(" ".join(part["text"] for part in parts).replace(REMINDER, "").split())
    return said


class Policy(RecordingPolicy):
    """A policy with random turns, some of which the engine aborts."""

    def __init__(self, tokenizer: Any, chance: random.Random) -> None:
        super().__init__(tokenizer, lambda _text, _number: self._turn(chance))

    @staticmethod
    def _turn(chance: random.Random) -> Any:
        thought = chance.choice(("", "<think>\nHm.\n</think>\n\n"))
        said = thought + chance.choice(
            (*(f"{word}<|im_end|>" for word in WORDS), tool_call("add", a=1), tool_call("add", a=2))
        )
        return (thought + "So", "abort") if chance.random() < 0.05 else said

    def has_read(self, messages: list[dict[str, Any]]) -> bool:
        """Return whether a request's prompt had the user messages of this history."""
        prompts = [self._tokenizer.decode(asked) for asked, _ in self.requests]
        read = [re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL) for prompt in prompts]
        marks = re.compile(rf"</?tool_response>|{REMINDER}")
        words = [[marks.sub(" ", text).split() for text in texts] for texts in read]
        return words_of_user(messages) in [[one for one in texts if one] for texts in words]

    def check_record(self, model: SGLangModel, grown: dict[int, Any]) -> None:
        """Compare a record with the wire; `grown` has each branch and its length at the last check, and is updated."""
        branches = [branch for one in model.record for branch in one if not branch.is_new]
        held: Counter[tuple[int, float]] = Counter()
        for branch in branches:
            trajectory = branch.trajectory
            ids, mask, logprobs = trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs
            assert len(ids) == len(mask) == len(logprobs)
            held.update((token, logprob) for token, one, logprob in zip(ids, mask, logprobs, strict=True) if one)
            before, count = grown.get(id(branch), (branch, 0))
            assert before is branch
            assert count <= len(ids)
            grown[id(branch)] = branch, len(ids)
        assert held == Counter(self.sampled)  # the unique logprob identifies each sampled token
        sent = Counter((*asked, *answer) for asked, answer in self.requests)
        kept = Counter(
            tuple(branch.trajectory.token_ids[: part.end]) for branch in branches for part in branch.trajectory.parts
        )
        assert kept == sent


@pytest.mark.parametrize("seed", range(12))
async def test_record_of_random_clients_has_each_token_once(shipped_tokenizer, seed):
    chance, told, answers = random.Random(seed), [[user("Hi")]], dict[str, list[Any]]()
    policy, grown = Policy(shipped_tokenizer, chance), dict[int, Any]()
    async with FakeSGLang(policy, context_length=8192) as fake:
        session = Session(SGLangModel(shipped_tokenizer, fake.base_url, **MANY))
        for _ in range(12):
            asked = list[TurnRequest]()
            for _ in range(chance.choice((1, 1, 2, 3))):
                messages = chance.choice(told[-4:])
                messages = rewritten(messages, chance) if chance.random() < 0.2 else messages
                system, tools = chance.choice((None, None, None, "Be brief.")), chance.choice(([TOOL], [TOOL], []))
                asked.append(TurnRequest(messages, system, tools, {}, "m", streams=False))
            replies = await asyncio.gather(*map(session.reply, asked))
            policy.check_record(session.model, grown)
            assert all(policy.has_read(one.messages) for one in asked)
            for one, reply in zip(asked, replies, strict=True):  # equal requests at the same time get several answers
                answers.setdefault(repr((one.messages, one.system, one.tools)), []).append(reply)
            for one, reply in zip(asked, replies, strict=True):
                sampled = len(policy.requests)
                assert await session.reply(one) in answers[repr((one.messages, one.system, one.tools))]
                assert len(policy.requests) == sampled
                thought = [{"reasoningContent": {"reasoningText": {"text": reply.reasoning}}}]
                calls = [{"toolUse": used} for used in reply.calls]
                said = {"role": "assistant", "content": [*thought, {"text": reply.text}, *calls]}
                told.append([*one.messages, said, followed(said, chance)])
        assert session.facts.repeats > 0


async def test_enter_leaves_no_messages_after_a_failed_first_request(shipped_tokenizer):
    model = SGLangModel(shipped_tokenizer, "http://127.0.0.1:1", **MANY)
    place = BeginBranch(model.conversation, [user("One"), user("Two")], shared=1)
    model.record.enter(place, Head()).is_busy = False
    assert Session(model).main_messages == []


async def test_enter_resets_the_client_view_of_a_failed_first_request(shipped_tokenizer):
    """The next request reuses the branch that the failed request began, with other messages."""
    model = SGLangModel(shipped_tokenizer, "http://127.0.0.1:1", **MANY)
    record, branch = model.record, model.conversation.branch
    for text in ("One", "Two"):
        place = record.place_of(ClientRequest([user(text)], Head(text, [TOOL])))
        record.enter(place, Head(text, [TOOL])).is_busy = False
        assert (record.main.branch, branch.client) == (branch, ClientView())
        branch.client = ClientView([user("One")], {"own": ["sent"]})  # as a fork inherits them


class Who:
    """The attributes of an agent that a model reads."""

    def __init__(self) -> None:
        self.messages = [user("Hi")]


@pytest.mark.parametrize("seed", range(12))
async def test_record_of_random_agents_has_each_token_once(shipped_tokenizer, seed):
    chance = random.Random(seed)
    policy, grown, team = Policy(shipped_tokenizer, chance), dict[int, Any](), [Who() for _ in range(3)]
    async with FakeSGLang(policy, context_length=8192) as fake:
        kept: Any = chance.choice(("keep", "segment"))
        model = SGLangModel(shipped_tokenizer, fake.base_url, transient_context=kept, **MANY)
        for _ in range(12):
            asked, agents = [], chance.sample(team, chance.choice((1, 1, 2, 3)))
            for who in agents:
                if chance.random() < 0.2:
                    who.messages[:] = rewritten(who.messages, chance)
                *earlier, last = who.messages
                reminded = {**last, "content": [*last["content"], {"text": REMINDER}]}
                shown = [*earlier, reminded] if chance.random() < 0.2 else who.messages
                asked.append(model.answer(shown, [TOOL], agent=who if chance.random() < 0.9 else None))
            answers = await asyncio.gather(*asked)
            assert all(policy.has_read(who.messages) for who in agents)
            for who, answer in zip(agents, answers, strict=True):
                if chance.random() < 0.9:  # otherwise the agent repeats its request
                    who.messages += [answer.message, followed(answer.message, chance)]
            policy.check_record(model, grown)
