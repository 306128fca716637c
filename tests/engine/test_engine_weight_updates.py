"""New weights for a running engine: the versions that answers name, the cache, and what fails."""

from __future__ import annotations

import asyncio
import json

import pytest
from engine_api import IDS, in_flight, streaming, until_load
from tiny_qwen3 import TinyQwen3

from strands_rollout.engine.generate_request import GenerateRequest
from strands_rollout.engine.generation import Generation
from strands_rollout.engine.sampling_params import SamplingParams


async def test_new_weights_change_the_answer_the_version_and_empty_the_cache(embedded, tiny_dir, other_dir, start):
    before = await embedded.generate(max_new_tokens=10, temperature=0)
    answer = await embedded.post("/update_weights_from_disk", {"model_path": str(other_dir), "weight_version": "v7"})
    assert (answer.status, answer.body) == (
        200,
        {
            "success": True,
            "message": "Succeeded to update model weights. Weight version updated to v7.",
            "num_paused_requests": 0,
        },
    )
    after = await embedded.generate(max_new_tokens=10, temperature=0)
    fresh = await (await start(other_dir)).generate(max_new_tokens=10, temperature=0)
    assert after["output_ids"] == fresh["output_ids"] != before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["weight_version"] == "v7"
    info = (await embedded.get("/model_info")).body
    assert (info["weight_version"], info["model_path"]) == ("v7", str(other_dir))
    assert info["tokenizer_path"] == str(tiny_dir)


async def test_without_a_version_the_old_one_stays(embedded, other_dir):
    answer = await embedded.post("/update_weights_from_disk", {"model_path": str(other_dir)})
    assert answer.body["message"] == "Succeeded to update model weights."
    assert (await embedded.generate(max_new_tokens=1))["meta_info"]["weight_version"] == "default"


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True)])
async def test_an_update_in_mid_generation_reports_both_versions(start, long_dir, long_other_dir, mode, flush):
    api = await start(long_dir)
    task = await streaming(api, max_new_tokens=400, ignore_eos=True)
    await api.post("/pause_generation", {"mode": mode})
    update = {"model_path": str(long_other_dir), "weight_version": "v2", "flush_cache": flush}
    answer = await api.post("/update_weights_from_disk", update)
    assert (answer.status, answer.body["success"]) == (200, True)
    await api.post("/continue_generation", {})
    meta = (await task)["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("default", 0, "v2", 400)
    assert 0 < first["end"] == second["start"] < 400
    assert meta["weight_version"] == "v2"


async def test_each_span_holds_what_the_weights_of_its_version_sample(start, long_dir, long_other_dir):
    api, old, new = [await start(folder) for folder in (long_dir, long_dir, long_other_dir)]
    fields = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}
    task = await streaming(api, **fields)
    await api.post("/pause_generation", {"mode": "retract"})
    await api.post("/update_weights_from_disk", {"model_path": str(long_other_dir), "weight_version": "v2"})
    await api.post("/continue_generation", {})
    answer = await task
    cut = answer["meta_info"]["weight_versions"][0]["end"]
    first, rest = answer["output_ids"][:cut], answer["output_ids"][cut:]
    assert first == (await old.generate(**fields))["output_ids"][:cut]
    assert rest == (await new.generate([*IDS, *first], **(fields | {"max_new_tokens": 400 - cut})))["output_ids"]


async def test_what_an_update_aborts_names_the_version_that_it_was_sampled_under(start, long_dir, long_other_dir):
    api = await start(long_dir)
    update = {"model_path": str(long_other_dir), "weight_version": "v2"}
    async with in_flight(api, "running") as [task]:
        await until_load(api, 1)
        await asyncio.sleep(0.05)
        await api.post("/pause_generation", {})
        held = asyncio.create_task(api.generate(max_new_tokens=2, ignore_eos=True))
        assert (await api.post("/update_weights_from_disk", update)).status == 200
        await api.post("/continue_generation", {})
        aborted, fresh = await task, await held
    end = len(aborted["output_ids"])
    assert aborted["meta_info"]["weight_version"] == "default"
    assert aborted["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": end}]
    assert fresh["meta_info"]["weight_versions"] == [{"version": "v2", "start": 0, "end": 2}]
    assert fresh["meta_info"]["cached_tokens"] == 0


async def test_an_update_under_a_frozen_generation_changes_weights_but_fails_to_flush(start, long_dir, long_other_dir):
    api = await start(long_dir)
    update = {"model_path": str(long_other_dir), "weight_version": "v2"}
    async with in_flight(api, "r1") as [task]:
        await until_load(api, 1)
        await api.post("/pause_generation", {"mode": "in_place"})
        answer = await api.post("/update_weights_from_disk", update)
        assert answer.status == 400
        assert answer.body["message"].startswith("Weights were updated, but the cache was not flushed")
        info = (await api.get("/model_info")).body
        assert (info["weight_version"], info["model_path"]) == ("default", str(long_dir))
        await api.post("/abort_request", {"abort_all": True})
        await api.post("/continue_generation", {})
        assert (await task)["meta_info"]["weight_version"] == "v2"


async def test_an_update_without_a_pause_waits_for_what_runs_and_holds_what_comes(start, long_dir, long_other_dir):
    api = await start(long_dir)
    running = await streaming(api, max_new_tokens=400, ignore_eos=True)
    update = {"model_path": str(long_other_dir), "weight_version": "v2"}
    updating = asyncio.create_task(api.post("/update_weights_from_disk", update))
    await asyncio.sleep(0.02)
    late = asyncio.create_task(api.generate(max_new_tokens=2, ignore_eos=True))
    await asyncio.sleep(0.02)
    assert await api.load() == (1, 0)
    assert (await running)["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 400}]
    assert (await updating).status == 200
    meta = (await late)["meta_info"]
    assert (meta["weight_version"], meta["cached_tokens"]) == ("v2", 0)


async def test_an_update_can_abort_what_runs(start, long_dir, long_other_dir):
    api = await start(long_dir)
    async with in_flight(api, "r1") as [task]:
        await until_load(api, 1)
        update = {"model_path": str(long_other_dir), "abort_all_requests": True}
        assert (await api.post("/update_weights_from_disk", update)).status == 200
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_abort_during_an_update_does_not_reach_what_waits_for_it(start, long_dir, long_other_dir):
    api = await start(long_dir)
    async with in_flight(api, "r1") as [task]:
        await until_load(api, 1)
        update = {"model_path": str(long_other_dir), "weight_version": "v2"}
        updating = asyncio.create_task(api.post("/update_weights_from_disk", update))
        await asyncio.sleep(0.02)
        late = asyncio.create_task(api.generate(max_new_tokens=2, ignore_eos=True))
        await asyncio.sleep(0.02)
        await api.post("/abort_request", {"abort_all": True})
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await updating).status == 200
        assert (await late)["meta_info"]["weight_versions"] == [{"version": "v2", "start": 0, "end": 2}]


async def test_a_version_can_change_without_the_weights(start, long_dir):
    api = await start(long_dir)
    running = await streaming(api, max_new_tokens=400, ignore_eos=True)
    body = {"new_version": "v2", "abort_all_requests": False}
    answer = (await api.post("/update_weight_version", body)).body
    assert answer == {"success": True, "message": "Weight version updated to v2", "new_version": "v2"}
    versions = (await running)["meta_info"]["weight_versions"]
    assert [span["version"] for span in versions] == ["default", "v2"]
    assert (await api.get("/model_info")).body["weight_version"] == "v2"
    async with in_flight(api, "r1") as [task]:
        await until_load(api, 1)
        await api.post("/update_weight_version", {"new_version": "v3"})
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


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
