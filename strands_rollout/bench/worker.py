"""A measured process: `python -m strands_rollout.bench.worker JOB`; prints its figures as one line of JSON.

Loads one variant and nothing of the others. Ends with its stdin: nobody is left to read the figures then.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Final

import orjson

from strands_rollout.bench.answer_script import load_scripts
from strands_rollout.bench.episode_run import check_all, play_episodes
from strands_rollout.bench.job import Figures, Job
from strands_rollout.bench.measures import MEASURES
from strands_rollout.bench.player import Player, Stage
from strands_rollout.bench.processor_cores import pin_to

_PLAYERS: Final = {
    "ours": ("ours_player", "OursPlayer"),
    "floor": ("floor_player", "FloorPlayer"),
    "strands-sglang": ("strands_sglang_player", "StrandsSGLangPlayer"),
    "openai": ("openai_player", "OpenAIPlayer"),
}


def main() -> None:
    """Do the job of the command line."""
    job = Job.from_json(sys.argv[1])
    pin_to(job.core)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(orjson.dumps(asyncio.run(measure(job))).decode(), flush=True)


def _end_with_stdin() -> None:
    """Waits in one read, and so takes no CPU from what is measured."""
    os.read(0, 1)
    os._exit(1)


async def measure(job: Job) -> Figures:
    """Warm up, measure, check.

    Raises:
        WrongEpisodeError: The variant did not play what the scripts say.
    """
    scripts, short = load_scripts(Path(job.scripts)), load_scripts(Path(job.warm_up_scripts))
    stage = Stage(
        job.port, Path(job.tokenizer), job.concurrency, [*scripts, *short], job.runs_code, job.collector != "unfrozen"
    )
    player = make_player(job.variant, stage)
    for warm_up, count in ((short, min(job.concurrency, job.episodes)), (scripts, 1)):
        check_all(await play_episodes(player, warm_up, count, job.concurrency), any_prompt=job.runs_code)
    gc.collect()
    if job.collector == "frozen":
        gc.freeze()
    figures = await MEASURES[job.kind](job, player, scripts)
    await player.close()
    return figures


def make_player(variant: str, stage: Stage) -> Player:
    """Load a variant, and nothing of the others."""
    module, name = _PLAYERS[variant]
    found: Player = getattr(importlib.import_module(f"strands_rollout.bench.{module}"), name)(stage)
    return found


if __name__ == "__main__":
    main()
