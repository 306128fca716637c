"""Prompts for both engines: a real conversation with a tool, and random ids."""

import json
import random
from pathlib import Path

# the conversation of the golden episode, in the shipped model's vocabulary
_EPISODE = json.loads((Path(__file__).parents[1] / "golden" / "episode.json").read_text(encoding="utf-8"))
CHAT_IDS = [token for stretch in _EPISODE["stretches"] for token in stretch["ids"]]
# ids below this number are not control tokens in the shipped vocabulary, and exist in any model's vocabulary
ORDINARY_IDS = 1000


def turn_prompts() -> list[list[int]]:
    """Return the model's input before each turn of the conversation."""
    prompts, so_far = [], []
    for stretch in _EPISODE["stretches"]:
        if stretch["trained"]:
            prompts.append(list(so_far))
        so_far += stretch["ids"]
    return prompts


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1_000_003 * seed + length)
    return [rng.randrange(ORDINARY_IDS) for _ in range(length)]
