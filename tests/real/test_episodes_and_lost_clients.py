"""Clients that disconnect from the real SGLang: their requests are not sampled any further."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import other_process
import pytest
from episode_stage import LONG_TURN, EpisodeStage, facts_of, new_samples
from harness import args_for

pytestmark = pytest.mark.real

EPISODES = 24
# about 15 s of work for the engine; SGLang checks every 4 s whether a client is still connected
ENDLESS = {**LONG_TURN, "max_new_tokens": 1700}
ALL_TOKENS = EPISODES * 1700
ReportRow = Callable[..., None]


async def left_behind(stage: EpisodeStage, report_row: ReportRow, client: str) -> int:
    """Wait until the engine is idle; return and report the maximum number of tokens that it held."""
    clock = asyncio.get_running_loop().time
    began = clock()
    most = await stage.most_tokens_until_idle()
    seconds = round(clock() - began, 2)
    report_row("lost clients of SGLang", client=client, episodes=EPISODES, idle_after_s=seconds, most_tokens=most)
    return most


async def test_generate_cancel_leaves_nothing_at_engine(stage: EpisodeStage, report_row: ReportRow) -> None:
    running = asyncio.create_task(stage.play(new_samples(EPISODES), ENDLESS))
    await stage.until_sampling(requests=EPISODES, tokens=50)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    # each request is aborted by its id, long before SGLang checks for its client
    assert await left_behind(stage, report_row, "tasks are cancelled") < ALL_TOKENS / 4
    # other episodes are not disturbed, and this process has no leftovers
    again = await stage.play(new_samples(EPISODES))
    assert {facts_of(sample)["stop_reason"] for sample in again} == {"completed"}


async def test_killed_process_leaves_nothing_at_engine(stage: EpisodeStage, report_row: ReportRow) -> None:
    samples = [sample.to_dict() for sample in new_samples(EPISODES)]
    args = vars(args_for(stage.engine_url, stage.tokenizer, strands_rollout={}))
    program = Path(other_process.__file__)
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, cwd=program.parent
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"args": args, "params": ENDLESS, "samples": samples}).encode())
    process.stdin.close()
    await stage.until_sampling(requests=EPISODES, tokens=50)
    process.kill()
    await process.wait()
    assert await left_behind(stage, report_row, "kill -9") < ALL_TOKENS / 2
