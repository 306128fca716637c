"""Finish aborted samples in another Python process.

As a program it reads `{"args": ..., "params": ..., "samples": [...]}` from stdin, runs the samples to their ends, and
writes them to stdout.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strands_rollout import Sample, generate, reward_func


async def finish_in_other_process(
    args: SimpleNamespace, params: Mapping[str, Any], samples: Sequence[Any]
) -> list[Any]:
    """Run samples to their ends in a new process, grade them in this one, and return them."""
    settings = {key: value for key, value in args.strands_rollout.items() if key != "should_abort"}
    order = {
        "args": {**vars(args), "strands_rollout": settings},
        "params": params,
        "samples": [sample.to_dict() for sample in samples],
    }
    pipe, folder = asyncio.subprocess.PIPE, Path(__file__).parent
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, stdin=pipe, stdout=pipe, cwd=folder)
    answer, _ = await process.communicate(json.dumps(order).encode())
    assert process.returncode == 0
    finished = [Sample.from_dict(values) for values in json.loads(answer.splitlines()[-1])]
    for sample in finished:
        sample.reward = await reward_func(args, sample)
    return finished


async def _finish(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    args = SimpleNamespace(**order["args"])
    samples = [Sample.from_dict(values) for values in order["samples"]]
    await asyncio.gather(*(generate(args, sample, order["params"]) for sample in samples))
    return [sample.to_dict() for sample in samples]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_finish(json.loads(sys.stdin.read())))))
