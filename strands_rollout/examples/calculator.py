"""An agent of your own by a function that builds it: the calculator of strands-agents-tools, and words to go with it.

`configs/calculator.yaml` names it; it needs `pip install 'strands-rollout[tools]'`.
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
    """The agent of one episode.

    Args:
        model: The policy that is trained; it records the agent's tokens.
        task: The row: its prompt, label and metadata. A row's own system message replaces the words here.
    """
    return Agent(model=model, tools=[calculator], system_prompt=task.system_prompt or SYSTEM_PROMPT)
