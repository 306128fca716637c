"""slime's reward function: a sample in, a number or a dict of plain JSON values out; it raises only what ends a run."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import reprlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from strands_rollout.errors import EnvironmentFaultError, FailedGroupsError, RolloutError
from strands_rollout.exits import exits_as_errors
from strands_rollout.grading import Grade, grade, last_assistant_text, slime_example_grade, spoken_text
from strands_rollout.log_once import log_once
from strands_rollout.samples import (
    FAILED_METHODS,
    NO_JUDGE,
    PART_PREFIX,
    REWARD_FAILED,
    EpisodeFacts,
    SampleLike,
    add_facts,
    facts_of,
    fan_out_part,
    rollout_id_of,
    statuses_of,
    take_fact,
    usable_number,
)
from strands_rollout.settings import TOOL_SHAPING_CEILING, RewardSettings, reward_settings
from strands_rollout.slime_plugin.reward_groups import count_reward, failed_groups_of, take_episode_number
from strands_rollout.slime_plugin.slime_adapter import uses_reward_func
from strands_rollout.tool_parsers import Segment, Text, get_parser, parser_names

if TYPE_CHECKING:
    from strands_rollout.slime_plugin.own_reward import Scored

_LOGGER = logging.getLogger(__name__)
_GRADING_THREADS: Final = 2  # beside the loop's own, which tools may hold for long
_LONGEST_SHOWN_CHARS: Final = 200
_DEEPEST_LIST: Final = 8
_CUTTING_REASONS: Final = frozenset({"turn_length", "response_length", "context_length"})
_CUT_STATUSES: Final = frozenset({"truncated", "aborted"})
_OWN_PATHS: Final = ("strands_rollout.reward_func", f"{__name__}.reward_func")

T = TypeVar("T")
RewardDict: TypeAlias = dict[str, float | str]
Reward: TypeAlias = "float | RewardDict"
RewardList: TypeAlias = "list[Reward | RewardList]"


async def reward_func(args: object, sample: Any, **kwargs: object) -> Reward | RewardList:  # noqa: ANN401 - one or a list
    """Grade the last assistant turn of a sample, or of each sample of a list; slime's `--custom-rm-path`.

    In a list, the siblings of a fan-out (one `rollout_id`) have one outcome, that of their main agent: its sample is
    graded, once, and each gets a copy of its reward. Where the main agent's sample is not in the list, each is graded
    by itself.

    Run slime with `--reward-key score --eval-reward-key acc`. Where slime reads no key, its reward is the number alone.

    Args:
        args: slime's; `args.strands_rollout["reward"]` is read, see `RewardSettings`, and the names of the keys.
        sample: slime's Sample, or any object with some of its fields. The text is
            `metadata["strands_rollout"]["final_text"]` where there is one (the last model turn's own text, with
            `final_in_reasoning` true beside it if the prompt had opened reasoning, and `tool_parser`), else cut out of
            `response`. An answer that a cut turn ends in is none, see `grading.extract_answer`: the turn is cut if
            `final_is_cut` is true beside the text, or where there are no such facts, if the status is TRUNCATED.
            `label` may be whatever `grading.label_texts` takes. Lists may hold lists, as slime's groups do.
        kwargs: Ignored: slime may pass more.

    Returns:
        For each sample, in lists like those given, a dict with the keys `score` (the settings' `correct` or `wrong`,
        perhaps shaped), `acc` (1.0 or 0.0), `pred` (the answer as written, "" for none), `label`, `method` (what
        decided), `error` (why the answer could not be judged; else ""), and `parts/NAME` for each further number of the
        user's reward or of an environment. A sample whose reward failed (method `error` or `no_judge`) is not trained
        (`remove_sample`). Or only its `score`, a float, where slime's args name no key to read from a dict: neither
        `reward_key` nor `eval_reward_key`, or, of a sample in training, only the latter; the dict is then kept in
        `metadata["strands_rollout"]["reward"]`. Args that lack both attributes are not slime's, and mean the dict.

    Raises:
        asyncio.CancelledError: The caller was cancelled.
        FailedGroupsError: So many groups of training samples in a row have nothing to train on, as while a judge is
            away, that the run is to be ended; see `FailedGroups`. Nothing else is raised: slime's run would die of it.
    """
    del kwargs
    if not isinstance(sample, list | tuple):
        graded = await _graded(args, sample)
        reward = _as_read(args, sample, graded.details)
        _count(args, [graded])
        return reward
    flat: list[Any] = []
    _visited(sample, flat.append)
    graders = _graders(flat)
    tasks: dict[int, asyncio.Task[_Graded]] = {}
    async with asyncio.TaskGroup() as group:
        for position in dict.fromkeys(graders):
            tasks[position] = group.create_task(_graded(args, flat[position]))
            await asyncio.sleep(0)  # one sample per turn of the loop: a long list must not hold it
    details = (dict(tasks[position].result().details) for position in graders)
    rewards = _visited(sample, lambda one: _as_read(args, one, next(details)))
    _count(args, [task.result() for task in tasks.values()])
    return rewards


@dataclass(frozen=True, slots=True)
class _Graded:
    sample: Any
    details: RewardDict
    number: int | None  # of its episode; None in an evaluation


async def _graded(args: object, sample: object) -> _Graded:
    """Grade one sample; until its reward is known its episode is one that may still succeed."""
    try:
        with exits_as_errors("the sample", RuntimeError):
            is_counted, number = not _is_evaluated(sample), take_episode_number(sample)
    except Exception:  # a foreign sample may raise anything
        is_counted, number = False, None
    if not is_counted:
        return _Graded(sample, await _reward(args, sample), None)
    with failed_groups_of(args).running_episode(number) as number:
        return _Graded(sample, await _reward(args, sample), number)


def _count(args: object, all_graded: Sequence[_Graded]) -> None:
    """Count rewards of training samples, each of which is set by now.

    Raises:
        FailedGroupsError: The run is to be ended.
    """
    for one in all_graded:
        failure = str(one.details["error"]) if one.details["method"] in FAILED_METHODS else None
        try:
            with exits_as_errors("it", RuntimeError):
                if one.number is not None:
                    count_reward(args, one.number, one.sample, failure)
        except FailedGroupsError:
            raise
        except Exception:  # a foreign sample may raise anything
            _LOGGER.debug("a sample can't be counted", exc_info=True)


def _visited(samples: Sequence[Any], visit: Callable[[Any], T], depth: int = 0) -> list[Any]:
    """What `visit` returns for each sample in order, in lists like those given.

    A list that is nested deeper than any of slime's, or in itself, is visited as a bad sample.
    """
    is_list = [isinstance(one, list | tuple) and depth < _DEEPEST_LIST for one in samples]
    pairs = zip(samples, is_list, strict=True)
    return [_visited(one, visit, depth + 1) if nested else visit(one) for one, nested in pairs]


def _as_read(args: object, sample: SampleLike, details: RewardDict) -> Reward:
    """The reward in the form in which slime reads it from this sample."""
    try:
        with exits_as_errors("the sample", RuntimeError):
            if details["method"] in FAILED_METHODS:  # not the policy's fault
                sample.remove_sample = True
            if _reads_a_key(args, sample):
                return details
            if isinstance(sample.metadata, dict):
                add_facts(sample, EpisodeFacts(reward=details))
    except Exception as e:  # a foreign sample may raise anything
        _report(e)
    return float(details["score"])


def _reads_a_key(args: object, sample: object) -> bool:
    """Whether slime reads an entry of this sample's reward; it doesn't tell a reward function."""
    if not (hasattr(args, "reward_key") or hasattr(args, "eval_reward_key")) or getattr(args, "reward_key", None):
        return True  # without a key of its own, an evaluation reads that of training
    if not getattr(args, "eval_reward_key", None):
        return False
    return _is_evaluated(sample)


def _is_evaluated(sample: object) -> bool:
    """Whether it is a sample of an evaluation."""
    facts = facts_of(sample)
    # only in training slime gives samples a group; this package's `generate` notes which it is
    return bool(facts.evaluation) if facts.stop_reason is not None else getattr(sample, "group_index", None) is None


def _graders(samples: Sequence[object]) -> list[int]:
    """For each sample the position of the one whose reward it gets: its main agent's, else its own."""
    fan_outs = [_fan_out(sample) for sample in samples]
    mains = {key: position for position, (key, part) in enumerate(fan_outs) if part == 0}
    return [position if part is None else mains.get(key, position) for position, (key, part) in enumerate(fan_outs)]


