"""A hook file of strands-env whose environment has the recorded tools."""

from typing import Any

import recorded_tools
from strands_env.core import Environment, RewardFunction, RewardResult, Task
from strands_env.core.models import build_model_factory


class Boxed(RewardFunction):
    """Reward 1.0 if the answer names the ground truth."""

    async def compute(self, task: Task, result: Any) -> RewardResult:
        return RewardResult(reward=float(str(task.ground_truth) in (result.final_response or "")))


class RecordedEnv(Environment):
    """An environment with tools that record their calls."""

    def get_tools(self) -> list[Any]:
        return [recorded_tools.work, recorded_tools.fail]


def create_env_factory(model_config: dict[str, Any], **env_config: Any) -> Any:
    model_factory = build_model_factory(model_config)

    async def env_factory() -> RecordedEnv:
        return RecordedEnv(model_factory=model_factory, reward_fn=Boxed(), **env_config)

    return env_factory
