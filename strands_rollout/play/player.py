"""Plays samples through `generate` and `reward_func`, and calls them as slime does."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from strands_rollout.agent.tool_loading import end_mcp_connections
from strands_rollout.client.transport import parse_base_url
from strands_rollout.play.audit import WireRecorder, record_wire, tito_violations
from strands_rollout.samples import EpisodeFacts, Sample, facts_of, reward_details
from strands_rollout.settings import REWARD_KEY
from strands_rollout.slime_plugin.generate import generate
from strands_rollout.slime_plugin.reward import reward_func
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.slime_plugin.workers import local_workers

if TYPE_CHECKING:
    import httpx
    from transformers import PreTrainedTokenizerBase

Generate: TypeAlias = Callable[..., Awaitable[Any]]
Reward: TypeAlias = Callable[..., Awaitable[Any]]
"""The signatures of slime's `--custom-generate-function-path` and `--custom-rm-path`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished episode, with its violations.

    Attributes:
        sample: The main agent's sample.
        contract_violations: Violations of slime's contract in all samples.
        tito_violations: Violations of token exactness in the main agent's sample.
        siblings: Further samples of a fan-out.
    """

    sample: Sample
    contract_violations: list[str]
    tito_violations: list[str]
    siblings: Sequence[Sample] = ()

    @property
    def facts(self) -> EpisodeFacts:
        """The episode's facts, from the sample's metadata."""
        return facts_of(self.sample)

    @property
    def graded(self) -> Mapping[str, Any]:
        """The reward function's dict; empty if the sample was not graded, or the reward is a number."""
        return reward_details(self.sample)


@dataclass(frozen=True, slots=True)
class Player:
    """Plays one sample after another on an engine; see `open_player`, whose arguments it keeps."""

    args: SimpleNamespace
    tokenizer: PreTrainedTokenizerBase
    recorder: WireRecorder | None
    audited: bool
    evaluation: bool
    generate: Generate | None = None
    reward: Reward | None = None

    async def play(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Outcome:
        """Play and grade a new sample, with its siblings if it fans out; raise nothing but CancelledError."""
        sample.session_id = sample.session_id or uuid.uuid4().hex
        given = await (self.generate or generate)(self.args, sample, sampling_params, evaluation=self.evaluation)
        done, *siblings = given if isinstance(given, list) else [given]
        if done.status is not Sample.Status.ABORTED:
            await self.grade(done, *siblings)
        # pop, because the recorder would otherwise keep the tokens of a whole run
        exchanges = self.recorder.episodes.pop(str(done.session_id), []) if self.recorder else []
        if not self.audited:
            return Outcome(done, [], [], siblings)
        broken = [contract_violations(one, decode=self.decode, reward_key=REWARD_KEY) for one in [done, *siblings]]
        return Outcome(done, [*chain.from_iterable(broken)], tito_violations(exchanges, done), siblings)

    async def grade(self, sample: Sample, *siblings: Sample) -> None:
        """Set a sample's reward. With siblings, call the reward function once with the whole list, as slime does."""
        grade: Reward = self.reward or reward_func
        if not siblings:
            sample.reward = await grade(self.args, sample)
            return
        together = [sample, *siblings]
        for one, reward in zip(together, await grade(self.args, together), strict=True):
            one.reward = reward

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including control tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


@asynccontextmanager
async def open_player(
    base_url: str,
    tokenizer_dir: Path,
    settings: Mapping[str, Any] | None,
    *,
    audited: bool,
    evaluation: bool = False,
    max_context_tokens: int | None = None,
    generate: Generate | None = None,
    reward: Reward | None = None,
    workers: int = 0,
) -> AsyncIterator[Player]:
    """Yield a player on an engine until the block ends.

    slime's args hold a host and a port. Any other URL is reached through the recording proxy, even without an audit.

    Args:
        base_url: The engine's URL.
        tokenizer_dir: Folder of the served model's tokenizer.
        settings: The mapping under `strands_rollout:` of a custom config.
        audited: Check each sample against slime's contract and against the recorded traffic.
        evaluation: Call `generate` with `evaluation=True`.
        max_context_tokens: slime's `eval_max_context_len`; None for the engine's own limit.
        generate: Function with slime's signature that plays episodes; None for `strands_rollout.generate`.
        reward: Function with slime's signature that grades samples; None for `strands_rollout.reward_func`.
        workers: Number of processes that play the episodes; 0 plays them in this process.

    Raises:
        ConfigError: The URL or the tokenizer can't be used.
    """
    url = parse_base_url(base_url)
    is_plain = url.scheme == "http" and url.path == "/" and not url.userinfo
    async with AsyncExitStack() as stack:
        stack.enter_context(local_workers(workers))
        recorder = None if is_plain and not audited else await stack.enter_async_context(record_wire(base_url))
        reached = url if recorder is None else parse_base_url(recorder.url)
        args = _args(reached, tokenizer_dir, _with_workers(settings or {}, workers), max_context_tokens)
        args.custom_rm_path = "strands_rollout.reward_func" if reward in (None, reward_func) else None
        stack.callback(end_mcp_connections)  # a server that does not answer would delay Ctrl-C
        yield Player(args, load_tokenizer(str(tokenizer_dir)), recorder, audited, evaluation, generate, reward)


def _with_workers(settings: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """Set the number of episode workers, unless it is 0 and this process is connected to Ray."""
    ray = sys.modules.get("ray")
    has_own = not count and ray is not None and ray.is_initialized()
    return settings if has_own else {**settings, "episode_workers": count}


def _args(
    url: httpx.URL, tokenizer_dir: Path, settings: Mapping[str, Any], max_context_tokens: int | None
) -> SimpleNamespace:
    """Return slime's args, as far as this package reads them."""
    host, port = f"[{url.host}]" if ":" in url.host else url.host, url.port or 80
    named = settings.get("model_name")
    return SimpleNamespace(
        hf_checkpoint=str(tokenizer_dir),
        sglang_router_ip=host,
        sglang_router_port=port,
        # the single engine serves the policy under any name that the settings have
        sglang_model_routers={named: (host, port)} if named else None,
        reward_key=REWARD_KEY,
        eval_reward_key="acc",
        eval_max_context_len=max_context_tokens,
        strands_rollout=settings,
    )
