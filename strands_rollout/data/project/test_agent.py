"""Tests of the tools, the reward and an episode; run pytest in this folder."""

import subprocess
import sys
from pathlib import Path

import pytest
from agent import execute_python_code, look_up_price
from reward import score


def test_tools() -> None:
    assert look_up_price(item="cards") == 46
    assert execute_python_code(code="print(7 * 46 + 2)") == 324
    with pytest.raises(ValueError, match="one line"):
        execute_python_code(code="__import__('os').getcwd()")


def test_score() -> None:
    assert score("It costs \\boxed{200}.", "200")["score"] == 1.0
    assert score("It costs \\boxed{100}.", "200")["score"] == 0.15
    assert score("I don't know.", "200")["score"] == 0.0


def test_episode_of_turns_yaml() -> None:
    command = [sys.executable, "-m", "strands_rollout.cli", "try", "rollout.yaml", "--script", "turns.yaml"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "score 1" in result.stdout
