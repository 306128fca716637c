"""Strands' harness as the agent: a shell, files, to-do lists, skills, sub-agents, and a history that is summed up.

`configs/harness.yaml` names `build`, and `scratch` for the folder that shell and files work in
(`pip install 'strands-rollout[harness]'`). Sessions, memory and the web are off: they outlive an episode, or leave it.
"""

from strands import Agent
from strands.vended_plugins.skills import Skill
from strands_harness import create_harness

from strands_rollout import SGLangModel, Task
from strands_rollout.code_tool.executors import shared_executor
from strands_rollout.code_tool.strands_sandbox import CodeExecutorSandbox

EXECUTOR = {"name": "local", "isolation": "files", "programs": True}
"""Files are confined by the kernel, and programs may be started, which a shell is for."""

# skills on disk are read by Skill.from_directory(path): the agent's own files are those of the episode's folder
SKILLS = [
    Skill(
        name="measured-answers",
        description="How to answer a question about a text: count, and do not guess.",
        instructions="Write the text to a file, count with the shell, and read the count once more before you answer.",
    )
]


def scratch(task: Task) -> CodeExecutorSandbox:
    """A folder and a shell for one episode, gone with it; each command may take a minute."""
    del task
    return CodeExecutorSandbox(shared_executor(EXECUTOR), max_timeout_s=60)


def build(model: SGLangModel, task: Task) -> Agent:
    """The harness of one episode.

    Args:
        model: Of the agent, its sub-agents and its context manager, each in a conversation of its own.
        task: The row; its `tools` are those of the configuration, beside the harness' own.
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
