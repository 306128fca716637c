"""An episode with images, played on the scripted engine, is dumped and shown whole."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSGLang
from harness import args_for, call_text
from strands import tool
from vision import VisionEngine, image_block, picture, save_llava

from strands_rollout import Sample, generate
from strands_rollout.dump import DumpRecord, TokenTexts, read_dump, write_dump
from strands_rollout.view.page import view_dump


@tool
def draw(code: str) -> dict[str, Any]:
    """Draw.

    Args:
        code: What.
    """
    drawn = [{"text": f"{code}:"}, image_block(picture(60, 90, seed=2)), image_block(picture(seed=3))]
    return {"status": "success", "content": drawn}


async def with_images(folder: Path) -> tuple[Any, Any]:
    """A sample that read three images, one of them in its prompt; and its tokenizer."""
    processor = save_llava(folder)
    engine = VisionEngine(processor, [call_text("a house", "draw"), "Two. \\boxed{2}<|im_end|>"])
    question = [{"type": "image", "image": picture(seed=1)}, {"type": "text", "text": "How many doors?"}]
    async with FakeSGLang(engine, context_length=8192) as fake:
        args = args_for(fake.base_url, processor.tokenizer, strands_rollout={"tools": ["test_view_images.draw"]})
        args.hf_checkpoint = str(folder)
        sample = Sample(prompt=[{"role": "user", "content": question}], label="2", index=30, group_index=3)
        return await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 2048}), processor.tokenizer


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
