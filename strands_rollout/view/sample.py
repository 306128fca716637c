"""Build a sample's values for the page: its row in the list, and the details of the opened sample."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from strands_rollout.code_tool.sandbox.code_runner import shorten
from strands_rollout.dump import DumpRecord, TokenTexts
from strands_rollout.dump.record import durations_of, steps_of, text_or_bytes, without_secrets
from strands_rollout.files.json_codec import Json
from strands_rollout.samples import (
    METADATA_KEY,
    UNGRADED_METHODS,
    EpisodeFacts,
    finite_number,
    recorded_facts,
    run_metric,
)
from strands_rollout.template.tokens import token_bytes
from strands_rollout.view.conversation import read_conversation
from strands_rollout.view.problems import Problem, find_problems, reward_key
from strands_rollout.view.tokens import DriftMark, TokenLists, TurnHabits, drift_marks, equal_runs, token_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INTEGER_BITS: Final = 63
_DROPPED: Final = frozenset({"failed", "removed", "stale", "masked"})
_PREVIEW_CHARS: Final = 160
_MAX_TEXT_CHARS: Final = 20_000
_MAX_PARTS: Final = 12
_PART_CHARS: Final = 40


class Retokenizer:
    """Detector of drift, which encodes turns again with the policy's tokenizer.

    Attributes:
        texts: Bytes of the tokenizer's ids.
        controls: Ids that were added to the vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = TokenTexts(tokenizer)
        self.controls = frozenset(tokenizer.get_added_vocab().values())
        self._tokenizer = tokenizer
        self._bytes_of = token_bytes(tokenizer)

    def marks(self, lists: TokenLists) -> list[DriftMark] | None:
        """Return the drift marks of all turns, in order, with positions in the sample's tokens.

        Return None if measuring fails, for example on ids of another tokenizer.
        """

        def marks() -> list[DriftMark]:
            return [
                DriftMark(start + mark.start, start + mark.end, mark.replacement)
                for start, end in lists.turns
                for mark in drift_marks(
                    lists.ids[start:end], self._tokenizer, self._bytes_of, lists.ids[start - 1] if start else None
                )
            ]

        return run_metric("drift", marks, of_sample=True)