def _fan_out(sample: object) -> tuple[Hashable, int | None]:
    """What siblings share, and which of them the sample is; (None, None) for a sample of no fan-out."""
    try:
        with exits_as_errors("the sample", RuntimeError):
            part, rollout_id = fan_out_part(sample), rollout_id_of(sample)
            key = (getattr(sample, "group_index", None), rollout_id)
            hash(key)
            return (None, None) if rollout_id is None else (key, part)
    except Exception:  # whatever a foreign sample raises when it is read, it is still graded, by itself
        return None, None


async def grade_ahead(args: object, sample: SampleLike) -> None:
    """Grade a sample in an episode worker, if slime asks this reward function for it next, which then finds it."""
    is_asked = uses_reward_func(args, sample) and not getattr(args, "group_rm", False)
    if is_asked and sample.reward is None and sample.status is not statuses_of(sample).ABORTED:
        began = time.monotonic()
        details = await _reward(args, sample)
        add_facts(sample, EpisodeFacts(reward_ahead=details, score_s=time.monotonic() - began))


async def _reward(args: object, sample: object) -> RewardDict:
    settings = RewardSettings()
    try:
        with exits_as_errors("the sample", RuntimeError):
            if (ahead := take_fact(sample, "reward_ahead")) is not None:
                return cast("RewardDict", ahead)
            ours = getattr(args, "strands_rollout", None)
            options = ours.get("reward") if isinstance(ours, Mapping) else None
            settings = reward_settings(options)
            return await (_own_reward(settings, sample, args) if settings.is_own else _built_in(settings, sample))
    except Exception as e:  # a reward that raises ends slime's training run
        method = NO_JUDGE if isinstance(e, EnvironmentFaultError) else REWARD_FAILED
        label = _named(getattr(sample, "label", None))
        return _as_dict(settings.wrong, Grade(correct=False, pred="", label=label, method=method), _report(e))


