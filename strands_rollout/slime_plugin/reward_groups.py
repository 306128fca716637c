"""Rewards by group: normalization, the dynamic sampling filters, and the end of a run in which too many groups fail.

slime treats a failed sample as a finished sample. While an engine or a judge is down, a run with a dynamic filter would
draw prompts without end. A run without a filter would train on nothing. Therefore `FailedGroups` counts failures, and
too many in a row raise an error that ends the run.

An exception from `generate` or the reward ends slime's synchronous rollout, except in a surplus group that slime no
longer awaits. The fully-async rollout logs such an exception and loses the group. An exception from `log_rollout` or
`normalize_rewards` ends the run in either rollout.

An episode has failed when its sample is FAILED or its reward failed. An episode whose sample can be trained has
succeeded when its reward is known. With a reward function other than this package's, such an episode has succeeded when
it has ended.
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
    finished_samples,
    rollout_id_of,
    statuses_of,
    take_fact,
    usable_number,
)
from strands_rollout.settings import settings_from_args
from strands_rollout.slime_plugin.slime_adapter import is_aborting, is_fully_async, slime_state, uses_reward_func

logger = logging.getLogger(__name__)
_CENTERED_ESTIMATORS: Final = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_SCALED_ESTIMATORS: Final = ("grpo", "gspo", "cispo")
_STD_EPSILON: Final = 1e-6  # as in slime 0.3
_MIN_SPREAD: Final = 1e-6  # as in slime 0.3's check_reward_nonzero_std
_FILTER_MODULE: Final = "slime.rollout.filter_hub.base_types"
MAX_FAILED_GROUPS: Final = 16
_MAX_JOBS: Final = 16  # jobs counted in one process, each with its own args


@dataclass(frozen=True, slots=True)
class Rollout:
    """One draw from a prompt: a sample, or the siblings of a fan-out.

    Attributes:
        group: The `group_index` of its samples.
        trained: The positions of its trained samples in the list of samples.
        reward: The one reward of all its trained samples; None if no sample is trained, or the reward is unusable.
    """

    group: Hashable
    trained: tuple[int, ...]
    reward: float | None


def normalize_rewards(args: SlimeArgs, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the rewards, raw and relative to their groups; slime's `--custom-reward-post-process-path`.

    Rollouts with the same `group_index` form a group; rollouts without a `group_index` form groups of
    `n_samples_per_prompt` consecutive rollouts. Each rollout counts once in the mean and the unbiased standard
    deviation of its group, however many samples it became. All trained samples of a rollout get the same normalized
    reward: GRPO compares draws from one prompt, and a rollout is one draw with one reward. A rollout gets the reward of
    its main agent's sample. In a fan-out from another generate function, this sample may be unknown. Then, the
    rollout's reward is the mean reward of its trained samples. If all groups have the same size, and there is neither a
    fan-out nor an excluded sample, the result equals slime's default.

    The statistics exclude a sample with `remove_sample` or the status FAILED, and a rollout without a usable reward. If
    the main sample is FAILED, all its siblings are excluded, too, since the policy did not cause the failure. A usable
    reward is a number that is finite in float32. The normalized reward of excluded samples is 0.0. An unusable reward
    is logged as an error; it raises no exception, which would end the training run.

    With the setting `max_sample_staleness`, samples that are too old are excluded first: they get `remove_sample` and
    an all-zero mask. This is not done earlier, since finished samples may wait long for their step in slime's
    fully-async rollout. This function is the last that slime calls before it trains.

    Args:
        args: slime's args; `advantage_estimator`, `rewards_normalization`, `grpo_std_normalization`, `reward_key`,
            `n_samples_per_prompt` and the setting `max_sample_staleness` are read.
        samples: The samples of one training step, as a flat list.

    Returns:
        The raw rewards (0.0 for an unusable reward) and the normalized rewards, one of each per sample, in the samples'
        order. Both lists hold the raw rewards if args turn normalization off, or name an estimator without it, such as
        ppo or reinforce_plus_plus.

    Raises:
        FailedGroupsError: No sample can be trained, and too many groups have failed in a row or an episode worker keeps
            dying; see `raise_on_failed_groups`.
    """
    raise_on_failed_groups(args, samples)
    _exclude_stale(args, samples)
    raw = [_usable_reward(args, sample) or 0.0 for sample in samples]
    rollouts = rollouts_of(args, samples)
    _log_unusable(samples, rollouts)
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in _CENTERED_ESTIMATORS or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    is_scaled = estimator in _SCALED_ESTIMATORS and bool(getattr(args, "grpo_std_normalization", True))
    return raw, _normalize(_groups(args, rollouts), len(samples), is_scaled=is_scaled)


