"""Strands' harness as the agent: a shell, files, to-do lists, skills, sub-agents, and a summarized history.

`configs/harness.yaml` names `build` as the agent factory and `scratch` as the resource for shell and files. The example
needs `pip install 'strands-rollout[harness]'`. Sessions, memory (both outlast an episode) and the web tools are off.
"""

from strands import Agent
from strands.vended_plugins.skills import Skill
from strands_harness import create_harness

from strands_rollout import SGLangModel, Task
from strands_rollout.code_tool.executors import shared_executor
from strands_rollout.code_tool.strands_sandbox import CodeExecutorSandbox

EXECUTOR = {"name": "local", "isolation": "files", "programs": True}
"""The kernel confines file access; code may start programs, which a shell needs."""

# to use skills from disk, load them here with Skill.from_directory(path): the agent can read only its own folder
SKILLS = [
    Skill(
        name="measured-answers",
        description="How to answer a question about a text: count, and do not guess.",
        instructions="Write the text to a file, count with the shell, and read the count once more before you answer.",
    )
]


def scratch(task: Task) -> CodeExecutorSandbox:
    """Return a shell for one episode; its folder is deleted when the episode ends. A command may take 60 seconds."""
    del task
    return CodeExecutorSandbox(shared_executor(EXECUTOR), max_timeout_s=60)


def build(model: SGLangModel, task: Task) -> Agent:
    """Build the harness of one episode.

    Args:
        model: Model of the agent, its sub-agents and its context manager, each with its own conversation.
        task: The row; its `tools` are the configured tools, which are added to the harness's own.
    """
    agent: Agent = create_harness(
        model=model,
        instructions=task.system_prompt,
        tools=list(task.tools),
        builtin_tools={"web_fetch": False, "web_search": False},
        skills=[*SKILLS],
        caching=False,
        session=False,
        memory=False,
        sandbox=task.resources["scratch"],
        callback_handler=None,
    )
    return agent
