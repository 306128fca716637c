"""A sample of a dump as the spans of a trace: the episode, its model turns and its tool calls.

Names and attributes are those of OpenTelemetry's conventions for generative AI (open-telemetry/semantic-conventions,
docs/gen-ai/gen-ai-spans.md and gen-ai-agent-spans.md, 1.41), and under `strands_rollout.` what they have no name for.
Knows records; nothing of OpenTelemetry's libraries. What a record does not tell is left out, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from strands_rollout.dump import DumpRecord
from strands_rollout.episode_times import Step, steps_of
from strands_rollout.export.span_contents import episode_contents, turn_contents
from strands_rollout.finished_sample import FinishedSample, finite
from strands_rollout.turn_params import turn_params

Attribute = str | bool | int | float | list[str]

OWN: Final = "strands_rollout."
TIMES: Final = "as recorded"
LAID_OUT: Final = "seconds as recorded, without start times: turns and calls are laid out one after the other"
_PROVIDER: Final = "sglang"
_MOST_SECONDS: Final = 1e8
_REQUEST: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "sampling_seed": "seed",
}
_FINISH: Final = {"completed": "stop", "turn_length": "length"}  # other ends may come before a turn is asked for
_CALL_ID: Final = re.compile(r"call_(\d{1,9})_\d+")
_ERROR_TYPE: Final = re.compile(r"\w+(?=: |$)")

_OF_SAMPLE: Final = {
    "index": "index",
    "group": "group_index",
    "rollout_id": "rollout_id",
    "response_tokens": "response_length",
    "removed": "remove_sample",
}
_OF_EPISODE: Final = (
    *("stop_reason", "turns", "tool_calls", "tool_errors", "tool_timeouts", "parse_failures", "sampled_tokens"),
    *("duration_s", "generate_s", "tool_s"),
)


@dataclass(frozen=True, slots=True)
class DumpSpan:
    """One span.

    Attributes:
        name: As the conventions form it.
        start_s: Seconds from the episode's start.
        end_s: Likewise.
        attributes: Plain values that any exporter can write.
        is_request: Whether it is a request to the engine.
        error: In a word, where it failed.
    """

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Attribute]
    is_request: bool = False
    error: str | None = None


def episode_spans(
    record: DumpRecord, *, reward_key: str, with_contents: bool, secrets: Collection[str] = ()
) -> list[DumpSpan]:
    """The episode's span, then those of its turns, each with its calls behind it.

    Args:
        record: One sample.
        reward_key: Where a reward that is a mapping has its number.
        with_contents: Whether texts come along: prompt, answer, label, error, and what each turn read and wrote, where
            the dump has the texts of its tokens; long ones cut in the middle.
        secrets: What is masked in these texts.
    """
    sample = FinishedSample(SimpleNamespace(**record.values), record.facts)
    turns = _turns(sample)
    calls = _calls_by_turn(sample, turns.keys())
    steps = steps_of(sample.facts)
    line, before, last = _Line(), 0, max(turns, default=None)
    for number, turn in turns.items():
        called = calls.pop(number, [])
        ended = _FINISH.get(sample.text("stop_reason") or "") if number == last else None
        finish = "tool_call" if called else ended
        attributes = _turn_attributes(sample, number, turn, finish)
        if with_contents and turn.bounds is not None:
            attributes |= turn_contents(record, before, *turn.bounds, finish, secrets)
        before = turn.bounds[1] if turn.bounds is not None else before
        line.add("chat", turn.seconds, attributes, is_request=True, place=_place_of_turn(steps, number))
        _add_calls(line, called, are_placed=bool(steps))
    _add_calls(line, calls.get(None, []), are_placed=bool(steps))
    attributes = _episode_attributes(record, sample, reward_key)
    attributes[f"{OWN}times"] = TIMES if steps else LAID_OUT
    if with_contents:
        attributes |= episode_contents(record, secrets)
    end_s = max(line.end_s, _seconds(sample.number("duration_s")) or 0.0)
    return [DumpSpan("invoke_agent", 0.0, end_s, _written(attributes), error=_error(sample)), *line.spans]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What is told of a model turn: where it begins and ends in the tokens, and its seconds."""

    bounds: tuple[int, int] | None
    seconds: float | None


def _place_of_turn(steps: Sequence[Step], number: int) -> tuple[float, float] | None:
    """From the beginning of a turn's first request to the end of its last one; a turn that is aborted has several."""
    own = [step for step in steps if step.kind == "generate" and step.turn == number]
    return (min(step.at_s for step in own), max(step.at_s + step.s for step in own)) if own else None


@dataclass(slots=True)
class _Line:
    """Spans one after the other, but for those that have a place."""

    spans: list[DumpSpan] = field(default_factory=list)
    end_s: float = 0.0

    def add(
        self,
        name: str,
        seconds: float | None,
        attributes: Mapping[str, Any],
        *,
        is_request: bool = False,
        error: str | None = None,
        place: tuple[float, float] | None = None,
    ) -> None:
        """Append one; without length where its seconds are not known."""
        start_s, end_s = (min(at_s, _MOST_SECONDS) for at_s in place or (self.end_s, self.end_s + (seconds or 0.0)))
        self.spans.append(DumpSpan(name, start_s, end_s, _written(attributes), is_request, error))
        self.end_s = max(self.end_s, end_s)


