"""One sample as the page shows it: a row of the list, and details to be read when it is opened."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from strands_rollout.code_tool.sandbox.code_runner import shorten
from strands_rollout.dump import DumpRecord, TokenTexts
from strands_rollout.dump.record import steps_of, sums_of, text_or_bytes, without_secrets
from strands_rollout.files.json_codec import Json
from strands_rollout.samples import (
    METADATA_KEY,
    UNGRADED_METHODS,
    EpisodeFacts,
    finite,
    recorded_facts,
    run_metric,
)
from strands_rollout.template.tokens import token_bytes
from strands_rollout.view.conversation import conversation
from strands_rollout.view.problems import Problem, find_problems, reward_key
from strands_rollout.view.tokens import DriftMark, TokenLists, TurnHabits, drift_marks, runs, token_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INTEGER_BITS: Final = 63
_DROPPED: Final = frozenset({"failed", "removed", "stale", "masked"})
_PREVIEW_CHARS: Final = 160
_MAX_TEXT_CHARS: Final = 20_000
_MAX_PARTS: Final = 12
_PART_CHARS: Final = 40


class Retokeniser:
    """Encodes turns again with the policy's tokenizer; knows the bytes of its ids, and which of them were added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = TokenTexts(tokenizer)
        self.controls = frozenset(tokenizer.get_added_vocab().values())
        self._tokenizer = tokenizer
        self._bytes_of = token_bytes(tokenizer)

    def marks(self, lists: TokenLists) -> list[DriftMark] | None:
        """Mark drift in all turns, in order, at places from the sample's first token.

        None where ids are not the tokenizer's.
        """

        def marks() -> list[DriftMark]:
            return [
                DriftMark(start + mark.start, start + mark.end, mark.instead)
                for start, end in lists.turns
                for mark in drift_marks(
                    lists.ids[start:end], self._tokenizer, self._bytes_of, lists.ids[start - 1] if start else None
                )
            ]

        return run_metric("drift", marks, of_sample=True)


