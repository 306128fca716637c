"""Each text of an episode is encoded once, and a history is compared without a step for each of its messages.

Counts of calls, never times.
"""

import copy
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from threading import Thread, current_thread
from typing import Any

import pytest
from fake_sglang import Reply
from harness import ANSWER, TOOL_CALL, ids_of, run
from strands import tool
from tokenizers import Tokenizer

from strands_rollout import Sample
from strands_rollout.model.conversation import HistorySegment, ModelCall, token_count
from strands_rollout.model.sampling import Room
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.tokens import TokenEncoder

numbers = iter(range(10**9))


@tool
async def count_up() -> str:
    """Give a text that no call has given before."""
    return f"number {next(numbers)}\nof " + "many numbers " * 20


SETTINGS = {"tools": [f"{__name__}.count_up"], "max_tool_iterations": None}
CALL = TOOL_CALL.format(name="count_up", arguments="{}")


async def calls_of(work: Callable[[], Awaitable[object]]) -> Counter[str]:
    """Calls of this thread meanwhile: functions by name, a tokenizer's methods as `Tokenizer.name`."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            owner = "Tokenizer." if isinstance(getattr(arg, "__self__", None), Tokenizer) else ""
            calls[owner + arg.__name__] += 1

    gc.disable()  # its callbacks would be counted
    sys.setprofile(note)
    try:
        await work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


WORDS = "The quick brown fox jumps over the lazy dog. " * 8000


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": WORDS}],
        [{"role": "user", "content": "<|im_end|>" * 30_000}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": WORDS}, {"role": "user", "content": "b"}],
    ],
    ids=["words", "control tokens", "earlier turns"],
)
async def test_a_long_prompt_is_encoded_beside_the_loop(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, chat: list[Any]
) -> None:
    threads: list[Thread] = []
    encode = TokenEncoder.encode_rendered

    def noting(self: TokenEncoder, rendered: str) -> list[int]:
        threads.append(current_thread())
        return encode(self, rendered)

    template = ChatTemplate(shipped_tokenizer)
    monkeypatch.setattr(TokenEncoder, "encode_rendered", noting)
    messages = [{**message, "content": [{"text": message["content"]}]} for message in chat]
    await HistorySegment(template).new_context(ModelCall(messages, []), Room(None, "context"), 1)
    assert threads
    assert current_thread() not in threads


def test_long_texts_have_the_ids_that_short_ones_have(shipped_tokenizer: Any) -> None:
    encoder = TokenEncoder(shipped_tokenizer)
    for text in (WORDS, "7" * 20_000, " \n" * 10_000, "<|im_end|>x" * 2000, "数é\u0301🎉" * 4000):
        assert encoder.encode_trusted(text) == shipped_tokenizer.encode(text, add_special_tokens=False)


async def episode(tokenizer: Any, turns: int, prompt: str = "Count.") -> Sample:
    """An episode within limits; none of its turns is encoded here."""
    call, answer = (Reply.tokens(ids_of(tokenizer, text)) for text in (CALL, ANSWER))
    limits = {"params": {"max_new_tokens": 60_000}, "context_length": 10**6}
    played = await run(tokenizer, [*[call] * turns, answer], prompt=prompt, settings=SETTINGS, **limits)
    assert played.facts["stop_reason"] == "completed", played.facts
    return played.sample


async def test_a_tool_result_is_encoded_once_and_its_turn_is_not_rendered(tokenizer: Any) -> None:
    await episode(tokenizer, 2)  # what is found out once per process
    few = await calls_of(lambda: episode(tokenizer, 3))
    many = await calls_of(lambda: episode(tokenizer, 10))
    assert many["Tokenizer.encode"] - few["Tokenizer.encode"] == 7
    assert many["apply_chat_template"] == few["apply_chat_template"]
    assert many["_chat_tool"] == few["_chat_tool"]  # nor are the tools made ready for it
    assert many["Tokenizer.decode"] == few["Tokenizer.decode"] == 0


async def test_an_encoder_is_made_without_a_copy_of_the_vocabulary(tokenizer: Any) -> None:
    async def make() -> None:
        TokenEncoder(tokenizer)

    calls = await calls_of(make)
    assert calls["Tokenizer.to_str"] == calls["from_str"] == calls["Tokenizer.get_vocab"] == 0


async def test_the_samples_of_a_group_encode_their_prompt_once(tokenizer: Any) -> None:
    first = await calls_of(lambda: episode(tokenizer, 0, "Say what no other test has asked."))
    second = await calls_of(lambda: episode(tokenizer, 0, "Say what no other test has asked."))
    assert first["apply_chat_template"] == 1
    assert second["apply_chat_template"] == 0


async def test_what_was_counted_is_not_encoded_again(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    segment = HistorySegment(template)
    first = [{"role": "user", "content": [{"text": "first, and never asked before"}]}]
    counted = await token_count(template, ModelCall(first, None, "Be brief."))
    sent: list[int] = []

    async def send(messages: list[dict[str, Any]]) -> None:
        sent[:] = await segment.new_context(ModelCall(messages, None, "Be brief."), Room(10_000, "response"), 16)

    assert (await calls_of(lambda: send(first)))["Tokenizer.encode"] == 0
    assert len(sent) == counted
    segment.trajectory.append_turn(
        sent, [template.end_of_turn_id], [-0.5], finish_reason="stop", rid="r", latency_s=0.0
    )
    segment.accept(first)
    more = [*first, ASKED, answered("a result that was counted")]
    counted = await token_count(template, ModelCall(more[2:]))
    assert (await calls_of(lambda: send(more)))["Tokenizer.encode"] == 0
    assert len(sent) == counted


ASKED = {"role": "assistant", "content": [{"toolUse": {"toolUseId": "call_1_0", "name": "run", "input": {"x": [1]}}}]}


def answered(text: str) -> dict[str, Any]:
    result = {"toolUseId": "call_1_0", "status": "success", "content": [{"text": text}]}
    return {"role": "user", "content": [{"toolResult": result}]}


def history(length: int) -> list[dict[str, Any]]:
    """Messages, no two of which share an object that could be changed."""
    pairs = [copy.deepcopy([ASKED, answered(f"result {n}")]) for n in range(length)]
    return [{"role": "user", "content": [{"text": "first"}]}, *(message for pair in pairs for message in pair)]


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda messages: messages[0]["content"][0].update(text="another"),
        lambda messages: messages[1]["content"][0]["toolUse"]["input"]["x"].append(2),
        lambda messages: messages[2]["content"][0]["toolResult"]["content"].clear(),
        lambda messages: messages[2]["content"].append({"text": "psst"}),
        lambda messages: messages[2].update(role="assistant"),
        lambda messages: messages.pop(0),
    ],
)
def test_a_history_that_is_rewritten_in_place_is_seen(shipped_tokenizer: Any, rewrite: Callable[[Any], object]) -> None:
    segment, messages = HistorySegment(ChatTemplate(shipped_tokenizer)), history(2)
    segment.accept(messages)
    messages[1]["metadata"] = {"usage": {"inputTokens": 1}}  # notes beside a message are no rewriting
    assert segment.is_covered(messages)
    messages += history(1)[1:]
    assert segment.is_extended_by(messages)
    rewrite(messages)
    assert not segment.is_extended_by(messages)
    assert not segment.is_covered(messages[: segment.covered_messages])


async def test_a_long_history_is_compared_and_remembered_in_as_many_calls_as_a_short_one(
    shipped_tokenizer: Any,
) -> None:
    async def costs(length: int) -> Counter[str]:
        segment, messages = HistorySegment(ChatTemplate(shipped_tokenizer)), history(length)
        segment.accept(messages)
        messages += history(1)[1:]

        async def turn() -> None:
            assert segment.is_extended_by(messages)
            segment.accept(messages)

        return await calls_of(turn)

    assert await costs(500) == await costs(2)


async def test_a_sample_keeps_little_beside_its_token_arrays(shipped_tokenizer: Any) -> None:
    sample = await episode(shipped_tokenizer, 20)
    arrays = size_of([sample.tokens, sample.loss_mask, sample.rollout_log_probs])
    assert size_of(vars(sample)) < 2 * arrays


def size_of(value: Any) -> int:
    """Bytes of all that is reached from a value, each object once, classes and modules left out."""
    seen: set[int] = set()
    left, size = [value], 0
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        left += gc.get_referents(one)
    return size


def test_what_slime_loads_imports_no_transformers() -> None:
    code = (
        "import sys, strands_rollout\n"
        "strands_rollout.generate, strands_rollout.reward_func\n"
        "print([name for name in ('transformers', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
