"""MCP servers in the settings, run as real processes: started, shared, filtered, lost; tools with other names."""

import asyncio
import gc
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sglang import FakeSGLang
from harness import ANSWER, TOOL_CALL, args_for, run
from mcp import StdioServerParameters, stdio_client
from strands.tools.mcp import MCPClient

from strands_rollout import Sample, generate
from strands_rollout.agent.tool_loading import load_tools
from strands_rollout.errors import ConfigError, ToolError
from strands_rollout.settings import RolloutSettings, settings_from_args
from strands_rollout.slime_plugin.inputs import with_row_settings

pytestmark = [
    pytest.mark.usefixtures("_leftovers"),
    # mcp 1 renamed the function that Strands calls
    pytest.mark.filterwarnings("ignore:Use `streamable_http_client` instead:DeprecationWarning"),
]
SERVER = Path(__file__).parents[1] / "support" / "user_mcp_server.py"
COMMAND = f"python {SERVER}"
FACTS = TOOL_CALL.format(name="facts", arguments="{}")
END = TOOL_CALL.format(name="end", arguments="{}")


@pytest.fixture(scope="module")
def _leftovers() -> Iterator[None]:
    """Collect the garbage of these tests' clients here rather than during another test."""
    yield
    gc.collect()


def servers(**server: Any) -> dict[str, Any]:
    return {"tools": [{"command": COMMAND, **server}]}


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Start a server that the tests of this module share, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), "--port", str(port)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


async def test_mcp_server_command_with_arguments_and_environment(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_FACT", "blue")
    settings = servers(args=["one", "two"], env={"FACT": "${SECRET_FACT}"})
    played = await run(shipped_tokenizer, [FACTS, ANSWER], settings=settings)
    assert "blue one two" in played.context_after(0)
    assert played.facts["stop_reason"] == "completed"


async def test_mcp_server_by_url(shipped_tokenizer: Any, served: str) -> None:
    played = await run(shipped_tokenizer, [FACTS, ANSWER], settings={"tools": [served]})
    assert "--port" in played.context_after(0)


async def test_mcp_tool_error_is_shown_to_the_policy(shipped_tokenizer: Any, served: str) -> None:
    failing = TOOL_CALL.format(name="fail", arguments=json.dumps({"reason": "too large"}))
    unfit = TOOL_CALL.format(name="fail", arguments="{}")
    played = await run(shipped_tokenizer, [failing, unfit, ANSWER], settings={"tools": [served]})
    assert "Error executing tool fail" in played.context_after(0)
    assert (played.sample.status, played.facts["tool_errors"]) == (Sample.Status.COMPLETED, 2)


client = MCPClient(lambda: stdio_client(StdioServerParameters(command=sys.executable, args=[str(SERVER)])))


@pytest.mark.parametrize("tool", [{"command": COMMAND}, f"{__name__}.client"], ids=["command", "client"])
async def test_mcp_server_lost_is_an_outage_and_restarts(shipped_tokenizer: Any, tool: Any) -> None:
    lost = await run(shipped_tokenizer, [END, ANSWER], settings={"tools": [tool]})
    assert (lost.sample.status, lost.facts["stop_reason"]) == (Sample.Status.FAILED, "sandbox_error")
    assert "was lost" in lost.facts["error"]
    assert set(lost.sample.loss_mask) == {0}
    again = await run(shipped_tokenizer, [FACTS, ANSWER], settings={"tools": [tool]})
    assert (again.facts["stop_reason"], again.facts["tool_errors"]) == ("completed", 0)


@pytest.mark.parametrize("more", [{}, {"agent_factory": "user_agents.with_tools_of_the_task"}], ids=["ours", "factory"])
async def test_mcp_server_that_does_not_start_is_an_outage(shipped_tokenizer: Any, more: dict[str, Any]) -> None:
    settings = {"tools": [{"name": "none", "command": "no-such-program --flag"}], **more}
    played = await run(shipped_tokenizer, [], settings=settings)
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "sandbox_error")
    assert "the MCP server 'none' did not start" in played.facts["error"]
    assert "no-such-program" in played.facts["error"]


