"""The environment of strands-sglang: a supported Python creates it; if there is none, a reason says so."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import peer
from benchmarks.client import missing_reason
from benchmarks.peer import PEER, find_python, peer_python


@pytest.fixture
def no_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make strands-sglang missing, here and in the environment that the benchmarks create for it."""
    monkeypatch.setattr(peer, "find_spec", lambda _name: None)
    monkeypatch.setattr(peer, "PEER_ENVIRONMENT", tmp_path / ".venv-peer")
    (tmp_path / "scripts").symlink_to(Path(__file__).parents[2] / "scripts")
    peer_python.cache_clear()
    yield
    peer_python.cache_clear()


def test_find_python_refuses_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    assert find_python() == (sys.executable if sys.version_info >= (3, 12) else None)
    monkeypatch.setenv("PYTHON", str(tmp_path / "python"))
    assert find_python() is None


def test_peer_is_left_out_without_a_python(monkeypatch: pytest.MonkeyPatch, no_peer: None) -> None:
    monkeypatch.setattr(peer, "find_python", lambda: None)
    reason = "it needs Python 3.12 or newer, and none was found; name one: PYTHON=/path/to/python"
    assert missing_reason(PEER) == reason


def test_peer_is_left_out_if_the_installation_fails(monkeypatch: pytest.MonkeyPatch, no_peer: None) -> None:
    monkeypatch.setattr(peer, "find_python", lambda: "no-such-python")
    reason = missing_reason(PEER)
    assert reason is not None
    assert "\n" not in reason
    assert reason.startswith("it can't be installed into .venv-peer: error: no Python")


def test_peer_uses_this_environment_if_it_has_strands_sglang(monkeypatch: pytest.MonkeyPatch, no_peer: None) -> None:
    monkeypatch.setattr(peer, "find_spec", lambda _name: object())
    monkeypatch.setattr(peer, "_OLDEST_PYTHON", (3, 11))
    assert peer_python() == sys.executable