async def _built_in(settings: RewardSettings, sample: object) -> RewardDict:
    if settings.style == "slime_strands_example":
        return _slime_example_reward(sample)
    if (scored := facts_of(sample).environment_score) is None:
        return await _default_reward(settings, sample)
    from strands_rollout.slime_plugin.own_reward import parse_score

    return _as_scored(settings, parse_score(scored, "environment_score"), sample, "environment")


async def _own_reward(settings: RewardSettings, sample: object, args: object) -> RewardDict:
    # these import Strands, which this package's own reward does without
    from strands_rollout.slime_plugin.own_reward import GradedAnswer, own_reward, parse_score
    from strands_rollout.user_code import search_beside

    async def built_in() -> Scored:
        found = await _built_in(settings, sample)
        if found["error"]:
            raise RolloutError(str(found["error"]))
        return parse_score({name.removeprefix(PART_PREFIX): value for name, value in found.items()}, "the grade")

    search_beside(getattr(args, "custom_config_path", None))
    answer = GradedAnswer(args, sample, _answer_text(sample), getattr(sample, "label", None))
    scored = await own_reward(settings, answer, built_in)
    method = "parts" if settings.parts else "function" if settings.function else "evaluator"
    return _as_scored(settings, scored, sample, method)


def _as_scored(settings: RewardSettings, scored: Scored, sample: object, method: str) -> RewardDict:
    """A score with its parts; right by its `acc` if it has one, else from the score of a right answer on."""
    acc = float(scored.score >= settings.correct) if scored.acc is None else scored.acc
    label = _named(getattr(sample, "label", None))
    parts = {f"{PART_PREFIX}{name}": value for name, value in scored.parts.items()}
    return _as_dict(scored.score, Grade(acc > 0, scored.pred, label, method), "") | {"acc": acc, **parts}


async def _default_reward(settings: RewardSettings, sample: object) -> RewardDict:
    loop = asyncio.get_running_loop()
    verdict = await loop.run_in_executor(_threads(os.getpid()), _grade_sample, sample, settings.symbolic_timeout_s)
    score = settings.correct if verdict.correct else settings.wrong
    if settings.tool_shaping and not verdict.correct:
        # what slime's strands example adds to a failure: negative below two iterations
        score += min(TOOL_SHAPING_CEILING, (_tool_iterations(sample) - 2) / 2 * 0.1)
    return _as_dict(score, verdict, "the sample has no label" if verdict.method == "no_label" else "")


