"""slime's reward function: it takes a sample, or a list of samples, and returns the reward of each.

A reward is a number, or a dict of plain JSON values. The function raises an error only if the run must end, or its
caller was cancelled. After any other failure, the function returns the reward of a wrong answer. The reason is in the
dict. If the reward is a number, the dict is in the sample's facts. `reward_func` is the entry.
"""

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
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, cast, get_args

from strands_rollout.errors import EnvironmentFaultError, FailedGroupsError, PromptError, RolloutError
from strands_rollout.exits import exits_as_errors
from strands_rollout.grading import Grade, grade, last_assistant_text, slime_example_grade, spoken_text
from strands_rollout.grading.choices import grade_choice, letter_of
from strands_rollout.grading.ifeval import Instructions
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
    question_of,
    rollout_id_of,
    statuses_of,
    take_fact,
    usable_number,
)
from strands_rollout.settings import MAX_TOOL_SHAPING, RewardSettings, reward_settings
from strands_rollout.slime_plugin.reward_groups import count_reward, failed_groups_of, take_episode_number
from strands_rollout.slime_plugin.slime_adapter import uses_reward_func
from strands_rollout.tool_parsers import Segment, Text, get_parser, parser_names

if TYPE_CHECKING:
    from strands_rollout.slime_plugin.own_reward import RewardResult

_LOGGER = logging.getLogger(__name__)
_GRADING_THREADS: Final = 2  # threads for grading alone, since tools may occupy the event loop's threads for long
_MAX_SHOWN_CHARS: Final = 200
_MAX_LIST_DEPTH: Final = 8
GRADING_KEY: Final = "strands_rollout_grading"
"""Key in a row's metadata that says how the answer is graded: its value is one of `Grading`, by default "math"."""
Grading: TypeAlias = Literal["math", "choice", "ifeval"]
"""Kinds of grading. "math" compares the answer with the label as mathematics. "choice" compares the letter of
the choice with the label. "ifeval" checks whether the answer follows IFEval's instructions."""
INSTRUCTIONS_PART: Final = "instructions"
FOLLOWED_PART: Final = "instructions_followed"
"""Parts of an IFEval row's reward: the number of instructions, and the number of instructions that the answer follows.

The accuracy by instruction is the ratio of their sums over all samples.
"""
_CUT_REASONS: Final = frozenset({"turn_length", "response_length", "context_length"})
_CUT_STATUSES: Final = frozenset({"truncated", "aborted"})

T = TypeVar("T")
RewardDict: TypeAlias = dict[str, float | str]
Reward: TypeAlias = "float | RewardDict"
RewardList: TypeAlias = "list[Reward | RewardList]"


