"""Reports of a server: health, model, limits and load."""

import pytest
from engine_api import Answer

from strands_rollout.engine import SHIPPED_MODEL_DIR


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/ping"])
async def test_health_is_an_empty_200(engine, path):
    assert await engine.get(path) == Answer(200, "")


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_has_path_and_weight_version(shipped, path):
    info = (await shipped.get(path)).body
    assert (info["is_generation"], info["has_image_understanding"]) == (True, False)
    assert (info["model_type"], info["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert info["model_path"] == info["tokenizer_path"] == info["served_model_name"]
    assert (info["model_path"], info["weight_version"]) == (str(SHIPPED_MODEL_DIR), "default")


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_limits(engine, path):
    info = (await engine.get(path)).body
    assert info["max_req_input_len"] == engine.facts.context_length - 6
    assert info["max_total_num_tokens"] >= engine.facts.context_length
    assert {"model_path", "tokenizer_path", "served_model_name", "dtype", "device", "random_seed"} <= set(info)


async def test_v1_models_lists_context_length(engine):
    body = (await engine.get("/v1/models")).body
    [card] = body["data"]
    assert body["object"] == "list"
    assert set(card) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
    assert card["id"] == card["root"] == (await engine.get("/model_info")).body["served_model_name"]
    assert card["max_model_len"] == engine.facts.context_length
    unknown = await engine.get("/v1/models/other")
    assert unknown.status == 404
    assert unknown.body["error"] == {
        "message": "The model 'other' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_v1_loads_has_an_entry_per_rank(engine):
    await engine.until_idle()
    body = (await engine.get("/v1/loads?include=core")).body
    [load] = body["loads"]
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    assert load["max_running_requests"] >= 1
    # slime reads one of these names as the sum of the two above
    assert not {"num_reqs", "num_total_reqs", "total_reqs"} & (set(load) | set(body))
