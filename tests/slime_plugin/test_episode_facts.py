"""Reading the facts of an episode back from whatever a sample's metadata holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from strands_rollout.samples import episode_facts, fan_out_part


def with_facts(facts: object) -> SimpleNamespace:
    return SimpleNamespace(metadata={"strands_rollout": facts, "of_the_row": 1})


def test_the_facts_are_ours_alone() -> None:
    assert episode_facts(with_facts({"turns": 2})) == {"turns": 2}


@pytest.mark.parametrize(
    "sample",
    [None, object(), SimpleNamespace(metadata=None), SimpleNamespace(metadata=["strands_rollout"]), with_facts(None)],
)
def test_a_sample_without_facts_has_none(sample: object) -> None:
    assert episode_facts(sample) == {}
    assert fan_out_part(sample) is None


def test_the_part_of_a_fan_out_is_read() -> None:
    assert fan_out_part(with_facts({"fan_out": {"part": 0, "of": 3, "kind": "main"}})) == 0
    assert fan_out_part(with_facts({"fan_out": {"part": 2, "of": 3, "kind": "agent"}})) == 2


@pytest.mark.parametrize("fan_out", [None, 0, ["part"], "main", {}, {"part": None}, {"part": "0"}])
def test_what_is_no_part_is_none(fan_out: object) -> None:
    assert fan_out_part(with_facts({"fan_out": fan_out})) is None
