"""Attacks on the sandbox: all fail on a `LocalExecutor` with default isolation, and most with `programs=True`.

Most attacks also run on the plain backend, where they must work, except for those that a machine itself may prevent.
"""

import asyncio
import os
import sys

import attacks_on_files
import attacks_on_other_runs
import attacks_on_processes
import attacks_on_resources
import attacks_on_the_kernel
import attacks_on_the_network
import pytest
from attack import MAX_THREADS, PRELUDE, Attack
from attack_targets import Stage
from attacks_on_other_runs import SEARCH_OWN_MEMORY
from host_view import ObservedProcesses
from ordinary_user import ordinary_user
from signs import holds

from strands_rollout.code_tool import CodeExecutor, ExecutionResult
from strands_rollout.code_tool.sandbox.kernel import landlock_abi

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the attacks need Linux")

ATTACKS = (
    *attacks_on_files.OF_PROCESSES,
    *attacks_on_files.OF_FILES,
    *attacks_on_files.ALL,
    *attacks_on_the_network.ALL,
    *attacks_on_processes.BY_STARTING,
    *attacks_on_processes.ON_PROCESSES,
    *attacks_on_resources.ALL,
    *attacks_on_resources.ON_LIMITS,
    *attacks_on_the_kernel.ALL,
    *attacks_on_other_runs.ALL,
)
_ATTACK_PARAMS = [pytest.param(attack, id=attack.name) for attack in ATTACKS]


async def run_attack(attack: Attack, stage: Stage) -> tuple[bool, str]:
    target = attack.target(stage)
    try:
        slowdown = 1 if stage.has_helpers else 5  # on the plain backend, attacks must succeed on a busy machine too
        code = attack.code_for(target.facts, hold_s=4 * slowdown)
        run = asyncio.create_task(stage.executor.run(code, timeout_s=attack.timeout_s * slowdown))
        was_damaged = False
        while not run.done() and not (was_damaged := target.check_damage()):
            await asyncio.wait({run}, timeout=0.01)
        run.cancel()
        (result,) = await asyncio.gather(run, return_exceptions=True)
        await asyncio.to_thread(target.finish)
        if isinstance(result, Exception):
            raise result
        worked = was_damaged or target.check_damage()
        if isinstance(result, ExecutionResult):  # an attack that breaks the executor has worked, too
            worked = worked or target.reveals_secret(result) or result.infra_error is not None
        was_stopped = isinstance(result, ExecutionResult) and attack.was_stopped(result, target.name)
        is_blind = isinstance(target, ObservedProcesses) and target.is_blind
        if not worked and is_blind and not was_stopped:  # the sign may be hidden from the host
            pytest.skip("this machine does not let the host look into sandboxed processes")
        return worked, f"{attack.name} on {type(stage.executor).__name__} ended as {result}"
    finally:
        target.close()


@pytest.mark.slow
@pytest.mark.parametrize("attack", _ATTACK_PARAMS)
async def test_attack_succeeds_on_plain_backend(attack, plain, make_stage) -> None:
    if attack.skip_on_plain:
        pytest.skip(f"the plain backend: {attack.skip_on_plain}")
    worked, outcome = await run_attack(attack, make_stage(plain))
    if not worked and attack.may_fail_on_plain:
        pytest.skip(f"not on this machine: {attack.may_fail_on_plain}")
    assert worked, outcome


@pytest.mark.parametrize("attack", _ATTACK_PARAMS)
async def test_local_executor_blocks_attack(attack, isolated, make_stage) -> None:
    worked, outcome = await run_attack(attack, make_stage(isolated))
    assert not worked, outcome
    assert (await isolated.run("print(1)", timeout_s=30)).stdout == "1\n"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="without Landlock, confining needs root")
@pytest.mark.parametrize("attack", _ATTACK_PARAMS)
async def test_chroot_blocks_attack_without_landlock(attack, without_landlock, make_stage) -> None:
    worked, outcome = await run_attack(attack, make_stage(without_landlock))
    assert not worked, outcome
    assert (await without_landlock.run("print(1)", timeout_s=30)).stdout == "1\n"


