"""Plays all episodes with the scripted policy and prints the transcripts: one JSON object for each conversation.

    python tests/real/many_tools/record.py > transcripts.jsonl

A line is `{"pieces": [[text, was it sampled], ...]}`. Prompts and tool results are what the package made of them.
"""

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[3]


async def transcripts() -> list[dict[str, object]]:
    """Every conversation of every episode, in the order of `turns.py`."""
    from fake_sglang import FakeSGLang

    from many_tools.direct import direct_episodes
    from many_tools.episodes import EPISODES, play
    from many_tools.policy import ScriptedPolicy
    from many_tools.turns import TURNS
    from strands_rollout.engine import SHIPPED_MODEL_DIR
    from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

    tokenizer_dir = SHIPPED_MODEL_DIR  # any will do: a transcript is text
    policy = ScriptedPolicy(load_tokenizer(str(tokenizer_dir)))
    async with FakeSGLang(policy, context_length=16_384) as fake:
        for episode in EPISODES:
            await play(episode, fake.base_url, tokenizer_dir)
        await direct_episodes(fake.base_url, tokenizer_dir)
    missing = sorted(TURNS.keys() - policy.transcripts.keys())
    assert not missing, f"nobody asked {missing}"
    return [{"pieces": policy.transcripts[question]} for question in TURNS]


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # some tools are made to fail
    sys.path[:0] = [str(REPOSITORY / "tests/support"), str(REPOSITORY / "tests/real")]
    for transcript in asyncio.run(transcripts()):
        print(json.dumps(transcript, ensure_ascii=False))
