"""What a variant is to the benchmark: something that plays a script's episode on the engine.

Knows the interface, and what a played episode must be; the variants are the modules `*_player`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.errors import RolloutError

MAX_RESPONSE_TOKENS: Final = 100_000


class WrongEpisodeError(RolloutError):
    """A variant did not play what the script says."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where episodes are played.

    Attributes:
        port: The engine's, on 127.0.0.1.
        tokenizer_dir: The tokenizer's folder.
        concurrency: Episodes at once.
        scripts: All that may be played.
        runs_code: Whether the real code tool runs, in place of one that knows the results.
        may_freeze: Whether a variant may freeze what the garbage collector would look through.
    """

    port: int
    tokenizer_dir: Path
    concurrency: int
    scripts: Sequence[AnswerScript]
    runs_code: bool = False
    may_freeze: bool = True

    @property
    def url(self) -> str:
        """The engine's URL."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Played:
    """A finished episode.

    Attributes:
        tokens: Prompt and response.
        loss_mask: Of the response: 1 for sampled tokens.
        logprobs: Of the response; what is said of tokens that were not sampled counts nothing. None where the variant
            has none.
        kept: What the trainer is handed; memory is measured of it.
    """

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None
    kept: Any


class Player(Protocol):
    """Plays episodes, many at once."""

    async def play(self, script: AnswerScript) -> Played:
        """Play one episode.

        Raises:
            WrongEpisodeError: It did not end as it should.
        """
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


def sampling_params() -> dict[str, Any]:
    """The sampling parameters that slime 0.3 hands to a rollout (slime/rollout/sglang_rollout.py)."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": MAX_RESPONSE_TOKENS,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def check_played(played: Played, script: AnswerScript, *, any_prompt: bool = False) -> None:
    """Compare an episode with its script, token by token.

    Args:
        played: The episode.
        script: What was to be played.
        any_prompt: Whether the prompt may be another one.

    Raises:
        WrongEpisodeError: Tokens, mask or logprobs are others.
    """
    mask = script.loss_mask()
    expected, got = script.tokens(), played.tokens
    if any_prompt:
        expected, got = expected[-len(mask) :], got[-len(mask) :]
    values: Mapping[str, tuple[Any, Any]] = {
        "tokens": (got, expected),
        "loss_mask": (played.loss_mask, mask),
        "logprobs": (
            None if played.logprobs is None else _sampled(played.logprobs, mask),
            None if played.logprobs is None else script.logprobs(),
        ),
    }
    for name, (found, wanted) in values.items():
        if found != wanted:
            raise WrongEpisodeError(f"an episode of {script.tool_turns} tool turns: {_difference(name, found, wanted)}")


def _sampled(logprobs: Sequence[float], mask: Sequence[int]) -> list[float]:
    return [logprob for logprob, bit in zip(logprobs, mask, strict=False) if bit]


def _difference(name: str, got: Sequence[Any], expected: Sequence[Any]) -> str:
    at = next((n for n, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    where = "" if at is None else f"; the first difference is at {at}: {got[at]!r}, expected {expected[at]!r}"
    return f"got {len(got)} {name}, expected {len(expected)}{where}"