# attacks that only the list of allowed system calls stops; they harm no other run, outside file or other user
_ALLOWED_WITH_PROGRAMS = """
    target-of-a-link start-system start-exec start-execveat start-memory-file fork kernel-memory-in-locks
    memory-in-parts-of-shared-memory memory-in-parts-of-shared-memory-of-a-device
    open-process-handle open-memory-file
"""
# attacks that are stopped because sandboxed code has a user of its own, which needs root
_ALLOWED_WITHOUT_ROOT = "change-mode change-time fork-bomb"
_ALLOWED = [*_ALLOWED_WITH_PROGRAMS.split(), *(_ALLOWED_WITHOUT_ROOT.split() if os.geteuid() else ())]


@pytest.mark.slow
@pytest.mark.skipif(landlock_abi() < 6, reason="needs Landlock that confines TCP and signals")
@pytest.mark.parametrize("attack", [param for param in _ATTACK_PARAMS if param.id not in _ALLOWED])
async def test_programs_mode_blocks_attack(attack, with_programs, make_stage):
    worked, outcome = await run_attack(attack, make_stage(with_programs))
    assert not worked, outcome


async def test_host_view_search_finds_existing_file(isolated: CodeExecutor) -> None:
    hidden = "a = ('secret-' + 'ab' * 16) * 5000\nb = a.encode()\nc = [a[:50] for _ in range(99)]\n"
    result = await isolated.run(PRELUDE.format(facts="{}", hold_s=4) + hidden + SEARCH_OWN_MEMORY, timeout_s=120)
    assert "secret-abababababababababababababababab" in result.stdout


async def test_host_view_sees_sandboxed_process(isolated, make_stage) -> None:
    code = "take_name()\nkept = open('mine.txt', 'w')\nhold(60)"  # until the host sees it
    attack = Attack("hold-own-file", code, lambda stage: ObservedProcesses(stage, holds("/mine.txt")), timeout_s=60)
    worked, outcome = await run_attack(attack, make_stage(isolated))
    assert worked, outcome


async def test_parallel_runs_get_max_threads(isolated: CodeExecutor) -> None:
    code = (
        "import threading\nthreading.stack_size(65536)\nall_counted = threading.Event()\n"
        f"threads = [threading.Thread(target=all_counted.wait) for _ in range({MAX_THREADS - 1})]\n"
        "for thread in threads: thread.start()\n"
        "print(threading.active_count())\nall_counted.set()"
    )
    results = await asyncio.gather(*[isolated.run(code, timeout_s=60) for _ in range(4)])
    assert [result.stdout for result in results] == [f"{MAX_THREADS}\n"] * 4, results


async def test_runs_draw_different_random_numbers(isolated: CodeExecutor) -> None:
    code = (
        "import gc, os, random, secrets, tempfile, uuid\nimport numpy, sympy\nfrom sympy.core.random import rng\n"
        "for thing in (random.random(), rng.random(), numpy.random.rand(), numpy.random.default_rng().random(),\n"
        "              random.Random().random(), os.urandom(8).hex(), secrets.token_hex(8), uuid.uuid4(),\n"
        "              tempfile.mktemp(), sympy.core.random.random_complex_number()): print(thing)\n"
        "for thing in gc.get_objects():\n"
        "    if isinstance(thing, random.Random): print(thing.random())\n"
        "    if isinstance(thing, (numpy.random.RandomState, numpy.random.Generator)): print(thing.random())\n"
    )
    first, second = [(await isolated.run(code, timeout_s=60)).stdout.splitlines() for _ in range(2)]
    assert len(first) >= 10
    assert not set(first) & set(second)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="without root, the attack suite already runs as an ordinary user")
def test_attacks_as_ordinary_user() -> None:
    files = [f"tests/code_tool/test_{name}.py" for name in ("attacks", "attacks_in_sessions", "disturbances")]
    with ordinary_user() as user:
        outcomes = user.results(*files, "-m", "slow or not slow", limit_s=1700)
    passed = [test for test, (outcome, _) in outcomes.items() if outcome == "passed"]
    skipped = [test for test, (outcome, _) in outcomes.items() if outcome == "skipped"]
    assert {test: outcomes[test] for test in outcomes.keys() - {*passed, *skipped}} == {}
    local_tests = [test for test in outcomes if "test_local_executor_" in test]
    assert len(local_tests) > len(ATTACKS)
    blind = [test for test in skipped if test in local_tests and "does not let the host look" in outcomes[test][1]]
    assert blind == []  # the code's own output decides where the host sees nothing
    worked = [test for test in passed if test_attack_succeeds_on_plain_backend.__name__ in test]
    assert len(worked) > len(ATTACKS) / 2  # attacks that fail even on the plain backend prove nothing
