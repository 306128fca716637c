"""The task of an agent in a shop, as configs/shop.yaml sets it up: two tools of its own, and no code tool.

Knows the configuration file and the package's data folder. Must not know models.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from strands.types.tools import AgentTool

import strands_rollout
from shipped_model.conversation import AgentPrompt
from shipped_model.plan import Plan
from shipped_model.shop_episodes import answers_of, shop_tools, write_episodes
from shipped_model.shop_problems import ShopProblem, split_problems
from shipped_model.task import Task
from shipped_model.word_problems import SHIPPED_MODEL
from strands_rollout.chat_messages import to_chat_tools
from strands_rollout.config_file import read_config_file
from strands_rollout.tool_loading import load_tools

CONFIG: Final = Path(__file__).parents[2] / "configs/shop.yaml"
PLAN: Final = Plan(
    steps=240,
    target=0.62,
    batch_size=16,
    learning_rate=2e-3,
    problems=4000,
    training_rows=2000,
    validation_rows=48,
    evaluate_from=80,
    evaluate_every=20,
)


def shop_task() -> Task[ShopProblem]:
    """The task, with the prompt and the tools that the configuration file names now."""
    settings = read_config_file(CONFIG)
    tools = [tool for tool in load_tools(settings.tools) if isinstance(tool, AgentTool)]
    prompt = AgentPrompt(settings.system_prompt or "", tuple(to_chat_tools(tool.tool_spec for tool in tools)))
    return Task(
        name="shop",
        prompt=prompt,
        prompts_sha256=prompt_sha256(prompt),
        open_tools=shop_tools,
        split=split_problems,
        write_episodes=write_episodes,
        answers_of=answers_of,
        out=Path(strands_rollout.__file__).parent / "data/shop_model",
        training_file="shop_train.jsonl",
        held_out_file="shop_held_out.jsonl",
        plan=PLAN,
        parent=SHIPPED_MODEL,
    )


def prompt_sha256(prompt: AgentPrompt) -> str:
    """Of all that the agent reads before a question."""
    return hashlib.sha256(json.dumps([prompt.system_prompt, prompt.tools], sort_keys=True).encode()).hexdigest()