def _normalize(groups: Iterable[Sequence[Rollout]], count: int, *, is_scaled: bool) -> list[float]:
    """Return the normalized rewards of `count` samples; 0.0 for an untrained sample or a rollout without a reward."""
    normalized = [0.0] * count
    for group in groups:
        rewards = [rollout.reward for rollout in group if rollout.reward is not None]
        mean, scale = _mean(rewards), reward_spread(rewards) + _STD_EPSILON if is_scaled else 1.0
        for rollout, reward in zip(group, rewards, strict=True):
            for position in rollout.trained:
                normalized[position] = (reward - mean) / scale
    return normalized


def _exclude_stale(args: SlimeArgs, samples: Sequence[Any]) -> None:
    try:
        limit = settings_from_args(args).max_sample_staleness
    except ConfigError:  # every sample has failed with this error already
        return
    if limit is None:
        return
    staleness = known_staleness(samples)
    stale = [sample for sample, versions in zip(samples, staleness, strict=True) if versions > limit]
    for sample in stale:
        sample.remove_sample, sample.loss_mask = True, [0] * sample.response_length
        if sample.rollout_log_probs is not None:  # the trainer expects 0.0 where the mask is 0
            sample.rollout_log_probs = [0.0] * sample.response_length
    if stale:
        message = "samples are too old to be trained samples=%d of=%d oldest=%s max_sample_staleness=%d"
        oldest = "before_a_restart" if max(staleness) == NOT_COMPARABLE else max(staleness)
        logger.warning(message, len(stale), len(samples), oldest, limit)


def known_staleness(samples: Sequence[Any]) -> list[float]:
    """Return how many weight versions each sample is behind the newest known version.

    The number is 0 if the sample's version is unknown, and `NOT_COMPARABLE` for a sample from before a restart.
    """
    known = sample_staleness(list(map(_last_weights, samples)))
    return [0 if versions is None else versions for versions in known]


def _last_weights(sample: SampleLike) -> LastWeights:
    versions = getattr(sample, "weight_versions", None) or ()
    return LastWeights.of(versions, facts_of(sample).version_numberings)


def rollouts_of(args: SlimeArgs, samples: Sequence[Any]) -> list[Rollout]:
    """Return the rollouts of a flat list of samples, in order of their first sample; excluded rollouts have no reward.

    Samples of one `group_index` belong to one rollout if they share a `rollout_id`. Without a `rollout_id`, samples
    with the same `index` belong to one rollout. A sample that has neither is a rollout of its own.
    """
    members: dict[Hashable, list[int]] = {}
    for position, sample in enumerate(samples):
        members.setdefault((sample.group_index, *_identity(sample, position)), []).append(position)
    return [_build_rollout(args, samples, positions) for positions in members.values()]


