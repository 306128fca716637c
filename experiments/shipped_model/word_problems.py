"""The task of the package's default model: word problems, solved with the code tool."""

import hashlib
import json
from pathlib import Path
from typing import Final

import strands_rollout
from experiments.shipped_model.conversation import AgentPrompt
from experiments.shipped_model.episodes import answers_of, write_episodes
from experiments.shipped_model.problems import Problem, split_problems
from experiments.shipped_model.task import Plan, Task
from experiments.shipped_model.tool_answers import code_tools
from strands_rollout.code_tool.tool import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA
from strands_rollout.settings import SYSTEM_PROMPT

CODE_AGENT: Final = AgentPrompt(
    system_prompt=SYSTEM_PROMPT,
    tools=(
        {
            "type": "function",
            "function": {"name": CODE_TOOL_NAME, "description": CODE_TOOL_DESCRIPTION, "parameters": CODE_TOOL_SCHEMA},
        },
    ),
)
SHIPPED_MODEL: Final = Path(strands_rollout.__file__).parent / "engine/checkpoint"


def prompts_sha256() -> str:
    """Return the SHA-256, in hex, of system prompt and tool specification; the shipped model's config stores it."""
    parts = [SYSTEM_PROMPT, CODE_TOOL_NAME, CODE_TOOL_DESCRIPTION, CODE_TOOL_SCHEMA]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


WORD_PROBLEMS: Final[Task[Problem]] = Task(
    name="word-problems",
    prompt=CODE_AGENT,
    prompts_sha256=prompts_sha256(),
    open_tools=code_tools,
    split=split_problems,
    write_episodes=write_episodes,
    answers_of=answers_of,
    out=SHIPPED_MODEL,
    training_file="train.jsonl",
    held_out_file="demo.jsonl",
    plan=Plan(steps=2000, target=1.0, problems=24000, guess_share=0.3, evaluate_from=400, evaluate_every=400),
)
