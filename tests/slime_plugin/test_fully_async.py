"""`generate_rollout_fully_async`: the groups in flight that a staleness allows, and a slime without that rollout."""

from argparse import Namespace

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.fully_async import generate_rollout_fully_async, groups_in_flight


def longest_wait(groups: int, prompts: int, update_interval: int = 1) -> float:
    """Return the weight updates during which a group may wait: slime plays and holds so many groups each."""
    return 2 * groups / prompts / update_interval


@pytest.mark.parametrize(
    ("limit", "prompts", "slots", "interval", "groups"),
    [(4, 16, 128, 1, 24), (4, 32, 128, 1, 48), (2, 16, 128, 4, 32), (9, 16, 40, 1, 40), (1, 16, 128, 1, 1)],
)
def test_groups_in_flight_keeps_the_wait_within_the_staleness(
    limit: int, prompts: int, slots: int, interval: int, groups: int
) -> None:
    found = groups_in_flight(limit, prompts=prompts, slots=slots, update_interval=interval)
    assert found == groups
    assert longest_wait(found, prompts, interval) <= max(limit - 1, 1)


def test_async_script_fills_its_engines_within_the_staleness() -> None:
    """The script's defaults: 16 prompts x 8 episodes, 2 engines x 64 episodes, at most 4 versions."""
    assert groups_in_flight(4, prompts=16, slots=128) * 8 >= 128


def test_generate_rollout_fully_async_names_the_missing_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_rollout.slime_plugin.fully_async._MODULE", "slime.no_such_rollout")
    with pytest.raises(ConfigError, match="expected slime 0.3.0 or newer"):
        generate_rollout_fully_async(Namespace(strands_rollout={}), 0, None)


@pytest.mark.parametrize(("given", "limit"), [(None, None), ("none", None), ("4", 4)])
def test_max_sample_staleness_default_comes_from_environment(
    given: str | None, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS", raising=False)
    if given is not None:
        monkeypatch.setenv("STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS", given)
    assert RolloutSettings().max_sample_staleness == limit
    assert RolloutSettings(max_sample_staleness=7).max_sample_staleness == 7


def test_max_sample_staleness_refuses_a_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS", "four")
    with pytest.raises(ConfigError, match="STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS='four'"):
        RolloutSettings()
