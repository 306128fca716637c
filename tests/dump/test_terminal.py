"""`print_transcript`: runs of tokens with their kind, readable without colors."""

import io
from typing import Any

import pytest
from rich.console import Console

from strands_rollout.dump.terminal import print_transcript, runs_by_kind
from strands_rollout.samples import Sample

TOKEN_TEXTS = {1: "Question?\n", 10: "call\n", 11: "<end>", 20: "\nresult\n", 12: "answer"}


def decode(ids: Any) -> str:
    return "".join(TOKEN_TEXTS[token] for token in ids)


def test_print_transcript_labels_each_run_of_tokens() -> None:
    sample, out = Sample(tokens=[1, 10, 11, 20, 12], response_length=4, loss_mask=[1, 1, 0, 1]), io.StringIO()
    print_transcript(Console(file=out, width=60), sample, decode)
    text = out.getvalue()
    assert "   prompt | Question?\n" in text
    assert "  trained | call\n          | <end>\n" in text
    assert "  context | \n          | result\n" in text
    assert "trained | sampled by the policy, trained; 3 tokens" in text


SPANS = {"strands_rollout": {"spans": [[0, 1, 3, "1"], [1, 4, 5, "2"]]}}


@pytest.mark.parametrize(
    ("mask", "removed", "metadata", "expected"),
    [
        ([0, 0, 0, 1], False, SPANS, ["prompt", "masked", "context", "trained"]),
        ([0, 0, 0, 0], True, SPANS, ["prompt", "masked", "context", "masked"]),
        ([1, 1, 0, 1], True, SPANS, ["prompt", "masked", "context", "masked"]),
        ([0, 0, 0, 0], True, {}, ["prompt", "untrained"]),
        ([0, 0, 0, 1], False, {"strands_rollout": {"spans": [["odd"]]}}, ["prompt", "context", "trained"]),
    ],
)
def test_runs_by_kind_distinguishes_masked_tokens_from_context(mask, removed, metadata, expected) -> None:
    sample = Sample(
        tokens=[1, 10, 11, 20, 12], response_length=4, loss_mask=mask, remove_sample=removed, metadata=metadata
    )
    assert [kind for kind, _ in runs_by_kind(sample)] == expected


def test_print_transcript_explains_masked_tokens() -> None:
    sample = Sample(tokens=[1, 10, 11, 20, 12], response_length=4, loss_mask=[0] * 4, metadata=SPANS)
    out = io.StringIO()
    print_transcript(Console(file=out, width=60), sample, decode)
    assert "masked | sampled by the policy, not trained; 3 tokens" in out.getvalue()