def reward_spread(rewards: Sequence[float]) -> float:
    """Return the unbiased standard deviation of rewards; exactly 0.0 if all are equal or there are fewer than two."""
    if not rewards or min(rewards) == max(rewards):
        return 0.0
    mean = _mean(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def _identity(sample: SampleLike, position: int) -> tuple[str, int]:
    """Return a key that the siblings of a rollout share; its first part distinguishes a rollout_id from an index."""
    if (rollout_id := rollout_id_of(sample)) is not None:
        return "rollout_id", rollout_id
    return ("index", sample.index) if sample.index is not None else ("position", position)


def _build_rollout(args: SlimeArgs, samples: Sequence[Any], positions: Sequence[int]) -> Rollout:
    """Return the rollout of the samples at these positions; its reward is as `normalize_rewards` describes."""
    mains = [position for position in positions if fan_out_part(samples[position]) == 0]
    trained = [
        position for position in positions if not samples[position].remove_sample and not _has_failed(samples[position])
    ]
    if not trained or any(_has_failed(samples[main]) for main in mains):
        return Rollout(samples[positions[0]].group_index, (), None)
    usable = (_usable_reward(args, samples[position]) for position in mains or trained)
    rewards = [reward for reward in usable if reward is not None]
    return Rollout(samples[positions[0]].group_index, tuple(trained), _mean(rewards) if rewards else None)


def _has_failed(sample: SampleLike) -> bool:
    return sample.status is statuses_of(sample).FAILED


def is_trained(sample: SampleLike) -> bool:
    """Return whether a sample is COMPLETED or TRUNCATED, and not excluded from training."""
    return not sample.remove_sample and sample.status in (statuses_of(sample).COMPLETED, statuses_of(sample).TRUNCATED)


def _usable_reward(args: SlimeArgs, sample: SampleLike) -> float | None:
    try:
        return usable_number(sample.get_reward_value(args))
    except Exception:  # slime's method raises errors of many types on a reward of another shape
        return None


def _groups(args: SlimeArgs, rollouts: Sequence[Rollout]) -> Iterable[list[Rollout]]:
    """Return the rollouts with a reward, by group.

    Rollouts without a `group_index` form groups of `n_samples_per_prompt` consecutive rollouts, in the order in
    which slime draws them. If that size is unknown or does not divide the number of these rollouts, they form a
    single group.
    """
    size = getattr(args, "n_samples_per_prompt", None)
    ungrouped = sum(rollout.group is None for rollout in rollouts)
    size = size if size and ungrouped % size == 0 else max(ungrouped, 1)
    groups: dict[Hashable, list[Rollout]] = {}
    seen = 0
    for rollout in rollouts:
        name: Hashable = ("ungrouped", seen // size) if rollout.group is None else rollout.group
        seen += rollout.group is None
        if rollout.reward is not None:
            groups.setdefault(name, []).append(rollout)
    return groups.values()


def _mean(rewards: Sequence[float]) -> float:
    """Return the mean of rewards; exactly their value if all are equal. Rounding must not create a spread."""
    return rewards[0] if min(rewards) == max(rewards) else math.fsum(rewards) / len(rewards)


def _log_unusable(samples: Sequence[Any], rollouts: Sequence[Rollout]) -> None:
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

    Its truth value is `keep`. slime uses the truth value of any output other than a DynamicFilterOutput.

    Attributes:
        keep: True if the group is kept.
        reason: The reason for dropping the group; slime counts dropped groups by reason.
        keep_when_insufficient: True if slime shall keep the group rather than draw more prompts.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False

    def __bool__(self) -> bool:
        return self.keep


def keep_informative_groups(args: SlimeArgs, samples: Sequence[Any], **kwargs: object) -> Any:  # noqa: ANN401 - slime's
    """Keep a group if its trained rollouts differ in reward; other groups have no advantage to learn from.

    Set this function as slime's `--dynamic-sampling-filter-path`. Rollouts, excluded samples and rewards are as in
    `normalize_rewards`. The siblings of a fan-out are one rollout. A failed sample does not count as a rollout;
    otherwise, an outage would make a group informative. If a reward function other than `reward_func` returns no number
    for a whole group, the group counts as failed. Otherwise, slime would draw prompts without end.

    Args:
        args: slime's args.
        samples: The samples of one prompt; the siblings of a fan-out may be in lists of their own.
        kwargs: Ignored; slime may pass more.

    Returns:
        slime's DynamicFilterOutput, or a `FilterVerdict` outside of slime. The reason of a dropped group is
        `no_trained_rollout` or `one_trained_rollout`. If the rewards are equal, it is `zero_std_` followed by the
        reward, rounded to one decimal, as in slime's own filter.

    Raises:
        FailedGroupsError: Too many groups in a row have no reward; the run must end.
    """
    del kwargs
    return _verdict(_trained_rewards(args, samples))


def keep_informative_groups_with_fallback(args: SlimeArgs, samples: Sequence[Any], **kwargs: object) -> Any:  # noqa: ANN401
    """Keep a group if `keep_informative_groups` keeps it, or if slime would have to draw more prompts without it.

    Works like slime's `check_reward_nonzero_std_with_fallback`. slime 0.3.1 or newer checks the second condition
    itself; for an older slime, this function checks it. A group without any trained rollout is always dropped.

    Arguments, result and errors are the same as for `keep_informative_groups`.
    """
    del kwargs
    rewards = _trained_rewards(args, samples)
    verdict = _verdict(rewards)
    if verdict.keep or not rewards:
        return verdict
    if hasattr(verdict, "keep_when_insufficient"):
        return type(verdict)(keep=False, reason=verdict.reason, keep_when_insufficient=True)
    # slime draws more prompts when the remaining groups can't fill a batch
    remaining = getattr(slime_state(args), "remaining_batch_size", None)
    would_draw = remaining is not None and remaining <= getattr(args, "rollout_batch_size", 0)
    return type(verdict)(keep=would_draw, reason=verdict.reason)


def _trained_rewards(args: SlimeArgs, samples: Sequence[Any]) -> list[float]:
    """Return the rewards of a group's trained rollouts, and count the group with `_count_unrewarded_group`."""
    flat = [sample for part in samples for sample in (part if isinstance(part, list) else [part])]
    rewards = [rollout.reward for rollout in rollouts_of(args, flat) if rollout.reward is not None]
    _count_unrewarded_group(args, flat, rewards)
    return rewards


def _verdict(rewards: Sequence[float]) -> Any:  # noqa: ANN401 - slime's
    keep = reward_spread(rewards) > _MIN_SPREAD
    # slime has loaded the module before it calls a filter; nothing is imported here
    verdict = getattr(sys.modules.get(_FILTER_MODULE), "DynamicFilterOutput", FilterVerdict)
    return verdict(keep=keep, reason=None if keep else _drop_reason(rewards))


def _drop_reason(rewards: Sequence[float]) -> str:
    if len(rewards) < 2:
        return "one_trained_rollout" if rewards else "no_trained_rollout"
    return f"zero_std_{round(rewards[0], 1)}"


class FailedGroups:
    """Counter of a job's consecutive failed groups; any sample that can be trained resets it.

    A group has failed when all of its samples have failed. A burst of failures among concurrent episodes is not enough
    to end the run. An episode that began before the streak's first failure may still succeed; the run continues while
    any such episode is running or being graded. Safe to use from several threads.

    Attributes:
        error: The error that must end the run; None while the run may continue.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._episodes_begun = 0  # also the number of the newest episode
        self._running: set[int] = set()  # the numbers of episodes that are running or being graded
        self._newest_at_raise = 0  # number of the newest episode when the error was last raised
        self._reset_streak()

    def _reset_streak(self) -> None:
        self.error: FailedGroupsError | None = None
        self._newest_at_first_failure: int | None = None  # number of the newest episode at the streak's first failure
        self._failed_members: dict[Hashable, set[Hashable]] = {}  # by group
        self._failed_episodes = self._failed_ungrouped = self._failed_groups = 0

    @contextmanager
    def running_episode(self, number: int | None = None) -> Iterator[int]:
        """Count an episode as running within the block, and yield its number.

        Pass the `number` of an earlier call to count the same episode again, while it is graded.
        """
        with self._lock:
            if number is None:
                self._episodes_begun += 1
                number = self._episodes_begun
            self._running.add(number)
        try:
            yield number
        finally:
            with self._lock:
                self._running.discard(number)

    def add_trained(self) -> None:
        """Count a sample that can be trained; it ends the streak."""
        with self._lock:
            self._reset_streak()

    def add_failed(
        self, number: int, sample: SampleLike, group_size: int, limit: int, why: str
    ) -> FailedGroupsError | None:
        """Count a failed episode, or an episode with a failed reward, after its `running_episode()` has ended.

        Args:
            number: The episode's number, from `running_episode`.
            sample: The episode's sample; its `group_index` and `index` identify it.
            group_size: Number of samples in a group.
            limit: Number of consecutive failed groups that ends the run, at least 1.
            why: The reason, for the error's message.

        Returns:
            The error if the caller must raise it, else None. If concurrent episodes fail, only one of them gets the
            error. If the run has continued all the same, an episode that begins later and fails gets the error again.
        """
        with self._lock:
            if self._newest_at_first_failure is None:
                self._newest_at_first_failure = self._episodes_begun
            group, member = sample.group_index, sample.index
            if not isinstance(group, int | str) or not isinstance(member, int | str | None):
                # assume that samples without a usable `group_index` or `index` arrive group by group
                group, member = ("ungrouped", self._failed_ungrouped // group_size), self._failed_ungrouped
                self._failed_ungrouped += 1
            members = self._failed_members.setdefault(group, set())
            self._failed_episodes += 1
            if member not in members:
                members.add(member)
                self._failed_groups += len(members) == group_size
            if self._failed_groups < limit or any(begun <= self._newest_at_first_failure for begun in self._running):
                return None
            self.error = FailedGroupsError(
                f"{self._failed_groups} groups of training samples failed in a row ({self._failed_episodes} "
                "episodes), by no fault of the policy; the run ends, since it would train on nothing. Fix the cause of "
                f"the last failure, or raise max_failed_groups (now {limit}; 0 never ends a run). The failure: {why}"
            )
            if number <= self._newest_at_raise:
                return None
            self._newest_at_raise = self._episodes_begun
            return self.error


@dataclass(frozen=True, slots=True)
class _JobCounts:
    args: Any  # kept alive, so that no other args get the same id
    failed: FailedGroups
    unrewarded: FailedGroups  # counts groups without a reward, which only a filter sees


_JOBS: Final[OrderedDict[int, _JobCounts]] = OrderedDict()
_JOBS_LOCK: Final = threading.Lock()


def failed_groups_of(args: SlimeArgs) -> FailedGroups:
    """Return the counts of failed groups of the job with these args; slime passes the same object in all calls."""
    return _job_counts(args).failed


def _job_counts(args: SlimeArgs) -> _JobCounts:
    with _JOBS_LOCK:
        counts = _JOBS.get(id(args))
        if counts is None:
            counts = _JOBS[id(args)] = _JobCounts(args, FailedGroups(), FailedGroups())
            if len(_JOBS) > _MAX_JOBS:
                _JOBS.popitem(last=False)
        _JOBS.move_to_end(id(args))
        return counts


def count_episode(args: SlimeArgs, number: int, sample: SampleLike) -> None:
    """Count a training episode that has ended.

    If `reward_func` will grade its sample, the episode is not counted as a success here, but later by `count_reward`.

    Raises:
        FailedGroupsError: Too many groups failed in a row; the run must end.
    """
    groups = failed_groups_of(args)
    if sample.status is statuses_of(sample).FAILED:
        facts = facts_of(sample)
        _add_failed(args, groups, number, sample, f"{facts.stop_reason}: {facts.error}")
    elif is_trained(sample):
        try:
            with exits_as_errors("reading args", RuntimeError):
                will_be_graded = uses_reward_func(args, sample) and sample.reward is None
        except Exception:  # args may be unreadable
            will_be_graded = False
        if will_be_graded:
            add_facts(sample, EpisodeFacts(episode_number=number))
        else:
            groups.add_trained()


def take_episode_number(sample: object) -> int | None:
    """Remove and return the number that `count_episode` stored on a sample; None if there is none."""
    number = take_fact(sample, "episode_number")
    return number if isinstance(number, int) else None


def count_reward(args: SlimeArgs, number: int, sample: SampleLike, failure: str | None) -> None:
    """Count a training sample after its grading; `failure` is the reason if the grading failed, else None.

    Raises:
        FailedGroupsError: Too many groups failed in a row; the run must end.
    """
    if _has_failed(sample):  # `count_episode` has counted it
        return
    groups = failed_groups_of(args)
    if failure is not None:
        settings = getattr(args, "strands_rollout", None)
        should_abort = settings.get("should_abort") if isinstance(settings, Mapping) else None
        if not is_aborting(args, sample, should_abort):  # a reward cancelled by an abort has not failed
            _add_failed(args, groups, number, sample, f"the reward failed: {failure}")
    elif is_trained(sample):
        groups.add_trained()


def _count_unrewarded_group(args: SlimeArgs, samples: Sequence[Any], rewards: Sequence[float]) -> None:
    """Count a group in which a reward function other than `reward_func` left nothing to train on.

    Only a dynamic filter sees such a group.
    """
    groups = _job_counts(args).unrewarded
    if rewards:
        groups.add_trained()
        return
    # FAILED samples are counted already, and a sample with an all-zero mask had nothing to train on
    trainable = [sample for sample in samples if not _has_failed(sample) and any(sample.loss_mask or ())]
    if not trainable or uses_reward_func(args, trainable[0]):
        return
    with groups.running_episode() as number:
        pass  # only the number is needed: no episode of the group is running
    why = (
        f"got the reward {trainable[0].reward!r:.200} for the group's first sample with tokens to train; expected a "
        "finite number for at least one sample without remove_sample"
    )
    _add_failed(args, groups, number, trainable[0], why, size=1)


def _add_failed(
    args: SlimeArgs, groups: FailedGroups, number: int, sample: SampleLike, why: str, size: int | None = None
) -> None:
    """Count a failed episode or a group without rewards; end the run after too many failed groups in a row.

    In slime's fully-async rollout, which would lose the exception, the error is logged instead of raised. `size` is the
    number of samples of a group; None for slime's `n_samples_per_prompt`.

    Raises:
        FailedGroupsError: Too many groups failed in a row; the run must end.
    """
    limit, slime_loses_errors = MAX_FAILED_GROUPS, False
    # if args can't be read, every episode fails, and the default limit ends the run
    try:
        with exits_as_errors("reading args", RuntimeError):
            group_size, slime_loses_errors = getattr(args, "n_samples_per_prompt", None), is_fully_async(args)
            size = size or (group_size if isinstance(group_size, int) and group_size > 0 else 1)
            limit = _max_failed_groups(args)
    except Exception:  # args may be unreadable
        logger.debug("slime's args can't be read", exc_info=True)
    error = groups.add_failed(number, sample, size or 1, limit, why) if limit else None
    if error is None:
        return
    if not slime_loses_errors:
        raise error
    logger.error(
        "event=groups_failed error=%s; log_rollout or normalize_rewards ends the run once a step has nothing to train",
        error,
    )


def _max_failed_groups(args: SlimeArgs) -> int:
    """Return the setting `max_failed_groups`, without validating the other settings; 0 never ends a run."""
    settings = getattr(args, "strands_rollout", None)
    limit = settings.get("max_failed_groups", MAX_FAILED_GROUPS) if isinstance(settings, Mapping) else MAX_FAILED_GROUPS
    if limit is None:
        return 0
    return limit if isinstance(limit, int) and limit >= 0 else MAX_FAILED_GROUPS


def raise_on_failed_groups(args: SlimeArgs, samples: object) -> None:
    """Raise the error that must end the run, if any, for a step with nothing to train on.

    `generate` and the reward can't end the run in slime's fully-async rollout, which loses their exceptions.

    Args:
        args: slime's args.
        samples: The samples of the step; lists may be nested, as with fan-out.

    Raises:
        FailedGroupsError: Too many groups failed in a row, or an episode worker keeps dying, and no sample of this step
            can be trained.
    """
    error = failed_groups_of(args).error
    if error is not None and not any(is_trained(view.sample) for view in finished_samples(samples)):
        raise error
