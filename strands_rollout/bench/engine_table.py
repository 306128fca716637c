"""The figures of compared engines as rows, as a Markdown table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Final

from strands_rollout.bench.engine_workloads import Took, Workload

_CACHE_WORDS: Final = {
    "distinct": "prompts never seen",
    "flushed": "cache just emptied",
    "again": "same prompts again",
    "shared": "one prompt for all",
}


@dataclass(frozen=True, slots=True)
class EngineRow:
    """What a workload took on an engine: medians over the rounds.

    Attributes:
        tokens_per_s: New tokens, with "prefill" the prompts' tokens, per second of wall time.
        cpu_us_per_token: Microseconds of the engine's CPU time per token of these; None where it can't be seen.
        cached_tokens: Prompt tokens found in the cache, over all requests.
    """

    engine: str
    workload: Workload
    wall_s: float
    tokens_per_s: float
    cpu_us_per_token: float | None
    cached_tokens: float


def engine_row(engine: str, workload: Workload, passes: Sequence[Took]) -> EngineRow:
    """The medians of at least one pass."""
    wall_s = median(took.wall_s for took in passes)
    cpus = [took.engine_cpu_s for took in passes if took.engine_cpu_s is not None]
    return EngineRow(
        engine=engine,
        workload=workload,
        wall_s=wall_s,
        tokens_per_s=workload.counted_tokens / wall_s,
        cpu_us_per_token=median(cpus) / workload.counted_tokens * 1e6 if cpus else None,
        cached_tokens=median(took.cached_tokens for took in passes),
    )


def rows_as_json(rows: Sequence[EngineRow]) -> str:
    """A JSON list of objects, one per row, with `EngineRow`'s names and the workload's as an object."""
    return json.dumps([asdict(row) for row in rows])


def rows_as_markdown(rows: Sequence[EngineRow]) -> str:
    """A table with a line per workload and, for each engine, tokens/s, wall ms and CPU per token."""
    engines = list(dict.fromkeys(row.engine for row in rows))
    found = {(row.workload, row.engine): row for row in rows}
    heads = ["measured", "cache"]
    for engine in engines:
        heads += [f"{engine}: tokens/s", "ms", "CPU us/token"]
    lines = [heads, ["---", "---", *["---:"] * 3 * len(engines)]]
    for workload in dict.fromkeys(row.workload for row in rows):
        cells = [_measured(workload), _CACHE_WORDS[workload.cache]]
        for engine in engines:
            cells += _figures(found.get((workload, engine)))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _measured(work: Workload) -> str:
    if work.kind == "prefill":
        return f"prefill of {work.prompt_tokens:,} tokens"
    requests = "1 request" if work.requests == 1 else f"{work.requests} requests"
    return f"{work.kind}: {requests}, {work.prompt_tokens:,} + {work.new_tokens:,} tokens"


def _figures(row: EngineRow | None) -> list[str]:
    if row is None:
        return [""] * 3
    cpu = "" if row.cpu_us_per_token is None else f"{row.cpu_us_per_token:,.0f}"
    return [f"{row.tokens_per_s:,.0f}", f"{1000 * row.wall_s:,.0f}", cpu]