async def reward_func(args: object, sample: Any, **kwargs: object) -> Reward | RewardList:  # noqa: ANN401 - one or a list
    """Grade the last assistant turn of a sample, or of each sample of a list; slime's `--custom-rm-path`.

    In a list, the siblings of a fan-out (the samples with the same `rollout_id`) share one reward. Only the main
    agent's sample is graded; each sibling gets a copy of its reward. If the main agent's sample is not in the list,
    each sibling is graded by itself.

    Run slime with `--reward-key score --eval-reward-key acc`. Without these arguments, slime gets the score alone.

    Args:
        args: slime's args. `strands_rollout["reward"]` (see `RewardSettings`), `reward_key` and `eval_reward_key`
            determine the result.
        sample: slime's Sample, or any object with some of its fields; or a list of these, nested as slime's groups are.
            The answer is taken from the fact `final_text` in `metadata["strands_rollout"]`, together with the facts
            `final_in_reasoning` and `tool_parser`; without `final_text`, from the end of `response`. `label` may be
            any value that `grading.label_texts` takes. `metadata["strands_rollout_grading"]` may choose a grading
            other than mathematics; see `Grading`. In the gradings "math" and "choice", an answer at the end of a cut
            turn (see `is_cut_answer`) does not count (see `grading.extract_answer`).
        kwargs: Ignored; slime may pass more.

    Returns:
        A reward for each sample, in lists nested as the samples are. A reward is a dict with these keys:

        - `score`: the setting `correct` or `wrong`, or the score of the user's reward, of the environment or of slime's
          example. `tool_shaping` may raise or lower `wrong`.
        - `acc`: 1.0 or 0.0, or the `acc` of the user's reward or of the environment.
        - `pred`: the answer as written; "" if there is none.
        - `label`: the row's label as text.
        - `method`: the name of the rule that determined the score.
        - `error`: why the answer could not be judged, else "".
        - `parts/NAME`: one key for each part of the user's reward, and for the two counts of IFEval's instructions.
          Each number other than `score` and `acc` from that reward or from the environment has a key, too.

        A sample whose reward failed (its `method` is `error` or `no_judge`) is excluded from training: it gets
        `remove_sample`.

        If slime reads no key from the reward, the reward is the `score` alone, a float, and the dict is kept in
        `metadata["strands_rollout"]["reward"]`. slime reads no key if `reward_key` is not set, and `eval_reward_key` is
        not set or the sample is for training. If `args` lacks both attributes, the caller is not slime, and gets the
        dict.

    Raises:
        asyncio.CancelledError: The caller was cancelled.
        FailedGroupsError: Too many groups of training samples in a row have nothing to train on, for example while a
            judge is down. The run must end (see `FailedGroups`). Every other failure becomes a reward, because an
            exception would end slime's run.
    """
    del kwargs
    if not isinstance(sample, list | tuple):
        graded = await _grade(args, sample)
        reward = _to_slime_reward(args, sample, graded.details)
        _count_rewards(args, [graded])
        return reward
    flat: list[Any] = []
    _map_nested(sample, flat.append)
    graded_positions = _graded_positions(flat)
    tasks: dict[int, asyncio.Task[_GradedSample]] = {}
    async with asyncio.TaskGroup() as group:
        for position in dict.fromkeys(graded_positions):
            tasks[position] = group.create_task(_grade(args, flat[position]))
            await asyncio.sleep(0)  # one sample in each pass of the event loop: a long list must not block it
    details = (dict(tasks[position].result().details) for position in graded_positions)
    rewards = _map_nested(sample, lambda each: _to_slime_reward(args, each, next(details)))
    _count_rewards(args, [task.result() for task in tasks.values()])
    return rewards


@dataclass(frozen=True, slots=True)
class _GradedSample:
    sample: Any
    details: RewardDict
    episode_number: int | None  # None for an evaluation's or an unreadable sample: it is not counted


async def _grade(args: object, sample: object) -> _GradedSample:
    """Grade one sample; until then, a training episode counts as running, since it may still succeed."""
    try:
        with exits_as_errors("the sample", RuntimeError):
            is_counted, number = not _is_evaluation(sample), take_episode_number(sample)
    except Exception:  # a sample's own class may raise anything
        is_counted, number = False, None
    if not is_counted:
        return _GradedSample(sample, await _compute_reward(args, sample), None)
    with failed_groups_of(args).running_episode(number) as number:
        return _GradedSample(sample, await _compute_reward(args, sample), number)


def _count_rewards(args: object, all_graded: Sequence[_GradedSample]) -> None:
    """Count the rewards of training samples, after all samples have theirs.

    Raises:
        FailedGroupsError: Too many groups failed in a row; the run must end.
    """
    for graded in all_graded:
        failure = str(graded.details["error"]) if graded.details["method"] in FAILED_METHODS else None
        try:
            with exits_as_errors("the sample", RuntimeError):
                if graded.episode_number is not None:
                    count_reward(args, graded.episode_number, graded.sample, failure)
        except FailedGroupsError:
            raise
        except Exception:  # a sample's own class may raise anything
            _LOGGER.debug("the reward can't be counted", exc_info=True)


def _map_nested(samples: Sequence[Any], function: Callable[[Any], T], depth: int = 0) -> list[Any]:
    """Apply a function to each sample in order, and return the results in lists nested as the samples are.

    A list nested more than `_MAX_LIST_DEPTH` levels deep is passed to the function as a bad sample. A list that
    contains itself is such a list.
    """
    is_list = [isinstance(each, list | tuple) and depth < _MAX_LIST_DEPTH for each in samples]
    pairs = zip(samples, is_list, strict=True)
    return [_map_nested(each, function, depth + 1) if nested else function(each) for each, nested in pairs]


