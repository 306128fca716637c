"""Finished, graded samples for the exports, from episodes on a scripted engine."""

import re
from pathlib import Path
from typing import Any

from harness import ANSWER, call_text, run

from strands_rollout import reward_func

WRONG = "I guess \\boxed{35}.<|im_end|>"


async def finished_sample(tokenizer: Any, script: Any, **more: Any) -> Any:
    done = (await run(tokenizer, script, **more)).sample
    done.reward = await reward_func(None, done)
    return done


async def two_samples(tokenizer: Any) -> list[Any]:
    """Return a right sample that used the tool and a wrong sample that answered immediately."""
    used = await finished_sample(tokenizer, [call_text(), ANSWER])
    return [used, await finished_sample(tokenizer, [WRONG])]


def documented_block(word: str) -> str:
    """Return the only Python example of docs/integrations.md that contains `word`."""
    text = (Path(__file__).parents[2] / "docs/integrations.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in block)
    return str(block)
