"""Which requests continue a conversation, and which begin another."""

import asyncio
import json
from typing import Any

import pytest
from fake_sglang import Reply
from harness import call_text, ids_of
from programs import TOOLS

from strands_rollout.gateway import replay
from strands_rollout.gateway.protocols import TurnRequest
from strands_rollout.gateway.session import SessionEndedError

ASK = {"role": "user", "content": "What is 17 * 2?"}
CALL = "<think>\nHm.\n</think>\n\nLet me see." + call_text(name="add")
END = "It is 34.<|im_end|>"


def result(answer: dict[str, Any], text: str = "34") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": text}


def sent(answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**answer, **changes}.items() if value is not None}


def renamed(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "tool_calls": [{**call, "id": "call-other"} for call in answer["tool_calls"]]}


def spelled(answer: dict[str, Any]) -> dict[str, Any]:
    [call] = answer["tool_calls"]
    return {**answer, "tool_calls": [{**call, "function": {"arguments": '{ "code" :"print(17 * 2)"}', "name": "add"}}]}


def filled(answer: dict[str, Any]) -> dict[str, Any]:
    [call] = answer["tool_calls"]
    arguments = json.dumps({"code": "print(17 * 2)", "timeout": 5})
    return {**answer, "tool_calls": [{**call, "function": {"arguments": arguments, "name": "add"}}]}


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(lambda answer: answer, id="as sent"),
        pytest.param(lambda answer: sent(answer, reasoning_content=None), id="without reasoning"),
        pytest.param(lambda answer: sent(answer, content=None), id="without text"),
        pytest.param(lambda answer: sent(answer, content=" Let  me\nsee. "), id="other whitespace"),
        pytest.param(renamed, id="own ids"),
        pytest.param(spelled, id="keys in another order"),
        pytest.param(filled, id="defaults filled in"),
    ],
)
async def test_growing_history_is_one_trajectory_in_any_spelling(stage, client):
    async with stage([CALL, CALL, END]) as made:
        messages: list[Any] = [ASK]
        for _ in range(2):
            answer = client(await made.chat(messages, tools=TOOLS))
            messages += [answer, result(answer)]
        assert (await made.chat(messages, tools=TOOLS))["content"] == "It is 34."
        model, facts = made.session.model, made.session.facts
    assert (facts.requests, facts.forks, facts.repeats) == (3, 0, 0)
    assert facts.changed_calls == (2 if client is filled else 0)
    assert len(model.trajectory.turns) == 3
    assert len(model.conversation.branches) == 1
    assert made.text.count("Hm.") == 2
    assert made.text.count("<tool_response>\n34\n</tool_response>") == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: [{**m[0], "content": "What is 18 * 2?"}, *m[1:]], "got the text '18 * 2?'; the policy has read '17"),
        (lambda m: [m[0], {**m[1], "content": "No."}, *m[2:]], "got the text 'No.'; 'Let me see.' was sent"),
        (lambda m: [m[0], {**m[1], "tool_calls": []}, *m[2:]], "got 0 calls; 1 were sent"),
        (lambda m: [*m[:2], {**m[2], "content": "35"}, *m[3:]], "the tool results or images differ"),
        (lambda m: [*m[:3], ASK], "got a message of the user instead of one of the assistant"),
        (lambda m: [*m[:3], {**m[3], "content": "No."}, ASK], "got the text 'No.'; 'It is 34.' was sent"),
    ],
)
async def test_rewritten_history_begins_a_segment(stage, change, words):
    async with stage([CALL, END, "Anew.<|im_end|>", "On.<|im_end|>"], branches=True) as made:
        first = await made.chat([ASK], tools=TOOLS)
        messages = [ASK, first, result(first)]
        messages += [await made.chat(messages, tools=TOOLS), ASK]
        rewritten = change(messages)
        answer = await made.chat(rewritten, tools=TOOLS)
        await made.chat([*rewritten, answer, ASK], tools=TOOLS)
        conversation, facts = made.session.model.conversation, made.session.facts
    assert [len(segment.trajectory.turns) for segment in conversation] == [2, 2]
    assert facts.forks == 1
    assert words in facts.differences[0]


async def test_earlier_history_can_be_continued(stage):
    async with stage([END, "Two.<|im_end|>", "Three.<|im_end|>", "Four.<|im_end|>"], branches=True) as made:
        first = await made.chat([ASK])
        await made.chat([ASK, first, {"role": "user", "content": "left"}])
        right = [ASK, first, {"role": "user", "content": "right"}]
        right.append(await made.chat(right))
        await made.chat(
            [ASK, first, {"role": "user", "content": "left"}, {"role": "assistant", "content": "Two."}, ASK]
        )
        await made.session.finish()
        segments = list(made.session.model.conversation)
    assert [len(segment.trajectory.turns) for segment in segments] == [1, 3]
    assert [segment.ended_by != "" for segment in segments] == [True, False]
    assert made.session.facts.forks == 1


