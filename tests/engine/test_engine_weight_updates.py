"""The spans of weight versions, and weights that the embedded engine refuses to take."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from tiny_qwen3 import TinyQwen3

from strands_rollout.engine.generation import Generation
from strands_rollout.engine.requests import GenerateRequest, SamplingParams


@pytest.mark.parametrize(
    ("changes", "output_count", "spans"),
    [
        ([], 0, [("now", 0, 0)]),
        ([], 7, [("now", 0, 7)]),
        ([("a", 3)], 7, [("a", 0, 3), ("now", 3, 7)]),
        ([("a", 3), ("b", 3)], 7, [("a", 0, 3), ("now", 3, 7)]),
        ([("a", 3)], 3, [("a", 0, 3)]),
        ([("now", 3), ("b", 3)], 7, [("now", 0, 7)]),
        ([("now", 3), ("b", 5)], 7, [("now", 0, 3), ("b", 3, 5), ("now", 5, 7)]),
    ],
)
def test_spans_cover_the_output_in_order_without_empty_ones(changes, output_count, spans):
    generation = Generation(GenerateRequest("r", (1,), SamplingParams(), 9), lambda: None)
    for version, count in (*changes, ("now", output_count)):
        generation.close_span(version, count)
    assert [(span.version, span.start, span.end) for span in generation.weight_spans] == spans


def _replaced(path: Path, kind: str) -> None:
    """Put something that is no readable file in the place of one."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("device", "dangling"):
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    elif kind == "sparse":
        header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}})
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header.encode())
            file.truncate(8 + len(header) + 2**40)
    else:
        path.write_bytes(b"[" * 100_000)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "dangling", "sparse", "nested"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
async def test_what_is_no_readable_file_is_refused_and_the_worker_lives(embedded, tiny_dir, tmp_path, kind, name):
    shutil.copytree(tiny_dir, tmp_path / "new")
    _replaced(tmp_path / "new" / name, kind)
    answer = await asyncio.wait_for(embedded.post("/update_weights_from_disk", {"model_path": f"{tmp_path}/new"}), 30)
    if (name, kind) == ("generation_config.json", "dangling"):
        assert answer.status == 200  # as one that is not there
    else:
        assert (answer.status, answer.body["success"]) == (400, False)
        assert str(tmp_path) in answer.body["message"]
    assert len((await embedded.generate(max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError("no memory")])
async def test_a_folder_that_can_not_be_read_is_refused_and_the_worker_lives(embedded, tmp_path, monkeypatch, error):
    def refuse(_: Path) -> bool:
        raise error

    monkeypatch.setattr(Path, "is_dir", refuse)  # root, as whom tests may run, is denied nothing
    answer = await embedded.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert (answer.status, answer.body["success"]) == (400, False)
    assert error.args[-1] in answer.body["message"]
    assert len((await embedded.generate(max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


@pytest.mark.parametrize("kind", ["missing", "foreign", "shape", "broken"])
async def test_weights_that_do_not_fit_leave_the_old_ones(embedded, tmp_path, kind):
    folder = tmp_path / "new"
    if kind != "missing":
        TinyQwen3(hidden=64 if kind == "shape" else 32).write(folder)
    if kind == "foreign":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    if kind == "broken":
        (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 garbage")
    before = await embedded.generate(max_new_tokens=10, temperature=0)
    answer = await embedded.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "v2"})
    assert (answer.status, answer.body["success"]) == (400, False)
    assert str(folder) in answer.body["message"]
    after = await embedded.generate(max_new_tokens=10, temperature=0)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "default"