def _to_slime_reward(args: object, sample: SampleLike, details: RewardDict) -> Reward:
    """Return the reward as slime reads it from this sample: the dict or the score."""
    try:
        with exits_as_errors("the sample", RuntimeError):
            if details["method"] in FAILED_METHODS:  # not the policy's fault
                sample.remove_sample = True
            if _reads_reward_key(args, sample):
                return details
            if isinstance(sample.metadata, dict):
                add_facts(sample, EpisodeFacts(reward=details))
    except Exception as e:  # a sample's own class may raise anything
        _log_failure(e)
    return float(details["score"])


def _reads_reward_key(args: object, sample: object) -> bool:
    if not (hasattr(args, "reward_key") or hasattr(args, "eval_reward_key")) or getattr(args, "reward_key", None):
        return True  # args are not slime's, or have `reward_key`, which an evaluation without its own key reads too
    if not getattr(args, "eval_reward_key", None):
        return False
    return _is_evaluation(sample)


def _is_evaluation(sample: object) -> bool:
    facts = facts_of(sample)
    # this package's `generate` records `evaluation`; of other samples, only training samples have a `group_index`
    return bool(facts.evaluation) if facts.stop_reason is not None else getattr(sample, "group_index", None) is None


def _graded_positions(samples: Sequence[object]) -> list[int]:
    """Return for each sample the position of the sample whose reward it gets.

    That is the main agent's sample of the same fan-out or, if there is none in the list, the sample itself.
    """
    fan_outs = [_fan_out_key(sample) for sample in samples]
    mains = {key: position for position, (key, part) in enumerate(fan_outs) if part == 0}
    return [position if part is None else mains.get(key, position) for position, (key, part) in enumerate(fan_outs)]


def _fan_out_key(sample: object) -> tuple[Hashable, int | None]:
    """Return a key that siblings share, and the sample's number among them.

    Without a fan-out, the number is None. If the sample has no rollout id or can't be read, both are None.
    """
    try:
        with exits_as_errors("the sample", RuntimeError):
            part, rollout_id = fan_out_part(sample), rollout_id_of(sample)
            key = (getattr(sample, "group_index", None), rollout_id)
            hash(key)
            return (None, None) if rollout_id is None else (key, part)
    except Exception:  # a sample's own class may raise anything; such a sample is graded by itself
        return None, None


async def grade_ahead(args: object, sample: SampleLike) -> None:
    """If slime will call `reward_func` next, grade the sample in its episode worker; slime's call reuses the reward."""
    will_be_graded = uses_reward_func(args, sample) and not getattr(args, "group_rm", False)
    if will_be_graded and sample.reward is None and sample.status is not statuses_of(sample).ABORTED:
        started_at = time.monotonic()
        details = await _compute_reward(args, sample)
        add_facts(sample, EpisodeFacts(reward_ahead=details, score_s=time.monotonic() - started_at))


async def _compute_reward(args: object, sample: object) -> RewardDict:
    """Return the reward of one sample; if the reward fails, the score of a wrong answer with the error."""
    settings = RewardSettings()
    try:
        with exits_as_errors("the sample", RuntimeError):
            if (ahead := take_fact(sample, "reward_ahead")) is not None:
                return cast("RewardDict", ahead)
            run_settings = getattr(args, "strands_rollout", None)
            options = run_settings.get("reward") if isinstance(run_settings, Mapping) else None
            settings = reward_settings(options)
            if settings.is_user_defined:
                return await _user_reward(settings, sample, args)
            return await _built_in_reward(settings, sample)
    except Exception as e:  # a reward that raises ends slime's training run
        method = NO_JUDGE if isinstance(e, EnvironmentFaultError) else REWARD_FAILED
        label = _display_text(getattr(sample, "label", None))
        return _reward_dict(settings.wrong, Grade(correct=False, pred="", label=label, method=method), _log_failure(e))


async def _built_in_reward(settings: RewardSettings, sample: object) -> RewardDict:
    if settings.style == "slime_strands_example":
        return _slime_example_reward(sample)
    if (scored := facts_of(sample).environment_score) is None:
        return await _default_reward(settings, sample)
    from strands_rollout.slime_plugin.own_reward import parse_score

    return _result_as_dict(settings, parse_score(scored, "environment_score"), sample, "environment")


