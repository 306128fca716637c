"""Limits of tokens, turns and tools on the real SGLang, and the prefix cache between turns.

All episodes are greedy, so the turns are known: the policy solves each problem with one call, and row 18 with a second
call if the first one failed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from episode_stage import GREEDY, EpisodeStage, episodes_on, facts_of, new_samples

from strands_rollout import Sample

pytestmark = pytest.mark.real

CONTEXT_LENGTH = 2048
# SGLang samples no further, whatever max_new_tokens is (scheduler.py, max_req_len)
FULL = CONTEXT_LENGTH - 2
# maximum length of a prompt (tp_worker.py, max_req_input_len)
LONGEST_PROMPT = CONTEXT_LENGTH - 7
CALLS_AGAIN = 18
NEVER_ENDING = {**GREEDY, "max_new_tokens": 5000, "ignore_eos": True}
# endpoints that report the context length
_TELLING = ("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/models")


def ended(sample: Sample) -> tuple[str, str, int]:
    facts = facts_of(sample)
    return sample.status.value, facts["stop_reason"], facts["turns"]


async def test_generate_turns_reuse_prefix_cache(stage: EpisodeStage) -> None:
    await stage.until_done("/flush_cache")
    sample = await stage.play_one(row=CALLS_AGAIN, tools=["stage_tools.failing_at_first"])
    assert ended(sample) == ("completed", "completed", 3)
    assert isinstance(sample.reward, dict)
    assert sample.reward["acc"] == 1.0
    facts = facts_of(sample)
    assert (facts["tool_calls"], facts["tool_errors"], facts["weight_versions"]) == (2, 1, ["default"])
    requests = [len(exchange.input_ids) for exchange in stage.recorder.episodes[str(sample.session_id)]]
    cache = sample.prefix_cache_info
    assert cache.total_prompt_tokens == sum(requests)
    # the first turn finds an empty cache; each later turn finds the previous request and answer, except its last token
    ends = [end for _, _, end, _ in facts["spans"]][:-1]
    assert cache.cached_tokens == sum(end - 1 for end in ends)


async def test_episode_timeout_s_ends_turn_and_request(stage: EpisodeStage) -> None:
    sample = await stage.play_one(NEVER_ENDING, episode_timeout_s=3.0)
    assert sample.status is Sample.Status.TRUNCATED
    assert facts_of(sample)["stop_reason"] == "episode_timeout"
    assert await stage.most_tokens_until_idle() < FULL - 200  # it would have continued to FULL
    assert len(stage.recorder.episodes[str(sample.session_id)]) == 1


async def test_generate_stops_at_engine_context(stage: EpisodeStage) -> None:
    (sample,) = await stage.play([asking(CONTEXT_LENGTH - 400)], NEVER_ENDING)
    assert ended(sample) == ("truncated", "context_length", 1)
    assert len(sample.tokens) == FULL


async def test_generate_longest_prompt_and_prompt_too_long(stage: EpisodeStage) -> None:
    (measured,) = await stage.play([asking(1)], {**GREEDY, "max_new_tokens": 1})
    template = len(measured.tokens) - 2
    lengths = [LONGEST_PROMPT, *range(LONGEST_PROMPT + 1, CONTEXT_LENGTH + 2)]
    fits, *too_long = await stage.play([asking(length - template) for length in lengths], NEVER_ENDING)
    assert ended(fits) == ("truncated", "context_length", 1)
    assert len(fits.tokens) - fits.response_length == LONGEST_PROMPT
    assert len(fits.tokens) == FULL
    for sample in too_long:
        assert ended(sample) == ("truncated", "prompt_too_long", 0)
        assert sample.remove_sample
    # a prompt that exceeds the context is not sent
    assert stage.recorder.episodes.keys() >= {str(fits.session_id)}
    assert not stage.recorder.episodes.keys() & {str(sample.session_id) for sample in too_long[-2:]}


async def test_generate_learns_context_length_from_refusal(sglang, shipped_tokenizer):
    async with silent_about_its_context(sglang) as url, episodes_on(url, shipped_tokenizer) as stage:
        fits, too_long = await stage.play([asking(CONTEXT_LENGTH - less) for less in (400, 0)], NEVER_ENDING)
    assert ended(fits) == ("truncated", "context_length", 1)
    assert len(fits.tokens) == FULL
    assert len(stage.recorder.episodes[str(fits.session_id)]) == 2
    assert ended(too_long) == ("truncated", "prompt_too_long", 0)
    assert len(stage.recorder.episodes[str(too_long.session_id)]) == 1


def asking(tokens: int) -> Sample:
    """Return a question of `tokens` tokens, to which the chat template adds more."""
    (sample,) = new_samples(1)
    sample.prompt = "a" + " a" * (tokens - 1)
    return sample


@asynccontextmanager
async def silent_about_its_context(engine_url: str) -> AsyncIterator[str]:
    """Run a proxy that hides the info endpoints of the engine, like a router."""

    async def forward(request: web.Request) -> web.Response:
        if request.path in _TELLING:
            return web.Response(status=404)
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{engine_url}{request.path}", data=await request.read(), headers={"Content-Type": "application/json"}
            ) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("params", [{"stop": ["sides"]}, {"stop_regex": ["s[a-z]des"]}])
async def test_generate_stop_string_ends_turn(stage: EpisodeStage, params: dict[str, Any]) -> None:
    sample = await stage.play_one({**GREEDY, **params})
    assert ended(sample) == ("completed", "completed", 1)
    assert sample.response.endswith(" of the sides")


async def test_generate_stop_token_ends_turn(stage: EpisodeStage) -> None:
    whole = await stage.play_one()
    prompt = len(whole.tokens) - whole.response_length
    stop = whole.tokens[prompt + 5]
    sample = await stage.play_one({**GREEDY, "stop_token_ids": [stop]})
    first = whole.tokens.index(stop, prompt)
    assert ended(sample) == ("completed", "completed", 1)
    assert sample.tokens == whole.tokens[: first + 1]


async def test_generate_unknown_sampling_parameter_fails_sample(stage) -> None:
    sample = await stage.play_one({**GREEDY, "nonsense": 1})
    assert ended(sample) == ("failed", "engine_error", 0)
    assert "unknown field `nonsense`" in facts_of(sample)["error"]
    assert sample.remove_sample


async def test_generate_logit_bias_reaches_sampler(stage: EpisodeStage) -> None:
    token = stage.tokenizer.encode(" No", add_special_tokens=False)[0]
    sample = await stage.play_one({**GREEDY, "max_new_tokens": 8, "logit_bias": {str(token): 1000.0}})
    assert sample.tokens[-8:] == [token] * 8
