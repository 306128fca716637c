"""Text can be read on whatever it stands on, in both themes: WCAG 2.1's 4.5 to 1 for text of its size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STYLE = (Path(__file__).parents[2] / "strands_rollout/view/assets/page.css").read_text(encoding="utf-8")
ON_SURFACES = [(tone, on) for tone in ("text", "dim", "good", "bad", "warn") for on in ("back", "card", "pick")]
PAIRS = [
    *ON_SURFACES,
    *(("trained", f"t{strength}") for strength in range(5)),
    *(("context", "context-back"), ("text", "context-back"), ("dim", "context-back"), ("prompt", "card")),
    *(("dropped", "dropped-back"), ("stale", "stale-back"), ("stale", "card"), ("text", "unknown-back")),
    *(("card", "bad"), ("card", "accent"), ("accent", "card")),
]


def colours(theme: str) -> dict[str, str]:
    block = STYLE[STYLE.index(theme) :].partition("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [":root {", ':root[data-theme="dark"] {'])
def test_text_can_be_read_on_what_it_stands_on(theme: str) -> None:
    found = colours(theme)
    ratios = {}
    for tone, on in PAIRS:
        dark, light = sorted((luminance(found[tone]), luminance(found[on])))
        ratios[tone, on] = (light + 0.05) / (dark + 0.05)
    assert {pair: round(ratio, 2) for pair, ratio in ratios.items() if ratio < 4.5} == {}
