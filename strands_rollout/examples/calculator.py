"""An agent factory: a function that builds an agent with the calculator of strands-agents-tools and a system prompt.

`configs/calculator.yaml` names `build`. The calculator needs `pip install 'strands-rollout[tools]'`.
"""

from typing import Final

from strands import Agent
from strands_tools import calculator  # type: ignore[import-not-found, import-untyped, unused-ignore] # an extra

from strands_rollout import SGLangModel, Task

SYSTEM_PROMPT: Final = (
    "You are a careful math solver. Reason briefly, use the calculator tool for every computation, and give the final "
    "answer in \\boxed{}."
)


def build(model: SGLangModel, task: Task) -> Agent:
    """Build the agent of one episode.

    Args:
        model: The policy to train, which records the agent's tokens.
        task: The row: its prompt, label and metadata. A row's own system message replaces `SYSTEM_PROMPT`.
    """
    return Agent(model=model, tools=[calculator], system_prompt=task.system_prompt or SYSTEM_PROMPT)
