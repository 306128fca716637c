"""Costs of each turn on the event loop's thread, as counts of calls, bytes and ids instead of times."""

import asyncio
import contextlib
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import orjson
from engine_thread import run_on_thread
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, args_for, call_text, ids_of

import strands_rollout
from benchmarks import gateway_client
from strands_rollout import Endpoint, Sample, SGLangModel, Task, generate
from strands_rollout.code_tool import ExecutionResult, ExecutorFacts

_PACKAGE = str(Path(strands_rollout.__file__).parent)
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")  # functions before Python 3.12
RESULT = "34\n"


class InstantExecutor:
    """A `CodeExecutor` that runs no code and returns a fixed result immediately."""

    facts = ExecutorFacts(libraries=("numpy",), memory_mb=None, isolated=False, keeps_sessions=False)

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        return ExecutionResult(RESULT, "", 0)

    async def close_session(self, session: str) -> None: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...


async def call_tools_in_a_thread(task: Task, endpoint: Endpoint) -> None:
    """Play `TURNS_OF_PROGRAM` tool turns as an agent program, whose client runs in another thread."""
    results = [RESULT] * TURNS_OF_PROGRAM
    client = gateway_client.play("chat", endpoint.base_url, endpoint.api_key, task.text, results)
    await asyncio.to_thread(asyncio.run, client)


TURNS_OF_PROGRAM = 60
AGENT = {"executor": f"{__name__}.{InstantExecutor.__name__}"}
PROGRAM = {"agent_program": f"{__name__}.{call_tools_in_a_thread.__name__}"}


@dataclass
class TurnCosts:
    """Costs of an episode's turns; entry n of each list covers the time between model calls n and n + 1."""

    calls_before: int  # calls of Python and C functions before the first model call
    calls: list[int]
    own_calls: list[int]  # calls of this package's functions, and of C functions by them
    encoded_bytes: list[int]  # bytes that orjson wrote
    ids_read: list[int]  # ids read from the trajectory, repeated reads included


class WatchedIds(list[int]):
    """List of token ids that counts reads by index, iteration, slices and copies."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def copy(self) -> list[int]:
        return [*self]


def growth(per_turn: Sequence[int]) -> int:
    """Return the last quarter's minimum minus the second quarter's; minima ignore turns in which a timer ran."""
    quarter = len(per_turn) // 4
    return min(per_turn[-quarter:]) - min(per_turn[quarter : 2 * quarter])


async def play_tool_turns(
    tokenizer: Any,
    turns: int,
    watch: AbstractContextManager[object],
    *,
    on_request: Callable[[], None] = lambda: None,
    settings: Mapping[str, Any] = AGENT,
) -> None:
    """Play an episode of `turns` tool turns inside `watch`; the engine's thread calls `on_request` at each request."""
    call, answer = (Reply.tokens(ids_of(tokenizer, text)) for text in (call_text(), ANSWER))

    def reply(_request: dict[str, Any], number: int) -> Reply:
        on_request()
        return call if number < turns else answer

    sample = Sample(prompt="What is 17 * 2?", label="34", index=0)
    fake = FakeSGLang(reply, keeps_requests=False)
    with run_on_thread(fake):
        args = args_for(fake.base_url, tokenizer, strands_rollout={"max_tool_iterations": None, **settings})
        with watch:
            done = await generate(args, sample, {"max_new_tokens": 10**6})
    facts = done.metadata["strands_rollout"]
    assert (facts["stop_reason"], facts["turns"]) == ("completed", turns + 1), facts


async def turn_costs(tokenizer: Any, turns: int, settings: Mapping[str, Any] = AGENT) -> TurnCosts:
    """Play an episode of `turns` tool turns, and return the costs of its turns."""
    counts = Counts()
    await play_tool_turns(tokenizer, turns, _counting(counts), settings=settings)
    return TurnCosts(counts.noted[0][0], *(_between(column) for column in zip(*counts.noted, strict=True)))


def _between(at_boundaries: Sequence[int]) -> list[int]:
    return [later - earlier for earlier, later in itertools.pairwise(at_boundaries)]


@dataclass
class Counts:
    """Counts so far on the thread that is watched."""

    calls: int = 0
    own_calls: int = 0
    encoded_bytes: int = 0
    noted: list[tuple[int, int, int, int]] = field(default_factory=list)

    def note(self, ids_read: int) -> None:
        self.noted.append((self.calls, self.own_calls, self.encoded_bytes, ids_read))


@contextlib.contextmanager
def _counting(counts: Counts) -> Iterator[None]:
    """Count calls, and bytes that orjson writes, on this thread only; the engine has another thread."""
    thread, dumps, profile = threading.get_ident(), orjson.dumps, sys.getprofile()

    def called(frame: FrameType, event: str, _arg: object) -> None:
        if event not in ("call", "c_call"):
            return
        counts.calls += 1
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            counts.own_calls += event == "c_call" or code.co_name not in _COMPREHENSIONS

    def counted_dumps(*args: Any, **kwargs: Any) -> bytes:
        written = dumps(*args, **kwargs)
        counts.encoded_bytes += len(written) if threading.get_ident() == thread else 0
        return written

    async def noted_answer(model: SGLangModel, *args: Any, **kwargs: Any) -> Any:
        """Store the counts when a turn begins; the first turn also replaces the trajectory's ids with `WatchedIds`."""
        if not model.trajectory.turns:
            model.trajectory.token_ids = WatchedIds()
        counts.note(model.trajectory.token_ids.read)  # type: ignore[attr-defined]
        return await answer_at(model, *args, **kwargs)

    answer_at = SGLangModel.answer_at
    gc.collect()
    gc.disable()  # a collection at a random turn is not a cost of that turn
    SGLangModel.answer_at, orjson.dumps = noted_answer, counted_dumps  # type: ignore[assignment, method-assign]
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(profile)
        SGLangModel.answer_at, orjson.dumps = answer_at, dumps  # type: ignore[method-assign]
        gc.enable()
