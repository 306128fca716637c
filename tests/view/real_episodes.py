"""Episodes that were played: on the embedded engine with its model, interrupted in the ways that a run interrupts them.

Images are played on the scripted engine, since the embedded one reads none.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import aiohttp
from fake_sglang import FakeSGLang
from harness import args_for, call_text
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from vision import VisionEngine, image_block, picture, save_llava

from strands_rollout import Sample, generate, reward_func, sub_agent_model
from strands_rollout.engine.process import engine_process
from strands_rollout.evaluation.demo import shipped_rows
from strands_rollout.evaluation.rows import read_rows

MOST_TRIES = 20
CODE = {"executor": {"name": "local", "isolation": "rlimits"}}


@tool(name="execute_python_code")
async def colleague(code: str) -> str:
    """Ask a colleague, who is played by the policy.

    Args:
        code: What to ask.
    """
    agent = Agent(
        model=sub_agent_model(), callback_handler=None, conversation_manager=NullConversationManager(), tools=[]
    )
    return str(await agent.invoke_async(code))


@tool
def draw(code: str) -> dict[str, Any]:
    """Draw.

    Args:
        code: What.
    """
    drawn = [{"text": f"{code}:"}, image_block(picture(60, 90, seed=2)), image_block(picture(seed=3))]
    return {"status": "success", "content": drawn}


async def _control(url: str, path: str, **body: Any) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def _update(url: str, tokenizer: Any, version: object) -> None:
    """As a trainer does between steps of an asynchronous run."""
    await _control(url, "/pause_generation", mode="abort")
    await _control(url, "/update_weights_from_disk", model_path=tokenizer.name_or_path, weight_version=str(version))
    await _control(url, "/continue_generation")


def _samples(count: int, group: int) -> list[Sample]:
    (row,) = read_rows(shipped_rows(), 1)
    return [
        Sample(prompt=row.prompt, label=row.label, index=10 * group + number, group_index=group)
        for number in range(count)
    ]


async def _play(
    url: str, tokenizer: Any, samples: list[Sample], *, max_new_tokens: int = 512, **settings: Any
) -> list[Any]:
    args = args_for(url, tokenizer, strands_rollout=settings, partial_rollout="should_abort" in settings)
    params = {"temperature": 1.0, "max_new_tokens": max_new_tokens}
    played = (generate(args, one, {**params, "sampling_seed": one.index}) for one in samples)
    return list(await asyncio.gather(*played))


async def updated_in_mid_episode(url: str, tokenizer: Any) -> list[Any]:
    """Samples of which one is of several weight versions at least, however fast this machine is."""
    await _play(url, tokenizer, _samples(1, 0), **CODE)  # the sandbox is up
    version = 1
    for _ in range(MOST_TRIES):
        running = asyncio.create_task(_play(url, tokenizer, _samples(4, 0), **CODE))
        while not running.done():
            await asyncio.sleep(0.05)
            version += 1
            await _update(url, tokenizer, version)
        played = await running
        if any(len(versions_of(one)) > 1 for one in played):
            return played
    raise AssertionError("no weights were updated in mid-episode")


async def aborted_and_resumed(url: str, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """Samples as they came back ABORTED, and the same after they had been resumed, by newer weights."""
    clock = asyncio.get_running_loop().time
    for number in range(MOST_TRIES):
        end = clock() + 0.05 * (1 + number % 8)
        back = await _play(url, tokenizer, _samples(4, 1), should_abort=lambda end=end: clock() > end, **CODE)
        begun = [one for one in back if one.status is Sample.Status.ABORTED and versions_of(one)]
        if begun:
            await _update(url, tokenizer, f"resumed-{number}")
            aborted, resumed = copy.deepcopy(begun), await _play(url, tokenizer, begun, **CODE)
            if any(len(versions_of(one)) > 1 for one in resumed):
                return aborted, resumed
    raise AssertionError("nothing was aborted in mid-episode")


def versions_of(sample: Any) -> set[str]:
    """Of the weights that its tokens were sampled by."""
    return {version for *_, version in sample.metadata["strands_rollout"].get("spans") or []}


async def fanned_out(url: str, tokenizer: Any) -> list[Any]:
    """Main agents' samples and their sub-agents'."""
    found = await _play(
        url, tokenizer, _samples(4, 2), tools=["real_episodes.colleague"], fan_out=True, max_new_tokens=160
    )
    return [one for many in found for one in many]


async def with_images(folder: Path) -> tuple[Any, Any]:
    """A sample that read three images, one of them in its prompt; and its tokenizer.

    Args:
        folder: Empty; the processor is saved there.
    """
    processor = save_llava(folder)
    engine = VisionEngine(processor, [call_text("a house", "draw"), "Two. \\boxed{2}<|im_end|>"])
    question = [{"type": "image", "image": picture(seed=1)}, {"type": "text", "text": "How many doors?"}]
    async with FakeSGLang(engine, context_length=8192) as fake:
        args = args_for(fake.base_url, processor.tokenizer, strands_rollout={"tools": ["real_episodes.draw"]})
        args.hf_checkpoint = str(folder)
        sample = Sample(prompt=[{"role": "user", "content": question}], label="2", index=30, group_index=3)
        return await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 2048}), processor.tokenizer


async def all_of_them(tokenizer: Any) -> dict[str, list[Any]]:
    """By kind, rewarded as a run rewards them."""
    async with engine_process() as url:
        fanned = await fanned_out(url, tokenizer)
        updated = await updated_in_mid_episode(url, tokenizer)
        aborted, resumed = await aborted_and_resumed(url, tokenizer)
    args = args_for("http://127.0.0.1:1", tokenizer)
    for one in [*updated, *resumed, *fanned]:
        one.reward = await reward_func(args, one)
    return {"updated": updated, "aborted": aborted, "resumed": resumed, "fanned": fanned}
