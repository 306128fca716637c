"""A scripted policy that marks each sampled token with a unique logprob; `play_agent` plays a test's agent on it."""

import asyncio
import json
from collections import Counter
from typing import Any

import user_agents
from fake_sglang import FakeSGLang, Reply
from harness import TOOL_CALL, args_for, ids_of

from strands_rollout import Sample, generate
from strands_rollout.slime_plugin.sample_contract import contract_violations


def tool_call(name: str, **arguments: object) -> str:
    return TOOL_CALL.format(name=name, arguments=json.dumps(arguments))


class RecordingPolicy:
    """Script for `FakeSGLang`; the unique logprob of each sampled token identifies it in the samples.

    Attributes:
        sampled: Id and logprob of every sampled token.
        requests: Ids of each request and of its answer.
    """

    def __init__(self, tokenizer: Any, script: Any) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.sampled: list[tuple[int, float]] = []
        self.requests: list[tuple[list[int], list[int]]] = []

    async def __call__(self, body: dict[str, Any], number: int) -> Reply:
        turn = self._script(self._tokenizer.decode(body["input_ids"]), number)
        text, finish = turn if isinstance(turn, tuple) else (turn, "stop")
        ids = ids_of(self._tokenizer, text)
        first = len(self.sampled)
        self.sampled += [(token, -(first + at + 1) / 8192) for at, token in enumerate(ids)]
        self.requests.append((body["input_ids"], ids))
        await asyncio.sleep(0)
        return Reply.tokens(ids, finish, logprobs=[logprob for _, logprob in self.sampled[first:]])

    def check(self, result: Any, masked: int = 0) -> list[Any]:
        """Check that each sampled token is trained at most once, and is in a sample or counted as dropped.

        Of the sampled tokens in the samples, `masked` tokens must not be trained. Return the samples.
        """
        samples = result if isinstance(result, list) else [result]
        trained: list[tuple[int, float]] = []
        for sample in samples:
            response = sample.tokens[len(sample.tokens) - sample.response_length :]
            given = zip(response, sample.rollout_log_probs, sample.loss_mask, strict=True)
            trained += [(token, logprob) for token, logprob, mask in given if mask]
            sample.reward = 1.0
            if sample.status is not Sample.Status.ABORTED:
                assert contract_violations(sample, decode=self._tokenizer.decode) == []
        assert not Counter(trained) - Counter(self.sampled)
        facts = [sample.metadata["strands_rollout"] for sample in samples]
        held = sum(one.get("sampled_tokens", 0) for one in facts)
        known = held + facts[0].get("dropped_sampled_tokens", 0)
        # an abort may cancel a request whose answer this policy has recorded already
        assert known == len(self.sampled) or (samples[0].status is Sample.Status.ABORTED and known < len(self.sampled))
        if samples[0].status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
            assert len(trained) == held - masked
        return samples


async def play_agent(
    tokenizer: Any,
    factory: Any,
    script: Any,
    context_length: int = 16384,
    max_new_tokens: int = 8192,
    policy: type[RecordingPolicy] = RecordingPolicy,
    **settings: Any,
) -> tuple[Any, RecordingPolicy]:
    """Play an episode of `factory`'s agent on the fake SGLang; return the result of `generate`, and the policy."""
    user_agents.factories_of_the_test[:] = [factory]
    answering = policy(tokenizer, script)
    async with FakeSGLang(answering, context_length=context_length) as fake:
        ours = {"agent_factory": "user_agents.build_for_test", "tools": [], "fan_out": True, **settings}
        args = args_for(fake.base_url, tokenizer, strands_rollout=ours)
        sample = Sample(prompt="What is 17 * 2?", label="34", index=0, group_index=0)
        result = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": max_new_tokens})
    return result, answering
