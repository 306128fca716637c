"""An agent factory: a function that builds an episode's agent. The agent may be a Strands Agent, Graph or Swarm."""

from agent import execute_python_code, look_up_price
from strands import Agent

from strands_rollout import SGLangModel, Task


def build(model: SGLangModel, task: Task) -> Agent:
    """Build the agent of one episode.

    Args:
        model: The policy, whose tokens are trained.
        task: The row: its prompt, label and metadata.
    """
    return Agent(model=model, tools=[look_up_price, execute_python_code], system_prompt=task.system_prompt)
