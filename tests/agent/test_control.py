"""`Control`: polling for aborts, refusing steps after an abort, the episode's clock, and nested tool calls."""

import asyncio
from types import SimpleNamespace

import pytest

from strands_rollout import Sample
from strands_rollout.control import Control, calling, current_call, is_in_episode
from strands_rollout.errors import EngineAbortedError
from strands_rollout.slime_plugin.slime_adapter import rollout_control

EPISODES = 50


async def test_control_polls_once_for_all_episodes_with_one_poll_key() -> None:
    shared = lone = 0

    def ask_shared() -> bool:
        nonlocal shared
        shared += 1
        return lone >= 3

    def ask_lone() -> bool:
        nonlocal lone
        lone += 1
        return False

    async def episode(control: Control) -> str:
        try:
            async with control.deadline(60, during="in the test"):
                await asyncio.sleep(600)
        except EngineAbortedError as e:
            return str(e)
        return "not aborted"

    lone_one = asyncio.create_task(episode(Control(ask_lone)))
    ends = await asyncio.gather(*(episode(Control(ask_shared, poll_key="shared")) for _ in range(EPISODES)))
    lone_one.cancel()
    assert ends == ["the rollout was aborted in the test"] * EPISODES
    assert shared <= lone + 1


def test_rollout_control_poll_key_per_run_and_function() -> None:
    args, other_args = SimpleNamespace(), SimpleNamespace()

    def asked() -> bool:
        return False

    given = [(args, None), (args, "module.function"), (args, asked), (args, asked.__call__), (other_args, None)]
    keys = [rollout_control(of, Sample(), asks).poll_key for of, asks in given]
    assert len(set(keys)) == len(keys)
    assert keys == [rollout_control(of, Sample(), asks).poll_key for of, asks in given]


def test_control_clock_counts_time_before_an_abort() -> None:
    control = Control()
    assert (control.step_start_s(0.0), control.elapsed_s, control.left_s(None), is_in_episode()) == (
        None,
        0.0,
        None,
        False,
    )
    with control.running(100.0):
        assert is_in_episode()
        assert control.elapsed_s >= 100
        assert control.left_s(100.0) == 0.0
        assert (control.left_s(10_000.0) or 0.0) <= 9_900
        assert (control.step_start_s(0.0) or 0.0) >= 100
        assert control.step_start_s(10_000.0) == 0.0
        with control.running():
            assert control.elapsed_s < 100
        assert control.elapsed_s >= 100
    assert (control.step_start_s(0.0), is_in_episode()) == (None, False)


def test_control_check_raises_after_an_abort() -> None:
    is_aborted = False
    control = Control(lambda: is_aborted)
    control.check("before a step")
    is_aborted = True
    with pytest.raises(EngineAbortedError, match="^the rollout was aborted before a step$"):
        control.check("before a step")


def test_calling_nests_calls_under_the_outer_call() -> None:
    assert current_call() is None
    with calling("outer") as outer:
        with calling("inner") as inner:
            assert current_call() is inner
        assert current_call() is outer
    assert (outer.id, outer.outer_id, inner.id, inner.outer_id) == ("outer", "outer", "inner", "outer")