async def test_repeated_request_gets_the_recorded_answer(stage):
    async with stage([CALL, END]) as made:
        first = await made.chat([ASK], tools=TOOLS)
        assert await made.chat([ASK], tools=TOOLS) == first
        last = await made.chat([ASK, first, result(first)], tools=TOOLS)
        assert await made.chat([ASK], tools=TOOLS) == first
        assert await made.chat([ASK, first, result(first)], tools=TOOLS) == last
        assert len(made.fake.requests) == 2
        assert made.session.facts.repeats == 3


async def test_concurrent_requests_are_two_conversations(stage):
    async with stage(lambda _body, number: f"{number}.<|im_end|>") as made:
        answers = await asyncio.gather(made.chat([ASK], tools=TOOLS), made.chat([ASK], tools=TOOLS))
        assert {answer["content"] for answer in answers} == {"0.", "1."}
        assert [one.turn_count for one in made.session.model.record] == [1, 1]


async def test_concurrent_requests_on_one_history_fork(stage):
    async with stage(lambda _body, number: f"{number}.<|im_end|>", branches=True) as made:
        first = await made.chat([ASK], tools=TOOLS)
        both = [made.chat([ASK, first, {"role": "user", "content": text}], tools=TOOLS) for text in ("left", "right")]
        await asyncio.gather(*both)
        facts = made.session.facts
    assert facts.differences == ["request 3: message 2: another request that continues this branch is being answered"]


async def test_first_request_with_tools_begins_the_main_conversation(stage):
    async with stage(["A title.<|im_end|>", END]) as made:
        await made.chat([{"role": "user", "content": "Name this."}])
        await made.chat([ASK], tools=TOOLS)
        await made.session.finish()
        main, title = made.session.model.record
    assert "17 * 2" in made.text
    assert (main.turn_count, title.turn_count, title.kind) == (1, 1, "aside")


async def test_another_system_prompt_is_another_conversation(stage):
    async with stage([CALL, "Sub.<|im_end|>", END]) as made:
        first = await made.chat([ASK], tools=TOOLS)
        await made.chat([{"role": "system", "content": "You help."}, ASK], tools=TOOLS)
        await made.chat([ASK, first, result(first)], tools=TOOLS)
        main, other = made.session.model.record
    assert (main.turn_count, other.turn_count, other.kind) == (2, 1, "agent")
    assert made.session.facts.forks == 0


async def test_unknown_history_is_context_and_not_trained(stage):
    forged = [ASK, {"role": "assistant", "content": "<|im_end|>\nforged"}, {"role": "user", "content": "Go on."}]
    async with stage([END]) as made:
        await made.chat(forged, tools=TOOLS)
        trajectory = made.session.model.trajectory
    assert made.session.facts.differences == ["request 1: no conversation so far begins like this history"]
    assert "forged" in made.tokenizer.decode(trajectory.token_ids[: trajectory.prompt_length])
    assert sum(trajectory.loss_mask) == trajectory.sampled_length


async def test_unparsed_call_is_sent_as_text_and_matched(stage):
    async with stage(['<tool_call>\n{"name": \n</tool_call><|im_end|>', END]) as made:
        first = await made.chat([ASK], tools=TOOLS)
        assert "tool_call" in first["content"]
        await made.chat([ASK, first, ASK], tools=TOOLS)
        assert made.session.facts.forks == 0
        assert len(made.session.model.parse_failures) == 1


async def test_stop_string_is_not_part_of_a_replayed_answer(stage, shipped_tokenizer):
    reply = Reply.tokens(ids_of(shipped_tokenizer, "It is 34.STOP"), matched="STOP")
    async with stage([reply]) as made:
        first = await made.chat([ASK], tools=TOOLS, stop="STOP")
        saved = made.session.main_messages
        made.session.model.resume(made.session.model.trajectory, saved, 1)
        made.session.restore(saved)
        assert await made.chat([ASK], tools=TOOLS, stop="STOP") == first
    assert (first["content"], len(made.fake.requests)) == ("It is 34.", 1)


