"""Samples made of alternating context and turns, and dumps of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strands_rollout import Sample
from strands_rollout.diagnostics.replay import DumpedEpisode, to_episode
from strands_rollout.dump import DumpRecord, write_dump

Parts = list[list[int]]
"""Context and turns alternately; the first part is the prompt, the last part a turn."""


def parts_of(sample: Any) -> Parts:
    parts, at = [], 0
    for _, start, end, _ in sample.metadata["strands_rollout"]["spans"]:
        parts += [sample.tokens[at:start], sample.tokens[start:end]]
        at = end
    return parts


def sample_of_parts(parts: Sequence[Sequence[int]], *, with_facts: bool = True, **fields: Any) -> Sample:
    tokens = [token for part in parts for token in part]
    mask = [number % 2 for number, part in enumerate(parts) for _ in part]
    ends = [sum(map(len, parts[: number + 1])) for number in range(len(parts))]
    spans = [[at // 2, ends[at - 1], ends[at], "1"] for at in range(1, len(parts), 2)]
    facts = {"spans": spans, "stop_reason": "completed"}
    length = len(tokens) - len(parts[0])
    return Sample(
        **{
            "index": 0,
            "tokens": tokens,
            "response_length": length,
            "loss_mask": mask[len(parts[0]) :],
            "rollout_log_probs": [-0.5 * value for value in mask[len(parts[0]) :]],
            "status": Sample.Status.COMPLETED,
            "metadata": {"strands_rollout": facts} if with_facts else {},
            **fields,
        }
    )


def dumped_episode(sample: Any) -> DumpedEpisode:
    found = to_episode(DumpRecord.from_sample(sample), 0)
    assert found is not None
    return found


def write_sample_dump(tmp_path: Path, *samples: Any, name: str = "samples.jsonl.gz") -> Path:
    path = tmp_path / name
    write_dump(path, samples)
    return path
