"""Episodes that were interrupted, resumed and fanned out on a real engine are shown as what they are, as no fault.

They are played on the embedded engine with its model; images on the scripted one, since the embedded one reads none.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from fake_sglang import FakeSGLang
from harness import args_for, call_text
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from vision import VisionEngine, image_block, picture, save_llava

from strands_rollout import Sample, generate, reward_func, sub_agent_model
from strands_rollout.dump import DumpRecord, TokenTexts, read_dump, write_dump
from strands_rollout.engine.process import engine_process
from strands_rollout.evaluation.demo import shipped_rows
from strands_rollout.evaluation.rows import read_rows
from strands_rollout.slime_plugin.reward_groups import normalize_rewards
from strands_rollout.view.page import DumpView, view_dump

ORDER = ("updated", "aborted", "resumed", "fanned")
MOST_TRIES = 20
CUT = threading.Event()
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


@tool(name="execute_python_code")
async def interrupted(code: str) -> str:
    """Have the rollout aborted while it runs.

    Args:
        code: What to run.
    """
    CUT.set()
    await asyncio.sleep(30)
    return code


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
    asked = {"prompt": row.prompt, "label": row.label, "group_index": group}
    return [Sample(index=10 * group + number, **asked) for number in range(count)]


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
        running = asyncio.create_task(_play(url, tokenizer, _samples(2, 0), **CODE))
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
    CUT.clear()
    samples = _samples(4, 1)  # of which some call the tool
    back = await _play(url, tokenizer, samples, tools=["test_view_real_episodes.interrupted"], should_abort=CUT.is_set)
    aborted = [one for one in back if one.status is Sample.Status.ABORTED and versions_of(one)]
    await _update(url, tokenizer, "resumed")
    return copy.deepcopy(aborted), await _play(url, tokenizer, aborted, **CODE)


def versions_of(sample: Any) -> set[str]:
    """Of the weights that its tokens were sampled by."""
    return {version for *_, version in sample.metadata["strands_rollout"].get("spans") or []}


async def fanned_out(url: str, tokenizer: Any) -> list[Any]:
    """Main agents' samples and their sub-agents'."""
    found = await _play(
        url, tokenizer, _samples(2, 2), tools=["test_view_real_episodes.colleague"], fan_out=True, max_new_tokens=160
    )
    return [one for many in found for one in many]


async def with_images(folder: Path) -> tuple[Any, Any]:
    """A sample that read three images, one of them in its prompt; and its tokenizer."""
    processor = save_llava(folder)
    engine = VisionEngine(processor, [call_text("a house", "draw"), "Two. \\boxed{2}<|im_end|>"])
    question = [{"type": "image", "image": picture(seed=1)}, {"type": "text", "text": "How many doors?"}]
    async with FakeSGLang(engine, context_length=8192) as fake:
        args = args_for(fake.base_url, processor.tokenizer, strands_rollout={"tools": ["test_view_real_episodes.draw"]})
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


async def test_interrupted_and_fanned_out_episodes_are_shown_right(shipped_tokenizer: Any, tmp_path: Path) -> None:
    played = await all_of_them(shipped_tokenizer)
    samples = [one for kind in ORDER for one in played[kind]]
    write_dump(tmp_path / "real.jsonl.gz", samples, TokenTexts(shipped_tokenizer))
    view = view_dump(tmp_path / "real.jsonl.gz", None)
    assert {problem for row in view.rows for problem in row["problems"]} <= {"stale version"}
    shown = dict(zip(ORDER, _cut(view, [len(played[kind]) for kind in ORDER]), strict=True))
    assert any(len(row["versions"]) > 1 for row, _ in shown["updated"])
    assert {row["status"] for row, _ in shown["aborted"]} == {"aborted"}
    assert all(row["advantage"] is None for row, _ in shown["aborted"])
    assert any(len(row["versions"]) > 1 for row, _ in shown["resumed"])
    parts = [row["part"] for row, _ in shown["fanned"] if row["part"]]
    assert "main, 1 of 2" in parts
    assert "agent, 2 of 2" in parts
    for row, detail in (one for kind in ORDER for one in shown[kind]):
        _check_times(row, detail)
    _check_advantages(samples, view)


def _cut(view: DumpView, counts: list[int]) -> list[list[tuple[dict[str, Any], dict[str, Any]]]]:
    pairs = [(row, json.loads(gzip.decompress(d))) for row, d in zip(view.rows, view.details, strict=True)]
    found = []
    for count in counts:
        found.append(pairs[:count])
        pairs = pairs[count:]
    return found


def _check_times(row: dict[str, Any], detail: dict[str, Any]) -> None:
    """The policy is asked for one thing after the other, within the episode."""
    requests = [(at, at + s) for kind, at, s, *_ in detail["steps"] if kind == "generate"]
    assert len(requests) >= len(detail["spans"]) > 0 or row["turns"] == 0
    assert all(end <= begin + 0.05 for (_, end), (begin, _) in pairwise(requests))
    if row["times"]:
        assert all(end <= row["times"]["all"] + 0.01 for _, end in requests)


def _check_advantages(samples: list[Any], view: DumpView) -> None:
    rewarded = [place for place, one in enumerate(samples) if one.reward is not None]
    _, expected = normalize_rewards(SimpleNamespace(reward_key="score"), [samples[place] for place in rewarded])
    assert [view.rows[place]["advantage"] for place in rewarded] == expected


async def test_an_episode_with_images_is_dumped_and_shown(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    sample, tokenizer = await with_images(tmp_path / "model")
    write_dump(tmp_path / "run.jsonl", [sample], TokenTexts(tokenizer))
    (record,) = read_dump(tmp_path / "run.jsonl")
    image = record.values["prompt"][0]["content"][0]["image"]
    assert image.tobytes() == sample.prompt[0]["content"][0]["image"].tobytes()
    view = view_dump(tmp_path / "run.jsonl", None)
    (row,), detail = view.rows, json.loads(gzip.decompress(view.details[0]))
    assert (row["problems"], row["asked"]) == ([], "[image] How many doors?")
    (call,) = (part for _, parts in detail["talk"] for part in parts if part[0] == "call")
    assert call[2:] == ["draw", {"code": "a house"}]
    assert DumpRecord.from_sample(sample).values["multimodal_train_inputs"]["pixel_values"].shape[0] == 3
