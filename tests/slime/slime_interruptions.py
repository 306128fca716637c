"""slime's rollouts on an interruptible engine, and checks of their samples."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import recorded_tools
from fake_sglang import FakeSGLang, Received, Reply
from fake_sglang_episodes import Episodes
from interruptible_policy import Change, Disturb, InterruptiblePolicy, PolicyRequest, TaskFacts, hold_after, prompt_of
from slime_run import CONTEXT_LENGTH, Rollouts, chat_row, trained_tokens
from slime_stage import arguments_for

from strands_rollout.slime_plugin.sample_contract import contract_violations

REWARD_KEY = "score"
PROGRAM = {"settings": {"agent_program": "recorded_tools.program", "resumable": "replay"}}


@dataclass(frozen=True)
class Scene:
    engine: FakeSGLang
    policy: InterruptiblePolicy
    rollouts: Rollouts
    tokenizer: Any

    @property
    def buffer(self) -> list[list[Any]]:
        """Groups that slime keeps for its next rollout."""
        kept: list[list[Any]] = self.rollouts.manager.data_source.buffer
        return kept

    async def update_weights(self, version: str, *, mode: str = "abort", for_s: float = 0.0) -> None:
        """Update the weights as slime does between or during training steps; the pause lasts at least `for_s`."""
        async with aiohttp.ClientSession() as http:
            for path, body in (
                ("pause_generation", {"mode": mode}),
                ("update_weights_from_tensor", {"weight_version": version}),
                ("continue_generation", {}),
            ):
                if path == "continue_generation":
                    await asyncio.sleep(for_s)
                async with http.post(f"{self.engine.worker_url}/{path}", json=body) as answer:
                    assert answer.status == 200

    def sampled_ids(self, sample: Any) -> list[int]:
        """Return the tokens that the sample reports as sampled."""
        spans = facts_of(sample)["spans"]
        return [token for _turn, start, end, _version in spans for token in sample.tokens[start:end]]

    def planned_ids(self, sample: Any) -> list[int]:
        """Return the ids of all turns that the policy plans for the sample."""
        turns = self.policy.planned_ids(sample.session_id, task_of(sample).partition("/")[0])
        return [token for turn in turns for token in turn]

    def problems(self, samples: Iterable[Any]) -> list[str]:
        """Return messages for faults in finished samples, in aborted ones, and in the engine's requests."""
        found = [*self.engine.violations, *self.engine.episodes.dropped]
        found += [*self.policy.violations, *self.rollouts.invalid]
        found += [f"raised: {error!r}" for error in self.rollouts.raised]
        if "agent_program" not in self.rollouts.args.strands_rollout:  # a program runs its tools again
            found += [f"{call} ended twice" for call in recorded_tools.calls_ended_twice()]
        if self.rollouts.changed_params:
            found.append("the sampling parameters were changed")
        for sample in samples:
            found += contract_violations(sample, decode=self.tokenizer.decode, reward_key=REWARD_KEY)
            if not sample.remove_sample:
                masked = self.rollouts.masked.get(sample.index, 0)
                found += wrong_facts(sample, self.engine.episodes, task_of(sample), masked_below=masked)
        return found


@dataclass(frozen=True)
class ForgetfulRouter:
    """Script for the fake engine: a policy behind a router that drops fields of requests."""

    policy: InterruptiblePolicy
    forgets: Callable[[dict[str, Any]], object]

    def reply(self, received: Received, number: int) -> Reply:
        """Return the policy's reply to the remaining fields of the request."""
        self.forgets(received.body)
        return self.policy.reply(received, number)


class Holds:
    """Script that holds samples of slow tasks in the middle of a turn, and then answers quick tasks.

    Args:
        count: Quick tasks are answered once this many samples are held.
        most: Maximum number of samples to hold, the first ones that reach the turn; None for all.
        quick_s: Minimum delay of a quick task's answer, in seconds, in which slow samples that are not held can finish.
    """

    def __init__(self, count: int = 2, *, most: int | None = None, quick_s: float = 0.0) -> None:
        self._count, self._most, self._quick_s = count, most, quick_s
        self._at: dict[int, int] = {}
        self._held: set[str] = set()
        self._enough_held = asyncio.Event()

    def hold(self, turn: int, tokens: int) -> None:
        """From now on, hold slow samples after `tokens` tokens of turn `turn`."""
        self._at, self._held, self._enough_held = {turn: tokens}, set(), asyncio.Event()

    def __call__(self, asked: PolicyRequest) -> Change | None:
        if asked.name == "quick":
            gate = self._enough_held
            return lambda rest: rest.after(self._quick_s).once_set(gate)
        if asked.turn not in self._at or (len(self._held) == self._most and asked.key not in self._held):
            return None
        self._held.add(asked.key)
        if len(self._held) == self._count:
            self._enough_held.set()
        return hold_after(self._at[asked.turn])


