"""Tools that fork the trainer's process: the child ends with the tool, and never continues the training run."""

import asyncio
import os
import signal
import sys
import time
from typing import Any

import pytest
from harness import ANSWER, call_text, run
from strands import tool

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]


def _fork(how: str) -> str:
    """Fork a child that leaves this function as `how` says; return a text: whether the child ended within 20 s.

    A child that has not ended by then is killed.
    """
    child = os.fork()
    if not child:
        if how == "exits":
            sys.exit(3)
        if how == "raises":
            raise ValueError("no luck")
        return "returned by the child"
    ended, give_up_at = (0, 0), time.monotonic() + 20
    while not ended[0] and time.monotonic() < give_up_at:
        time.sleep(0.02)
        ended = os.waitpid(child, os.WNOHANG)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "the child went on"
    return "the child ended"


@tool
def fork(code: str) -> str:
    """Fork a child.

    Args:
        code: "exits", "raises" or "returns".
    """
    return _fork(code)


@tool
async def fork_on_the_loop(code: str) -> str:
    """Fork a child.

    Args:
        code: "exits", "raises" or "returns".
    """
    return _fork(code)


@pytest.mark.parametrize("name", ["fork", "fork_on_the_loop"])
@pytest.mark.parametrize("how", ["exits", "raises", "returns"])
async def test_generate_ends_children_forked_by_tools(shipped_tokenizer, name, how) -> None:
    turns = [call_text(how, name=name), ANSWER]
    played = await run(shipped_tokenizer, turns, settings={"tools": [f"{__name__}.{name}"]})
    assert "the child ended" in played.context_after(0)
    assert len(played.fake.requests) == 2


async def test_generate_ends_children_of_strands_python_repl(
    shipped_tokenizer, monkeypatch: Any, tmp_path: Any
) -> None:
    pytest.importorskip("strands_tools.python_repl")
    monkeypatch.setenv("BYPASS_TOOL_CONSENT", "true")
    monkeypatch.setenv("PYTHON_REPL_PERSISTENCE_DIR", str(tmp_path))
    turns = [call_text("import sys; print('before'); sys.exit(3)", name="python_repl"), ANSWER]
    async with asyncio.timeout(60):
        played = await run(shipped_tokenizer, turns, settings={"tools": ["strands_tools.python_repl"]})
    assert played.sample.status.value == "completed"
    assert played.facts["calls"][0]["tool"] == "python_repl"
