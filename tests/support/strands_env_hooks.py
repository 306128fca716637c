"""A hook file of strands-env, as its users write it, and other environments and functions, some of which fail."""

import asyncio
import sys
from typing import Any

from strands import tool
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry
from strands_env.core import Environment, RewardFunction, RewardResult, Task
from strands_env.core.models import build_model_factory
from strands_env.environments.math import MathEnv, MathVerifyReward

events: list[str] = []
"""Steps of the environments, in order."""
offset = 0
"""Added to the results of `multiply`."""


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    events.append(f"multiply {a} {b}")
    return a * b + offset


class Counter(HookProvider):
    """A hook of the environment that records model calls."""

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, lambda _event: events.append("model call"))


class CalculatorTask(Task):
    """A task with a field of its own."""

    difficulty: int


class CalculatorEnv(MathEnv, Environment[CalculatorTask]):
    """An environment with tools, hooks and a conversation manager."""

    async def reset(self, task: CalculatorTask) -> None:
        events.append(f"reset {task.difficulty} {task.ground_truth} {len(task.conversation_history)}")

    async def cleanup(self) -> None:
        events.append("cleanup")

    def get_tools(self) -> list[Any]:
        return [multiply]

    def get_hooks(self) -> list[Any]:
        return [Counter()]

    def get_conversation_manager(self) -> Any:
        return SlidingWindowConversationManager(window_size=20)


def create_env_factory(model_config: dict[str, Any], **env_config: Any) -> Any:
    """Create a factory of environments; strands-env's command line calls this function."""
    events.append("create")
    model_factory = build_model_factory(model_config)
    reward_fn = MathVerifyReward()

    async def env_factory() -> CalculatorEnv:
        return CalculatorEnv(model_factory=model_factory, reward_fn=reward_fn, **env_config)

    return env_factory


async def create() -> MathEnv:
    """Create an environment with a model factory that the package must replace."""
    return MathEnv(model_factory=sys.exit)


def create_with(model_factory: Any, system_prompt: str) -> MathEnv:
    """Create an environment with the policy's model factory and a setting."""
    return MathEnv(model_factory=model_factory, system_prompt=system_prompt)


class JudgedEnv(MathEnv):
    """An environment whose reward asks a second model."""

    def __init__(self, judge_factory: Any, **given: Any) -> None:
        super().__init__(**given)
        self.judge_factory = judge_factory

    async def _compute_reward(self, task: Task, result: Any) -> None:
        from strands import Agent

        judge = Agent(model=self.judge_factory(), callback_handler=None)
        verdict = await judge.invoke_async(f"Is {result.final_response} right?")
        result.reward_result = RewardResult(reward=float("yes" in str(verdict)), info={"votes": 1})


def create_judged(model_config: dict[str, Any]) -> Any:
    model_factory = build_model_factory(model_config)

    async def env_factory() -> JudgedEnv:
        return JudgedEnv(model_factory, model_factory=model_factory)

    return env_factory


class Scores(RewardFunction):
    """A reward function that returns or raises what it is given."""

    def __init__(self, given: Any) -> None:
        self.given = given

    async def compute(self, task: Task, result: Any) -> RewardResult:
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given


class FaultyEnv(MathEnv):
    """An environment that fails in the way that its configuration names."""

    def __init__(self, *, fault: str, **given: Any) -> None:
        rewards = {
            "reward_raises": Scores(ZeroDivisionError("no scorer")),
            "reward_exits": Scores(SystemExit(3)),
            "reward_failed": Scores(RewardResult(reward=0.0, info={"status": "error", "error": "no key"})),
            "reward_nan": Scores(RewardResult(reward=float("nan"))),
        }
        super().__init__(reward_fn=rewards.get(fault), **given)
        self.fault = fault

    async def reset(self, task: Task) -> None:
        if self.fault == "reset_raises":
            raise ConnectionError("no sandbox")
        if self.fault == "reset_hangs":
            events.append("reset")
            await asyncio.Event().wait()

    async def cleanup(self) -> None:
        events.append("cleanup")
        if self.fault == "cleanup_hangs":
            events.append("hangs")
            await asyncio.Event().wait()
        if self.fault == "cleanup_raises":
            raise ConnectionError("the sandbox is gone")

    def get_tools(self) -> list[Any]:
        return [multiply, hang]

    def get_hooks(self) -> list[Any]:
        return [_Raises()] if self.fault == "hook_raises" else []


@tool
async def hang() -> str:
    """Never return."""
    events.append("hang")
    await asyncio.Event().wait()
    return ""


class _Raises(HookProvider):
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeModelCallEvent, self._fail)

    def _fail(self, _event: BeforeModelCallEvent) -> None:
        raise KeyError("a bug in a hook")


class RewardlessEnv(Environment):
    """An environment without a reward function."""


_shared = MathEnv(model_factory=sys.exit)


async def create_shared() -> MathEnv:
    return _shared


async def create_nothing() -> str:
    return "no environment"


def create_raises(model_config: dict[str, Any]) -> Any:
    raise RuntimeError("no data set")


number = 3
