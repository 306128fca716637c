"""This package, called as slime calls it: `strands_rollout.generate` on samples."""

from __future__ import annotations

from types import SimpleNamespace

from strands_rollout import Sample, generate
from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.bench.null_tool import NULL_TOOL_PATH, learn_results
from strands_rollout.bench.player import Played, Stage, WrongEpisodeError, sampling_params


class OursPlayer:
    """Plays through `generate`, with no limit that a script would meet."""

    def __init__(self, stage: Stage) -> None:
        learn_results(stage.scripts)
        tools = {} if stage.runs_code else {"tools": [NULL_TOOL_PATH]}
        self._params = sampling_params()
        self._args = SimpleNamespace(
            hf_checkpoint=str(stage.tokenizer_dir),
            sglang_router_ip="127.0.0.1",
            sglang_router_port=stage.port,
            strands_rollout={"max_tool_iterations": None, "freeze_gc": stage.may_freeze, **tools},
        )

    async def play(self, script: AnswerScript) -> Played:
        """Play one episode."""
        sample = Sample(prompt=[{"role": "user", "content": script.question}], label="144")
        sample = await generate(self._args, sample, self._params)
        if sample.status is not Sample.Status.COMPLETED:
            raise WrongEpisodeError(f"the sample is {sample.status.name}: {sample.metadata}")
        return Played(sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample)

    async def close(self) -> None:
        """The shared client is closed with its loop."""
