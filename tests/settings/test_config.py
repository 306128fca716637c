"""Settings from slime's args: defaults, unknown keys, bad values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.settings import RolloutSettings, settings_from_args


def parsed(given: Any) -> RolloutSettings:
    return settings_from_args(SimpleNamespace(strands_rollout=given))


@pytest.mark.parametrize(
    "args", [SimpleNamespace(), SimpleNamespace(strands_rollout=None), SimpleNamespace(strands_rollout={})]
)
def test_absent_settings_are_the_defaults(args: Any) -> None:
    assert settings_from_args(args) == RolloutSettings()
    assert settings_from_args(args).max_tool_iterations == 5
    assert settings_from_args(args).tools == ("strands_rollout.tools.execute_python_code",)


def test_settings_are_read() -> None:
    settings = parsed({"max_tool_iterations": None, "tools": ["a.b"], "reward": {"style": "slime_strands_example"}})
    assert settings.max_tool_iterations is None
    assert settings.tools == ("a.b",)
    assert settings.reward.style == "slime_strands_example"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tool_iters": 3}, "unknown setting strands_rollout.max_tool_iters; did you mean 'max_tool_iterations'"),
        ({"reward": {"stile": "x"}}, "unknown setting strands_rollout.reward.stile; did you mean 'style'"),
        ({"zzz": 3}, "unknown setting strands_rollout.zzz; expected one of .*enable_thinking.*max_tool_calls"),
        ({"max_tool_iterations": -1}, "got strands_rollout.max_tool_iterations=-1; expected: .*greater than or equal"),
        ({"tool_timeout_s": "soon"}, "got strands_rollout.tool_timeout_s='soon'; expected: .*number"),
        ([1], "of type list; expected a mapping of settings"),
    ],
)
def test_a_bad_setting_says_what_was_got_and_expected(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(given)
