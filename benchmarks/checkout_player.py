"""A measured process of the comparison of checkouts: it plays the rounds requested on stdin and prints their figures.

It also runs on the package of an older checkout. So it imports only names that every version has, such as `generate`
and `Sample`, and none of the other benchmark modules.
"""

import asyncio
import gc
import json
import logging
import os
import sys
import time
import tracemalloc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from strands import Agent, hooks, tool

from strands_rollout import Sample, generate

JOB_VARIABLE: Final = "CHECKOUT_PLAYER_JOB"
"""The environment variable with the path of the job, a JSON file; see `benchmarks.checkouts`."""
_JOB: Final[dict[str, Any]] = json.loads(Path(os.environ[JOB_VARIABLE]).read_bytes())
_TOOL: Final[dict[str, Any]] = _JOB["tool"]
_RESULTS: Final[dict[str, str]] = {
    turn["code"]: turn["result"] for script in _JOB["scripts"] for turn in script["turns"]
}
_EVENTS: Final = (
    hooks.BeforeInvocationEvent,
    hooks.AfterInvocationEvent,
    hooks.MessageAddedEvent,
    hooks.BeforeModelCallEvent,
    hooks.AfterModelCallEvent,
    hooks.BeforeToolsEvent,
    hooks.AfterToolsEvent,
    hooks.BeforeToolCallEvent,
    hooks.AfterToolCallEvent,
)


@tool(name=_TOOL["name"], description=_TOOL["description"], inputSchema={"json": _TOOL["parameters"]})
async def tool_from_script(code: str) -> str:
    """Return the result that the scripts have for `code`; fail if no script has it."""
    return _RESULTS[code]


class Listener(hooks.HookProvider):
    """A user's hook that receives every event of an agent and does nothing."""

    def register_hooks(self, registry: hooks.HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002 - Strands' signature
        for kind in _EVENTS:
            registry.add_callback(kind, self._ignore)

    def _ignore(self, event: Any) -> None:
        pass


def build_agent(model: Any, task: Any) -> Agent:
    """Build an agent, as a user's agent factory."""
    return Agent(model=model, system_prompt=_JOB["system_prompt"], tools=list(task.tools))


async def play_through_gateway(task: Any, endpoint: Any) -> None:
    """Play an episode as a user's program; its client runs in the scripted engine's process."""
    body = json.dumps(["chat", endpoint.base_url, endpoint.api_key, task.text]).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", _JOB["port"])
    writer.write(b"POST /play HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await reader.readuntil(b"\r\n")
    writer.close()


_TOOLS: Final = {"tools": [f"{__name__}.tool_from_script"]}
_AGENTS: Final[dict[str, dict[str, Any]]] = {
    "plain": _TOOLS,
    "hook": {**_TOOLS, "hooks": [f"{__name__}.{Listener.__name__}"]},
    "factory": {**_TOOLS, "agent_factory": f"{__name__}.{build_agent.__name__}"},
    "gateway": {"agent_program": f"{__name__}.{play_through_gateway.__name__}"},
}


class Player:
    """Player of the job's scripts, which calls `generate` as slime does."""

    def __init__(self) -> None:
        self._count = 0
        self._args = SimpleNamespace(
            hf_checkpoint=_JOB["tokenizer"],
            sglang_router_ip="127.0.0.1",
            sglang_router_port=_JOB["port"],
            strands_rollout={
                "max_tool_iterations": None,
                "system_prompt": _JOB["system_prompt"],
                **_AGENTS[_JOB["agent"]],
                **_JOB["settings"],
            },
        )

    async def play(self, turns: int, episodes: int, concurrency: int) -> list[tuple[Any, Any]]:
        """Play `episodes` episodes with `turns` tool turns each, `concurrency` of them at once.

        Returns:
            Each episode's script and sample.
        """
        scripts = [script for script in _JOB["scripts"] if len(script["turns"]) == turns + 1]
        todo = (scripts[number % len(scripts)] for number in range(episodes))
        done: list[tuple[Any, Any]] = []

        async def work() -> None:
            for script in todo:
                self._count += 1
                prompt = [{"role": "user", "content": script["question"]}]
                sample = Sample(index=self._count, prompt=prompt, label="144")
                done.append((script, await generate(self._args, sample, _JOB["sampling_params"])))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, episodes)):
                group.create_task(work())
        return done


def check(done: list[tuple[Any, Any]]) -> None:
    """Compare every sample's tokens with its script: a version that skips work must not look fast.

    Raises:
        RuntimeError: The tokens differ, or an episode did not complete.
    """
    for script, sample in done:
        expected = list(script["prompt_ids"])
        for turn in script["turns"]:
            expected += [*turn["ids"], *turn["context_ids"]]
        if sample.status is not Sample.Status.COMPLETED or sample.tokens != expected:
            raise RuntimeError(
                f"got a sample with {sample.status} and {len(sample.tokens)} tokens; expected a completed sample with "
                f"the script's {len(expected)} tokens; the sample's metadata: {sample.metadata}"
            )


async def cpu(player: Player, turns: int, episodes: int, concurrency: int) -> dict[str, float]:
    """Measure this process's CPU time per episode: all threads, user and system."""
    started = time.process_time()
    done = await player.play(turns, episodes, concurrency)
    spent = time.process_time() - started
    check(done)
    return {"ms_per_episode": spent / episodes * 1e3}


async def memory(player: Player, turns: int, episodes: int, concurrency: int) -> dict[str, float]:
    """Measure Python's allocations per episode: the peak, and the part that stays with the finished samples.

    All episodes should run at once, so `episodes` should equal `concurrency`.
    """
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    done = await player.play(turns, episodes, concurrency)
    _, peak = tracemalloc.get_traced_memory()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    check(done)
    return {
        "peak_kb_per_episode": (peak - before) / episodes / 1e3,
        "kept_kb_per_sample": (kept - before) / episodes / 1e3,
    }


async def main() -> None:
    if _JOB["core"] is not None:
        os.sched_setaffinity(0, {_JOB["core"]})
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    measures, player = {"cpu": cpu, "memory": memory}, Player()
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        gc.collect()
        print(json.dumps(await measures[request.pop("measure")](player, **request)), flush=True)
