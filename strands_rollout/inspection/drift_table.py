"""Drift for people: totals in words, and the episodes that lose most.

Knows rich and what was measured; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from strands_rollout.retokenisation.meter import Divergence, DriftTotals, EpisodeDrift


def print_drift(
    console: Console, measured: Sequence[EpisodeDrift], totals: DriftTotals, template_fault: str | None, *, show: int
) -> None:
    """Print the totals, then `show` episodes at most, those that lose most first.

    Args:
        console: Where to.
        measured: Each episode.
        totals: Of all of them.
        template_fault: Why the context was not looked at, where it was not.
        show: How many episodes.
    """
    _say(console, f"{totals.episodes} episodes, {totals.sampled_tokens} sampled tokens")
    _say(console, f"drift: in {totals.drifted_episodes} episodes ({totals.drifted_share:.1%})")
    _say(console, f"  each turn encoded again:   {totals.turn_drift} tokens change")
    _say(console, f"  the whole text encoded again: {totals.text_drift} tokens change")
    off_policy = f"{totals.off_policy} sampled tokens ({totals.off_policy_share:.1%})"
    _say(console, f"  off-policy then: {off_policy} stand behind the first change")
    kinds = ", ".join(f"{name} {count}" for name, count in totals.classes.items())
    _say(console, f"  by kind: {kinds}")
    if totals.mismatched_episodes is None:
        _say(console, f"context: not looked at{f': {template_fault}' if template_fault else ''}", "yellow")
    elif totals.mismatched_episodes:
        words = f"{totals.mismatched_tokens} tokens in {totals.mismatched_episodes} episodes"
        _say(console, f"context: {words} are not what the chat template renders", "bold red")
    else:
        _say(console, "context: what the chat template renders, token for token", "green")
    worst = sorted(measured, key=lambda drift: (-drift.mismatched_tokens, -drift.off_policy, drift.number))
    for drift in worst[:show]:
        _print_episode(console, drift)


def _print_episode(console: Console, drift: EpisodeDrift) -> None:
    if drift.first is None and not drift.mismatches:
        return
    lost = f"{drift.turn_drift} turn by turn, {drift.text_drift} in the whole text, {drift.off_policy} off-policy"
    _say(console, f"\nsample {drift.number} (index {drift.index}): of {drift.sampled_tokens} tokens {lost}")
    if drift.first is not None:
        _say(console, f"  {_words(drift.first)}")
    for found in drift.mismatches or []:
        words = f"{found.tokens} tokens from token {found.position} on: got {found.got!r}, expected {found.expected!r}"
        _say(console, f"  context differs: {words}", "red")


def _words(first: Divergence) -> str:
    place = "in what the policy read" if first.turn is None else f"in turn {first.turn}"
    return (
        f"first change at token {first.position}, {place}, after {first.before!r}: "
        f"{first.got} {first.got_texts} becomes {first.again} {first.again_texts}"
    )


def _say(console: Console, words: str, style: str = "") -> None:
    console.print(Text(words, style=style), soft_wrap=True)
