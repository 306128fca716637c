"""Another Python process that takes samples out of a dump and runs them to their ends.

Run as a program it reads `{"args": ..., "params": ..., "samples": [...]}` from stdin, and writes what became of the
samples, and which calls of the recorded tools ended there, to stdout.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import recorded_tools
from rollout_record import RolloutRecord

from strands_rollout import Sample, generate


async def finish_elsewhere(
    args: SimpleNamespace, params: Mapping[str, Any], samples: Sequence[Any], record: RolloutRecord
) -> list[Any]:
    """The samples, each run to its end by a new process, rewarded here."""
    settings = {key: value for key, value in args.strands_rollout.items() if key != "should_abort"}
    order = {
        "args": {**vars(args), "strands_rollout": settings},
        "params": params,
        "samples": [sample.to_dict() for sample in samples],
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parent,
    )
    answer, _ = await process.communicate(json.dumps(order).encode())
    assert process.returncode == 0
    told = json.loads(answer.splitlines()[-1])
    recorded_tools.ended.extend(told["ended"])
    finished = [Sample.from_dict(values) for values in told["samples"]]
    for sample in finished:
        await record.reward(args, sample)
    return finished


async def _finish(order: Mapping[str, Any]) -> dict[str, Any]:
    args = SimpleNamespace(**order["args"])
    samples = [Sample.from_dict(values) for values in order["samples"]]
    await asyncio.gather(*(generate(args, sample, order["params"]) for sample in samples))
    return {"samples": [sample.to_dict() for sample in samples], "ended": recorded_tools.ended}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_finish(json.loads(sys.stdin.read())))))