async def _user_reward(settings: RewardSettings, sample: object, args: object) -> RewardDict:
    # Import here: the built-in reward works without Strands
    from strands_rollout.slime_plugin.own_reward import AnswerToGrade, parse_score, user_reward
    from strands_rollout.user_code import add_config_folder

    async def built_in() -> RewardResult:
        details = await _built_in_reward(settings, sample)
        if details["error"]:
            raise RolloutError(str(details["error"]))
        return parse_score({name.removeprefix(PART_PREFIX): value for name, value in details.items()}, "the grade")

    add_config_folder(getattr(args, "custom_config_path", None))
    answer = AnswerToGrade(args, sample, answer_text(sample), getattr(sample, "label", None))
    result = await user_reward(settings, answer, built_in)
    method = "parts" if settings.parts else "function" if settings.function else "evaluator"
    return _result_as_dict(settings, result, sample, method)


def _result_as_dict(settings: RewardSettings, result: RewardResult, sample: object, method: str) -> RewardDict:
    acc = float(result.score >= settings.correct) if result.acc is None else result.acc
    label = _display_text(getattr(sample, "label", None))
    parts = {f"{PART_PREFIX}{name}": value for name, value in result.parts.items()}
    return _reward_dict(result.score, Grade(acc > 0, result.pred, label, method), "") | {"acc": acc, **parts}


async def _default_reward(settings: RewardSettings, sample: object) -> RewardDict:
    """Grade the sample's answer as its row says: compare it with the label, or check the row's instructions."""
    loop = asyncio.get_running_loop()
    verdict, parts = await loop.run_in_executor(
        _grading_pool(os.getpid()), _grade_sample, sample, settings.symbolic_timeout_s
    )
    score = settings.correct if verdict.correct else settings.wrong
    if settings.tool_shaping and not verdict.correct:
        # slime's strands example adds the same term; it is negative for fewer than two tool iterations
        score += min(MAX_TOOL_SHAPING, (_tool_iterations(sample) - 2) / 2 * 0.1)
    error = "the sample has no label" if verdict.method == "no_label" else ""
    return {**_reward_dict(score, verdict, error), **{f"{PART_PREFIX}{name}": value for name, value in parts.items()}}


@functools.cache
def _grading_pool(_pid: int) -> ThreadPoolExecutor:
    """Return the pool of a process; a forked process lacks the threads of its parent's pool."""
    return ThreadPoolExecutor(_GRADING_THREADS, thread_name_prefix="grading")


def grading_of(metadata: object) -> Grading:
    """Return the grading that a row's metadata names under `GRADING_KEY`; without this key, "math".

    Raises:
        PromptError: There is no such grading.
    """
    name = metadata.get(GRADING_KEY, "math") if isinstance(metadata, Mapping) else "math"
    if name not in get_args(Grading):
        raise PromptError(
            f"got {GRADING_KEY}={name!r:.80} in a row's metadata; expected one of {', '.join(get_args(Grading))}"
        )
    return cast("Grading", name)


def check_row_grading(label: object, metadata: Mapping[str, Any]) -> None:
    """Check that the answer of a row can be graded as its metadata says.

    Raises:
        ConfigError: A library that the grading needs is missing.
        PromptError: The grading or an instruction is unknown, or the label of a choice is not a letter.
    """
    grading = grading_of(metadata)
    if grading == "ifeval":
        Instructions.of(metadata).check_usable()
    if grading == "choice" and not (isinstance(label, str) and letter_of(label)):
        raise PromptError(f"got the label {label!r:.80}; expected the letter of the right choice, such as C")


def _grade_sample(sample: object, cpu_s: float) -> tuple[Grade, Mapping[str, float]]:
    text, label, is_cut = answer_text(sample), getattr(sample, "label", None), is_cut_answer(sample)
    metadata = getattr(sample, "metadata", None)
    grading = grading_of(metadata)
    if grading == "choice":
        return grade_choice(text, label, is_cut=is_cut), {}
    if grading == "ifeval":
        followed = Instructions.of(metadata or {}).followed(text, question_of(getattr(sample, "prompt", None) or ""))
        verdict = Grade(correct=all(followed), pred="", label=_display_text(label), method="instructions")
        return verdict, {INSTRUCTIONS_PART: float(len(followed)), FOLLOWED_PART: float(sum(followed))}
    return grade(text, label, cpu_s, is_cut=is_cut), {}


