"""What a rollout asks of `generate` and gets from it: a record of every call, and what is wrong with what came back.

Knows samples by slime's contract, and the truth of the fake engine; nothing of how either came about.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_sglang_episodes import Episodes
from interruptible_policy import TaskFacts

from strands_rollout import generate, reward_func
from strands_rollout.slime_plugin.sample_contract import contract_violations

REWARD_KEY = "score"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `generate` that returned, and the sample's status at that time.

    Attributes:
        phase: Where an ABORTED sample was cut: "fresh" if nothing of it is kept, else "turn", "calls" (some of them
            ended), "tools" (none did), or "between".
        after_flag_s: From the abort flag, or its own begin if that was later, to its return; None without a flag.
    """

    sample: Any
    status: str
    phase: str
    after_flag_s: float | None


@dataclass
class RolloutRecord:
    """Wraps `generate` and the reward function."""

    decode: Callable[[Sequence[int]], str]
    calls: list[Call] = field(default_factory=list)
    raised: list[BaseException] = field(default_factory=list)  # whatever came out of them
    violations: list[str] = field(default_factory=list)  # of slime's contract, in words
    flag_at_s: float | None = None  # when the abort flag was raised; None while it is down
    # by sample's index, tokens that the rollout masked as older weights' before its last call
    masked: dict[int, int] = field(default_factory=dict)

    async def generate(self, args: Any, sample: Any, params: Mapping[str, Any]) -> Any:
        """As `generate`; what it raises is recorded and makes the sample FAILED."""
        started_s = time.monotonic()
        before = dict(params)
        try:
            result = await generate(args, sample, params)
        except BaseException as e:
            self.raised.append(e)
            raise
        after_s = None if self.flag_at_s is None else time.monotonic() - max(self.flag_at_s, started_s)
        status = str(result.status.value)
        self.calls.append(Call(result, status, _phase(result), after_s))
        if dict(params) != before or result is not sample:
            self.violations.append(f"sample {sample.index}: another sample came back, or the parameters were changed")
        if status == "aborted":
            self._check(result, may_abort=True)
        return result

    async def reward(self, args: Any, sample: Any) -> None:
        """As slime: the reward of a sample that has none, and then the sample must be valid."""
        try:
            sample.reward = await reward_func(args, sample)
        except BaseException as e:
            self.raised.append(e)
            raise
        self._check(sample, may_abort=False)

    def aborts_of(self, index: int) -> int:
        """How often a sample came back ABORTED."""
        return sum(call.sample.index == index for call in self.calls if call.status == "aborted")

    def returned(self, status: str) -> list[Any]:
        """Samples that came back with this status at some time."""
        return [call.sample for call in self.calls if call.status == status]

    @property
    def abort_latencies_s(self) -> list[float]:
        """From the flag to the return of `generate`, of all calls that were running or made then."""
        return [call.after_flag_s for call in self.calls if call.after_flag_s is not None]

    def phases(self) -> dict[str, int]:
        """How many ABORTED samples were cut where."""
        return dict(Counter(call.phase for call in self.calls if call.status == "aborted"))

    def _check(self, sample: Any, *, may_abort: bool) -> None:
        found = contract_violations(sample, decode=self.decode, reward_key=REWARD_KEY, may_abort=may_abort)
        self.violations += [f"sample {sample.index} ({sample.prompt:.20}): {words}" for words in found]


def _phase(sample: Any) -> str:
    state = sample.metadata["strands_rollout"].get("resume")
    if state is None:
        return "fresh"
    if state["turns"][-1]["parts"][-1]["finish_reason"] == "abort":
        return "turn"
    if any("toolUse" in block for block in state["messages"][-1]["content"]):
        return "calls" if state["finished"] else "tools"
    return "between"


def untruths(sample: Any, episodes: Episodes, task: str, *, masked_below: int = 0) -> list[str]:
    """What a trained sample says of its tokens, and the engine does not: ids, mask, logprobs, versions.

    Args:
        sample: Its session id is the key of its episode.
        episodes: What the engine received and sampled.
        task: Whose facts the logprobs follow.
        masked_below: Tokens before this one were sampled by older weights and masked for that.
    """
    episode, facts = episodes[sample.session_id], sample.metadata["strands_rollout"]
    if sample.tokens != episode.sequence:
        return [
            f"sample {sample.index}: got {len(sample.tokens)} tokens; the engine saw {len(episode.sequence)} others"
        ]
    start = len(sample.tokens) - sample.response_length
    if start != len(episode.first):
        return [f"sample {sample.index}: its prompt has {start} tokens; the first request had {len(episode.first)}"]
    mask = [int(v is not None and start + n >= masked_below) for n, v in enumerate(episode.versions[start:])]
    law = TaskFacts(task)
    logprobs = [law.logprob(n, str(episode.versions[n])) if m else 0.0 for n, m in enumerate(mask, start)]
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
