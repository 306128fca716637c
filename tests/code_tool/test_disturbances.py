"""Whatever code does to whoever runs it: the result is true and comes in time, and the next run knows nothing of it."""

import asyncio
import sys

import pytest
from disturbances import DISTURBANCES, Disturbance

from strands_rollout.code_tool import CodeExecutor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what the kernel does to code is Linux's")

_TRUTH: str = "import random, sys\nprint(len(sys.argv), sys.gettrace(), isinstance(1, int), sorted([2, 1]))\n1 / 0"
_SPARE_S = 30.0  # only a hang takes longer
_NAMED = [pytest.param(disturbance, id=disturbance.name) for disturbance in DISTURBANCES]


@pytest.mark.parametrize("disturbance", _NAMED)
async def test_the_isolated_backend_tells_the_truth(disturbance: Disturbance, isolated: CodeExecutor) -> None:
    async with asyncio.timeout(disturbance.timeout_s + _SPARE_S):
        result = await isolated.run(disturbance.code, timeout_s=disturbance.timeout_s)
    assert disturbance.is_true(result), result
    after = await isolated.run(_TRUTH, timeout_s=30)
    assert (after.stdout, after.exit_code) == ("1 None True [1, 2]\n", 1)
    assert after.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", _NAMED)
async def test_the_plain_backend_tells_the_truth(disturbance: Disturbance, plain: CodeExecutor) -> None:
    result = await plain.run(disturbance.code, timeout_s=disturbance.timeout_s)
    assert disturbance.is_true(result), result
