"""strands-sglang as slime's example uses it: one client for all episodes, a model, a limiter and an agent for each.

Written from its public API (strands-sglang 0.4.3).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from strands import Agent
from strands_sglang import LoopLimiter, SGLangModel, get_client_from_slime_args
from strands_sglang.tool_parsers import HermesToolParser

from strands_rollout import Sample
from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.bench.null_tool import answer_from_script, learn_results
from strands_rollout.bench.player import Played, Stage, sampling_params
from strands_rollout.prompts import SYSTEM_PROMPT
from strands_rollout.slime_seam import load_tokenizer


class StrandsSGLangPlayer:
    """Plays with an agent per episode."""

    def __init__(self, stage: Stage) -> None:
        learn_results(stage.scripts)
        self._tokenizer = load_tokenizer(str(stage.tokenizer_dir))
        self._params = sampling_params()
        self._args = SimpleNamespace(
            sglang_router_ip="127.0.0.1",
            sglang_router_port=stage.port,
            sglang_server_concurrency=1024,
            rollout_num_gpus=1,
            rollout_num_gpus_per_engine=1,
        )

    async def play(self, script: AnswerScript) -> Played:
        """Play one episode."""
        client = get_client_from_slime_args(self._args, timeout=300.0)
        model = SGLangModel(
            tokenizer=self._tokenizer, client=client, tool_parser=HermesToolParser(), sampling_params=self._params
        )
        agent = Agent(
            model=model,
            tools=[answer_from_script],
            hooks=[LoopLimiter(max_tool_iters=script.tool_turns + 1)],
            callback_handler=None,
            system_prompt=SYSTEM_PROMPT,
        )
        await agent.invoke_async(script.question)
        sample = self._sample(model)
        model.reset()
        agent.cleanup()
        return Played(sample.tokens, sample.loss_mask or [], sample.rollout_log_probs, sample)

    def _sample(self, model: Any) -> Sample:  # noqa: ANN401 - strands_sglang's model
        rollout, start = model.rollout, model.rollout.initial_prompt_length
        sample = Sample(status=Sample.Status.COMPLETED)
        sample.tokens = rollout.token_ids
        sample.loss_mask = rollout.loss_mask[start:]
        sample.rollout_log_probs = rollout.logprobs[start:]
        sample.response_length = len(sample.tokens) - start
        sample.response = self._tokenizer.decode(sample.tokens[start:], skip_special_tokens=False)
        return sample

    async def close(self) -> None:
        """Release connections."""
        await get_client_from_slime_args(self._args, timeout=300.0).close()