def _turns(sample: FinishedSample) -> dict[int, _Turn]:
    """Those of which seconds or tokens are told, by their numbers from 0, in order."""
    bounds = sample.bounds_by_turn or {}
    listed = sample.facts.get("turn_s")
    seconds = dict(enumerate(listed)) if isinstance(listed, list) else {}
    numbers = sorted({*bounds, *seconds})
    return {number: _Turn(bounds.get(number), _seconds(seconds.get(number))) for number in numbers}


def _seconds(value: object) -> float | None:
    """A length that a span can have; its times are nanoseconds since 1970 in 64 bits."""
    number = finite(value)
    return number if number is not None and 0 <= number <= _MOST_SECONDS else None


def _turn_attributes(sample: FinishedSample, number: int, turn: _Turn, finish: str | None) -> dict[str, Any]:
    params = sample.facts.get("sampling_params")
    start, end = turn.bounds or (None, None)
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": _PROVIDER,
        **(_request_attributes(turn_params(params, number)) if isinstance(params, Mapping) else {}),
        "gen_ai.usage.input_tokens": start,
        "gen_ai.usage.output_tokens": None if start is None or end is None else end - start,
        "gen_ai.response.finish_reasons": None if finish is None else [finish],
        f"{OWN}turn": number,
    }


def _request_attributes(params: Mapping[str, Any]) -> dict[str, Any]:
    """Without `max_new_tokens`, which is the whole episode's."""
    stop = params.get("stop")
    return {
        **{f"gen_ai.request.{name}": params.get(key) for key, name in _REQUEST.items()},
        "gen_ai.request.stop_sequences": [stop] if isinstance(stop, str) else stop,
    }


def _calls_by_turn(sample: FinishedSample, turns: Collection[int]) -> dict[int | None, list[Mapping[str, Any]]]:
    """The calls by the number of the turn that made them; None where it is none of the sample's.

    An id counts the turns of the whole episode from 1, those of a history that was rewritten included: then it does
    not tell which of the sample's turns it was.
    """
    calls = sample.facts.get("calls")
    is_whole = sample.facts.get("segments") in (None, 1)
    found: dict[int | None, list[Mapping[str, Any]]] = {}
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, Mapping):
            named = _CALL_ID.fullmatch(str(call.get("id"))) if is_whole else None
            turn = int(named[1]) - 1 if named else None
            found.setdefault(turn if turn in turns else None, []).append(call)
    return found


def _add_calls(line: _Line, calls: Sequence[Mapping[str, Any]], *, are_placed: bool) -> None:
    for call in calls:
        place = (call["at_s"], call["at_s"] + call["s"]) if are_placed else None
        sandbox = call.get("sandbox")
        told = sandbox if isinstance(sandbox, Mapping) else {}
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.get("tool"),
            "gen_ai.tool.call.id": call.get("id"),
            f"{OWN}tool.status": call.get("status"),
            **{f"{OWN}sandbox.{name}": told.get(name) for name in ("queued_s", "run_s", "exit_code", "killed_by")},
        }
        status = call.get("status")
        error = _clean(status) if isinstance(status, str) and status != "success" else None
        name = " ".join(["execute_tool", *([str(call["tool"])] if "tool" in call else [])])
        line.add(_clean(name), _seconds(call.get("s")), attributes, error=error, place=place)


def _episode_attributes(record: DumpRecord, sample: FinishedSample, reward_key: str) -> dict[str, Any]:
    values, facts = record.values, record.facts
    fan_out, params, tokens = facts.get("fan_out"), facts.get("sampling_params"), values.get("tokens")
    part = fan_out if isinstance(fan_out, Mapping) else {}
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.max_tokens": params.get("max_new_tokens") if isinstance(params, Mapping) else None,
        **{f"{OWN}{name}": values.get(key) for name, key in _OF_SAMPLE.items()},
        **{f"{OWN}{name}": facts.get(name) for name in _OF_EPISODE},
        f"{OWN}status": sample.status,
        f"{OWN}reward": sample.reward(reward_key),
        f"{OWN}tokens": len(tokens) if isinstance(tokens, Sized) else None,
        f"{OWN}weight_versions": sample.weight_versions or None,
        **{f"{OWN}fan_out.{name}": part.get(name) for name in ("part", "of", "kind")},
        f"{OWN}where": Path(record.where).name,
    }


def _error(sample: FinishedSample) -> str | None:
    """The error's class, or else the stop reason, of a failed sample."""
    if sample.status != "failed":
        return None
    named = _ERROR_TYPE.match(sample.text("error") or "")
    return named[0] if named else _clean(sample.text("stop_reason") or "failed")


def _written(attributes: Mapping[str, Any]) -> dict[str, Attribute]:
    """What an exporter can write; what is None or of another kind is left out."""
    return dict(_plain(attributes))


def _plain(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Attribute]]:
    for name, value in attributes.items():
        if isinstance(value, bool):
            yield name, value
        elif isinstance(value, int):
            yield name, value if value.bit_length() < 64 else str(value)  # the protocol's integers have 64 bits
        elif isinstance(value, str):
            yield name, _clean(value)
        elif isinstance(value, list | tuple):
            yield name, [_clean(item) for item in value if isinstance(item, str)]
        elif (number := finite(value)) is not None:
            yield name, number


def _clean(text: str) -> str:
    """Without lone surrogates, which no file takes."""
    return text.encode("utf-8", "replace").decode()
