"""The code tool in episodes: executors, sessions, messages to the policy, and sandbox errors."""

from __future__ import annotations

from typing import Any

import pytest
from fake_sglang import Reply
from harness import ANSWER, call_text, run

from strands_rollout.code_tool import ExecutionResult, ExecutorFacts

runs: list[tuple[str, str | None]] = []
closed_sessions: list[str] = []


class FaultyExecutor:
    """Executor that records runs and closed sessions, and fails with `fault` and `close_fault` if they are given."""

    facts = ExecutorFacts(libraries=("numpy",), memory_mb=None, isolated=False, keeps_sessions=True)

    def __init__(self, fault: str = "", close_fault: str = "") -> None:
        self.fault = fault
        self.close_fault = close_fault

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        runs.append((code, session))
        return ExecutionResult("34\n", "", 0, infra_error=self.fault or None, queued_s=0.25, duration_s=0.5)

    async def close_session(self, session: str) -> None:
        closed_sessions.append(session)
        if self.close_fault:
            raise RuntimeError(self.close_fault)

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> FaultyExecutor:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...


@pytest.fixture(autouse=True)
def clear_records() -> None:
    runs.clear()
    closed_sessions.clear()


def faulty_executor(**options: Any) -> dict[str, Any]:
    return {"executor": {"name": f"{__name__}.FaultyExecutor", **options}}


async def test_code_tool_without_session_starts_each_call_fresh(shipped_tokenizer: Any) -> None:
    done = await run(shipped_tokenizer, [call_text("x = 1"), call_text("x"), ANSWER])
    assert done.sample.status.value == "completed"
    assert "NameError" in done.context_after(1)
    assert (done.facts["code"]["calls"], done.facts["code"]["nonzero_exits"]) == (2, 1)
    prompt = done.decode(done.fake.requests[0].input_ids)
    assert "Each call starts fresh: variables and files are not kept." in prompt
    assert "Installed besides the standard library: numpy, sympy." in prompt
    assert "At most 60 s, 4096 MB of memory and 20000 characters of output." in prompt


async def test_code_session_lasts_for_one_episode(shipped_tokenizer: Any) -> None:
    settings = {"code_session": True}
    turns = [call_text("x = 17"), call_text("print(x * 2)"), ANSWER]
    done = await run(shipped_tokenizer, turns, settings=settings)
    assert "34" in done.context_after(1)
    assert "Variables and files are kept between calls." in done.decode(done.fake.requests[0].input_ids)
    done = await run(shipped_tokenizer, [call_text("print(x)"), ANSWER], settings=settings)
    assert "NameError" in done.context_after(0)


@pytest.mark.parametrize("turns", [[call_text("1"), ANSWER], [ANSWER]])
async def test_code_session_is_closed_after_the_episode(shipped_tokenizer: Any, turns: list[str]) -> None:
    settings = faulty_executor(close_fault="no") | {"code_session": True}
    done = await run(shipped_tokenizer, turns, settings=settings)
    assert (done.sample.status.value, len(closed_sessions)) == ("completed", 1)
    assert {session for _, session in runs} <= set(closed_sessions)


async def test_code_session_refuses_executors_without_sessions(shipped_tokenizer: Any) -> None:
    done = await run(shipped_tokenizer, [ANSWER], settings={"executor": "subprocess", "code_session": True})
    assert done.sample.status.value == "failed"
    assert "SubprocessExecutor keeps no sessions" in done.facts["error"]


async def test_sandbox_error_masks_the_sample_and_ends_the_episode(shipped_tokenizer: Any) -> None:
    done = await run(shipped_tokenizer, [call_text("1"), ANSWER], settings=faulty_executor(fault="disk on fire"))
    assert (done.sample.status.value, set(done.sample.loss_mask)) == ("failed", {0})
    assert done.facts["stop_reason"] == "sandbox_error"
    assert "disk on fire" in done.facts["error"]
    assert len(done.fake.requests) == 1


async def test_sandbox_start_error_fails_before_the_first_request(shipped_tokenizer) -> None:
    settings = {"executor": {"name": "local", "disabled_layers": ["syscalls"]}}
    done = await run(shipped_tokenizer, [ANSWER], settings=settings)
    assert (done.sample.status.value, done.facts["stop_reason"]) == ("failed", "sandbox_error")
    assert "can't enforce isolation='full'" in done.facts["error"]
    assert done.fake.requests == []


async def test_facts_code_counts_calls_and_seconds(shipped_tokenizer: Any) -> None:
    done = await run(shipped_tokenizer, [call_text("1"), call_text("2"), ANSWER], settings=faulty_executor())
    assert done.facts["code"] == {
        "calls": 2,
        "queued_s": 0.5,
        "run_s": 1.0,
        "timeouts": 0,
        "killed": 0,
        "nonzero_exits": 0,
    }


@pytest.mark.parametrize(
    ("code", "shown", "counted"),
    [
        ("while True: pass", "TimeoutError: the code was stopped at the time limit of 0.5 s.", {"timeouts": 1}),
        ("import os; os.kill(os.getpid(), 11)", "The code was ended by: SIGSEGV (crash).", {"killed": 1}),
        ("import socket; socket.socket()", "PermissionError", {"killed": 0}),
    ],
)
async def test_code_tool_shows_the_codes_faults_to_the_policy(shipped_tokenizer, code, shown, counted) -> None:
    settings = {"tool_timeout_s": 0.5 if "timeouts" in counted else 30.0}
    done = await run(shipped_tokenizer, [call_text(code), ANSWER], settings=settings)
    assert done.sample.status.value == "completed"
    assert shown in done.context_after(0)
    assert counted.items() <= done.facts["code"].items()


async def test_code_session_restart_is_shown_to_the_policy(shipped_tokenizer: Any) -> None:
    turns = [call_text("x = 1"), call_text("while True: pass"), call_text("x"), ANSWER]
    done = await run(shipped_tokenizer, turns, settings={"code_session": True, "tool_timeout_s": 3.0})
    assert "The interpreter was restarted: variables and files are gone." in done.context_after(1)
    assert "NameError" in done.context_after(2)


async def test_code_session_lost_by_a_resume_is_shown_to_the_policy(shipped_tokenizer: Any) -> None:
    aborting = False

    def cut(_body: dict[str, Any], number: int) -> Any:
        nonlocal aborting
        aborting = number == 1
        return Reply.abort() if aborting else call_text("x = 34")

    settings = {"code_session": True, "should_abort": lambda: aborting}
    first = await run(shipped_tokenizer, cut, settings=settings)
    assert first.sample.status.value == "aborted"
    aborting = False
    turns = [call_text("print('x' in globals())"), call_text("print(2)"), ANSWER]
    done = await run(shipped_tokenizer, turns, settings=settings, sample=first.sample)
    assert done.sample.status.value == "completed"
    assert "False\nThe interpreter was restarted: variables and files are gone." in done.context_after(0)
    assert "restarted" not in done.context_after(1)
    assert done.facts["code"]["calls"] == 3
