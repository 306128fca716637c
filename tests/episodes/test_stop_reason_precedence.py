"""Several causes end one episode: the stop reason and the error that count, for agents, environments and programs.

In each table, a row is the end of the policy's turns, and a column is the end of the user's code around them. A cell is
the episode's stop reason; after the colon, a part of its error.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import pytest
from fake_sglang import Reply
from harness import ANSWER, TOOL_CALL, ids_of, run
from strands import Agent, tool
from strands.hooks import AfterInvocationEvent, HookProvider, HookRegistry

from strands_rollout.agent import environment_player
from strands_rollout.agent.limits import StopReason
from strands_rollout.agent.loop import HAS_MIDDLEWARE
from strands_rollout.agent.run import PlayedEpisode
from strands_rollout.errors import EnvironmentFaultError, SandboxError
from strands_rollout.settings import ENVIRONMENT_LIBRARIES


class _Abort:
    """The rollout's abort flag; `seen` is set when the flag is polled while it is up."""

    def __init__(self) -> None:
        self.is_up, self.seen = False, asyncio.Event()

    def __call__(self) -> bool:
        if self.is_up:
            self.seen.set()
        return self.is_up


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
abort = _Abort()
column = ""  # the column of the table that the running test plays


@tool
def work() -> str:
    """Work."""
    return "done"


@tool
def fail() -> str:
    """Fail as a sandbox does."""
    raise SandboxError("no sandbox")


@tool
async def hang() -> str:
    """Wait forever."""
    await asyncio.sleep(600)
    return "done"


@tool
async def hang_in_abort() -> str:
    """Wait forever, in a rollout that is aborted."""
    abort.is_up = True
    await asyncio.sleep(600)
    return "done"


TOOLS = [work, fail, hang, hang_in_abort]


def calls(*names: str) -> str:
    texts = (TOOL_CALL.format(name=name, arguments="{}").removesuffix("<|im_end|>") for name in names)
    return "\n".join(texts) + "<|im_end|>"


