"""An agent that asks another one: both are played by the policy, and both are trained.

`configs/sub_agent.yaml` names `build`, and with `fan_out` returns a sample for each of the two conversations. A Swarm
or a Graph is built in the same way: `model` for the agent whose answer counts, `sub_agent_model()` for each other one.
"""

from strands import Agent

from strands_rollout import SGLangModel, Task, sub_agent_model


def build(model: SGLangModel, task: Task) -> Agent:
    """The main agent of one episode, with the other one as a tool.

    Args:
        model: For the main agent: its tokens are the sample's.
        task: The row; its `tools` are those of the configuration, here for the expert.
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
