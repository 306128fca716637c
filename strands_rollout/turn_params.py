"""Sampling parameters of one turn, and of one request of it.

Knows SGLang's names for them; nothing of requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from strands_rollout.trajectory import Trajectory


def turn_seed(seed: int, turn: int | str) -> int:
    """The sampling seed of a turn (from 0), made from the sample's own; that of the first turn is the sample's.

    A further agent's own seed is made in the same way, from a name.

    SGLang draws each token from (seed, position), so all parts of a turn have the same: a turn that was aborted and
    continued gets the tokens that it would have got. Neighbouring samples have neighbouring seeds, hence the hash.
    """
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 33


def turn_params(params: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """The sampling parameters of a turn (from 0): those of the conversation, with a seed of its own."""
    seed = params.get("sampling_seed")
    return dict(params) if seed is None else {**params, "sampling_seed": turn_seed(seed, turn)}


def part_params(params: Mapping[str, Any], trajectory: Trajectory, allowance: int | None) -> dict[str, Any]:
    """Of the next request: at most `allowance` tokens, and at least what its turn lacks of its least length.

    SGLang refuses a least length above the greatest one; the budget counts.
    """
    asked = {**params, "max_new_tokens": allowance}
    least = params.get("min_new_tokens")
    if not least:
        return asked
    sampled = trajectory.turns[-1].end - trajectory.turns[-1].start if trajectory.is_open else 0
    left = max(0, least - sampled)
    return {**asked, "min_new_tokens": left if allowance is None else min(left, allowance)}