def _turns(tokenizer: Any, row: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return engine replies, settings and sampling parameters that make the turns end as `row` says."""
    work_ids = ids_of(tokenizer, calls("work"))

    def aborted(_body: dict[str, Any], _number: int) -> Reply:
        abort.is_up = True
        return Reply.tokens(ids_of(tokenizer, ANSWER)).once_set(abort.seen)

    def busy(_body: dict[str, Any], _number: int) -> Reply:
        return Reply.status(503)

    short = {"episode_timeout_s": 0.8}
    return {
        "nothing": ([], {}, {}),
        "answer": ([ANSWER], {}, {}),
        "cut": ([Reply.tokens(work_ids[:20], "length")], {"max_turn_tokens": 20}, {}),
        "budget": ([calls("work")], {}, {"max_new_tokens": len(work_ids) + 1}),
        "engine": ([calls("work"), Reply.status(503)], {"engine_patience_s": 0}, {}),
        "sandbox": ([calls("fail")], {}, {}),
        "tool limit": ([calls("work")], {"max_tool_calls": 0}, {}),
        "timeout": ([calls("hang")], short, {}),
        "timeout of the engine": (busy, short, {}),
        "sandbox, timeout": ([calls("fail", "hang")], short, {}),
        "abort": ([calls("hang_in_abort")], {}, {}),
        "sandbox, abort": ([calls("fail", "hang_in_abort")], {}, {}),
        "answer, abort": (aborted, {"abort_grace_s": 60.0}, {}),
    }[row]


async def _play(tokenizer: Any, row: str, end: str, settings: Mapping[str, Any]) -> str:
    """Play an episode, and return its cell with the whole error."""
    global abort, column
    abort, column = _Abort(), f"nothing,{end}" if row == "nothing" else end
    script, turn_settings, params = _turns(tokenizer, row)
    given = {**settings, **turn_settings, "should_abort": abort}
    played = await run(tokenizer, script, settings=given, params=params, args={"partial_rollout": True})
    error = played.facts["error"]
    return str(played.facts["stop_reason"]) + ("" if error is None else f": {error}")


def _cells(columns: Sequence[str], table: Mapping[str, Sequence[str]]) -> list[tuple[str, str, str]]:
    return [(row, end, cell) for row, cells in table.items() for end, cell in zip(columns, cells, strict=False)]


def _agrees(got: str, cell: str) -> bool:
    reason, _, part = cell.partition(": ")
    got_reason, _, error = got.partition(": ")
    return reason == got_reason and (part in error if part else not error)


class RaisingHook(HookProvider):
    """Raise an exception after the agent's turns."""

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(AfterInvocationEvent, self._raise)

    def _raise(self, _event: AfterInvocationEvent) -> None:
        raise ValueError("no luck")


AGENT = {
    # the agent returns, its hook raises
    "answer": ["completed", "internal_error: no luck"],
    "cut": ["turn_length: the turn was cut", "internal_error: no luck"],
    "budget": ["response_length: response budget", "internal_error: no luck"],
    "engine": ["engine_error: HTTP 503", "internal_error: no luck"],
    "sandbox": ["sandbox_error: no sandbox", "sandbox_error: no sandbox"],
    "tool limit": ["max_tool_calls", "internal_error: no luck"],
    "timeout": ["episode_timeout: took more than", "episode_timeout: took more than"],
    "timeout of the engine": ["engine_error: took more than 0.8 s; the engine fails", "engine_error: the engine fails"],
    "sandbox, timeout": ["sandbox_error: no sandbox", "sandbox_error: no sandbox"],
    "abort": ["aborted: the rollout was aborted", "aborted: the rollout was aborted"],
    "sandbox, abort": ["aborted: the rollout was aborted", "aborted: the rollout was aborted"],
    "answer, abort": ["completed", "internal_error: no luck"],
}


@pytest.mark.parametrize(("row", "end", "cell"), _cells(["returns", "raises"], AGENT))
async def test_agent_stop_reason_of_several_causes(shipped_tokenizer: Any, row: str, end: str, cell: str) -> None:
    hooks = {"hooks": [f"{__name__}.RaisingHook"]} if end == "raises" else {}
    tools = [f"{__name__}.{each.tool_name}" for each in TOOLS]
    got = await _play(shipped_tokenizer, row, end, {"tools": tools, "system_prompt": None, **hooks})
    assert _agrees(got, cell), got


class Environment:
    """An environment whose agent may fail, and which then ends as `column` says."""

    def __init__(self, *_given: Any) -> None:
        self.tools: list[Any] = []

    async def play(self, model: Any, hooks: Sequence[Any]) -> PlayedEpisode:
        agent = Agent(model, tools=TOOLS, hooks=list(hooks), callback_handler=None, retry_strategy=None)
        try:
            if column.partition(",")[0] != "nothing":
                await agent.invoke_async("go")
        except Exception:  # noqa: S110 - as strands-env, which returns the failures of its agent
            pass
        server_fault, scoring_fault = EnvironmentFaultError("no server"), ValueError("no scorer")
        match column.removeprefix("nothing,"):
            case "limit":
                return PlayedEpisode(StopReason.ENVIRONMENT_LIMIT)
            case "fault":
                return PlayedEpisode(StopReason.ENVIRONMENT_ERROR, server_fault)
            case "no score":
                return PlayedEpisode(StopReason.COMPLETED, scoring_error=scoring_fault)
            case "fault, no score":
                return PlayedEpisode(StopReason.ENVIRONMENT_ERROR, server_fault, scoring_fault)
            case "raises":
                raise ValueError("no luck")
        return PlayedEpisode(StopReason.COMPLETED, score={"score": 1.0})


ENDS = ("returns", "limit", "fault", "no score", "fault, no score", "raises")
NO_SERVER, NO_SCORER, NO_LUCK = (f"environment_error: {part}" for part in ("no server", "no scorer", "no luck"))
NO_TURNS, NO_SANDBOX = "environment_error: without asking the policy", "sandbox_error: no sandbox"
BUDGET, ENGINE, TIMEOUT = "response_length: response budget", "engine_error: HTTP 503", "episode_timeout: took more"
OUTAGE, ABORTED = "engine_error: 0.8 s; the engine fails", "aborted: the rollout was aborted"
ENVIRONMENT = {
    "nothing": [NO_TURNS, NO_TURNS, NO_TURNS, NO_TURNS, NO_TURNS, NO_LUCK],
    "answer": ["completed", "environment_limit", NO_SERVER, NO_SCORER, NO_SERVER, NO_LUCK],
    "cut": ["completed", "environment_limit", NO_SERVER, NO_SCORER, NO_SERVER, NO_LUCK],
    "budget": ["completed", BUDGET, BUDGET, NO_SCORER, NO_SCORER, NO_LUCK],
    "engine": ["completed", ENGINE, ENGINE, NO_SCORER, ENGINE, ENGINE],
    "sandbox": [NO_SANDBOX] * 6,
    "tool limit": ["max_tool_calls", "max_tool_calls", "max_tool_calls", NO_SCORER, NO_SCORER, NO_LUCK],
    "timeout": [TIMEOUT, TIMEOUT, TIMEOUT, NO_SCORER, NO_SCORER, NO_LUCK],
    "timeout of the engine": [OUTAGE] * 6,
    "sandbox, timeout": [NO_SANDBOX] * 6,
    "abort": [ABORTED] * 6,
    "sandbox, abort": [ABORTED] * 6,
    "answer, abort": [ABORTED] * 6,
}


@pytest.mark.parametrize(("row", "end", "cell"), _cells(ENDS, ENVIRONMENT))
async def test_environment_stop_reason_of_several_causes(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, row: str, end: str, cell: str
) -> None:
    if "timeout" in row and not HAS_MIDDLEWARE:
        pytest.skip("Strands before 1.62 can't cut an agent's turns")
    monkeypatch.setitem(ENVIRONMENT_LIBRARIES, "strands_env", f"{__name__}.Environment")
    settings = {"environment": "strands_env", "environment_factory": "builtins.object"}
    got = await _play(shipped_tokenizer, row, end, settings)
    assert _agrees(got, cell), got


async def test_environment_timeout_in_an_older_strands_names_it(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without middleware, a timeout can't end the agent's turns alone: it ends the environment without a score."""
    monkeypatch.setattr(environment_player, "HAS_MIDDLEWARE", False)
    monkeypatch.setitem(ENVIRONMENT_LIBRARIES, "strands_env", f"{__name__}.Environment")
    settings = {"environment": "strands_env", "environment_factory": "builtins.object"}
    got = await _play(shipped_tokenizer, "timeout", "returns", settings)
    assert got.startswith("environment_error: ")
    assert "the episode took more than 0.8 s, and was ended without a score" in got
    assert got.endswith("Raise episode_timeout_s, or install strands-agents 1.62 or newer")


async def program(task: Any, endpoint: Any) -> object:
    """Ask the policy until it calls no tool or a request fails, then end as `column` says."""
    functions = [{"type": "function", "function": {"name": "work", "parameters": {"type": "object", "properties": {}}}}]
    messages: list[Any] = [{"role": "user", "content": task.text}]
    is_ended = column.partition(",")[0] == "nothing"
    async with aiohttp.ClientSession() as http:
        while not is_ended:
            body = {"messages": messages, "tools": functions}
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as response:
                message = (await response.json())["choices"][0]["message"] if response.status == 200 else {}
            requested = message.get("tool_calls") or []
            messages += [
                message,
                *({"role": "tool", "tool_call_id": each["id"], "content": "done"} for each in requested),
            ]
            is_ended = not requested
    match column.removeprefix("nothing,"):
        case "bad score":
            return {"acc": 1.0}
        case "raises":
            raise ValueError("no luck")
        case "hangs":
            await asyncio.sleep(600)
        case "hangs in abort":
            abort.is_up = True
            await asyncio.sleep(600)
    return "34"


BAD_SCORE, RAISED = "environment_error: expected a finite number", "setup_error: raised ValueError: no luck"
PROGRAM = {
    # the program returns, raises, returns a bad score, hangs until the timeout or an abort
    "nothing": ["setup_error: without an answer of the policy", RAISED, BAD_SCORE, TIMEOUT, ABORTED],
    "answer": ["completed", RAISED, BAD_SCORE, TIMEOUT, ABORTED],
    "cut": ["turn_length", "turn_length: raised ValueError: no luck", BAD_SCORE, TIMEOUT, ABORTED],
    "budget": [BUDGET, BUDGET, BUDGET, BUDGET, ABORTED],
    "engine": [ENGINE, ENGINE, ENGINE, ENGINE, ABORTED],
    "tool limit": ["max_tool_calls"] * 4,
}


@pytest.mark.parametrize(
    ("row", "end", "cell"), _cells(["returns", "raises", "bad score", "hangs", "hangs in abort"], PROGRAM)
)
async def test_program_stop_reason_of_several_causes(shipped_tokenizer: Any, row: str, end: str, cell: str) -> None:
    settings = {"agent_program": f"{__name__}.program"} | ({"episode_timeout_s": 0.8} if end == "hangs" else {})
    got = await _play(shipped_tokenizer, row, end, settings)
    assert _agrees(got, cell), got


async def program_with_an_image(task: Any, endpoint: Any) -> None:
    """Send an image to a model that reads no images, then hang."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": task.text}, image]}]
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with aiohttp.ClientSession() as http:
        url = f"{endpoint.base_url}/chat/completions"
        async with http.post(url, json={"messages": messages}, headers=headers) as response:
            assert response.status == 400
    await asyncio.sleep(600)


