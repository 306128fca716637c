"""Growing prompts: each id is encoded once, and the request equals a fresh encoding of the whole prompt."""

from typing import Any

import orjson
import pytest
from fake_sglang import FakeSGLang, Reply
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strands_rollout.client.client import SGLangClient
from strands_rollout.client.generate_api import EncodedIds, EncodedPrompt
from strands_rollout.errors import TrajectoryError
from strands_rollout.model.sampling import SamplingRequest, SGLangModelConfig, TokenLimits, TurnSampler
from strands_rollout.record.tokens import Trajectory

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # passes on a busy machine
CONFIG: SGLangModelConfig = {
    "model_id": None,
    "sampling_params": {"temperature": 1.0, "max_new_tokens": 8},
    "limits": TokenLimits(),
    "return_logprobs": True,
    "context_window_limit": None,
    "headers": {},
    "extra": {},
    "continue_aborted": True,
    "on_rewritten_history": "error",
}
IDS = st.lists(st.integers(0, 200_000), max_size=6)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    extend = EncodedIds.extend

    def counting(self: EncodedIds, ids: Any) -> EncodedIds:
        extend(self, ids)
        seen.extend(ids)
        return self

    monkeypatch.setattr(EncodedIds, "extend", counting)
    return seen


async def take_turn(sampler: TurnSampler, client: SGLangClient, trajectory: Trajectory, context: list[int]) -> None:
    turn = len(trajectory.turns)
    await sampler.sample(SamplingRequest(client, CONFIG, trajectory, context), turn=turn)


@UNHURRIED
@given(
    st.lists(st.tuples(IDS, IDS, st.sampled_from(["answered", "lost", "lost and asked again", "other"])), max_size=8)
)
def test_encoded_prompt_equals_whole_encoding(turns) -> None:
    token_ids: list[int] = []
    prompt = EncodedPrompt(token_ids, vocab_size=200_001)
    for context, sampled, fate in turns:
        for _ in range(2 if fate == "lost and asked again" else 1):
            assert prompt.with_context(context).to_json() == orjson.dumps([*token_ids, *context])
        if fate == "answered":
            token_ids += [*context, *sampled]
        elif fate == "other":  # ids that were never sent
            token_ids += sampled
    assert prompt.with_context([]).to_json() == orjson.dumps(token_ids)


def test_encoded_prompt_is_unchanged_by_invalid_id() -> None:
    token_ids = [1]
    prompt = EncodedPrompt(token_ids, vocab_size=10)
    prompt.with_context([2])
    token_ids += [2, 3]
    with pytest.raises(TrajectoryError, match=r"input id 10 \(int\) at position 4"):
        prompt.with_context([4, 10])
    with pytest.raises(TrajectoryError, match=r"input id 5.0 \(float\) at position 3"):
        prompt.with_context([5.0])  # type: ignore[list-item]
    assert prompt.with_context([4, 5]).to_json() == b"[1,2,3,4,5]"


async def test_episode_encodes_each_id_once(encoded: list[int]) -> None:
    script = [
        Reply.tokens([7, 8]),
        Reply.abort([]),
        Reply.abort([9]),
        Reply.status(503),
        Reply.tokens([10]),
        Reply.tokens([11, 12]),
    ]
    trajectory, sampler = Trajectory(), TurnSampler(100)
    async with (
        FakeSGLang(script, vocab_size=100) as fake,
        SGLangClient(fake.base_url, vocab_size=100, backoff_base_s=0) as client,
    ):
        for context in ([1, 2, 3], [4, 5], [6]):
            await take_turn(sampler, client, trajectory, context)
    assert trajectory.token_ids == [1, 2, 3, 7, 8, 4, 5, 9, 10, 6, 11, 12]
    assert encoded == trajectory.token_ids[:-2]  # no request contained the last answer's tokens
    assert [request.input_ids for request in fake.requests] == [
        trajectory.token_ids[:length] for length in (3, 7, 7, 8, 8, 10)
    ]
