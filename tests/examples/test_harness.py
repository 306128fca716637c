"""The Strands harness with all of its tools, over a long episode whose history is summarized several times."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from harness import ANSWER
from processes import wait_until
from recording_policy import RecordingPolicy, play_agent, tool_call

from strands_rollout import Sample
from strands_rollout.code_tool import ExecutionResult
from strands_rollout.code_tool.executors import ExecutorFacts
from strands_rollout.code_tool.strands_sandbox import CodeExecutorSandbox

pytest.importorskip("strands_harness")
from strands_rollout.examples import harness as example

SETTINGS = yaml.safe_load((Path(__file__).parents[2] / "configs" / "harness.yaml").read_text())["strands_rollout"]
TODO = {"content": "Count", "activeForm": "Counting", "status": "in_progress"}
TURNS = 200
CODE = "found = await shell(command='ls')\nprint(found['output'])"
PLAYED = "user_agents.build_for_test"


@pytest.fixture(autouse=True)
def _on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(example.EXECUTOR, "isolation", "rlimits")


class Policy:
    def __init__(self) -> None:
        self.text = self.folder = ""
        self.spoken: list[str] = []
        self._turns = self._main()

    def __call__(self, text: str, _number: int) -> str:
        if "You are a summarization assistant" in text:
            return "It was about lines.<|im_end|>"
        if "You are a general-purpose subagent" in text:
            return "Counted.<|im_end|>" if "777" in text else tool_call("shell", command="echo $((700 + 77))")
        self.text = text
        self.spoken.append(next(self._turns))
        return self.spoken[-1]

    def _main(self) -> Iterator[str]:
        """Yield calls of each tool repeatedly, three sub-agents, then the answer."""
        self.folder = re.findall(r"Working directory: (\S+)", self.text)[-1]
        path, many = f"{self.folder}/notes.txt", "line\n" * 20
        yield tool_call("todo_write", todos=[TODO])
        yield tool_call("skills", skill_name="measured-answers")
        yield tool_call("todo_write", todos=[])
        yield tool_call("shell", command="yes expression expression | head -n 1000")
        yield tool_call(
            "retrieve_context",
            reference=re.findall(r"\[ref: (\S+)\]", self.text)[-1],
            line_range={"start": 1, "end": 1},
        )
        for number in range(TURNS // 8):
            yield tool_call("write", path=path, content=f"{many}{number}")
            yield tool_call("edit", path=path, old_str=many, new_str="one\n")
            yield tool_call("read", path=path)
            yield tool_call("shell", command=f"wc -l < notes.txt; seq {number} {number + 60}")
            yield tool_call("programmatic_tool_caller", code=CODE)
            yield tool_call("shell", command="echo later", _background_execution=True)
            yield tool_call("strands_manage_background_task", mode="list")
            yield tool_call("read", path="/etc/shadow")
            if number % 8 == 3:
                yield tool_call("subagent", task=f"Count {number}.", context=("none", "all", "no_tools")[number // 8])
        yield ANSWER


async def played(tokenizer: Any, said: Any, made: list[Any], **more: Any) -> tuple[Any, RecordingPolicy]:
    def build(model: Any, task: Any) -> Any:
        made.append(example.build(model, task))
        return made[-1]

    return await play_agent(tokenizer, build, said, 16384, 1 << 20, **{**SETTINGS, **more, "agent_factory": PLAYED})


class Broken:
    facts = ExecutorFacts(keeps_sessions=True)

    async def run(self, _code: str, **_more: Any) -> ExecutionResult:
        return ExecutionResult("", "", None, infra_error="no disk")

    async def close_session(self, _session: str) -> None: ...


async def test_harness_sandbox_error_in_a_sub_agent_fails_the_episode(shipped_tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(example, "scratch", lambda _task: CodeExecutorSandbox(Broken()))

    def said(text: str, _number: int) -> str:
        first = "shell" if "You are a general-purpose subagent" in text else "subagent"
        return ANSWER if "<tool_response>" in text else tool_call(first, command="ls", task="List.")

    result, _ = await played(shipped_tokenizer, said, [])
    facts = result[0].metadata["strands_rollout"]
    assert (facts["stop_reason"], facts["error"]) == (
        "sandbox_error",
        "SandboxError: the code executor failed: no disk",
    )
    assert set(result[0].loss_mask) == {0}


async def wait_until_deleted(path: str) -> None:
    """Wait until `path` is deleted; the deletion runs beside the episode's end."""
    await wait_until(lambda: not os.path.lexists(path))


@pytest.mark.end_to_end
@pytest.mark.parametrize("transient", ["segment", pytest.param("keep", marks=pytest.mark.slow)])
async def test_harness_trains_each_token_of_a_long_episode_once(shipped_tokenizer, transient, capsys):
    policy, made = Policy(), []  # type: ignore[var-annotated]
    more = {"max_tool_iterations": None, "transient_context": transient}
    result, wire = await played(shipped_tokenizer, policy, made, **more)
    samples = wire.check(result)
    facts = [sample.metadata["strands_rollout"] for sample in samples]
    kinds = [one["fan_out"]["kind"] for one in facts]
    assert (samples[0].status, facts[0]["stop_reason"]) == (Sample.Status.COMPLETED, "completed")
    assert facts[0]["dropped_sampled_tokens"] == 0
    assert len(policy.spoken) > TURNS
    assert kinds.count("agent") >= 3
    assert kinds.count("aside") >= 3
    assert kinds.count("segment") >= 3
    called = {re.search(r'"name": "(\w+)"', said)[1] for said in policy.spoken[:-1]}  # type: ignore[index]
    assert called == made[0].tool_registry.registry.keys()
    assert facts[0]["tool_errors"] == TURNS // 8  # a read outside the folder fails
    assert capsys.readouterr().out == ""
    await wait_until_deleted(f"{policy.folder}/notes.txt")


ENDS = {"an abort": ({}, "aborted"), "a time limit": ({"episode_timeout_s": 3.0}, "episode_timeout")}


@pytest.mark.parametrize(("settings", "stop_reason"), ENDS.values(), ids=ENDS)
async def test_harness_deletes_the_folder_at_every_end(shipped_tokenizer, settings, stop_reason):
    state = SimpleNamespace(folder="", aborting=False)

    def said(text: str, number: int) -> str:
        state.folder = state.folder or re.findall(r"Working directory: (\S+)", text)[-1]
        state.aborting = number == 1 and stop_reason == "aborted"
        return tool_call("shell", command="echo x > file" if number == 0 else "sleep 100")

    result, wire = await played(shipped_tokenizer, said, [], should_abort=lambda: state.aborting, **settings)
    assert (wire.check(result)[0].metadata["strands_rollout"]["stop_reason"], len(wire.requests)) == (stop_reason, 2)
    await wait_until_deleted(f"{state.folder}/file")