async def test_program_timeout_counts_before_the_clients_own_fault(shipped_tokenizer: Any) -> None:
    settings = {"agent_program": f"{__name__}.program_with_an_image", "episode_timeout_s": 1.0}
    done = await run(shipped_tokenizer, [ANSWER], settings=settings)
    assert done.facts["stop_reason"] == "episode_timeout"


async def program_with_an_outage(task: Any, endpoint: Any) -> str:
    """Answer as a user again and again, although each request after the first fails."""
    messages: list[Any] = [{"role": "user", "content": task.text}]
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with aiohttp.ClientSession() as http:
        for _ in range(4):
            url = f"{endpoint.base_url}/chat/completions"
            async with http.post(url, json={"messages": messages}, headers=headers) as response:
                if response.status == 200:
                    messages.append((await response.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": "Sure?"})
    return "34"


async def test_program_limit_precedes_an_earlier_outage(shipped_tokenizer: Any) -> None:
    settings = {"agent_program": f"{__name__}.program_with_an_outage", "max_user_turns": 1, "engine_patience_s": 0}

    def script(_body: dict[str, Any], number: int) -> Reply:
        return Reply.tokens(ids_of(shipped_tokenizer, ANSWER)) if number == 0 else Reply.status(503)

    played = await run(shipped_tokenizer, script, settings=settings)
    assert (played.facts["stop_reason"], played.facts["error"]) == ("max_user_turns", None)
