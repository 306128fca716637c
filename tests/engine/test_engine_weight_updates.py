"""The spans of weight versions, and weights that the embedded engine refuses to take."""

from __future__ import annotations

import json

import pytest
from tiny_qwen3 import TinyQwen3

from strands_rollout.engine.generate_request import GenerateRequest
from strands_rollout.engine.generation import Generation
from strands_rollout.engine.sampling_params import SamplingParams


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
