"""Token-exact Strands agent rollouts for slime.

The main public names can be imported from here. They are loaded on first use: `import strands_rollout` imports neither
Strands nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strands_rollout.agent.environment import Task, current_task
    from strands_rollout.agent.limits import EpisodeLimits, StopReason, ToolLimiter
    from strands_rollout.agent.multi_agent import sub_agent_model
    from strands_rollout.client.client import SGLangClient
    from strands_rollout.client.transport import create_client
    from strands_rollout.code_tool.tool import execute_python_code
    from strands_rollout.gateway.program import Endpoint
    from strands_rollout.model.sampling import TokenLimits
    from strands_rollout.model.sglang_model import SGLangModel
    from strands_rollout.record.tokens import Trajectory
    from strands_rollout.samples import Sample
    from strands_rollout.slime_plugin.fully_async import generate_rollout_fully_async
    from strands_rollout.slime_plugin.generate import generate
    from strands_rollout.slime_plugin.metrics import log_eval, log_rollout
    from strands_rollout.slime_plugin.reward import reward_func
    from strands_rollout.slime_plugin.reward_groups import (
        keep_informative_groups,
        keep_informative_groups_with_fallback,
        normalize_rewards,
    )

__version__ = "0.3.0"

__all__ = [
    "Endpoint",
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
    "generate_rollout_fully_async",
    "keep_informative_groups",
    "keep_informative_groups_with_fallback",
    "log_eval",
    "log_rollout",
    "normalize_rewards",
    "reward_func",
    "sub_agent_model",
]

_MODULES = {
    "Endpoint": "gateway.program",
    "EpisodeLimits": "agent.limits",
    "SGLangClient": "client.client",
    "SGLangModel": "model.sglang_model",
    "Sample": "samples",
    "StopReason": "agent.limits",
    "Task": "agent.environment",
    "TokenLimits": "model.sampling",
    "ToolLimiter": "agent.limits",
    "Trajectory": "record.tokens",
    "create_client": "client.transport",
    "current_task": "agent.environment",
    "execute_python_code": "code_tool.tool",
    "generate": "slime_plugin.generate",
    "generate_rollout_fully_async": "slime_plugin.fully_async",
    "keep_informative_groups": "slime_plugin.reward_groups",
    "keep_informative_groups_with_fallback": "slime_plugin.reward_groups",
    "log_eval": "slime_plugin.metrics",
    "log_rollout": "slime_plugin.metrics",
    "normalize_rewards": "slime_plugin.reward_groups",
    "reward_func": "slime_plugin.reward",
    "sub_agent_model": "agent.multi_agent",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    if name == "sandbox":  # before 0.3, `code_tool` had this name; settings may name executors by that path
        return importlib.import_module(f"{__name__}.code_tool")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
