"""One episode, token for token, as it was when it was last looked at.

A change of template, parser, tool wording or tokenizer shows here. If it is wanted, regenerate the transcript and read
its diff:

    UPDATE_GOLDEN=1 bash scripts/test.sh tests/episodes/test_golden_transcript.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness import ANSWER, call_text, run

GOLDEN = Path(__file__).parents[1] / "golden" / "episode.json"


async def test_an_episode_is_token_for_token_the_golden_one(shipped_tokenizer: Any) -> None:
    malformed = '<tool_call>\n{"name": "execute_python_code"}\n</tool_call><|im_end|>'
    question = "Ben buys 17 apples at 2 dollars each. How many dollars does Ben spend?"
    done = await run(shipped_tokenizer, [call_text("print(17 * 2)"), malformed, ANSWER], prompt=question)
    sample = done.sample
    transcript = {
        "stretches": [{"trained": trained, "text": done.decode(ids), "ids": ids} for trained, ids in stretches(sample)],
        "status": sample.status.value,
        "stop_reason": done.facts["stop_reason"],
    }
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(transcript, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert transcript == json.loads(GOLDEN.read_text(encoding="utf-8"))


def stretches(sample: Any) -> list[tuple[bool, list[int]]]:
    """Runs of tokens with the same mask; the prompt first."""
    masks = [0] * (len(sample.tokens) - sample.response_length) + sample.loss_mask
    found: list[tuple[bool, list[int]]] = []
    for token, mask in zip(sample.tokens, masks, strict=True):
        if not found or found[-1][0] != bool(mask):
            found.append((bool(mask), []))
        found[-1][1].append(token)
    return found