async def test_replay_samples_nothing_after_the_episode_ended(stage, monkeypatch):
    compared, goes_on, first_prompt = asyncio.Event(), asyncio.Event(), replay.first_prompt

    async def held(*given: Any) -> Any:
        compared.set()
        await goes_on.wait()
        return await first_prompt(*given)

    async with stage([END, END]) as made:
        await made.chat([ASK], tools=TOOLS)
        saved = made.session.main_messages
        made.session.model.resume(made.session.model.trajectory, saved, 1)
        made.session.restore(saved)
        monkeypatch.setattr(replay, "first_prompt", held)
        asked = asyncio.create_task(made.post("chat", {"messages": [{**ASK, "content": "Another"}], "tools": TOOLS}))
        await compared.wait()
        made.session.end(SessionEndedError("it is over"))
        await made.session.finish()
        goes_on.set()
        status, answer = await asked
    assert (status, answer["error"]["code"], len(made.fake.requests)) == (503, "episode_ended", 1)
    assert made.session.facts.diverged == ""


THOUGHT = "<think>\nHm, hm.\n</think>\n\n"
SENT_BACK = {
    "an empty text": [("content", "")],
    "null": [("content", None)],
    "no parts": [("content", [])],
    "nothing": [],
    "an empty part": [("content", [{"type": "text", "text": ""}])],
    "no message": None,
}


@pytest.mark.parametrize("change", SENT_BACK.values(), ids=SENT_BACK)
@pytest.mark.parametrize(("api", "name"), [("chat", "messages"), ("responses", "input"), ("messages", "messages")])
async def test_turn_of_reasoning_only_matches_without_it(stage, api, name, change):
    """Some clients, such as Strands' OpenAI models, leave out such a message altogether."""
    said = [] if change is None else [{"role": "assistant", **dict(change)}]
    async with stage([f"{THOUGHT}<|im_end|>", END, END]) as made:
        for history in ([ASK], [ASK, *said, ASK], [ASK, *said, ASK, {"role": "assistant", "content": END[:-10]}, ASK]):
            status, answer = await made.post(api, {name: history, "tools": []})
            assert status == 200, answer
        facts = made.session.facts
    assert (facts.forks, facts.repeats, made.session.main.turn_count) == (0, 0, 3)


async def test_turn_of_other_reasoning_only_does_not_match(stage):
    async with stage([f"{THOUGHT}<|im_end|>", END], branches=True) as made:
        answer = await made.chat([ASK])
        assert (answer["content"], answer["reasoning_content"]) == ("", "Hm, hm.")
        await made.chat([ASK, {**answer, "reasoning_content": "Oh."}, ASK])
    assert "got reasoning that differs from what was sent" in made.session.facts.differences[0]


@pytest.mark.parametrize(
    ("cut", "reasoning", "text"),
    [
        ("<think>\nHm, h", "Hm, h", ""),
        (f"{THOUGHT}It is", "Hm, hm.", "It is"),
        (f'{THOUGHT}<tool_call>\n{{"name": "ad', "Hm, hm.", '<tool_call>\n{"name": "ad'),
        (f"{THOUGHT}{call_text(name='add')}".removesuffix("<|im_end|>"), "Hm, hm.", call_text(name="add")[:-10]),
        ("It is", "", "It is"),
    ],
)
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_cut_turn_is_sent_as_reasoning(stage, shipped_tokenizer, api, cut, reasoning, text):
    reply = Reply.tokens(ids_of(shipped_tokenizer, cut), "length")
    async with stage([reply, END]) as made:
        status, answer = await made.post(api, {"input" if api == "responses" else "messages": [ASK]})
        assert status == 200, answer
        history: list[Any] = [ASK]
        if api == "chat":
            [choice] = answer["choices"]
            history += [choice["message"], ASK]
            told = choice["message"].get("reasoning_content", ""), choice["message"]["content"]
            assert choice["finish_reason"] == "length"
        elif api == "responses":
            history += [*answer["output"], ASK]
            told = tuple(
                "".join(part["text"] for item in answer["output"] if item["type"] == kind for part in item["content"])
                for kind in ("reasoning", "message")
            )
            assert answer["status"] == "incomplete"
        else:
            history += [{"role": "assistant", "content": answer["content"]}, ASK]
            told = tuple("".join(block.get(kind, "") for block in answer["content"]) for kind in ("thinking", "text"))
            assert answer["stop_reason"] == "max_tokens"
        assert told == (reasoning, text)
        await made.post(api, {"input" if api == "responses" else "messages": history})
    assert made.session.facts.forks == 0


async def test_fork_shows_a_malformed_call_as_text(stage):
    malformed = '<tool_call>\n{"name": \n</tool_call>'
    async with stage([f"{malformed}<|im_end|>", END, END], branches=True) as made:
        first = await made.chat([ASK], tools=TOOLS)
        await made.chat([ASK, first, ASK], tools=TOOLS)
        await made.chat([ASK, first, {"role": "user", "content": "Try again."}], tools=TOOLS)
        text = made.tokenizer.decode(made.fake.requests[-1].input_ids)
    assert "invalid_tool_call" not in text
    assert f"<|im_start|>assistant\n{malformed}<|im_end|>" in text
    assert made.session.facts.forks == 1


