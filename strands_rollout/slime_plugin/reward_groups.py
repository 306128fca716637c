"""Rewards by group: normalisation, the dynamic sampling filter, and the end of a run whose groups all fail.

slime takes a failed sample for a finished one: while an engine or a judge is dead it would draw prompts without end
with a dynamic filter, and train on nothing without one. Its synchronous rollout ends when `generate` or the reward
raises, except in a surplus group that it no longer looks at; its fully-async rollout logs the exception and loses the
group. Both end when `log_rollout` or `normalize_rewards` raises.

An episode has failed when it says so, or when its reward does; it has succeeded when its reward is known. Where slime
asks another reward than this package's, that is when the episode has ended.
"""

import logging
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.errors import ConfigError, FailedGroupsError
from strands_rollout.exits import exits_as_errors
from strands_rollout.record.weight_versions import NOT_COMPARABLE, LastWeights, sample_staleness
from strands_rollout.samples import (
    EpisodeFacts,
    SampleLike,
    SlimeArgs,
    add_facts,
    facts_of,
    fan_out_part,
    rollout_id_of,
    statuses_of,
    take_fact,
    usable_number,
)
from strands_rollout.settings import settings_from_args
from strands_rollout.slime_plugin.slime_adapter import is_aborting, is_fully_async, slime_state, uses_reward_func

logger = logging.getLogger(__name__)
_CENTRED: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_SCALED: Final = ("grpo", "gspo", "cispo")
_STD_EPSILON: Final = 1e-6  # slime 0.3's
_LEAST_SPREAD: Final = 1e-6  # of slime 0.3's check_reward_nonzero_std
_FILTER_MODULE: Final = "slime.rollout.filter_hub.base_types"
MAX_FAILED_GROUPS: Final = 16
_MOST_JOBS: Final = 16  # of one process: each has its own args


@dataclass(frozen=True, slots=True)
class Rollout:
    """One draw from a prompt: a sample, or the siblings of a fan-out."""

    group: Hashable  # the `group_index` of its samples
    trained: tuple[int, ...]  # positions of the samples that are trained, in a list of samples
    reward: float | None  # of each of those; None where none is trained, or there is no usable reward


