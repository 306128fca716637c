"""Each example on a scripted engine, compared with the recorded transcript `<example>.txt` beside this file.

After an intended change, record the transcripts again and review the diff:

    UPDATE_GOLDEN=1 bash scripts/test.sh tests/examples
"""

import json
import os
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import TOOL_CALL, run

from strands_rollout import Sample, reward_func
from strands_rollout.slime_plugin.sample_contract import contract_violations

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
MAX_LINES = 60


def call(name: str, **arguments: object) -> str:
    return TOOL_CALL.format(name=name, arguments=json.dumps(arguments))


def said(text: str) -> str:
    return f"{text}<|im_end|>"


EXAMPLES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "calculator": (
        {"prompt": "What is 17 * 2?", "label": "34"},
        [call("calculator", expression="17 * 2"), said("It is \\boxed{34}.")],
    ),
    "two_tools": (
        {
            "prompt": "Are there screws? If not, order 50.",
            "label": "50",
            "metadata": {
                "strands_rollout_settings": {
                    "tools": [f"strands_rollout.examples.two_tools.{name}" for name in ("count_stock", "order")]
                }
            },
        },
        [
            call("count_stock", item="screw"),
            call("order", item="screw", pieces=50),
            said("There were none; ordered: \\boxed{50}."),
        ],
    ),
    "mcp": (
        {"prompt": "How many kilometres are 100 miles?", "label": "160.9344"},
        [call("to_kilometres", miles=100), said("It is \\boxed{160.9344}.")],
    ),
    "sub_agent": (
        {"prompt": "Which is farther north, Oslo or Rome?", "label": "Oslo", "index": 3, "group_index": 1},
        [
            call("expert", input="Is Oslo or Rome farther north?"),
            said("Oslo is farther north."),
            said("It is \\boxed{Oslo}."),
        ],
    ),
    "guessing_game": (
        {"prompt": "Play.", "label": "37"},
        [call("guess", number=50), said("Is it lower than 50?"), call("guess", number=37), said("It was 37.")],
    ),
}


@pytest.mark.filterwarnings("ignore:calculator is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", EXAMPLES)
async def test_example_matches_its_transcript(shipped_tokenizer: Any, name: str) -> None:
    if name == "calculator":
        pytest.importorskip("strands_tools")
    row, turns = EXAMPLES[name]
    settings = yaml.safe_load((REPOSITORY / "configs" / f"{name}.yaml").read_text())["strands_rollout"]
    played = await run(shipped_tokenizer, turns, settings=settings, sample=Sample(**row))
    samples = played.sample if isinstance(played.sample, list) else [played.sample]
    rewards = await reward_func(None, samples)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
        assert contract_violations(sample, decode=played.decode, reward_key="score") == []
    transcript = "\n".join(shown(sample, played.decode) for sample in samples)
    path = HERE / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(transcript, encoding="utf-8")
    assert transcript == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_short(name: str) -> None:
    module = {"mcp": "mcp_server"}.get(name, name)
    for path in (f"strands_rollout/examples/{module}.py", f"configs/{name}.yaml"):
        assert len((REPOSITORY / path).read_text().splitlines()) < MAX_LINES, path


def tool_names(tools: re.Match[str]) -> str:
    names = [json.loads(line)["function"]["name"] for line in tools[0].splitlines()[1:-1]]
    return f"<tools>{', '.join(names)}</tools>"


def shown(sample: Sample, decode: Any) -> str:
    """Return a sample as text: the prompt, the context and trained parts, and how the episode ended."""
    start = len(sample.tokens) - sample.response_length
    # leave out the tools' descriptions, which their libraries may change
    prompt = re.sub(r"<tools>.*?</tools>", tool_names, decode(sample.tokens[:start]), flags=re.DOTALL)
    lines = [f"[prompt] {prompt}"]
    place = start
    for mask, group in groupby(sample.loss_mask or []):
        count = len(list(group))
        lines.append(f"[{'trained' if mask else 'context'}] {decode(sample.tokens[place : place + count])}")
        place += count
    facts = sample.metadata["strands_rollout"]
    lines.append(f"[status] {sample.status.value}, {facts['stop_reason']}, reward {json.dumps(sample.reward)}")
    return "\n".join(lines) + "\n"
