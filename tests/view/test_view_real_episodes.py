"""Episodes that were interrupted, resumed and fanned out on a real engine are shown as what they are, as no fault."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_episodes import all_of_them, with_images

from strands_rollout.dump import DumpRecord, TokenTexts, read_dump, write_dump
from strands_rollout.slime_plugin.reward_groups import normalize_rewards
from strands_rollout.view.page import DumpView, view_dump

ORDER = ("updated", "aborted", "resumed", "fanned")


async def test_interrupted_and_fanned_out_episodes_are_shown_right(shipped_tokenizer: Any, tmp_path: Path) -> None:
    played = await all_of_them(shipped_tokenizer)
    samples = [one for kind in ORDER for one in played[kind]]
    write_dump(tmp_path / "real.jsonl.gz", samples, TokenTexts(shipped_tokenizer))
    view = view_dump(tmp_path / "real.jsonl.gz", None)
    assert {problem for row in view.rows for problem in row["problems"]} <= {"stale version"}
    shown = dict(zip(ORDER, _cut(view, [len(played[kind]) for kind in ORDER]), strict=True))
    assert any(len(row["versions"]) > 1 for row, _ in shown["updated"])
    assert {row["status"] for row, _ in shown["aborted"]} == {"aborted"}
    assert all(row["advantage"] is None for row, _ in shown["aborted"])
    assert any(len(row["versions"]) > 1 for row, _ in shown["resumed"])
    parts = [row["part"] for row, _ in shown["fanned"] if row["part"]]
    assert "main, 1 of 2" in parts
    assert "agent, 2 of 2" in parts
    for row, detail in (one for kind in ORDER for one in shown[kind]):
        _check_times(row, detail)
    _check_advantages(samples, view)


def _cut(view: DumpView, counts: list[int]) -> list[list[tuple[dict[str, Any], dict[str, Any]]]]:
    pairs = [(row, json.loads(gzip.decompress(d))) for row, d in zip(view.rows, view.details, strict=True)]
    found = []
    for count in counts:
        found.append(pairs[:count])
        pairs = pairs[count:]
    return found


def _check_times(row: dict[str, Any], detail: dict[str, Any]) -> None:
    """The policy is asked for one thing after the other, within the episode."""
    requests = [(at, at + s) for kind, at, s, *_ in detail["steps"] if kind == "generate"]
    assert len(requests) >= len(detail["spans"]) > 0 or row["turns"] == 0
    assert all(end <= begin + 0.05 for (_, end), (begin, _) in pairwise(requests))
    if row["times"]:
        assert all(end <= row["times"]["all"] + 0.01 for _, end in requests)


def _check_advantages(samples: list[Any], view: DumpView) -> None:
    rewarded = [place for place, one in enumerate(samples) if one.reward is not None]
    _, expected = normalize_rewards(SimpleNamespace(reward_key="score"), [samples[place] for place in rewarded])
    assert [view.rows[place]["advantage"] for place in rewarded] == expected


async def test_an_episode_with_images_is_dumped_and_shown(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    sample, tokenizer = await with_images(tmp_path / "model")
    write_dump(tmp_path / "run.jsonl", [sample], TokenTexts(tokenizer))
    (record,) = read_dump(tmp_path / "run.jsonl")
    image = record.values["prompt"][0]["content"][0]["image"]
    assert image.tobytes() == sample.prompt[0]["content"][0]["image"].tobytes()
    view = view_dump(tmp_path / "run.jsonl", None)
    (row,), detail = view.rows, json.loads(gzip.decompress(view.details[0]))
    assert (row["problems"], row["asked"]) == ([], "[image] How many doors?")
    (call,) = (part for _, parts in detail["talk"] for part in parts if part[0] == "call")
    assert call[2:] == ["draw", {"code": "a house"}]
    assert DumpRecord.from_sample(sample).values["multimodal_train_inputs"]["pixel_values"].shape[0] == 3
