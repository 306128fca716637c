"""`EpisodeFacts`: reading an episode's facts from a sample's metadata and writing them."""

import json
import math
from typing import Any

import pytest
from harness import ANSWER, call_text, run

from strands_rollout.samples import EpisodeFacts, Sample, add_facts, facts_of, take_fact

LOCAL = {"executor": {"name": "local", "isolation": "rlimits"}}


def sample_with(**facts: Any) -> Sample:
    return Sample(metadata={"strands_rollout": facts})


@pytest.mark.parametrize("settings", [LOCAL, {"tools": ["no.such.tool"]}, {"tools": [], "should_abort": lambda: True}])
async def test_facts_of_reads_facts_of_generate(shipped_tokenizer: Any, settings: dict[str, Any]) -> None:
    sample = (await run(shipped_tokenizer, [call_text(), ANSWER], settings=settings)).sample
    written = sample.metadata["strands_rollout"]
    assert list(facts_of(sample).to_metadata().items()) == list(written.items())
    assert EpisodeFacts.read(json.loads(json.dumps(written))) == facts_of(sample)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("turns", "3"),
        ("turns", True),
        ("turns", 2.5),
        ("duration_s", math.nan),
        ("duration_s", 10**400),
        ("stop_reason", 3),
        ("final_is_cut", 1),
        ("spans", "text"),
        ("code", [1]),
        ("fan_out", 0),
    ],
)
def test_facts_of_drops_values_of_wrong_type(name: str, value: object) -> None:
    assert facts_of(sample_with(**{name: value})) == EpisodeFacts()


def test_facts_of_reads_whole_float_as_count() -> None:
    assert facts_of(sample_with(turns=3.0)).turns == 3
    assert type(facts_of(sample_with(turns=3.0)).turns) is int


@pytest.mark.parametrize("foreign", [None, object(), Sample(), Sample(metadata={"strands_rollout": [1]})])
def test_facts_of_foreign_sample_is_empty(foreign: object) -> None:
    assert facts_of(foreign) == EpisodeFacts()


def test_add_facts_keeps_other_keys() -> None:
    sample = sample_with(turns=1, error=None, text_endpoint={"of": "another program"})
    add_facts(sample, EpisodeFacts(queue_s=0.5, episode_number=7))
    assert (take_fact(sample, "episode_number"), take_fact(sample, "episode_number")) == (7, None)
    expected = {"turns": 1, "error": None, "text_endpoint": {"of": "another program"}, "queue_s": 0.5}
    assert sample.metadata["strands_rollout"] == expected
