"""An agent that asks another agent; the policy plays both, and both are trained.

`configs/sub_agent.yaml` names `build`, and sets `fan_out`, which makes a sample of each conversation. Build a Swarm or
a Graph in the same way: `model` for the agent whose answer is graded, and `sub_agent_model()` for each other agent.
"""

from strands import Agent

from strands_rollout import SGLangModel, Task, sub_agent_model


def build(model: SGLangModel, task: Task) -> Agent:
    """Build the main agent of one episode, with the expert as a tool.

    Args:
        model: Model of the main agent, whose tokens become the first sample.
        task: The row; its `tools` are the configured tools, which the expert gets here.
    """
    expert = Agent(
        name="expert",
        description="Ask an expert on geography a question.",
        model=sub_agent_model(),
        system_prompt="You know geography. Answer in one short sentence.",
        tools=list(task.tools),
    )
    return Agent(
        model=model,
        system_prompt="Answer the question. Ask the expert for every fact that you need.",
        tools=[expert.as_tool()],
    )
