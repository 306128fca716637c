"""Whole episodes in a family's format against a scripted engine, and what its template makes of each of their contexts.

The expected tokens are those of the tokenizer's own `apply_chat_template` on the whole history up to a turn, from the
token that ended the turn before it on; nothing of this package renders them.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fake_sglang import FakeSGLang, Reply
from harness import ids_of
from parser_families import family
from strands import Agent, tool

from strands_rollout import SGLangModel
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.messages import to_chat_tools

MARK = "an-earlier-turn-{}"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a family ends turns."""

    answer: str  # token with which its template ends a turn without calls, before a user's
    calls: str  # token with which it ends a turn with calls
    sampled: str | None = None  # what the policy samples at the end of an answer, where that is another
    # of a turn's calls, as its results are shown under; None for those of this package
    ids: tuple[str, ...] | None = None
    is_parallel: bool = True  # whether a turn may have several calls
    users: int = 2  # how many user turns an episode with tools may have
    arguments_as_text: bool = False  # whether its template wants them so
    opens_reasoning: bool = False  # whether its prompt does
    silent: bool = False  # whether it shows words beside calls behind their results


_EOS = "<｜end▁of▁sentence｜>"  # noqa: RUF001 - DeepSeek's own characters
ENDINGS: dict[str, Ending] = {
    "hermes": Ending("<|im_end|>", "<|im_end|>"),
    "qwen3_coder": Ending("<|im_end|>", "<|im_end|>"),
    "glm4": Ending("<|user|>", "<|observation|>"),
    "glm4-7": Ending("<|user|>", "<|observation|>", opens_reasoning=True),
    "kimi_k2": Ending("<|im_end|>", "<|im_end|>", ids=("functions.add:0", "functions.add:1")),
    "deepseek_v3": Ending(_EOS, _EOS, arguments_as_text=True),
    "deepseek_v3-1": Ending(_EOS, _EOS),
    "deepseek_v3-2": Ending(_EOS, _EOS, opens_reasoning=True),
    "deepseek_v4": Ending(_EOS, _EOS, opens_reasoning=True),
    "minimax_m2": Ending("[e~[", "[e~[", opens_reasoning=True),
    "lfm2": Ending("<|im_end|>", "<|im_end|>"),
    "pythonic": Ending("<|eot|>", "<|eot|>"),
    "hunyuan3": Ending("<|user|>", "<|observation|>"),
    "hunyuan_a13b": Ending("<|eos|>", "<|eos|>"),
    "llama3_json": Ending("<|eot_id|>", "<|eot_id|>", is_parallel=False),
    "mistral-array": Ending("</s>", "</s>"),
    "mistral-nemo": Ending("</s>", "</s>", ids=("Ab3456780", "Ab3456781"), users=1),
    "mistral-named": Ending("</s>", "</s>"),
    "gpt_oss": Ending("<|end|>", "<|call|>", sampled="<|return|>", is_parallel=False),
    "apertus": Ending("<|assistant_end|>", "<|tools_suffix|>"),
    "gemma4": Ending("<turn|>", "<|tool_response>", silent=True),
    "kimi_k3": Ending("<|end_of_msg|>", "<|end_of_msg|>", opens_reasoning=True),
    "seed_oss": Ending("<seed:eos>", "<seed:eos>"),
    "smollm3": Ending("<|im_end|>", "<|im_end|>"),
    "deepseek_r1_tools": Ending(_EOS, _EOS),
    "hermes_tools": Ending("<|im_end|>", "<|im_end|>"),
    "command_r7b": Ending("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
}


@tool
def add(a: int, b: int, note: str = "") -> str:
    """Add."""
    return f'"{a + b}" <|im_end|> is {a} + {b} ({note})'


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode as it was sent: prompt, turn, context, turn, ..."""

    contexts: list[list[int]]  # the prompt, and what the policy read before each later turn
    expected: list[list[int]]  # the same by the template; from the end of the turn before on
    turns: list[list[int]]
    model: SGLangModel


async def play(known: str, tokenizer: Any, ending: Ending) -> PlayedEpisode:
    """Play an episode of several turns, with parallel calls where the family has them."""
    calls = [[("add", {"a": 1, "b": 2, "note": "x"})], [("add", {"a": 3, "b": 4, "note": "y"})]]
    calls[1] += [("add", {"a": 5, "b": 6, "note": ""})] if ending.is_parallel else []
    plan: list[list[Any]] = [calls[0], calls[1], [], *([calls[0], []] if ending.users > 1 else [])]
    turns = [_turn(known, tokenizer, ending, made) for made in plan]
    async with FakeSGLang([Reply.tokens(turn) for turn in turns]) as fake:
        model = SGLangModel(tokenizer, fake.base_url, tool_parser="auto")
        agent = Agent(model=model, callback_handler=None, retry_strategy=None, tools=[add])
        for number in range(ending.users):
            await agent.invoke_async(f"Question {number}?")
    sent = [request.input_ids for request in fake.requests]
    covered = [0, *(len(ids) + len(turn) for ids, turn in zip(sent, turns, strict=True))]
    contexts = [ids[start:] for ids, start in zip(sent, covered, strict=False)]
    assert all(later[: len(ids)] == ids for ids, later in itertools.pairwise(sent))
    history = _history(plan, ending, model)
    tools = to_chat_tools([add.tool_spec])
    expected = [expected_context(tokenizer, messages, ending, at, tools) for at, messages in enumerate(history)]
    for index, (turn, ids) in enumerate(zip(turns, expected[1:], strict=False), start=1):
        expected[index] = ids[1:] if turn[-1] == ids[0] else ids
    return PlayedEpisode(contexts, expected, turns, model)


def _turn(known: str, tokenizer: Any, ending: Ending, calls: Sequence[Any]) -> list[int]:
    said = family(known)
    why = "why" if ending.opens_reasoning else ""
    text = said.turn(
        reasoning=why, text="I add." if said.mixes else "", calls=calls, in_reasoning=ending.opens_reasoning
    )
    if not calls:
        text = said.turn(reasoning=why, text="Done.", in_reasoning=ending.opens_reasoning)
    end = ending.calls if calls else (ending.sampled or ending.answer)
    return [*ids_of(tokenizer, text), tokenizer.convert_tokens_to_ids(end)]


def _history(plan: Sequence[Sequence[Any]], ending: Ending, model: SGLangModel) -> list[list[dict[str, Any]]]:
    """The messages before each turn of the policy."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Question 0?"}]
    found, users = [], 1
    for number, made in enumerate(plan):
        found.append(list(messages))
        mark = MARK.format(number)
        calls, results = [], []
        for at, (name, given) in enumerate(made):
            call_id = ending.ids[at] if ending.ids else _own_id(model, number + 1, at)
            arguments = {"a": 1, "b": 2, "note": mark}
            given_form = json.dumps(arguments) if ending.arguments_as_text else arguments
            calls.append({"type": "function", "id": call_id, "function": {"name": name, "arguments": given_form}})
            results.append({"role": "tool", "name": name, "tool_call_id": call_id, "content": add(**given)})
        words = "" if calls and ending.silent else mark
        answer = {"role": "assistant", "content": words, **({"tool_calls": calls} if calls else {})}
        messages += [answer, *(results or [{"role": "user", "content": f"Question {users}?"}])]
        users += not made
    return found


def _own_id(model: SGLangModel, turn: int, at: int) -> str:
    """The id under which this package shows the result of a call without one, or with words before it."""
    shown = model.conversation.last.shown_ids
    return [value for key, value in shown.items() if key.startswith(f"call_{turn}_")][at]


def expected_context(
    tokenizer: Any, messages: Sequence[Any], ending: Ending, number: int, tools: Sequence[Any]
) -> list[int]:
    """What a template makes of messages, from the end of the assistant's turn before `number` on, if there is one.

    Text that looks like control tokens is none, as everywhere.
    """
    encoder = ChatTemplate(tokenizer).encoder
    shown = [{**message, "content": encoder.escape(message["content"])} for message in messages]
    named = {"tools": list(tools), "xml_tools": list(tools)}
    rendered = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True, **named)
    if number:
        mark = MARK.format(number - 1)
        end = ending.calls if messages[-1]["role"] == "tool" else ending.answer
        rendered = rendered[rendered.index(end, rendered.rindex(mark)) :]
    return encoder.encode_rendered(rendered)
