"""The camel backend where camel-ai is not installed."""

from __future__ import annotations

import sys

import pytest

from strands_rollout.code_tool.camel import CamelExecutor
from strands_rollout.errors import ConfigError


def test_without_camel_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "camel", None)
    monkeypatch.delitem(sys.modules, "camel.interpreters", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'strands-rollout\[camel\]'"):
        CamelExecutor()


def test_importing_the_backend_does_not_import_camel() -> None:
    assert "camel" not in sys.modules or sys.modules["camel"] is not None