@functools.cache
def _threads(_pid: int) -> ThreadPoolExecutor:
    """This process's: a forked one inherits the object without its threads."""
    return ThreadPoolExecutor(_GRADING_THREADS, thread_name_prefix="grading")


def _grade_sample(sample: object, cpu_s: float) -> Grade:
    return grade(_answer_text(sample), getattr(sample, "label", None), cpu_s, is_cut=_is_cut(sample))


def _is_cut(sample: object) -> bool:
    """Whether the last turn ended in the middle; of a foreign sample, which has the status alone, whether it may have.

    An episode may be truncated between two turns, so that its last turn is whole.
    """
    facts = facts_of(sample)
    if facts.final_is_cut is not None:
        return facts.final_is_cut
    if facts.stop_reason is not None:  # of a dump from before that fact
        return facts.stop_reason in _CUTTING_REASONS
    status = getattr(sample, "status", None)
    return getattr(status, "value", status) in _CUT_STATUSES


def _answer_text(sample: object) -> str:
    """What the last assistant message says, without reasoning and calls."""
    facts = facts_of(sample)
    if facts.final_text is not None:
        return _said(facts.final_text, facts.tool_parser, in_reasoning=bool(facts.final_in_reasoning))
    prompt = getattr(sample, "prompt", None)
    in_reasoning = isinstance(prompt, str) and prompt.rstrip().endswith("<think>")
    return last_assistant_text(_text(getattr(sample, "response", None)), in_reasoning=in_reasoning)


def _said(turn: str, tool_parser: str | None, *, in_reasoning: bool) -> str:
    """A turn's `spoken_text`; in a format whose reasoning has other tags than `<think>`, as its parser reads it."""
    parser = get_parser(tool_parser) if tool_parser in parser_names() else None
    if parser is None or getattr(parser, "open_reasoning", "") == "<think>":
        return spoken_text(turn, in_reasoning=in_reasoning)
    parts: Sequence[Segment] = ()
    try:
        parts = parser.segments(turn, in_reasoning)
    except Exception:  # a user's parser may raise anything, by which the policy must not avoid training
        _LOGGER.debug("a parser failed", exc_info=True)
    texts = [part.text for part in parts if isinstance(part, Text)]
    return "".join(texts).strip() if parts and isinstance(parts[-1], Text) else ""


def _slime_example_reward(sample: object) -> RewardDict:
    label = getattr(sample, "label", None)
    result = slime_example_grade(_text(getattr(sample, "response", None)), label, _tool_iterations(sample))
    verdict = Grade(correct=result.correct, pred=result.pred, label=_text(label), method="slime_strands_example")
    return _as_dict(result.score, verdict, result.error)


def _as_dict(score: float, verdict: Grade, error: str) -> RewardDict:
    return {
        "score": float(score),
        "acc": 1.0 if verdict.correct else 0.0,
        "pred": _shown(verdict.pred),
        "label": _shown(verdict.label),
        "method": verdict.method,
        "error": _shown(error),
    }


def _shown(text: str) -> str:
    """Short enough for a log, and encodable: a lone surrogate would break a JSON dump."""
    return text[:_LONGEST_SHOWN_CHARS].encode("utf-8", "replace").decode("utf-8")


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _named(value: object) -> str:
    """A value in a message: "" for None, shortened where it is large or recursive, its type where it can't be shown."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return str(value) if isinstance(value, Exception) else reprlib.repr(value)
    except Exception:  # a foreign value's own methods may raise anything
        return f"a {type(value).__name__}"


def _tool_iterations(sample: object) -> float:
    found = facts_of(sample).tool_iterations
    return (usable_number(getattr(sample, "tool_iters", 0)) if found is None else float(found)) or 0.0


def _report(error: Exception) -> str:
    """The error's text, logged once per kind, since a wrong setting fails every sample; a bug with its traceback."""
    text = f"{type(error).__name__}: {_named(error)}"
    kind = text[:_LONGEST_SHOWN_CHARS]
    bug = None if isinstance(error, RolloutError) else error
    log_once(_LOGGER, logging.ERROR, "event=reward_failed error=%s", kind, exc_info=bug)
    return text