def normalize_rewards(args: SlimeArgs, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Compare each rollout with the others of its group, as slime does by default where all groups are alike.

    A group is what has one `group_index`; without any, each `n_samples_per_prompt` rollouts in their order. Each
    rollout counts once in its group's mean and unbiased standard deviation, however many samples it became, and gives
    each of them the same reward: GRPO compares draws from one prompt, and a rollout is one draw with one outcome. That
    is the reward of the main agent's sample; of a foreign fan-out, which has no such sample, the mean of its trained
    samples' rewards, which depends on no order and is their reward where they agree.

    Left out of the statistics and given 0.0: a sample with `remove_sample` or the status FAILED; all siblings of a main
    agent that FAILED, whose outcome is the infrastructure's; and a rollout without a usable reward, that is, a finite
    number in float32. The last is logged as an error and not raised, since that would end the training run.

    With the setting `max_sample_staleness`, samples that are too old get `remove_sample` first: slime calls this last
    before it trains, and in its fully-async rollout finished samples wait long for their step.

    Args:
        args: slime's; `advantage_estimator`, `rewards_normalization`, `grpo_std_normalization`, `reward_key` and
            `n_samples_per_prompt` are read.
        samples: Those of one training step, flat, as slime hands them over.

    Returns:
        The raw rewards (0.0 for an unusable one) and the normalised ones, one of each per sample, in order. Both are
        the raw ones where args ask for no normalisation or for an estimator that has none (ppo, reinforce_plus_plus).

    Raises:
        FailedGroupsError: The run is to be ended, and `generate` could not end it.
    """
    raise_on_failed_groups(args, samples)
    _exclude_stale(args, samples)
    raw = [_usable_reward(args, sample) or 0.0 for sample in samples]
    rollouts = rollouts_of(args, samples)
    _report_unusable(samples, rollouts)
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in _CENTRED or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    is_scaled = estimator in _SCALED and bool(getattr(args, "grpo_std_normalization", True))
    return raw, _normalized(_groups(args, rollouts), len(samples), is_scaled=is_scaled)


def _normalized(groups: Iterable[Sequence[Rollout]], count: int, *, is_scaled: bool) -> list[float]:
    """By sample, its rollout's reward less the group's mean, in units of the group's spread where it is scaled."""
    normalized = [0.0] * count
    for group in groups:
        rewards = [rollout.reward for rollout in group if rollout.reward is not None]
        mean, unit = _mean(rewards), reward_spread(rewards) + _STD_EPSILON if is_scaled else 1.0
        for rollout, reward in zip(group, rewards, strict=True):
            for position in rollout.trained:
                normalized[position] = (reward - mean) / unit
    return normalized


def _exclude_stale(args: SlimeArgs, samples: Sequence[Any]) -> None:
    try:
        limit = settings_from_args(args).max_sample_staleness
    except ConfigError:  # each sample has failed of it
        return
    if limit is None:
        return
    known = sample_staleness(list(map(_last_weights, samples)))
    ages = [0 if age is None else age for age in known]
    stale = [sample for sample, age in zip(samples, ages, strict=True) if age > limit]
    for sample in stale:
        sample.remove_sample, sample.loss_mask = True, [0] * sample.response_length
        if sample.rollout_log_probs is not None:  # the trainer expects none where the mask is 0
            sample.rollout_log_probs = [0.0] * sample.response_length
    if stale:
        words = "samples are too old to be trained samples=%d of=%d oldest=%s max_sample_staleness=%d"
        oldest = "before_a_restart" if max(ages) == NOT_COMPARABLE else max(ages)
        logger.warning(words, len(stale), len(samples), oldest, limit)


def _last_weights(sample: SampleLike) -> LastWeights:
    versions = getattr(sample, "weight_versions", None) or ()
    return LastWeights.of(versions, facts_of(sample).version_numberings)


def rollouts_of(args: SlimeArgs, samples: Sequence[Any]) -> list[Rollout]:
    """The rollouts of a flat list of samples, in order of their first sample; excluded ones have no reward.

    Samples are one rollout by their `rollout_id`, else by their `index`, within one `group_index`; else each is one.
    """
    members: dict[Hashable, list[int]] = {}
    for position, sample in enumerate(samples):
        members.setdefault((sample.group_index, *_identity(sample, position)), []).append(position)
    return [_rollout(args, samples, positions) for positions in members.values()]


def reward_spread(rewards: Sequence[float]) -> float:
    """Their unbiased standard deviation; exactly 0.0 where all are equal, for a single one and for none."""
    if not rewards or min(rewards) == max(rewards):
        return 0.0
    mean = _mean(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def _identity(sample: SampleLike, position: int) -> tuple[str, int]:
    """What the siblings of a rollout share; the name keeps a rollout_id apart from another sample's index."""
    if (rollout_id := rollout_id_of(sample)) is not None:
        return "rollout_id", rollout_id
    return ("index", sample.index) if sample.index is not None else ("position", position)


def _rollout(args: SlimeArgs, samples: Sequence[Any], positions: Sequence[int]) -> Rollout:
    mains = [position for position in positions if fan_out_part(samples[position]) == 0]
    trained = [at for at in positions if not samples[at].remove_sample and not _has_failed(samples[at])]
    if not trained or any(_has_failed(samples[main]) for main in mains):
        return Rollout(samples[positions[0]].group_index, (), None)
    found = (_usable_reward(args, samples[position]) for position in mains or trained)
    rewards = [reward for reward in found if reward is not None]
    return Rollout(samples[positions[0]].group_index, tuple(trained), _mean(rewards) if rewards else None)


def _has_failed(sample: SampleLike) -> bool:
    return sample.status is statuses_of(sample).FAILED


def is_trained(sample: SampleLike) -> bool:
    """Whether a sample of an episode has tokens to train on."""
    return not sample.remove_sample and sample.status in (statuses_of(sample).COMPLETED, statuses_of(sample).TRUNCATED)


def _usable_reward(args: SlimeArgs, sample: SampleLike) -> float | None:
    """The sample's reward where the trainer can compute with it; None where it is absent, no number, or not finite."""
    try:
        return usable_number(sample.get_reward_value(args))
    except Exception:  # slime's method fails in many ways on a reward of another shape
        return None


def _groups(args: SlimeArgs, rollouts: Sequence[Rollout]) -> Iterable[list[Rollout]]:
    """The rollouts that have a reward, by group; those without a group in slime's order, if that comes out even."""
    size = getattr(args, "n_samples_per_prompt", None)
    nameless = sum(rollout.group is None for rollout in rollouts)
    size = size if size and nameless % size == 0 else max(nameless, 1)
    groups: dict[Hashable, list[Rollout]] = {}
    seen = 0
    for rollout in rollouts:
        name: Hashable = ("nameless", seen // size) if rollout.group is None else rollout.group
        seen += rollout.group is None
        if rollout.reward is not None:
            groups.setdefault(name, []).append(rollout)
    return groups.values()


def _mean(rewards: Sequence[float]) -> float:
    """Equal rewards have exactly their own mean: rounding must not make a spread."""
    return rewards[0] if min(rewards) == max(rewards) else math.fsum(rewards) / len(rewards)


def _report_unusable(samples: Sequence[Any], rollouts: Sequence[Rollout]) -> None:
    """One line a step, with one of the rewards."""
    positions = [rollout.trained[0] for rollout in rollouts if rollout.trained and rollout.reward is None]
    if positions:
        first = samples[positions[0]]
        logger.error(
            "event=reward_unusable rollouts=%d first_index=%s first_reward=%.200r expected=finite_number used=0.0",
            len(positions),
            first.index,
            first.reward,
        )


@dataclass(frozen=True, slots=True)
class FilterVerdict:
    """A stand-in for slime's DynamicFilterOutput.

    It is true where the group is kept: slime takes an output of a class that it does not know for a truth value.
    """

    keep: bool
    reason: str | None = None  # why not; slime counts dropped groups by it
    keep_when_insufficient: bool = False  # whether a dropped group may fill up a batch that would be too small

    def __bool__(self) -> bool:
        return self.keep


def keep_informative_groups(args: SlimeArgs, samples: Sequence[Any], **kwargs: object) -> Any:  # noqa: ANN401 - slime's
    """Keep a group whose trained rollouts differ in reward: the others have no advantage to learn from.

    Rollouts, excluded samples and rewards are those of `normalize_rewards`: siblings of a fan-out are one rollout, and
    a failed sample is none, so that a group does not seem informative because of an outage. Groups to which a reward of
    somebody else's gives no number are counted as failed ones are, since slime would draw prompts without end.

    Args:
        args: slime's; `reward_key` is read.
        samples: Those of one prompt; the siblings of a fan-out may be in lists of their own.
        kwargs: Ignored: slime may pass more.

    Returns:
        slime's DynamicFilterOutput, or a `FilterVerdict` outside of slime. The reason of a dropped group is
        `no_trained_rollout`, `one_trained_rollout`, or `zero_std_` and the common reward to one decimal, as slime's
        own filter has it.

    Raises:
        FailedGroupsError: So many groups in a row have no reward that the run is to be ended.
    """
    del kwargs
    return _verdict(_trained_rewards(args, samples))


def keep_informative_groups_with_fallback(args: SlimeArgs, samples: Sequence[Any], **kwargs: object) -> Any:  # noqa: ANN401
    """Prefer the groups that `keep_informative_groups` keeps; train on others before drawing further prompts.

    As slime's `check_reward_nonzero_std_with_fallback`. An older slime than 0.3.1 knows only kept and dropped groups,
    and is told to keep the group where it would draw prompts. One without any trained rollout is dropped in any case.
    The arguments, the result and what is raised are those of `keep_informative_groups`.
    """
    del kwargs
    rewards = _trained_rewards(args, samples)
    verdict = _verdict(rewards)
    if verdict.keep or not rewards:
        return verdict
    if hasattr(verdict, "keep_when_insufficient"):
        return type(verdict)(keep=False, reason=verdict.reason, keep_when_insufficient=True)
    # slime draws further prompts once what remains can't fill a batch
    remaining = getattr(slime_state(args), "remaining_batch_size", None)
    would_draw = remaining is not None and remaining <= getattr(args, "rollout_batch_size", 0)
    return type(verdict)(keep=would_draw, reason=verdict.reason)


def _trained_rewards(args: SlimeArgs, samples: Sequence[Any]) -> list[float]:
    flat = [sample for part in samples for sample in (part if isinstance(part, list) else [part])]
    rewards = [rollout.reward for rollout in rollouts_of(args, flat) if rollout.reward is not None]
    _count_unrewarded_group(args, flat, rewards)
    return rewards


def _verdict(rewards: Sequence[float]) -> Any:  # noqa: ANN401 - slime's
    keep = reward_spread(rewards) > _LEAST_SPREAD
    # slime has loaded its module before it calls a filter; nothing is imported here
    verdict = getattr(sys.modules.get(_FILTER_MODULE), "DynamicFilterOutput", FilterVerdict)
    return verdict(keep=keep, reason=None if keep else _reason(rewards))


def _reason(rewards: Sequence[float]) -> str:
    if len(rewards) < 2:
        return "one_trained_rollout" if rewards else "no_trained_rollout"
    return f"zero_std_{round(rewards[0], 1)}"


class FailedGroups:
    """Counts the groups of one job that failed in a row; any sample that can be trained ends the row.

    A group has failed when all of its samples have. A burst among concurrent episodes is not enough: the run continues
    as long as an episode is running, or its reward is awaited, that began before the first failure of the row, since it
    may still succeed. Threads of several rollouts may use it.

    Attributes:
        error: What is to end the run, as long as the row lasts; None while it is not long enough.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._running: set[int] = set()
        self._raised_to = 0  # the last episode that had begun when the error was raised
        self._begin_row()

    def _begin_row(self) -> None:
        self.error: FailedGroupsError | None = None
        self._first: int | None = None  # the last episode that had begun at the row's first failure
        self._failed: dict[Hashable, set[Hashable]] = {}
        self._episodes = self._nameless = self._groups = 0

    @contextmanager
    def running_episode(self, number: int | None = None) -> Iterator[int]:
        """Entered while an episode runs, and with its number while it is graded; gives its number."""
        with self._lock:
            if number is None:
                self._begun += 1
                number = self._begun
            self._running.add(number)
        try:
            yield number
        finally:
            with self._lock:
                self._running.discard(number)

    def add_trained(self) -> None:
        """Count a sample to train on."""
        with self._lock:
            self._begin_row()

    def add_failed(
        self, number: int, sample: SampleLike, group_size: int, limit: int, why: str
    ) -> FailedGroupsError | None:
        """Count an episode that failed, or whose reward failed, after its `running_episode()` has ended.

        Returns:
            The error if it must be raised now: once for all concurrent episodes, and again when later episodes fail
            because the run continued.
        """
        with self._lock:
            self._first = self._begun if self._first is None else self._first
            group, member = sample.group_index, sample.index
            if not isinstance(group, int | str) or not isinstance(member, int | str | None):
                # taken to come in the order of their groups
                group, member = ("nameless", self._nameless // group_size), self._nameless
                self._nameless += 1
            members = self._failed.setdefault(group, set())
            self._episodes += 1
            if member not in members:
                members.add(member)
                self._groups += len(members) == group_size
            if self._groups < limit or any(one <= self._first for one in self._running):
                return None
            self.error = FailedGroupsError(
                f"got {self._groups} failed groups of training samples in a row ({self._episodes} episodes), by no "
                "fault of the policy; the run is ended, since it would train on nothing. Fix what the last one failed "
                f"with, or set max_failed_groups (now {limit}; 0 never ends a run): {why}"
            )
            if number <= self._raised_to:
                return None
            self._raised_to = self._begun
            return self.error


@dataclass(frozen=True, slots=True)
class _CountedJob:
    args: Any  # held so that no others get their id
    failed: FailedGroups
    unrewarded: FailedGroups  # groups without a reward, in the order in which a filter sees them


_JOBS: Final[OrderedDict[int, _CountedJob]] = OrderedDict()
_JOBS_LOCK: Final = threading.Lock()


def failed_groups_of(args: SlimeArgs) -> FailedGroups:
    """The count of the job that has these args, which are one object in all of its calls."""
    return _job_of(args).failed


def _job_of(args: SlimeArgs) -> _CountedJob:
    with _JOBS_LOCK:
        held = _JOBS.get(id(args))
        if held is None:
            held = _JOBS[id(args)] = _CountedJob(args, FailedGroups(), FailedGroups())
            if len(_JOBS) > _MOST_JOBS:
                _JOBS.popitem(last=False)
        _JOBS.move_to_end(id(args))
        return held


def count_episode(args: SlimeArgs, number: int, sample: SampleLike) -> None:
    """Count a training episode that has ended; one that is to be graded here counts as trained when that is done.

    Raises:
        FailedGroupsError: So many groups have failed in a row that the run is to be ended.
    """
    groups = failed_groups_of(args)
    if sample.status is statuses_of(sample).FAILED:
        facts = facts_of(sample)
        _add_failed(args, groups, number, sample, f"{facts.stop_reason}: {facts.error}")
    elif is_trained(sample):
        try:
            with exits_as_errors("reading args", RuntimeError):
                is_graded_next = uses_reward_func(args, sample) and sample.reward is None
        except Exception:  # args may be unreadable
            is_graded_next = False
        if is_graded_next:
            add_facts(sample, EpisodeFacts(episode_number=number))
        else:
            groups.add_trained()


def take_episode_number(sample: object) -> int | None:
    """Take the number that `count_episode` has left on a sample; None of a sample that another function has played."""
    number = take_fact(sample, "episode_number")
    return number if isinstance(number, int) else None


def count_reward(args: SlimeArgs, number: int, sample: SampleLike, failure: str | None) -> None:
    """Count a training sample that was graded; `failure` says why it could not be.

    Raises:
        FailedGroupsError: So many groups have failed in a row that the run is to be ended.
    """
    if _has_failed(sample):  # counted with its episode
        return
    groups = failed_groups_of(args)
    if failure is not None:
        ours = getattr(args, "strands_rollout", None)
        asked = ours.get("should_abort") if isinstance(ours, Mapping) else None
        if not is_aborting(args, sample, asked):  # which lets go of rewards
            _add_failed(args, groups, number, sample, f"the reward failed: {failure}")
    elif is_trained(sample):
        groups.add_trained()


def _count_unrewarded_group(args: SlimeArgs, samples: Sequence[Any], rewards: Sequence[float]) -> None:
    """Count a group of which only a filter sees that a reward of somebody else's gave it nothing to train on.

    Raises:
        FailedGroupsError: So many groups have failed in a row that the run is to be ended.
    """
    groups = _job_of(args).unrewarded
    if rewards:
        groups.add_trained()
        return
    # FAILED ones are counted already, and without a token in the mask there was nothing to train on
    left = [one for one in samples if not _has_failed(one) and any(one.loss_mask or ())]
    if not left or uses_reward_func(args, left[0]):
        return
    with groups.running_episode() as number:
        pass
    why = f"the reward gave {left[0].reward!r:.200}, or took the sample out; expected a finite number"
    _add_failed(args, groups, number, left[0], why, size=1)


def _add_failed(
    args: SlimeArgs, groups: FailedGroups, number: int, sample: SampleLike, why: str, size: int | None = None
) -> None:
    limit, loses = MAX_FAILED_GROUPS, False
    # args that can't be read fail every episode, which is to end the run as any other fault does
    try:
        with exits_as_errors("reading args", RuntimeError):
            given, loses = getattr(args, "n_samples_per_prompt", None), is_fully_async(args)
            size = size or (given if isinstance(given, int) and given > 0 else 1)
            limit = _max_failed_groups(args)
    except Exception:  # args may be unreadable
        logger.debug("args can't be read", exc_info=True)
    error = groups.add_failed(number, sample, size or 1, limit, why) if limit else None
    if error is None:
        return
    if not loses:
        raise error
    logger.error(
        "event=groups_failed error=%s log_rollout and normalize_rewards end the run with their next step", error
    )


def _max_failed_groups(args: SlimeArgs) -> int:
    """The setting alone, since another one that is wrong fails every episode; 0 never ends a run."""
    settings = getattr(args, "strands_rollout", None)
    limit = settings.get("max_failed_groups", MAX_FAILED_GROUPS) if isinstance(settings, Mapping) else MAX_FAILED_GROUPS
    if limit is None:
        return 0
    return limit if isinstance(limit, int) and limit >= 0 else MAX_FAILED_GROUPS


def raise_on_failed_groups(args: SlimeArgs, samples: Iterable[Any]) -> None:
    """End the run at the end of a step that has nothing to train on, where slime has lost what `generate` raised.

    Raises:
        FailedGroupsError: So many groups have failed in a row, and none of these samples of the step can be trained.
    """
    error = failed_groups_of(args).error
    if error is not None and not any(map(is_trained, samples)):
        raise error
