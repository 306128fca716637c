"""An agent whose code tool is another agent on the same policy, which the shipped model can play."""

import re

from strands import Agent, tool

from strands_rollout import SGLangModel, Task, sub_agent_model
from strands_rollout.settings import SYSTEM_PROMPT


def build(model: SGLangModel, task: Task) -> Agent:
    """One who asks, and one who solves the same problem and whose answer the tool gives."""
    [code_tool] = task.tools
    spec = code_tool.tool_spec

    @tool(name=spec["name"], description=spec["description"], inputSchema=spec["inputSchema"])
    async def delegate(code: str) -> str:
        worker = Agent(model=sub_agent_model(), system_prompt=SYSTEM_PROMPT, tools=[code_tool], callback_handler=None)
        boxed = re.findall(r"boxed\{(.*?)\}", str(await worker.invoke_async(task.text)))
        return f"{boxed[-1]}\n" if boxed else ""

    return Agent(model=model, system_prompt=SYSTEM_PROMPT, tools=[delegate])
