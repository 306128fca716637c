"""An agent program, which calls the policy through OpenAI's or Anthropic's API; here a Strands agent on OpenAI's."""

from agent import execute_python_code, look_up_price
from strands import Agent
from strands.models.openai import OpenAIModel

from strands_rollout import Endpoint, Task


async def run(task: Task, endpoint: Endpoint) -> str:
    """Play one episode and return the answer.

    Args:
        task: The row: its prompt, label and metadata.
        endpoint: The API of the policy, whose tokens are trained.
    """
    client = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    agent = Agent(
        model=OpenAIModel(client_args=client, model_id=endpoint.model),
        tools=[look_up_price, execute_python_code],
        system_prompt=task.system_prompt,
        callback_handler=None,
    )
    return str(await agent.invoke_async(task.text))
