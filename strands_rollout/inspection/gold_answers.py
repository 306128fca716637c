r"""Gold answers: is a row's own label, said as the policy would say it, right by the reward?

A label is said as `\boxed{label}` and in a line `Answer: label`; both must be right, and of several alternatives each.
Knows labels and a reward; nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strands_rollout.inspection.reward_call import RewardCall
from strands_rollout.sample_type import Sample

SAYINGS: Final = ("\\boxed{{label}}", "Answer: {label}")
"""How a gold answer is said; `{label}` stands for it."""
PLACE: Final = "{label}"
_RIGHT: Final = 1.0


@dataclass(frozen=True, slots=True)
class GoldAnswer:
    """One problem with what answers it.

    Attributes:
        prompt: As its row has it.
        label: What the reward is given.
        texts: The answers, each of which must be right.
        metadata: The row's, which a reward may read.
    """

    prompt: Any
    label: Any
    texts: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


async def gold_refusals(golds: Sequence[GoldAnswer], reward: RewardCall, sayings: Sequence[str] = SAYINGS) -> list[str]:
    """For each gold answer why the reward would not give the point for it; "" where it does.

    Args:
        golds: Any number; all are asked at once.
        reward: A number of 1 or more is right.
        sayings: How an answer is said, `{label}` standing for it.
    """
    said = [
        (number, saying.replace(PLACE, text))
        for number, gold in enumerate(golds)
        for text in gold.texts
        for saying in sayings
    ]
    samples = [
        Sample(
            prompt=golds[at].prompt,
            label=golds[at].label,
            response=words,
            metadata=dict(golds[at].metadata),
            status=Sample.Status.COMPLETED,
        )
        for at, words in said
    ]
    reasons = ["" if gold.texts else f"no answer equals the label {gold.label!r:.80}" for gold in golds]
    for (at, words), answer in zip(said, await reward.rewards(samples), strict=True):
        reasons[at] = reasons[at] or _refusal(reward, answer, words)
    return reasons


def _refusal(reward: RewardCall, answer: Any, words: str) -> str:  # noqa: ANN401
    if isinstance(answer, Exception):
        return f"the reward raises {type(answer).__name__}: {answer} for {words!r:.200}"
    number = reward.number(answer)
    if number is not None and number >= _RIGHT:
        return ""
    if reward.is_own and isinstance(answer, Mapping):
        fault = f"; {answer['error']}" if answer["error"] else ""
        return (
            f"the reward reads {answer['pred']!r} in its own gold answer and finds it wrong ({answer['method']}){fault}"
        )
    return f"the reward gives {answer!r:.200} for {words!r:.200}; expected {_RIGHT:g} or more"
