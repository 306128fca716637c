"""A function that builds the agent of an episode: any Strands Agent, Graph or Swarm."""

from agent import execute_python_code, look_up_price
from strands import Agent

from strands_rollout import SGLangModel, Task


def build(model: SGLangModel, task: Task) -> Agent:
    """Build the agent; `model` is the policy, whose tokens are trained, and `task` is the row."""
    return Agent(model=model, tools=[look_up_price, execute_python_code], system_prompt=task.system_prompt)
