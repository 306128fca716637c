"""The texts of a sample as attributes of spans, long ones cut in the middle.

Messages have the form of OpenTelemetry's conventions for generative AI (open-telemetry/semantic-conventions,
docs/gen-ai/gen-ai-output-messages.json, 1.41). Knows records; a text that the dump lacks is None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from strands_rollout.dump import DumpRecord
from strands_rollout.secret_mask import masked, without_values
from strands_rollout.transcript_table import MAX_LABEL_CHARS, MAX_PROMPT_CHARS, MAX_RESPONSE_CHARS, bounded_text

_NO_KEY: Final = re.compile(r"(?!)")


def episode_contents(record: DumpRecord, secrets: Collection[str] = ()) -> dict[str, Any]:
    """Prompt, last answer, label and error of a sample, with these texts masked."""
    values, facts = record.values, record.facts
    prompt = values.get("prompt")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    asked = [
        _message(str(message.get("role")), message.get("content"), MAX_PROMPT_CHARS, secrets)
        for message in messages
        if isinstance(message, Mapping)
    ]
    answer = facts.get("final_text") or values.get("response") or ""
    error = facts.get("error")
    return {
        "gen_ai.input.messages": _json(asked),
        "gen_ai.output.messages": _json([_message("assistant", answer, MAX_RESPONSE_CHARS, secrets)]),
        "strands_rollout.label": bounded_text(values.get("label"), MAX_LABEL_CHARS, secrets),
        # the error of a file that is not our dump may hold the password of a URL
        "strands_rollout.error": without_values(masked(error, _NO_KEY), secrets) if isinstance(error, str) else None,
    }


def turn_contents(
    record: DumpRecord, before: int, start: int, end: int, finish: str | None, secrets: Collection[str] = ()
) -> dict[str, Any]:
    """What a turn wrote, and what the policy had read since the turn before; special tokens included.

    Args:
        record: One sample.
        before: Where the turn before ends in the tokens; 0 for the first.
        start: Where this one begins.
        end: Where it ends.
        finish: Why it did, where that is known.
        secrets: Texts that are masked.
    """
    tokens = record.values["tokens"]
    read, wrote = (_text(record, tokens[first:last]) for first, last in ((before, start), (start, end)))
    message = None if wrote is None else _message("assistant", wrote, MAX_RESPONSE_CHARS, secrets)
    ended = {} if message is None or finish is None else {"finish_reason": finish}
    return {
        "gen_ai.output.messages": None if message is None else _json([{**message, **ended}]),
        "strands_rollout.context": bounded_text(read, MAX_RESPONSE_CHARS, secrets),
    }


def _text(record: DumpRecord, ids: Sequence[int]) -> str | None:
    """None where the dump lacks the text of one of them."""
    texts = [record.token_texts.get(token) for token in ids]
    return b"".join(text for text in texts if text is not None).decode(errors="replace") if None not in texts else None


def _message(role: str, content: Any, max_chars: int, secrets: Collection[str]) -> dict[str, Any]:  # noqa: ANN401
    return {"role": role, "parts": [{"type": "text", "content": bounded_text(content, max_chars, secrets) or ""}]}


def _json(messages: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(messages, ensure_ascii=False)
