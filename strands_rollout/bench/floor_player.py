"""The floor: the same requests with no agent, and the answers read into one episode's lists.

The least that a client does which sends whole requests: ids are concatenated and encoded again each turn. It knows what
tools would have answered, so it renders, parses and calls nothing.
"""

from __future__ import annotations

import uuid

import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.bench.player import Played, Stage, WrongEpisodeError, sampling_params


class FloorPlayer:
    """Plays on one client of the httpx API with the transport of aiohttp."""

    def __init__(self, stage: Stage) -> None:
        limits = httpx.Limits(max_connections=1024, max_keepalive_connections=1024)
        self._http = httpx.AsyncClient(
            base_url=stage.url, transport=AiohttpTransport(limits=limits), timeout=httpx.Timeout(None), trust_env=False
        )
        self._params = sampling_params()

    async def play(self, script: AnswerScript) -> Played:
        """Play one episode."""
        tokens = list(script.prompt_ids)
        loss_mask: list[int] = []
        logprobs: list[float] = []
        headers = {"content-type": "application/json", "x-smg-routing-key": uuid.uuid4().hex}
        for turn in script.turns:
            request = {
                "input_ids": tokens,
                "sampling_params": self._params,
                "return_logprob": True,
                "rid": uuid.uuid4().hex,
            }
            response = await self._http.post("/generate", content=orjson.dumps(request), headers=headers)
            if response.status_code != 200:
                raise WrongEpisodeError(f"got HTTP {response.status_code}: {response.text:.300}")
            answer = orjson.loads(response.content)
            sampled = answer["output_ids"]
            tokens += sampled
            tokens += turn.context_ids
            loss_mask += [1] * len(sampled) + [0] * len(turn.context_ids)
            logprobs += [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            logprobs += [0.0] * len(turn.context_ids)
        return Played(tokens, loss_mask, logprobs, (tokens, loss_mask, logprobs))

    async def close(self) -> None:
        """Release connections."""
        await self._http.aclose()
