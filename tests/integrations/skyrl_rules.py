"""What SkyRL asks of a GeneratorOutput, in our words, and its own validator out of a checkout.

Read in NovaSky-AI/SkyRL a9564572: validate_generator_output in skyrl/train/utils/trainer_utils.py, GeneratorOutput in
skyrl/train/generators/base.py.
"""

import ast
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FIELDS = (
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics"),
    *("rollout_logprobs", "trajectory_ids", "trajectory_generation_times", "trajectory_time_splits"),
    *("rollout_expert_indices", "is_last_step", "env_metrics", "pixel_values", "image_grid_thw"),
)
PER_RESPONSE = ("prompt_token_ids", "loss_masks", "rewards", "rollout_logprobs", "stop_reasons", "trajectory_ids")


def violations(output: dict[str, Any], prompts: int) -> Iterator[str]:
    """Everything that the validator would refuse."""
    count = len(output["response_ids"])
    if not count or count != prompts:
        yield f"{count} responses to {prompts} prompts"
    for name in PER_RESPONSE:
        if isinstance(output[name], list) and len(output[name]) != count:
            yield f"{name} has {len(output[name])} entries for {count} responses"
    for name in ("loss_masks", "rollout_logprobs"):
        if [len(values) for values in output[name]] != [len(ids) for ids in output["response_ids"]]:
            yield f"{name} differs in length from response_ids"
    if not all(type(reward) is float for reward in output["rewards"]):
        yield "rewards are no floats"


def validator_of(checkout: Path) -> Callable[..., None]:
    """SkyRL's own validator, without the packages that its module imports: two functions that need numpy and a log."""
    source = (checkout / "skyrl/train/utils/trainer_utils.py").read_text()
    wanted = ("validate_generator_output", "_validate_step_wise_fields")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert len(functions) == len(wanted)
    namespace: dict[str, Any] = {"np": np, "logger": logging.getLogger("skyrl"), "GeneratorOutput": dict}
    exec(compile(ast.Module(functions, []), "trainer_utils.py", "exec", dont_inherit=True), namespace)
    return namespace["validate_generator_output"]  # type: ignore[no-any-return]