def is_cut_answer(sample: object) -> bool:
    """Return whether the text that holds the answer was cut before its end.

    The episode's facts record this. A sample without facts has only its status. With the status truncated or aborted,
    the last turn counts as cut, although it may be whole.
    """
    facts = facts_of(sample)
    if facts.final_is_cut is not None:
        return facts.final_is_cut
    if facts.stop_reason is not None:  # an old dump, without the fact `final_is_cut`
        return facts.stop_reason in _CUT_REASONS
    status = getattr(sample, "status", None)
    return getattr(status, "value", status) in _CUT_STATUSES


def answer_text(sample: object) -> str:
    """Return the text of the last assistant message or of a program's answer, without reasoning and calls."""
    facts = facts_of(sample)
    if facts.final_text is not None:
        return _remove_reasoning(facts.final_text, facts.tool_parser, in_reasoning=bool(facts.final_in_reasoning))
    prompt = getattr(sample, "prompt", None)
    in_reasoning = isinstance(prompt, str) and prompt.rstrip().endswith("<think>")
    return last_assistant_text(_text(getattr(sample, "response", None)), in_reasoning=in_reasoning)


def _remove_reasoning(turn: str, tool_parser: str | None, *, in_reasoning: bool) -> str:
    """Return a turn's text without reasoning and calls."""
    parser = get_parser(tool_parser) if tool_parser in parser_names() else None
    if parser is None or getattr(parser, "open_reasoning", "") == "<think>":
        return spoken_text(turn, in_reasoning=in_reasoning)
    parts: Sequence[Segment] = ()
    try:
        parts = parser.segments(turn, in_reasoning)
    except Exception:  # a user's parser may raise anything; the policy must not avoid training by provoking an error
        _LOGGER.debug("tool_parser %r failed; the turn is graded as empty", tool_parser, exc_info=True)
    texts = [part.text for part in parts if isinstance(part, Text)]
    return "".join(texts).strip() if parts and isinstance(parts[-1], Text) else ""


def _slime_example_reward(sample: object) -> RewardDict:
    label = getattr(sample, "label", None)
    result = slime_example_grade(_text(getattr(sample, "response", None)), label, _tool_iterations(sample))
    verdict = Grade(correct=result.correct, pred=result.pred, label=_text(label), method="slime_strands_example")
    return _reward_dict(result.score, verdict, result.error)


def _reward_dict(score: float, verdict: Grade, error: str) -> RewardDict:
    return {
        "score": float(score),
        "acc": 1.0 if verdict.correct else 0.0,
        "pred": _shorten(verdict.pred),
        "label": _shorten(verdict.label),
        "method": verdict.method,
        "error": _shorten(error),
    }


def _shorten(text: str) -> str:
    """Cut a text to `_MAX_SHOWN_CHARS`, and replace lone surrogates, which would break a JSON dump."""
    return text[:_MAX_SHOWN_CHARS].encode("utf-8", "replace").decode("utf-8")


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _display_text(value: object) -> str:
    """Return a text that shows the value: a string unchanged, an exception's message, else a short `repr`."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return str(value) if isinstance(value, Exception) else reprlib.repr(value)
    except Exception:  # the methods of the value's class may raise anything
        return f"a {type(value).__name__}"


def _tool_iterations(sample: object) -> float:
    iterations = facts_of(sample).tool_iterations
    return (usable_number(getattr(sample, "tool_iters", 0)) if iterations is None else float(iterations)) or 0.0


def _log_failure(error: Exception) -> str:
    """Log an error and return its text; log each text only once, since a wrong setting fails every sample."""
    text = f"{type(error).__name__}: {_display_text(error)}"
    shown = text[:_MAX_SHOWN_CHARS]
    bug = None if isinstance(error, RolloutError) else error
    log_once(_LOGGER, logging.ERROR, "event=reward_failed error=%s", shown, exc_info=bug)
    return text
