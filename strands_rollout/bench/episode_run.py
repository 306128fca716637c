"""Plays many episodes, a number of them at once, and keeps what they played to be checked later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.bench.player import Played, Player, check_played


async def play_episodes(
    player: Player, scripts: Sequence[AnswerScript], episodes: int, concurrency: int
) -> list[tuple[AnswerScript, Played]]:
    """Play the scripts in turn.

    Args:
        player: Who plays.
        scripts: As many are played as there are episodes, from the first one again after the last one.
        episodes: How many.
        concurrency: How many at once.
    """
    todo: Iterator[AnswerScript] = (scripts[n % len(scripts)] for n in range(episodes))
    done: list[tuple[AnswerScript, Played]] = []

    async def work() -> None:
        done.extend([(script, await player.play(script)) for script in todo])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, episodes)):
            group.create_task(work())
    return done


def check_all(done: Sequence[tuple[AnswerScript, Played]], *, any_prompt: bool = False) -> None:
    """Compare all episodes with their scripts.

    Raises:
        WrongEpisodeError: One is another than its script's.
    """
    for script, played in done:
        check_played(played, script, any_prompt=any_prompt)
