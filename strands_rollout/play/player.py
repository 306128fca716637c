"""Plays samples through `generate` and `reward_func`, called as slime calls them."""

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
"""Of slime's `--custom-generate-function-path` and `--custom-rm-path`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished episode, and the violations found in it.

    `siblings` are its further samples, where it fanned out; `contract_violations` are of all its samples,
    `tito_violations` of the main agent's.
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
        """What the reward function found; empty where it was not asked, or gave only a number."""
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
        """Fill a new sample and grade it, and its siblings where it fans out; raises nothing but CancelledError."""
        sample.session_id = sample.session_id or uuid.uuid4().hex
        given = await (self.generate or generate)(self.args, sample, sampling_params, evaluation=self.evaluation)
        done, *siblings = given if isinstance(given, list) else [given]
        if done.status is not Sample.Status.ABORTED:
            await self.grade(done, *siblings)
        # taken out: the recorder would keep the tokens of a whole run
        exchanges = self.recorder.episodes.pop(str(done.session_id), []) if self.recorder else []
        if not self.audited:
            return Outcome(done, [], [], siblings)
        broken = [contract_violations(one, decode=self.decode, reward_key=REWARD_KEY) for one in [done, *siblings]]
        return Outcome(done, [*chain.from_iterable(broken)], tito_violations(exchanges, done), siblings)

    async def grade(self, sample: Sample, *siblings: Sample) -> None:
        """Set a sample's reward; with siblings, as slime does, by one call with the list of all."""
        grade: Reward = self.reward or reward_func
        if not siblings:
            sample.reward = await grade(self.args, sample)
            return
        together = [sample, *siblings]
        for one, reward in zip(together, await grade(self.args, together), strict=True):
            one.reward = reward

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
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
    """Play samples on an engine while the block lasts.

    slime's args name a host and a port: any other URL is reached through the recording proxy, as if it were audited.

    Args:
        base_url: The engine's.
        tokenizer_dir: The served model's tokenizer.
        settings: The mapping under `strands_rollout:` of a custom config.
        audited: Check each sample against its contract and against the wire.
        evaluation: Tell `generate` that this is an evaluation.
        max_context_tokens: slime's `eval_max_context_len`; None for the engine's own limit.
        generate: Plays episodes in place of this package's, with slime's signature.
        reward: Grades them, likewise.
        workers: Processes that play the episodes; 0: this one.

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
        stack.callback(end_mcp_connections)  # a server that does not answer would hold up Ctrl-C
        yield Player(args, load_tokenizer(str(tokenizer_dir)), recorder, audited, evaluation, generate, reward)


def _with_workers(settings: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """The settings with so many episode workers; their own hold where this process is connected to a Ray."""
    ray = sys.modules.get("ray")
    has_own = not count and ray is not None and ray.is_initialized()
    return settings if has_own else {**settings, "episode_workers": count}


def _args(
    url: httpx.URL, tokenizer_dir: Path, settings: Mapping[str, Any], max_context_tokens: int | None
) -> SimpleNamespace:
    """The args of slime, as far as this package reads them."""
    host, port = f"[{url.host}]" if ":" in url.host else url.host, url.port or 80
    named = settings.get("model_name")
    return SimpleNamespace(
        hf_checkpoint=str(tokenizer_dir),
        sglang_router_ip=host,
        sglang_router_port=port,
        # the one engine there is serves the policy under any name that the settings give it
        sglang_model_routers={named: (host, port)} if named else None,
        reward_key=REWARD_KEY,
        eval_reward_key="acc",
        eval_max_context_len=max_context_tokens,
        strands_rollout=settings,
    )