def view_sample(
    record: DumpRecord, habits: TurnHabits, retokeniser: Retokeniser | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a sample's row and details, as values of JSON; the habits are its dump's.

    Without a retokeniser there are no marks of drift, and no texts but the record's.
    """
    lists = TokenLists.of(record)
    marks = retokeniser.marks(lists) if retokeniser is not None and record.has_tokens else None
    texts = record.token_texts
    if retokeniser is not None:
        ids = {*lists.ids, *(token for mark in marks or () for token in mark.instead)}
        texts = {token: retokeniser.texts[token] for token in sorted(ids) if token in retokeniser.texts}
    judged = _Judged(record, lists, token_kinds(record, lists), marks, find_problems(record, lists, habits), texts)
    return _row(judged), _detail(judged)


class _Judged(NamedTuple):
    record: DumpRecord
    lists: TokenLists
    kinds: list[str]
    marks: list[DriftMark] | None
    problems: list[Problem]
    texts: Mapping[int, bytes]


def _row(judged: _Judged) -> dict[str, Any]:
    record, lists, kinds, marks, problems, _ = judged
    values, facts = record.values, record.facts
    grade = _grade(record)
    # what failed, or was not graded, by a fault of the infrastructure is neither right nor wrong
    is_missing = values.get("status") in ("failed", "aborted") or grade.get("method") in UNGRADED_METHODS
    return {
        "index": values.get("index"),
        "group": _group(values),
        "set": _text(_evaluated(values).get("data_set")),
        "question": _question_id(values),
        "part": _part(facts),
        "status": _text(values.get("status")),
        "stop": _text(facts.stop_reason),
        "reward": None if is_missing else _reward(record),
        "right": None if is_missing else _number(grade.get("acc")),
        "parts": _parts(grade),
        "answer": shorten(_text(grade["pred"]), _PREVIEW_CHARS) if "pred" in grade else None,
        "turns": len(lists.turns) if facts.turns is None else facts.turns,
        "calls": facts.tool_calls,
        "errors": facts.tool_errors,
        "tools": _tools(facts),
        "length": finite(values.get("response_length")),
        "trained": kinds.count("trained"),
        "dropped": sum(kind in _DROPPED for kind in kinds),
        "drift": None if marks is None else sum(mark.end - mark.start for mark in marks),
        "problems": list(dict.fromkeys(problem.kind for problem in problems)),
        "times": sums_of(facts),
        "versions": sorted({span.version for span in lists.spans if span.version is not None}),
        "asked": shorten(_question(values.get("prompt")), _PREVIEW_CHARS),
        "final": shorten(_text(facts.final_text or values.get("response")), _PREVIEW_CHARS),
        "label": shorten(_text(values.get("label")), _PREVIEW_CHARS),
        "where": record.where,
        "source": record.source,
    }


def _detail(judged: _Judged) -> dict[str, Any]:
    record, lists, kinds, marks, problems, texts = judged
    values = record.values
    given = values.get("metadata")
    metadata = without_secrets(given) if isinstance(given, Mapping) else {}
    facts = recorded_facts(metadata)
    if facts:
        del metadata[METADATA_KEY]
    facts = {name: value for name, value in facts.items() if name not in ("spans", "resume", "final_text", "requests")}
    return {
        "ids": lists.ids,
        "prompt": lists.prompt_length,
        "kinds": [list(run) for run in runs(kinds)],
        "mask": [[int(bool(kind)), start, end] for kind, start, end in runs(lists.loss_mask)],
        "logprobs": [round(value, 3) if math.isfinite(value) else None for value in lists.logprobs],
        "spans": [list(span) for span in lists.spans],
        "drift": None if marks is None else [list(mark) for mark in marks],
        "problems": [list(problem) for problem in problems],
        "talk": [[start, plain(parts)] for start, parts in conversation(lists, texts, record.facts)],
        "steps": [[step.kind, step.at_s, step.s, step.turn, step.call] for step in steps_of(record.facts)],
        "texts": {str(token): text_or_bytes(text) for token, text in texts.items()},
        "messages": plain(values.get("prompt")),
        "response": _text(values.get("response")) if not texts or not lists.ids else "",
        "reward": plain(values.get("reward")),
        "label": plain(values.get("label")),
        "facts": plain(facts),
        "metadata": plain(metadata),
    }


def _reward(record: DumpRecord) -> float | None:
    reward, key = record.values.get("reward"), reward_key(record)
    return _number(reward.get(key) if key is not None and isinstance(reward, Mapping) else reward)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, bool) else finite(value)


def _grade(record: DumpRecord) -> Mapping[str, Any]:
    """Find the reward function's verdict: in the reward, or, where slime reads a number alone, in the facts."""
    reward = record.values.get("reward")
    return reward if isinstance(reward, Mapping) else record.facts.reward or {}


def _parts(grade: Mapping[str, Any]) -> dict[str, float]:
    """Read the further numbers of a reward, by name."""
    numbers = {name: _number(value) for name, value in grade.items() if name not in ("score", "acc")}
    named = {str(plain(name)).removeprefix("parts/")[:_PART_CHARS]: number for name, number in numbers.items()}
    return {name: number for name, number in list(named.items())[:_MAX_PARTS] if number is not None}


def _tools(facts: EpisodeFacts) -> dict[str, list[int]]:
    """Count calls by tool, and how many of them were no success or exited with an error."""
    found, calls = Counter[str](), Counter[str]()
    for call in facts.calls or ():
        if isinstance(call, Mapping):
            box, name = call.get("sandbox"), _text(call.get("tool"))
            calls[name] += 1
            found[name] += call.get("status") != "success" or bool(isinstance(box, Mapping) and box.get("exit_code"))
    return {name: [count, found[name]] for name, count in calls.items()}


def _evaluated(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the problem and data set that an evaluation asked; empty in training."""
    metadata = values.get("metadata")
    asked = metadata.get("eval") if isinstance(metadata, Mapping) else None
    return asked if isinstance(asked, Mapping) else {}


def _group(values: Mapping[str, Any]) -> Json:
    """Name the group in slime, or an evaluation's problem, whose samples are to be seen side by side."""
    asked = _evaluated(values)
    if values.get("group_index") is None and asked:
        return f"{asked['data_set']}/{asked['problem']}"
    return values.get("group_index")


def _question_id(values: Mapping[str, Any]) -> str:
    """Name a sample's question, in all runs alike; "" where it is not known."""
    asked, prompt = _evaluated(values), values.get("prompt")
    if asked:
        return f"{asked['data_set']}/{asked['problem']}"
    text = json.dumps(plain(prompt), ensure_ascii=False) if prompt else ""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest() if text else ""


def _part(facts: EpisodeFacts) -> str:
    """Name a sample's place in its fan-out; "" for a rollout of its own."""
    part = facts.fan_out
    return f"{part['kind']}, {part['part'] + 1} of {part['of']}" if part and part["of"] > 1 else ""


def _question(prompt: Json) -> str:
    """Return a user's last message, or the prompt where it is a text."""
    if not isinstance(prompt, list):
        return _text(prompt)
    of_user = [message for message in prompt if message.get("role") == "user"]
    said = of_user[-1].get("content") if of_user else ""
    parts = said if isinstance(said, list) else [{"text": said}]
    return " ".join(_text(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in parts)


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(plain(value)) if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def plain(value: object) -> Json:
    """Make a value JSON for people to read: long texts shortened, and as Python writes it where JSON has no form."""
    if isinstance(value, str):
        return shorten(value, _MAX_TEXT_CHARS).encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value.bit_length() <= _INTEGER_BITS):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else repr(value)[:_PREVIEW_CHARS]
