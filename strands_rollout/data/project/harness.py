"""Strands' harness as the agent: a shell, files, to-do lists and sub-agents, in addition to the tools of agent.py."""

from strands import Agent
from strands_harness import create_harness

from strands_rollout import SGLangModel, Task
from strands_rollout.code_tool.executors import shared_executor
from strands_rollout.code_tool.strands_sandbox import CodeExecutorSandbox

EXECUTOR = {"name": "local", "isolation": "files", "programs": True}


def scratch(task: Task) -> CodeExecutorSandbox:
    """Return an episode's temporary folder and shell, which can't reach other files."""
    del task  # the sandbox does not depend on the row
    return CodeExecutorSandbox(shared_executor(EXECUTOR), max_timeout_s=60)


def build(model: SGLangModel, task: Task) -> Agent:
    """Build the agent of one episode.

    Args:
        model: The policy, which also plays sub-agents.
        task: The row, with the tools of rollout.yaml.
    """
    agent: Agent = create_harness(
        model=model,
        instructions=task.system_prompt,
        tools=list(task.tools),
        builtin_tools={"web_fetch": False, "web_search": False},
        caching=False,
        session=False,  # sessions and memory outlive an episode
        memory=False,
        sandbox=task.resources["scratch"],
        callback_handler=None,
    )
    return agent
