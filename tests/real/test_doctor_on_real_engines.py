"""`doctor` on the real SGLang, directly and behind the real routers."""

import asyncio
import json
from pathlib import Path

import pytest
from gateway_stage import gateway_before
from real_server import version_of

from strands_rollout.diagnostics import DoctorOptions, Finding
from strands_rollout.diagnostics.doctor import check_server
from strands_rollout.engine import SHIPPED_MODEL_DIR

pytestmark = pytest.mark.real
CONTEXT = json.loads((SHIPPED_MODEL_DIR / "config.json").read_text())["max_position_embeddings"]


async def look(url: str, max_context_length: int = CONTEXT, tokenizer: Path = SHIPPED_MODEL_DIR) -> list[Finding]:
    asked = DoctorOptions({}, Path(), tokenizer=tokenizer, max_context_length=max_context_length)
    return await asyncio.to_thread(check_server, url, asked)


async def test_doctor_reports_version_context_and_tokens(sglang: str) -> None:
    server, context, tokens = await look(sglang)
    assert [finding.status for finding in (server, context, tokens)] == ["ok"] * 3
    assert f"SGLang {version_of(sglang)}" in server.found
    assert f"{CONTEXT} tokens" in context.found


async def test_doctor_finds_wrong_tokenizer(sglang: str, tmp_path: Path) -> None:
    description = json.loads((SHIPPED_MODEL_DIR / "tokenizer.json").read_text())
    description["model"]["vocab"] = {
        token: index for index, token in enumerate(reversed(description["model"]["vocab"]))
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert (await look(sglang, tokenizer=tmp_path))[-1].status == "error"


async def test_doctor_checks_worker_behind_router(router: str, sglang: str) -> None:
    async with gateway_before(sglang, router=router) as gateway:
        found = await look(gateway.base_url)
    assert [finding.status for finding in found] == ["ok"] * 4
    assert "1 of 1 workers" in found[0].found