def view_sample(
    record: DumpRecord, habits: TurnHabits, retokenizer: Retokenizer | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a sample's row and details as JSON values.

    Args:
        record: The sample's record in the dump.
        habits: The rules that most turns of the sample's dump follow.
        retokenizer: Marks drift and has the texts of tokens. If it is None, drift is not marked, and the texts come
            from the dump.
    """
    lists = TokenLists.from_record(record)
    marks = retokenizer.marks(lists) if retokenizer is not None and record.has_tokens else None
    texts = record.token_texts
    if retokenizer is not None:
        ids = {*lists.ids, *(token for mark in marks or () for token in mark.replacement)}
        texts = {token: retokenizer.texts[token] for token in sorted(ids) if token in retokenizer.texts}
    analysis = _Analysis(record, lists, token_kinds(record, lists), marks, find_problems(record, lists, habits), texts)
    return _row(analysis), _detail(analysis)


class _Analysis(NamedTuple):
    record: DumpRecord
    lists: TokenLists
    kinds: list[str]
    marks: list[DriftMark] | None
    problems: list[Problem]
    texts: Mapping[int, bytes]


def _row(analysis: _Analysis) -> dict[str, Any]:
    record, lists, kinds, marks, problems, _ = analysis
    values, facts = record.values, record.facts
    grade = _grade(record)
    # samples that failed, were aborted or have no verdict of the reward are neither right nor wrong
    is_missing = values.get("status") in ("failed", "aborted") or grade.get("method") in UNGRADED_METHODS
    return {
        "index": values.get("index"),
        "group": _group(values),
        "set": _as_text(_evaluated_problem(values).get("data_set")),
        "question": _question_id(values),
        "part": _fan_out_part(facts),
        "status": _as_text(values.get("status")),
        "stop": _as_text(facts.stop_reason),
        "reward": None if is_missing else _reward(record),
        "right": None if is_missing else _as_number(grade.get("acc")),
        "parts": _reward_parts(grade),
        "answer": shorten(_as_text(grade["pred"]), _PREVIEW_CHARS) if "pred" in grade else None,
        "turns": len(lists.turns) if facts.turns is None else facts.turns,
        "calls": facts.tool_calls,
        "errors": facts.tool_errors,
        "tools": _tool_counts(facts),
        "length": finite_number(values.get("response_length")),
        "trained": kinds.count("trained"),
        "dropped": sum(kind in _DROPPED for kind in kinds),
        "drift": None if marks is None else sum(mark.end - mark.start for mark in marks),
        "problems": list(dict.fromkeys(problem.kind for problem in problems)),
        "times": durations_of(facts),
        "versions": sorted({span.version for span in lists.spans if span.version is not None}),
        "asked": shorten(_last_user_text(values.get("prompt")), _PREVIEW_CHARS),
        "final": shorten(_as_text(facts.final_text or values.get("response")), _PREVIEW_CHARS),
        "label": shorten(_as_text(values.get("label")), _PREVIEW_CHARS),
        "where": record.where,
        "source": record.source,
    }


def _detail(analysis: _Analysis) -> dict[str, Any]:
    record, lists, kinds, marks, problems, texts = analysis
    values = record.values
    recorded = values.get("metadata")
    metadata = without_secrets(recorded) if isinstance(recorded, Mapping) else {}
    facts = recorded_facts(metadata)
    if facts:
        del metadata[METADATA_KEY]
    facts = {name: value for name, value in facts.items() if name not in ("spans", "resume", "final_text", "requests")}
    return {
        "ids": lists.ids,
        "prompt": lists.prompt_length,
        "kinds": [list(run) for run in equal_runs(kinds)],
        "mask": [[int(bool(kind)), start, end] for kind, start, end in equal_runs(lists.loss_mask)],
        "logprobs": [round(value, 3) if math.isfinite(value) else None for value in lists.logprobs],
        "spans": [list(span) for span in lists.spans],
        "drift": None if marks is None else [list(mark) for mark in marks],
        "problems": [list(problem) for problem in problems],
        "talk": [[start, to_plain(parts)] for start, parts in read_conversation(lists, texts, record.facts)],
        "steps": [[step.kind, step.at_s, step.s, step.turn, step.call] for step in steps_of(record.facts)],
        "texts": {str(token): text_or_bytes(text) for token, text in texts.items()},
        "messages": to_plain(values.get("prompt")),
        "response": _as_text(values.get("response")) if not texts or not lists.ids else "",
        "reward": to_plain(values.get("reward")),
        "label": to_plain(values.get("label")),
        "facts": to_plain(facts),
        "metadata": to_plain(metadata),
    }


def _reward(record: DumpRecord) -> float | None:
    reward, key = record.values.get("reward"), reward_key(record)
    return _as_number(reward.get(key) if key is not None and isinstance(reward, Mapping) else reward)


def _as_number(value: object) -> float | None:
    return float(value) if isinstance(value, bool) else finite_number(value)


def _grade(record: DumpRecord) -> Mapping[str, Any]:
    reward = record.values.get("reward")
    return reward if isinstance(reward, Mapping) else record.facts.reward or {}


def _reward_parts(grade: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: _as_number(value) for name, value in grade.items() if name not in ("score", "acc")}
    parts = {str(to_plain(name)).removeprefix("parts/")[:_PART_CHARS]: number for name, number in numbers.items()}
    return {name: number for name, number in list(parts.items())[:_MAX_PARTS] if number is not None}


def _tool_counts(facts: EpisodeFacts) -> dict[str, list[int]]:
    """Return the number of calls, and of calls that failed or exited with an error, by tool."""
    failed, calls = Counter[str](), Counter[str]()
    for call in facts.calls or ():
        if isinstance(call, Mapping):
            sandbox, name = call.get("sandbox"), _as_text(call.get("tool"))
            calls[name] += 1
            has_exit_code = isinstance(sandbox, Mapping) and bool(sandbox.get("exit_code"))
            failed[name] += call.get("status") != "success" or has_exit_code
    return {name: [count, failed[name]] for name, count in calls.items()}


def _evaluated_problem(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the problem and data set of an evaluation's sample; empty in training."""
    metadata = values.get("metadata")
    problem = metadata.get("eval") if isinstance(metadata, Mapping) else None
    return problem if isinstance(problem, Mapping) else {}


def _group(values: Mapping[str, Any]) -> Json:
    """Return the sample's group; samples of one group are shown side by side."""
    evaluated = _evaluated_problem(values)
    if values.get("group_index") is None and evaluated:
        return f"{evaluated['data_set']}/{evaluated['problem']}"
    return values.get("group_index")


def _question_id(values: Mapping[str, Any]) -> str:
    """Return a key of the sample's question that is equal in all runs; "" if the question is unknown."""
    evaluated, prompt = _evaluated_problem(values), values.get("prompt")
    if evaluated:
        return f"{evaluated['data_set']}/{evaluated['problem']}"
    text = json.dumps(to_plain(prompt), ensure_ascii=False) if prompt else ""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest() if text else ""


def _fan_out_part(facts: EpisodeFacts) -> str:
    part = facts.fan_out
    return f"{part['kind']}, {part['part'] + 1} of {part['of']}" if part and part["of"] > 1 else ""


def _last_user_text(prompt: Json) -> str:
    if not isinstance(prompt, list):
        return _as_text(prompt)
    user_messages = [message for message in prompt if message.get("role") == "user"]
    content = user_messages[-1].get("content") if user_messages else ""
    parts = content if isinstance(content, list) else [{"text": content}]
    return " ".join(_as_text(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in parts)


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return str(to_plain(value)) if isinstance(value, str) else json.dumps(to_plain(value), ensure_ascii=False)


def to_plain(value: object) -> Json:
    """Convert a value to readable JSON: shorten long texts, and write values that JSON can't express by `repr`."""
    if isinstance(value, str):
        return shorten(value, _MAX_TEXT_CHARS).encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value.bit_length() <= _INTEGER_BITS):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else repr(value)[:_PREVIEW_CHARS]
