"""`WeightSync`, the trainer's link to the engine."""

import pytest
from fake_sglang import FakeSGLang, Reply

pytest.importorskip("torch")

from strands_rollout.errors import EngineError
from strands_rollout.train.trainer import WeightSync

pytestmark = pytest.mark.torch


async def test_abort_all_raises_if_the_engine_refuses() -> None:
    async with FakeSGLang([]) as fake, WeightSync(fake.base_url) as sync:
        await sync.abort_all()
        assert fake.aborts == [{"abort_all": True}]
        fake.outage = Reply.status(400, "no such engine")
        with pytest.raises(EngineError, match="answered /abort_request with 400: 'no such engine'"):
            await sync.abort_all()


async def test_weight_sync_load_shows_why_weights_were_refused(tmp_path) -> None:
    async with FakeSGLang([]) as fake, WeightSync(fake.base_url) as sync:
        fake.outage = Reply.status(400, '{"success": false, "message": "no weights"}')
        with pytest.raises(EngineError, match="did not load the weights from .*: 'no weights'"):
            await sync.load(tmp_path, 1)
