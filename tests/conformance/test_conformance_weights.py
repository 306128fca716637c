"""Weight updates of a running engine: reported versions, the cache, and refusals."""

import asyncio

import numpy as np
import pytest
from engine_api import IDS, in_flight, queued_request, start_stream, wait_for_load
from reference_qwen3 import ReferenceQwen3, log_softmax, shipped_reference
from served_engine import ABORTED

from strands_rollout.engine import SHIPPED_MODEL_DIR

GREEDY = {"max_new_tokens": 10, "temperature": 0, "ignore_eos": True}
TWO = {"max_new_tokens": 2, "ignore_eos": True}
# the weights change before the end of this stream: the embedded engine samples over a thousand tokens a second
STREAMED = {"max_new_tokens": 400, "ignore_eos": True}

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


@pytest.fixture(scope="module")
def other_reference(other_weights) -> ReferenceQwen3:
    return ReferenceQwen3(other_weights)


def _versions(answer) -> list[str]:
    """Return the weight versions of an answer, after checking that its spans cover it."""
    spans = answer["meta_info"]["weight_versions"]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == len(answer["output_ids"])
    assert answer["meta_info"]["weight_version"] == spans[-1]["version"]
    return [span["version"] for span in spans]


async def test_update_weights_changes_version_and_flushes_cache(shipped, reweighted, other_reference):
    before = await shipped.generate(**GREEDY)
    answer = await reweighted(weight_version="v7")
    async with asyncio.timeout(300):  # SGLang refuses to flush until it has cleaned up after its answers
        while "not flushed" in answer.body["message"]:
            answer = await reweighted(weight_version="v7")
    message = "Succeeded to update model weights. Weight version updated to v7."
    assert (answer.status, answer.body) == (200, {"success": True, "message": message, "num_paused_requests": 0})
    after = await shipped.generate(**GREEDY)
    best = other_reference.logits([*IDS, *after["output_ids"]]).argmax(axis=-1)
    assert after["output_ids"] == best[len(IDS) - 1 : -1].tolist() != before["output_ids"]
    assert (after["meta_info"]["cached_tokens"], _versions(after)) == (0, ["v7"])


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True)])
async def test_weight_version_spans_match_their_weights(shipped, reweighted, other_reference, mode, flush):
    task = await start_stream(shipped, temperature=0, **STREAMED)
    await shipped.post("/pause_generation", {"mode": mode})
    answer = await reweighted(weight_version="v2", flush_cache=flush)
    assert (answer.status, answer.body["success"]) == (200, True)
    await shipped.post("/continue_generation", {})
    body = await task
    assert _versions(body) == ["default", "v2"]
    cut, ids = body["meta_info"]["weight_versions"][0]["end"], body["output_ids"]
    assert 0 < cut < len(ids) == STREAMED["max_new_tokens"]
    old, new = (
        log_softmax(model.logits([*IDS, *ids]))[len(IDS) - 1 : -1] for model in (shipped_reference(), other_reference)
    )
    positions = np.arange(len(ids))
    # the place of the cut is random, and two tokens after it may be equally likely
    assert old[positions, ids][:cut] == pytest.approx(old.max(axis=-1)[:cut], abs=1e-3)
    if mode == "retract":  # in place, the new weights read keys and values of the old ones
        assert new[positions, ids][cut:] == pytest.approx(new.max(axis=-1)[cut:], abs=1e-3)
        reported = [entry[0] for entry in body["meta_info"]["output_token_logprobs"]]
        assert reported[cut:] == pytest.approx(new[range(cut, len(ids)), ids[cut:]], abs=1e-3)


async def test_update_weights_abort_reports_old_version(shipped, reweighted):
    async with in_flight(shipped, "running", **shipped.long) as [task]:
        await wait_for_load(shipped, 1)
        await shipped.post("/pause_generation", {})
        waiting = await queued_request(shipped, "waiting", **TWO)
        assert (await reweighted(weight_version="v2")).status == 200
        await shipped.post("/continue_generation", {})
        aborted, fresh = await task, (await waiting).body
    assert (_versions(aborted), _versions(fresh)) == (["default"], ["v2"])
    assert fresh["meta_info"]["cached_tokens"] == 0


async def test_update_weights_during_freeze_fails_to_flush(shipped, reweighted):
    task = await start_stream(shipped, **STREAMED)
    await shipped.post("/pause_generation", {"mode": "in_place"})
    answer = await reweighted(weight_version="v2")
    assert (answer.status, answer.body["success"], answer.body["message"]) == (400, False, NOT_FLUSHED)
    info = (await shipped.get("/model_info")).body
    assert (info["weight_version"], info["model_path"]) == ("default", str(SHIPPED_MODEL_DIR))
    await shipped.post("/continue_generation", {})
    assert _versions(await task) == ["default", "v2"]


async def test_update_weight_version_keeps_weights(engine):
    version = (await engine.get("/model_info")).body["weight_version"]
    running = await start_stream(engine, **STREAMED)
    answer = await engine.post("/update_weight_version", {"new_version": "v2", "abort_all_requests": False})
    assert answer.body == {"success": True, "message": "Weight version updated to v2", "new_version": "v2"}
    assert _versions(await running) == [version, "v2"]
    assert (await engine.get("/model_info")).body["weight_version"] == "v2"
    await engine.until_idle()
    async with in_flight(engine, "r1", **engine.long) as [task]:
        await wait_for_load(engine, 1)
        await engine.post("/update_weight_version", {"new_version": version})
        assert (await task)["meta_info"]["finish_reason"] == ABORTED
