"""`generate_rollout_fully_async`: the groups in flight that a staleness allows, and a slime without that rollout."""

import heapq
import itertools
import random
from argparse import Namespace
from collections import deque
from typing import Any

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.fully_async import generate_rollout_fully_async, max_started_groups


def longest_wait(groups: int, prompts: int, update_interval: int = 1) -> float:
    """Return the weight updates until the last of so many groups is taken."""
    return groups / prompts / update_interval


@pytest.mark.parametrize(
    ("limit", "prompts", "interval", "groups"),
    [(4, 16, 1, 48), (4, 32, 1, 96), (2, 16, 4, 64), (1, 16, 1, 16), (0, 16, 1, 16)],
)
def test_max_started_groups_keeps_the_wait_within_the_staleness(
    limit: int, prompts: int, interval: int, groups: int
) -> None:
    found = max_started_groups(limit, prompts=prompts, update_interval=interval)
    assert found == groups
    assert longest_wait(found, prompts, interval) <= max(limit - 1, 1)


def test_async_script_fills_its_engines_within_the_staleness() -> None:
    """The script's defaults: 16 prompts x 8 episodes, 2 engines x 64 episodes, at most 4 versions."""
    assert max_started_groups(4, prompts=16) * 8 >= 2 * 64


@pytest.mark.parametrize("train_s", [30.0, 120.0, 400.0], ids=["engines are slower", "equal", "trainer is slower"])
@pytest.mark.parametrize("limit", [1, 2, 4, 8])
def test_max_started_groups_in_a_simulation(limit: int, train_s: float) -> None:
    """Few samples are too old, and steps take as long as with slime's own number of groups, from a limit of 4 on."""
    groups = max_started_groups(limit, prompts=16)
    staleness, step_s = simulate(groups, train_s=train_s)
    _, unlimited_s = simulate(16 * 16, train_s=train_s)
    assert sum(versions > limit for versions in staleness) / len(staleness) < 0.1
    assert limit < 4 or step_s < 1.1 * unlimited_s


def simulate(groups: int, *, train_s: float, prompts: int = 16, size: int = 8, slots: int = 128) -> Any:
    """Return the staleness of the trained samples, and the mean seconds of a step.

    Episodes take a minute on average. As in slime's train_async.py, a step's groups are collected while the step before
    is trained, and the weights are updated in between.
    """
    rng, steps = random.Random(0), 120
    events: list[tuple[float, int, int | None]] = []  # time, order, group of an episode that ends; None for the trainer
    order = itertools.count()
    remaining, versions, waiting = dict[int, int](), dict[int, list[int]](), deque[int]()
    queued, collected, staleness = deque[int](), list[int](), list[int]()
    version, free, started, trained, is_training, now = 1, slots, 0, 0, False, 0.0
    while trained < steps:
        while len(remaining) + len(queued) < groups:
            remaining[started], versions[started] = size, []
            waiting.extend([started] * size)
            started += 1
        while free and waiting:
            free -= 1
            heapq.heappush(events, (now + 60 * rng.lognormvariate(-0.18, 0.6), next(order), waiting.popleft()))
        while queued and len(collected) < prompts:
            collected.append(queued.popleft())
        if len(collected) == prompts and not is_training:
            staleness += [version - each for group in collected for each in versions.pop(group)]
            collected, is_training, version = [], True, version + 1
            heapq.heappush(events, (now + train_s, next(order), None))
            continue
        now, _, group = heapq.heappop(events)
        if group is None:
            is_training, trained = False, trained + 1
            continue
        free += 1
        versions[group].append(version)
        remaining[group] -= 1
        if not remaining[group]:
            del remaining[group]
            queued.append(group)
    return staleness[len(staleness) // 5 :], now / steps


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