async def test_mcp_server_connection_refused_fails_all_episodes(
    shipped_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Collect garbage often, on every thread including the client's own: a finalizer that waits would deadlock."""
    url = "http://127.0.0.1:1/mcp"
    frequency = gc.get_threshold()
    gc.set_threshold(10)
    try:
        async with FakeSGLang([]) as fake:
            args = args_for(fake.base_url, shipped_tokenizer, strands_rollout={"tools": [url]})
            rows = [Sample(prompt="?", index=index) for index in range(8)]
            async with asyncio.timeout(60):
                await asyncio.gather(*(generate(args, row, {"max_new_tokens": 64}) for row in rows))
    finally:
        gc.set_threshold(*frequency)
    assert {row.metadata["strands_rollout"]["stop_reason"] for row in rows} == {"sandbox_error"}
    for row in rows:
        assert re.search("did not start: .*Connect call failed", row.metadata["strands_rollout"]["error"])
    assert not [record for record in caplog.records if record.exc_info]


DEAD = """
import pathlib, os, sys, time
pathlib.Path("pid").write_text(str(os.getpid()))
if "speaks" in sys.argv:
    print("no JSON", flush=True)
time.sleep(600)
"""


# a shell makes background processes ignore SIGINT, and their children inherit that
HEEDING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("strands_rollout.cli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("server", "ends_by"),
    [("refuses", "itself"), ("speaks", "itself"), ("silent", "Ctrl-C"), ("accepts", "Ctrl-C")],
)
def test_try_command_ends_when_an_mcp_server_is_dead(server: str, ends_by: str, tmp_path: Path) -> None:
    (tmp_path / "dead.py").write_text(DEAD)
    (tmp_path / "turns.yaml").write_text("- nothing is asked\n")
    with ExitStack() as stack:
        accepting = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        urls = {"refuses": "http://127.0.0.1:1/mcp", "accepts": f"http://127.0.0.1:{accepting.getsockname()[1]}/mcp"}
        started = {"command": f"{sys.executable} dead.py {server}", "cwd": str(tmp_path)}
        tool = {"url": urls[server]} if server in urls else started
        tool["startup_timeout"] = 2 if ends_by == "itself" else 600
        (tmp_path / "rollout.yaml").write_text(json.dumps({"strands_rollout": {"tools": [tool]}}))
        command = [sys.executable, "-c", HEEDING, "try", "rollout.yaml", "--script", "turns.yaml"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ends_by == "Ctrl-C":
            if server == "accepts":
                stack.enter_context(accepting.accept()[0])
            else:
                wait_for((tmp_path / "pid").exists)
            process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=120)
    assert "Traceback" not in shown
    cause = "connection refused" if server == "refuses" else "did not answer within startup_timeout=2 s"
    assert ("interrupted" if ends_by == "Ctrl-C" else cause) in shown
    assert process.returncode == (130 if ends_by == "Ctrl-C" else 1)
    if (pid := tmp_path / "pid").exists():
        wait_for(lambda: not Path("/proc", pid.read_text()).exists())


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


async def test_mcp_startup_over_the_episode_timeout_is_a_setup_error(shipped_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "dead.py").write_text(DEAD)
    server = {"command": f"{sys.executable} dead.py", "cwd": str(tmp_path), "startup_timeout": 4}
    settings = {"tools": [server], "episode_timeout_s": 1}
    played = await run(shipped_tokenizer, [], settings=settings)
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "setup_error")
    assert "the agent and its tools did not start within the episode's timeout of 1 s" in played.facts["error"]


async def test_mcp_server_prefix_and_filters_with_per_episode(shipped_tokenizer: Any, served: str) -> None:
    server = {"url": served, "prefix": "my", "tool_filters": {"allowed": ["facts"]}, "per_episode": True}
    played = await run(shipped_tokenizer, [FACTS.replace("facts", "my_facts"), ANSWER], settings={"tools": [server]})
    assert "--port" in played.context_after(0)
    prompt = played.decode(played.sample.tokens)
    assert '"my_facts"' in prompt
    assert "end" not in prompt.split("</tools>")[0].split("<tools>")[1]


async def test_mcp_server_chosen_by_a_row(shipped_tokenizer: Any, served: str) -> None:
    settings = {"tools": [], "row_tools": [{"name": "facts", "url": served}]}
    sample = Sample(prompt="?", metadata={"strands_rollout_settings": {"tools": ["facts"]}})
    played = await run(shipped_tokenizer, [FACTS, ANSWER], settings=settings, sample=sample)
    assert played.facts["tool_calls"] == 1


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"name": "x"}, "expected: an MCP server with either a command or a url"),
        ({"command": "a", "url": "http://127.0.0.1/"}, "expected: an MCP server with either a command or a url"),
        ({"comand": "a"}, "did you mean 'command'?"),
        (3, "tools.0"),
    ],
)
def test_mcp_server_settings_refuse_a_bad_entry(tool: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_from_args(SimpleNamespace(strands_rollout={"tools": [tool]}))


def test_mcp_server_unset_variable_is_named() -> None:
    settings = RolloutSettings(tools=({"url": "http://127.0.0.1/mcp", "headers": {"X": "${NO_SUCH_VARIABLE}"}},))  # type: ignore[arg-type]
    with pytest.raises(ToolError, match="NO_SUCH_VARIABLE"):
        load_tools(settings.tools)


@pytest.mark.parametrize("per_episode", [False, True])
def test_mcp_server_is_shared_unless_per_episode(per_episode: bool) -> None:
    settings = RolloutSettings(tools=({"command": COMMAND, "per_episode": per_episode},))  # type: ignore[arg-type]
    first, second = load_tools(settings.tools), load_tools(with_row_settings(settings, {}).tools)
    assert (first[0] is second[0]) is not per_episode


async def test_mcp_tools_with_names_strands_refuses_are_renamed(shipped_tokenizer, caplog):
    names = ["store_count", "store_count_2", "store_count_3", f"store_{'x' * 58}"]
    turns = [*(TOOL_CALL.format(name=name, arguments="{}") for name in names), ANSWER]
    played = await run(shipped_tokenizer, turns, settings={**servers(args=["--named"]), "max_tool_iterations": 9})
    assert (played.sample.status.value, played.facts["error"]) == ("completed", None)
    prompt = played.decode(played.fake.requests[0].input_ids)
    assert "store." not in prompt
    assert all(f'"name": "{name}"' in prompt for name in names)
    own = ["store_count", "store.count", "store/count", f"store.{'x' * 80}"]
    assert [played.context_after(turn).count(f"called {name}\n") for turn, name in enumerate(own)] == [1] * 4
    assert [call["status"] for call in played.facts["calls"]] == ["success"] * 4
    assert "renamed the tool 'store.count' to 'store_count_2'" in caplog.text
