"""The transcript shows every token once, under its kind, and reads the same without colours."""

import io
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from strands_rollout.dump.terminal import print_transcript, stretches
from strands_rollout.samples import Sample

WORDS = {1: "Question?\n", 10: "call\n", 11: "<end>", 20: "\nresult\n", 12: "answer\x1b[31m", 9: "filler"}


def decode(ids: Any) -> str:
    return "".join(WORDS[token] for token in ids)


def sample(**changes: Any) -> Sample:
    made = Sample(tokens=[1, 10, 11, 20, 12], response_length=4, loss_mask=[1, 1, 0, 1])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def shown(made: Sample, **console: Any) -> str:
    out = io.StringIO()
    print_transcript(Console(file=out, width=60, **console), made, decode)
    return out.getvalue()


def test_each_stretch_is_shown_under_its_kind() -> None:
    text = shown(sample())
    assert "   prompt | Question?\n" in text
    assert "  trained | call\n          | <end>\n" in text
    assert "  context | \n          | result\n" in text
    assert "trained | sampled by the policy, trained; 3 tokens" in text


def test_control_characters_of_the_policy_are_shown_and_not_obeyed() -> None:
    text = shown(sample())
    assert "answer␛[31m" in text
    assert "\x1b" not in text


def test_an_excluded_sample_is_not_shown_as_trained() -> None:
    text = shown(sample(tokens=[1, 9], response_length=1, loss_mask=[0], remove_sample=True))
    assert "untrained | filler" in text
    assert "  trained |" not in text


def test_colours_are_for_terminals_and_no_color_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;32mcall" in shown(sample(), force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in shown(sample(), force_terminal=True)


@given(st.lists(st.sampled_from([0, 1]), min_size=1), st.integers(1, 5))
def test_stretches_hold_every_token_once_and_in_order(mask: list[int], prompt_length: int) -> None:
    tokens = list(range(prompt_length + len(mask)))
    found = stretches(sample(tokens=tokens, response_length=len(mask), loss_mask=mask))
    assert [token for _, ids in found for token in ids] == tokens
    assert found[0][0] == "prompt"
    assert all(first != second for (first, _), (second, _) in itertools.pairwise(found))
    trained = [token for kind, ids in found if kind == "trained" for token in ids]
    assert trained == [token for token, one in zip(tokens[prompt_length:], mask, strict=True) if one]
