"""`replay` from end to end: the engine, its tokenizer, and what became of each turn, in words and as JSON.

Glue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.text import Text

from strands_rollout.dataset_rows import json_line
from strands_rollout.errors import DumpError
from strands_rollout.evaluate import slime_sampling_params
from strands_rollout.inspection.replay import ReplayedTurn, recorded_gaps, recorded_params, replay
from strands_rollout.inspection.saved_episode import SavedEpisode, nth_episode
from strands_rollout.report import make_console
from strands_rollout.served_engine import served_engine, served_tokenizer
from strands_rollout.sglang_client import SGLangClient
from strands_rollout.sglang_connection import create_client
from strands_rollout.slime_seam import load_tokenizer, vocab_size_of

_SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the command was asked for; see its --help."""

    dump: Path
    sample: int
    base_url: str | None
    model_dir: Path | None
    tokenizer_dir: Path | None
    temperature: float | None
    seed: int | None
    as_json: bool


async def run_replay(options: ReplayOptions) -> bool:
    """Replay and show; whether every turn is the same.

    Raises:
        DumpError: There is no such sample, or it has no tokens, or images.
        ConfigError: The engine's tokenizer is not on this machine.
        EngineError: The engine can't be reached, or refuses a request.
    """
    episode = nth_episode(options.dump, options.sample)
    if episode.sample.multimodal_train_inputs is not None:
        raise DumpError(f"{episode.where} has images, which replay does not send; choose an episode of text")
    async with served_engine(options.base_url, options.model_dir) as base_url:
        folder = options.tokenizer_dir or await served_tokenizer(base_url)
        tokenizer = load_tokenizer(str(folder))
        vocab_size = vocab_size_of(SimpleNamespace(hf_checkpoint=str(folder))) or len(tokenizer)
        async with create_client(base_url) as http:
            client = SGLangClient(http, vocab_size=vocab_size)
            params = _params(options, episode)
            asked = replay(client, episode, params)
            turns = [turn async for turn in asked]
            gaps = await recorded_gaps(http, episode, vocab_size=vocab_size)
    report = {
        **episode.name,
        "temperature": params["temperature"],
        "seed": params.get("sampling_seed"),
        "same": not any(turn.departs for turn in turns),
        "turns": [_turn(turn, episode, tokenizer) for turn in turns],
        "recorded_tokens": _gap_facts(gaps),
    }
    if options.as_json:
        print(json_line(report).decode(), end="")
    else:
        _show(make_console(), report)
    return bool(report["same"])


def _params(options: ReplayOptions, episode: SavedEpisode) -> dict[str, Any]:
    """What was asked for; else the episode's own, where they decide what is sampled; else greedy."""
    recorded = recorded_params(episode)
    if options.temperature is None and options.seed is None and recorded is not None:
        return {**slime_sampling_params(1.0, 1), **recorded}
    default = 0.0 if options.seed is None else 1.0
    params = slime_sampling_params(default if options.temperature is None else options.temperature, 1)
    return params if options.seed is None else {**params, "sampling_seed": options.seed}


def _turn(turn: ReplayedTurn, episode: SavedEpisode, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
    departure = None
    if turn.departs:
        at = turn.start + turn.same
        recorded, again = (ids[turn.same : turn.same + _SHOWN_TOKENS] for ids in (turn.recorded, turn.again))
        departure = {
            "token": turn.same,
            "position": at,
            "before": _text(tokenizer, episode.tokens[max(0, at - _SHOWN_TOKENS) : at]),
            "recorded": {"ids": recorded, "text": _text(tokenizer, recorded)},
            "again": {"ids": again, "text": _text(tokenizer, again), "finish": turn.finish},
        }
    return {
        "turn": turn.turn,
        "tokens": len(turn.recorded),
        "same_tokens": turn.same,
        "logprobs": _gap_facts(turn.gaps),
        "departure": departure,
    }


def _gap_facts(gaps: Sequence[float] | None) -> dict[str, float] | None:
    if not gaps:
        return None
    sizes = [abs(gap) for gap in gaps]
    return {"tokens": len(sizes), "largest_gap": max(sizes), "mean_gap": sum(sizes) / len(sizes)}


def _text(tokenizer: Any, ids: Sequence[int]) -> str:  # noqa: ANN401
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _show(console: Console, report: dict[str, Any]) -> None:
    for turn in report["turns"]:
        gaps, departure = turn["logprobs"], turn["departure"]
        logprobs = "" if gaps is None else f"; logprobs differ by {gaps['largest_gap']:.2g} at most"
        words = f"turn {turn['turn']}: {turn['same_tokens']} of {turn['tokens']} tokens are the same{logprobs}"
        console.print(Text(words, style="green" if departure is None else "red"), soft_wrap=True)
        if departure is not None:
            console.print(Text(_departure_words(departure)), soft_wrap=True)
    told = report["recorded_tokens"]
    if told is None:
        words = "recorded tokens: no logprobs of its input from this engine, or none recorded"
    else:
        gaps = f"{told['largest_gap']:.2g} at most, {told['mean_gap']:.2g} on average"
        words = f"recorded tokens: the engine's logprobs differ from the recorded ones by {gaps}"
    console.print(Text(words), soft_wrap=True)


def _departure_words(departure: dict[str, Any]) -> str:
    recorded, again = departure["recorded"], departure["again"]
    now = f"{again['ids']} {again['text']!r}" if again["ids"] else f"the end ({again['finish']})"
    return (
        f"  departs at its token {departure['token']} ({departure['position']} of the sample), after "
        f"{departure['before']!r}:\n  recorded {recorded['ids']} {recorded['text']!r}\n  now      {now}"
    )