async def train_interrupted(scene: Scene, holds: Holds, cuts: Sequence[tuple[int, int]]) -> list[Any]:
    """Run a partial rollout for each cut, and one that finishes the slow group; return all samples that were trained.

    Each rollout trains a quick group, and aborts the slow one at the turn and number of tokens of its cut. New weights
    follow. Checks that slime trained each token that the engine sampled, in all rollouts together.
    """
    samples, trained = list[Any](), 0
    for number, cut in enumerate([*cuts, None]):
        if cut is None:
            scene.policy.disturb = lambda _asked: None
            scene.rollouts.args.over_sampling_batch_size = 1
        else:
            holds.hold(*cut)
        trained += sum(map(trained_tokens, await scene.rollouts.train(number)))
        samples += scene.rollouts.samples
        assert [one.status.value for group in scene.buffer for one in group] == ["aborted"] * (0 if cut is None else 2)
        await scene.update_weights(str(number + 2))
    assert {one.status.value for one in samples} == {"completed"}
    assert [scene.sampled_ids(one) for one in samples] == [scene.planned_ids(one) for one in samples]
    assert trained == sum(sum(one.loss_mask) for one in samples)
    assert trained == sum(episode.sampled_length for episode in scene.engine.episodes)
    return samples


Begin = Callable[..., Awaitable[Scene]]


async def set_up_scene(
    stack: AsyncExitStack,
    tokenizer: Any,
    folder: Path,
    plans: Mapping[str, Sequence[str]],
    tasks: Sequence[str],
    disturb: Disturb = lambda _asked: None,
    *,
    settings: Mapping[str, Any] | None = None,
    forgets: Callable[[dict[str, Any]], object] = lambda _body: None,
    rows: Sequence[Mapping[str, Any]] = (),
    **slime_arguments: Any,
) -> Scene:
    """Start a fake engine with an interruptible policy, and build slime's rollouts on it; `stack` stops the engine.

    Args:
        stack: Stack that the engine is entered into.
        tokenizer: Tokenizer of the policy.
        folder: Folder for the data set and the dumps.
        plans: The policy's turns by task name.
        tasks: Tasks of the prompts, one prompt each. Ignored if `rows` are given.
        disturb: Function that chooses the engine's fault for a request, or returns None for no fault.
        settings: Settings of this package in addition to the recorded tools.
        forgets: Function that removes fields of a request before it reaches the policy, as a router might.
        rows: The data set's rows.
        **slime_arguments: Arguments of slime that differ from the tests' defaults; `context_length` is the engine's.
    """
    policy = InterruptiblePolicy(tokenizer, plans, disturb)
    engine = await stack.enter_async_context(
        FakeSGLang(
            ForgetfulRouter(policy, forgets),
            context_length=slime_arguments.pop("context_length", CONTEXT_LENGTH),
            vocab_size=len(tokenizer),
            router=True,
            weight_version="1",
        )
    )
    rows = rows or [chat_row(prompt_of(name, number)) for number, name in enumerate(tasks)]
    given = {"strands_rollout": {"tools": list(recorded_tools.PATHS), **(settings or {})}, **slime_arguments}
    args = arguments_for(tokenizer, folder, rows, engine, given)
    return Scene(engine, policy, Rollouts(args), tokenizer)


def facts_of(sample: Any) -> dict[str, Any]:
    facts: dict[str, Any] = sample.metadata["strands_rollout"]
    return facts


def task_of(sample: Any) -> str:
    text = sample.prompt[0]["content"]
    return str(text[2:].partition("]]")[0])


def wrong_facts(sample: Any, episodes: Episodes, task: str, *, masked_below: int = 0) -> list[str]:
    """Return messages for ids, mask, logprobs and versions of a trained sample that differ from the engine's.

    Args:
        sample: The sample; its session id is the key of its episode.
        episodes: Ids that the engine received and sampled.
        task: Name of the task, on which the policy's logprobs depend.
        masked_below: Position below which tokens are masked, since older weights sampled them.
    """
    episode, facts = episodes[sample.session_id], sample.metadata["strands_rollout"]
    if sample.tokens != episode.sequence:
        return [
            f"sample {sample.index}: its {len(sample.tokens)} tokens differ from the engine's {len(episode.sequence)}"
        ]
    start = len(sample.tokens) - sample.response_length
    if start != len(episode.first):
        return [f"sample {sample.index}: its prompt has {start} tokens; the first request had {len(episode.first)}"]
    mask = [int(v is not None and start + n >= masked_below) for n, v in enumerate(episode.versions[start:])]
    expected_facts = TaskFacts(task)
    logprobs = [expected_facts.logprob(n, str(episode.versions[n])) if m else 0.0 for n, m in enumerate(mask, start)]
    trained = [value if m else 0.0 for value, m in zip(sample.rollout_log_probs, mask, strict=True)]
    found = [
        f"sample {sample.index}: {name} differs from position {_difference(got, expected)} of the response"
        for name, got, expected in (("loss_mask", sample.loss_mask, mask), ("rollout_log_probs", trained, logprobs))
        if got != expected
    ]
    versions: list[str | None] = [None] * len(sample.tokens)
    for _turn, first, end, version in facts.get("spans", []):
        versions[first:end] = [version] * (end - first)
    if versions != episode.versions:
        found.append(f"sample {sample.index}: spans differ from position {_difference(versions, episode.versions)}")
    if facts.get("weight_versions") != [*dict.fromkeys(v for v in episode.versions if v is not None)]:
        found.append(f"sample {sample.index}: weight_versions is {facts.get('weight_versions')}")
    if episode.restarts:
        found.append(f"sample {sample.index}: it began again {episode.restarts} times after tokens had been sampled")
    return found


def _difference(got: Sequence[Any], expected: Sequence[Any]) -> int:
    pairs = zip(got, expected, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
