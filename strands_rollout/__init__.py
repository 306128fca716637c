"""Token-exact Strands agent rollouts for slime.

Everything public is importable from here and loaded on first use: `import strands_rollout` loads neither Strands nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strands_rollout.agent_models import sub_agent_model
    from strands_rollout.episode_bounds import EpisodeLimits
    from strands_rollout.group_filter import keep_informative_groups
    from strands_rollout.group_rewards import normalize_rewards
    from strands_rollout.metrics import log_eval, log_rollout
    from strands_rollout.reward import reward_func
    from strands_rollout.rollout import generate
    from strands_rollout.sample_type import Sample
    from strands_rollout.sglang_client import SGLangClient, create_client
    from strands_rollout.sglang_model import SGLangModel
    from strands_rollout.stop_reason import StopReason
    from strands_rollout.task import Task, current_task
    from strands_rollout.token_limits import TokenLimits
    from strands_rollout.tool_limiter import ToolLimiter
    from strands_rollout.tools import execute_python_code
    from strands_rollout.trajectory import Trajectory

__version__ = "0.1.0"

__all__ = [
    "EpisodeLimits",
    "SGLangClient",
    "SGLangModel",
    "Sample",
    "StopReason",
    "Task",
    "TokenLimits",
    "ToolLimiter",
    "Trajectory",
    "create_client",
    "current_task",
    "execute_python_code",
    "generate",
    "keep_informative_groups",
    "log_eval",
    "log_rollout",
    "normalize_rewards",
    "reward_func",
    "sub_agent_model",
]

_HOMES = {
    "EpisodeLimits": "episode_bounds",
    "SGLangClient": "sglang_client",
    "SGLangModel": "sglang_model",
    "Sample": "sample_type",
    "StopReason": "stop_reason",
    "Task": "task",
    "TokenLimits": "token_limits",
    "ToolLimiter": "tool_limiter",
    "Trajectory": "trajectory",
    "create_client": "sglang_client",
    "current_task": "task",
    "execute_python_code": "tools",
    "generate": "rollout",
    "keep_informative_groups": "group_filter",
    "log_eval": "metrics",
    "log_rollout": "metrics",
    "normalize_rewards": "group_rewards",
    "reward_func": "reward",
    "sub_agent_model": "agent_models",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