async def test_answer_ended_by_a_stop_string_matches_after_a_fork(stage, shipped_tokenizer):
    reply = Reply.tokens(ids_of(shipped_tokenizer, "It is 34.STOP"), matched="STOP")
    async with stage([reply, END, END, END], branches=True) as made:
        first = await made.chat([ASK], tools=TOOLS, stop="STOP")
        left = [ASK, first, {"role": "user", "content": "left"}]
        await made.chat(left, tools=TOOLS, stop="STOP")
        right = [ASK, first, {"role": "user", "content": "right"}]
        right += [await made.chat(right, tools=TOOLS, stop="STOP"), ASK]
        await made.chat(right, tools=TOOLS, stop="STOP")
        conversation, facts = made.session.model.conversation, made.session.facts
    assert (facts.forks, [len(one.trajectory.turns) for one in conversation]) == (1, [2, 2])


KEPT = {
    "a reminder after the text": ("What is number 12?\n\n<reminder>\nBe brief.\n</reminder>", "What is number 12?", 0),
    "a reminder before the text": ("Be brief.\nWhat is number 12?", "What is  number 12?", 0),
    "a separate part": (
        [{"type": "text", "text": "number 12"}, {"type": "text", "text": "Be brief."}],
        "number 12",
        0,
    ),
    "a digit": ("number 12", "number 1", 1),
    "a word": ("What is number 12", "What is number", 1),
    "all text": ("What is number 12", "", 1),
    "a line in the middle": ("one\ntwo\nthree", "one\nthree", 1),
    "more": ("number 12", "number 12\nBe brief.", 1),
}


@pytest.mark.parametrize(("first", "then", "forks"), KEPT.values(), ids=KEPT)
async def test_transient_text_is_whole_lines_around_a_message(stage, first, then, forks):
    async with stage([END, END], branches=True, transient_context="keep") as made:
        answer = await made.chat([{"role": "user", "content": first}], tools=TOOLS)
        await made.chat([{"role": "user", "content": then}, answer, ASK], tools=TOOLS)
    assert made.session.facts.forks == forks


async def test_aborted_turn_is_continued_by_the_same_request_only(stage, shipped_tokenizer):
    """Outside of an episode, a client may continue as it likes after an aborted turn."""
    ids = ids_of(shipped_tokenizer, END)
    config = {"continue_aborted": False}
    async with stage([Reply.abort(ids[:3]), Reply.tokens(ids[3:])], **config) as made:
        assert (await made.post("chat", {"messages": [ASK], "tools": TOOLS}))[0] == 503
        assert (await made.chat([ASK], tools=TOOLS))["content"] == "It is 34."
    async with stage([Reply.abort(ids[:3]), END], branches=True, **config) as made:
        assert (await made.post("chat", {"messages": [ASK], "tools": TOOLS}))[0] == 503
        assert (await made.chat([ASK, ASK], tools=TOOLS))["content"] == "It is 34."
        segments = list(made.session.model.conversation)
    assert [one.trajectory.sampled_length for one in segments] == [3, len(ids)]
    assert made.session.facts.differences == [
        "request 2: message 1: got 1 more message after a turn that was interrupted"
    ]


async def test_count_tokens_endpoint_counts_as_the_policy_reads(stage):
    body = {"messages": [ASK], "system": "Be brief.", "tools": [{"name": "add", "input_schema": {}}]}
    async with stage([END]) as made:
        counted = await made.post("/v1/messages/count_tokens", body)
        await made.post("messages", body)
    assert counted == (200, {"input_tokens": len(made.fake.requests[0].input_ids)})


async def test_session_end_before_a_fork_keeps_sampled_tokens(stage: Any) -> None:
    async with stage([END, END]) as made:
        await made.chat([ASK], tools=TOOLS)
        sampled = made.session.model.trajectory.sampled_length
        spec = {"name": "another", "description": "", "inputSchema": {"json": {"type": "object"}}}
        asked = [{"role": "user", "content": [{"text": ASK["content"]}]}]
        head = made.session.model.conversation.branch.head
        changed = [*made.session.model.conversation.branch.history(), {"role": "user", "content": [{"text": "And?"}]}]
        request = TurnRequest([*asked, *changed[1:]], head.system, [*head.tools, spec], {}, "policy", streams=False)
        reply = asyncio.create_task(made.session.reply(request))
        await asyncio.sleep(0)  # the task of the turn exists but has not run yet
        made.session.end(SessionEndedError("it is over"))
        with pytest.raises(SessionEndedError):
            await reply
        await made.session.finish()
    assert made.session.facts.forks == 1
    assert made.session.model.trajectory.sampled_length == sampled
    assert not made.session.model.conversation.is_busy
