"""Random hostile turns: tool calls in every format with unexpected names, keys and values, and damaged text.

Each turn comes from a `random.Random`, so a failure can be repeated with its seed.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from fake_sglang import Reply
from parser_families import Family

NAMES = (
    *("echo", "reflect", "raw", "weird") * 3, "handoff_to_agent", "invalid_tool_call", "INVALID_TOOL_NAME", "Answer",
    "execute_python_code", "strands_rollout", "call_1_0_unparsed", "tooluse_1", "no.such", "agent", "self", "", " ",
    "é日", "a b", "x" * 64, "x" * 65, "x" * 5000, "functions.echo", "<|im_end|>", "{{ x }}", "%s", r"\u0000",
    r"\ud800", "echo:0", "echo\\n",
)  # fmt: skip
KEYS = (
    *("text", "n", "f", "items", "flag", "d", "value", "kind") * 2, "agent_name", "message", "context", "agent",
    "self", "cls", "kwargs", "tool_context", "toolUseId", "run_in_background", "model_config", "__class__", "", "a b",
    "<|im_end|>", r"\ud800", "$ref",
)  # fmt: skip
KINDS = ("raise", "surrogate", "cause", "deep", "huge", "bytes", "set", "cycle", "object", "generator", "cancel")
VALUES = (
    "1", "-0", "1.5", "true", "null", '""', '"x"', "x", '"other"', "[]", "{}", "True", "None", "['a', 'b']", "9" * 19,
    "9" * 308, "9" * 309, "-" + "9" * 400, "9" * 4300, "9" * 4301, "1e308", "1e309", "-1.7e308", "1e999999",
    "1e-999999", "0." + "3" * 5000, "NaN", "-Infinity", r'"\ud800"', r'"\ud83d\ude00"', r'"\u0000"',
    '"<|im_end|>\\n<|im_start|>assistant"', '{"a": 1, "a": 2}', '{"status": "success", "content": [{"text": "x"}]}',
    '{"status": "error", "content": 5}',
    '{"status": 7, "content": [{"text": null}, {"json": {}}, {"image": 1}, {}, 3]}',
    '{"status": "success", "content": [{"image": {"format": "png", "source": {"bytes": "x"}}}, {"text": []}]}',
    '{"status": "success", "content": {"text": "x"}, "toolUseId": "call_1_0"}', '[{"toolResult": {}}]',
    '"' + "y" * 3000 + '"', "[" * 40 + "]" * 40, "[" * 99 + "]" * 99, "[" * 101 + "]" * 101,
    '{"a":' * 98 + "1" + "}" * 98, "[" * 3000 + "]" * 3000, "[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000, "[1,",
    '"open', *(f'"{kind}"' for kind in KINDS),
)  # fmt: skip


def raw_turn(family: Family, calls: Sequence[tuple[str, Mapping[str, str]]], **more: Any) -> str:
    """Return a turn whose calls contain names, keys and values literally, valid JSON or not; see `Family.turn`."""
    marked, raw = [], {}
    for number, (name, arguments) in enumerate(calls):
        given = {}
        for place, (key, value) in enumerate(arguments.items()):
            raw[f"@k{number}.{place}@"], raw[f"@v{number}.{place}@"] = key, value
            given[f"@k{number}.{place}@"] = f"@v{number}.{place}@"
        raw[f"@n{number}@"] = name
        marked.append((f"@n{number}@", given))
    text = family.turn(calls=marked, **more)
    for mark, written in raw.items():
        text = text.replace(f'"{mark}"', written) if mark.startswith("@v") else text
        text = text.replace(mark, written)
    return text


def random_turn(family: Family, rng: random.Random, *, in_reasoning: bool = False) -> str:
    """Return the text of a random turn without its end token."""
    calls = [
        (rng.choice(NAMES), {rng.choice(KEYS): rng.choice(VALUES) for _ in range(rng.choice((0, 1, 1, 2, 4)))})
        for _ in range(rng.choice((0, *(1,) * 10, *(2, 3) * 5, 30)))
    ]
    thought = rng.choice(("", "", "hm", family.pieces[0]))
    answer = rng.choice(("", "", "so: ", "\\boxed{34}", " \n"))
    text = raw_turn(family, calls, reasoning=thought, text=answer, in_reasoning=in_reasoning)
    for _ in range(rng.choice((*(0,) * 6, 1, 2, 5))):
        text = _damaged(text, family.pieces, rng)
    return text


def _damaged(text: str, pieces: Sequence[str], rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    kind = rng.randrange(4)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + text[at + rng.choice((1, 3, 20)) :]
    if kind == 2:
        return text + text[at:]
    return text[:at] + rng.choice((*pieces, "\x00", "\ufffd", '"', "}", "<", " ")) + text[at:]


def random_reply(tokenizer: Any, text: str, rng: random.Random, ends: Sequence[int]) -> Reply:
    """Return a reply with the first 20,000 tokens of `text`, sometimes random tokens among them, and a random end."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))[:20_000]
    for _ in range(rng.choice((*(0,) * 6, 1, 4))):
        ids.insert(rng.randrange(len(ids) + 1), rng.randrange(len(tokenizer)))
    kind = rng.randrange(12)
    if kind == 0 and ids:
        return Reply.tokens(ids, "length")
    if kind == 1 and ids:
        return Reply.tokens(ids, matched=rng.choice(("</tool_call>", "x", "")))
    return Reply.tokens([*ids, rng.choice(ends)])
