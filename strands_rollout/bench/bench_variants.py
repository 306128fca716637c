"""Which variants can play here, and what the others lack."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final

from strands_rollout.bench.bench_options import VARIANTS
from strands_rollout.errors import ConfigError

_NEEDS: Final = {
    "strands-sglang": ("strands_sglang", "strands-rollout[bench]"),
    "openai": ("openai", "strands-rollout[openai]"),
}


def playable_variants(asked: Iterable[str]) -> tuple[list[str], list[str]]:
    """The variants that can play, and a sentence for each other one.

    Raises:
        ConfigError: There is no such variant, or none can play.
    """
    can_play: list[str] = []
    sentences: list[str] = []
    for variant in asked:
        if variant not in VARIANTS:
            raise ConfigError(f"got the variant {variant!r}; expected some of {', '.join(VARIANTS)}")
        module, extra = _NEEDS.get(variant, ("", ""))
        if module and find_spec(module) is None:
            sentences.append(f"{variant} is left out; to measure it: pip install '{extra}'")
        else:
            can_play.append(variant)
    if not can_play:
        raise ConfigError("; ".join(["got no variant that can play", *sentences]))
    return can_play, sentences
