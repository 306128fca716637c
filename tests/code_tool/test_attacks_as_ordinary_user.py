"""The attack suite once more, as a user who is not root and owns all that is attacked: no user is changed then.

Each test here stands for one that ran there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from attacks import ATTACKS
from disturbances import DISTURBANCES
from ordinary_user import ordinary_user

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="the attacks are on Linux"),
    pytest.mark.skipif(os.geteuid() != 0, reason="whoever is no root runs the attack suite as an ordinary user anyway"),
]

_RUN_LIMIT_S = 550
_FILES = [f"tests/code_tool/test_{name}.py" for name in ("attacks", "attacks_in_sessions", "disturbances")]
_TESTS = [f"test_the_isolated_backend_blocks_it[{attack.name}]" for attack in ATTACKS]
_TESTS += [f"test_the_isolated_backend_tells_the_truth[{disturbance.name}]" for disturbance in DISTURBANCES]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, tuple[str, str]]]:
    with ordinary_user() as user:
        yield user.results(*_FILES, "-m", "slow or not slow", limit_s=_RUN_LIMIT_S)


@pytest.mark.parametrize("test", _TESTS)
def test_it_holds_for_an_ordinary_user(test: str, outcomes: dict[str, tuple[str, str]]) -> None:
    outcome, reason = outcomes.get(test, ("skipped", "an ordinary user's machine offers nothing to attack that way"))
    if outcome == "skipped":
        pytest.skip(reason)
    assert outcome == "passed", reason


def test_everything_else_holds_too(outcomes: dict[str, tuple[str, str]]) -> None:
    others = {test: outcome for test, outcome in outcomes.items() if test not in _TESTS}
    assert {test: reason for test, (outcome, reason) in others.items() if outcome not in ("passed", "skipped")} == {}
    worked = [test for test, (outcome, _) in others.items() if "lets_it_happen" in test and outcome == "passed"]
    assert len(worked) > 100  # or nothing would be proved
