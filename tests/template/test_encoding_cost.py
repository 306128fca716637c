"""Each text of an episode is encoded once, and comparing a history takes no step for each of its messages.

The tests count calls, and measure no times.
"""

import copy
import gc
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

from strands_rollout.model.context import first_prompt
from strands_rollout.record.agent_request import has_read_exactly, is_extended_by
from strands_rollout.record.record import Branch, Head
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.tokens import TokenEncoder

numbers = iter(range(10**9))


@tool
async def count_up() -> str:
    """Return a text that no earlier call has returned."""
    return f"number {next(numbers)}\nof " + "many numbers " * 20


SETTINGS = {"tools": [f"{__name__}.count_up"], "max_tool_iterations": None}
CALL = TOOL_CALL.format(name="count_up", arguments="{}")


async def calls_of(work: Callable[[], Awaitable[object]]) -> Counter[str]:
    """Count this thread's calls during `work` by function name; a tokenizer's methods are `Tokenizer.NAME`."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            owner = "Tokenizer." if isinstance(getattr(arg, "__self__", None), Tokenizer) else ""
            calls[owner + arg.__name__] += 1

    gc.disable()  # callbacks of the collector would be counted
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
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": WORDS}, {"role": "user", "content": "b"}],
    ],
    ids=["words", "earlier turns"],
)
async def test_long_prompt_is_encoded_off_the_loop(shipped_tokenizer, monkeypatch, chat) -> None:
    threads: list[Thread] = []
    encode = TokenEncoder.encode_rendered

    def noting(self: TokenEncoder, rendered: str) -> list[int]:
        threads.append(current_thread())
        return encode(self, rendered)

    template = ChatTemplate(shipped_tokenizer)
    monkeypatch.setattr(TokenEncoder, "encode_rendered", noting)
    messages = [{**message, "content": [{"text": message["content"]}]} for message in chat]
    await first_prompt(template, Branch(), Head(), messages)
    assert threads
    assert current_thread() not in threads


def test_encode_long_text_equals_short_path(shipped_tokenizer: Any) -> None:
    encoder = TokenEncoder(shipped_tokenizer)
    for text in (WORDS, "7" * 20_000, " \n" * 10_000, "<|im_end|>x" * 2000, "数é\u0301🎉" * 4000):
        assert encoder.encode_trusted(text) == shipped_tokenizer.encode(text, add_special_tokens=False)


async def episode(tokenizer: Any, turns: int, prompt: str = "Count.") -> None:
    """Play an episode within its limits; the turns are given as ids."""
    call, answer = (Reply.tokens(ids_of(tokenizer, text)) for text in (CALL, ANSWER))
    limits = {"params": {"max_new_tokens": 60_000}, "context_length": 10**6}
    played = await run(tokenizer, [*[call] * turns, answer], prompt=prompt, settings=SETTINGS, **limits)
    assert played.facts["stop_reason"] == "completed", played.facts


async def test_tool_result_is_encoded_once_and_not_rendered(shipped_tokenizer: Any) -> None:
    await episode(shipped_tokenizer, 2)  # fills the caches of the process
    few = await calls_of(lambda: episode(shipped_tokenizer, 3))
    many = await calls_of(lambda: episode(shipped_tokenizer, 10))
    assert many["Tokenizer.encode"] - few["Tokenizer.encode"] == 7
    assert many["apply_chat_template"] == few["apply_chat_template"]
    assert many["_chat_tool"] == few["_chat_tool"]  # the tools are not converted again either
    assert many["Tokenizer.decode"] == few["Tokenizer.decode"] == 0


async def test_group_encodes_its_prompt_once(shipped_tokenizer: Any) -> None:
    first = await calls_of(lambda: episode(shipped_tokenizer, 0, "Say what no other test has asked."))
    second = await calls_of(lambda: episode(shipped_tokenizer, 0, "Say what no other test has asked."))
    assert (first["apply_chat_template"], second["apply_chat_template"]) == (1, 0)


ASKED = {"role": "assistant", "content": [{"toolUse": {"toolUseId": "call_1_0", "name": "run", "input": {"x": [1]}}}]}


def answered(text: str) -> dict[str, Any]:
    result = {"toolUseId": "call_1_0", "status": "success", "content": [{"text": text}]}
    return {"role": "user", "content": [{"toolResult": result}]}


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
def test_history_rewritten_in_place_is_noticed(rewrite: Callable[[Any], object]) -> None:
    branch = Branch()
    messages = [{"role": "user", "content": [{"text": "first"}]}, copy.deepcopy(ASKED), answered("result 1")]
    branch.append_read(messages)
    messages[1]["metadata"] = {"usage": {"inputTokens": 1}}  # added metadata does not count as a change
    assert has_read_exactly(branch, messages)
    messages += [copy.deepcopy(ASKED), answered("result 2")]
    assert is_extended_by(branch, messages)
    rewrite(messages)
    assert not is_extended_by(branch, messages)
    assert not has_read_exactly(branch, messages[: branch.covered])
