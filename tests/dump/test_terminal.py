"""`print_transcript`: runs of tokens with their kind, readable without colors."""

import io
from typing import Any

from rich.console import Console

from strands_rollout.dump.terminal import print_transcript
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
