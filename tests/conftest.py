"""Fixtures that all tests share (tokenizers, the real SGLang, retries without waits), and hooks of pytest."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_server import start_sglang, version_of
from run_report import note_engine, pytest_terminal_summary, report_row

from strands_rollout import log_once

_REPOSITORY = Path(__file__).parents[1]
SHIPPED_TOKENIZER = _REPOSITORY / "strands_rollout" / "engine" / "checkpoint"
QWEN3_TOKENIZER = Path(os.environ.get("QWEN3_TOKENIZER", _REPOSITORY.parent / "shared" / "qwen3-8b-tokenizer"))
_REAL_LIMIT_S = 900

__all__ = ["pytest_terminal_summary", "report_row"]  # pytest finds them here


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sglang-base-url",
        default=os.environ.get("SGLANG_BASE_URL"),
        help="URL of an SGLang server with the shipped model, for the tests marked `real`; default: SGLANG_BASE_URL, "
        "else the tests start a server on this CPU.",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests marked `real` more time, since they may start an engine, unless a test sets its own timeout."""
    for item in items:
        if item.get_closest_marker("real") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_REAL_LIMIT_S))


@pytest.fixture(autouse=True)
def _reset_log_once() -> None:
    """Reset `log_once`, so that each test gets the messages that are logged once per process."""
    log_once._LOGGED.clear()


@pytest.fixture(scope="session", autouse=True)
def _report_missing_names() -> None:
    """Log the names that an old Strands lacks before the first test, so that no test finds this warning in its log."""
    try:
        from strands_rollout.agent.loop import IMPORT_FAULT
        from strands_rollout.agent.strands_names import report_missing_names
    except ModuleNotFoundError:  # the attacks on the sandbox also run without Strands, as an ordinary user
        return
    report_missing_names(IMPORT_FAULT)


@pytest.fixture(scope="session")
def sglang_server(pytestconfig: pytest.Config) -> Iterator[str]:
    """Yield the URL of the real SGLang with the shipped model; all tests share it, so each must leave it as it was."""
    given = pytestconfig.getoption("--sglang-base-url")
    if given:
        yield given.rstrip("/")
        return
    server = start_sglang()
    yield server.base_url
    server.stop()


@pytest.fixture
def sglang(sglang_server: str, request: pytest.FixtureRequest) -> str:
    """Return the URL of `sglang_server`, and report the test as one that ran on this server."""
    note_engine(request.node, f"SGLang {version_of(sglang_server)}")
    return sglang_server


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def retry_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make the retries of clients wait no time, and return the list of seconds that they would have waited."""
    from strands_rollout.client.client import SGLangClient

    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setitem(SGLangClient.__init__.__kwdefaults__, "sleep", sleep)
    return waits


@pytest.fixture(scope="session")
def shipped_tokenizer() -> Any:
    return _load(SHIPPED_TOKENIZER)


@pytest.fixture(scope="session")
def qwen3_tokenizer() -> Any:
    """Return Qwen3's real tokenizer with Qwen3-8B's chat template, or skip the test."""
    if not QWEN3_TOKENIZER.is_dir():
        pytest.skip("needs Qwen3's tokenizer: set QWEN3_TOKENIZER to a folder that holds it")
    return _load(QWEN3_TOKENIZER)


@pytest.fixture(scope="session", params=["shipped", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_tokenizer")
