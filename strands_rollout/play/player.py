"""Play samples through `generate` and `reward_func`, called as slime calls them."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
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
"""A function with the signature of slime's `--custom-generate-function-path`."""
Reward: TypeAlias = Callable[..., Awaitable[Any]]
"""A function with the signature of slime's `--custom-rm-path`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A played, perhaps aborted episode, with the violations that an audit found.

    Attributes:
        sample: The main agent's sample.
        contract_violations: Violations of slime's contract in all samples; empty without an audit.
        tito_violations: Violations of token exactness in the main agent's sample; empty without an audit.
        siblings: The other samples of the episode; empty without fan-out.
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
    def reward_details(self) -> Mapping[str, Any]:
        """The reward function's dict, from the sample's reward or its facts; empty if there is none."""
        return reward_details(self.sample)


@dataclass(frozen=True, slots=True)
class Player:
    """Player of samples on an engine, which also grades and checks the samples. Created by `open_player`.

    Attributes:
        args: slime's args, with the address of the engine or of the recorder.
        tokenizer: The served model's tokenizer.
        recorder: The recording proxy; None if requests go to the engine directly.
        audited: See `open_player`, also for `evaluation`, `generate` and `reward`.
    """

    args: SimpleNamespace
    tokenizer: PreTrainedTokenizerBase
    recorder: WireRecorder | None
    audited: bool
    evaluation: bool
    generate: Generate | None = None
    reward: Reward | None = None

    async def play(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Outcome:
        """Play a new sample or resume an aborted one; grade the sample and its siblings, and check them if `audited`.

        An episode that ends aborted is not graded.

        If `generate` and `reward` are this package's own, only CancelledError and FailedGroupsError are raised: the
        sample records other faults.
        """
        sample.session_id = sample.session_id or uuid.uuid4().hex
        returned = await (self.generate or generate)(self.args, sample, sampling_params, evaluation=self.evaluation)
        main, *siblings = returned if isinstance(returned, list) else [returned]
        if main.status is not Sample.Status.ABORTED:
            await self.grade(main, *siblings)
        # pop the exchanges: the recorder would otherwise keep the tokens of the whole run
        exchanges = self.recorder.episodes.pop(str(main.session_id), []) if self.recorder else []
        if not self.audited:
            return Outcome(main, [], [], siblings)
        violations = [
            violation
            for played in (main, *siblings)
            for violation in contract_violations(played, decode=self.decode, reward_key=REWARD_KEY)
        ]
        return Outcome(main, violations, tito_violations(exchanges, main), siblings)

    async def grade(self, sample: Sample, *siblings: Sample) -> None:
        """Grade a sample and its siblings, and set their rewards.

        If there are siblings, all samples are graded in one call, as in slime.
        """
        grade: Reward = self.reward or reward_func
        if not siblings:
            sample.reward = await grade(self.args, sample)
            return
        samples = [sample, *siblings]
        for each, reward in zip(samples, await grade(self.args, samples), strict=True):
            each.reward = reward

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

    slime's args hold only a host and a port. So the recording proxy is used even without an audit if the URL is not
    http, or has a path or a user.

    Args:
        base_url: The engine's URL.
        tokenizer_dir: The folder of the served model's tokenizer.
        settings: The mapping under `strands_rollout:` of a settings file; None for the defaults.
        audited: Check each sample against slime's contract and against the recorded traffic.
        evaluation: Call `generate` with `evaluation=True`.
        max_context_tokens: slime's `eval_max_context_len`; None for the engine's own limit.
        generate: The function that plays episodes; None for `strands_rollout.generate`.
        reward: The function that grades samples; None for `strands_rollout.reward_func`.
        workers: The number of processes that play the episodes. With 0, the setting `episode_workers` applies if this
            process is connected to Ray; otherwise, this process plays the episodes.

    Raises:
        ConfigError: The URL or the tokenizer can't be used.
    """
    url = parse_base_url(base_url)
    is_plain = url.scheme == "http" and url.path == "/" and not url.userinfo
    async with AsyncExitStack() as stack:
        stack.enter_context(local_workers(workers))
        recorder = None if is_plain and not audited else await stack.enter_async_context(record_wire(base_url))
        router_url = url if recorder is None else parse_base_url(recorder.url)
        args = _slime_args(router_url, tokenizer_dir, _with_workers(settings or {}, workers), max_context_tokens)
        args.custom_rm_path = "strands_rollout.reward_func" if reward in (None, reward_func) else None
        stack.callback(end_mcp_connections)  # else an unresponsive MCP server delays Ctrl-C
        yield Player(args, load_tokenizer(str(tokenizer_dir)), recorder, audited, evaluation, generate, reward)


def _with_workers(settings: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    ray = sys.modules.get("ray")
    keeps_settings = not count and ray is not None and ray.is_initialized()
    return settings if keeps_settings else {**settings, "episode_workers": count}


def _slime_args(
    url: httpx.URL, tokenizer_dir: Path, settings: Mapping[str, Any], max_context_tokens: int | None
) -> SimpleNamespace:
    """Return slime's args, as far as this package reads them."""
    host, port = f"[{url.host}]" if ":" in url.host else url.host, url.port or 80
    model_name = settings.get("model_name")
    return SimpleNamespace(
        hf_checkpoint=str(tokenizer_dir),
        sglang_router_ip=host,
        sglang_router_port=port,
        # there is only one engine, which serves the policy whatever model_name is set
        sglang_model_routers={model_name: (host, port)} if model_name else None,
        reward_key=REWARD_KEY,
        eval_reward_key="acc",
        eval_max_context_len=max_context_tokens,
        strands_rollout=settings,
    )
