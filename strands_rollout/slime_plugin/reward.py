"""slime's reward entry: a sample in, a dict of plain JSON values out, and never an exception.

Knows the few fields of a Sample that grading needs, and the settings. What an answer means is `grading`'s business.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from strands_rollout.episode_facts import episode_facts, fan_out_part
from strands_rollout.grading import Grade, grade, last_assistant_text, spoken_text
from strands_rollout.grading.dapo_score import slime_example_grade
from strands_rollout.grading.symbolic import compare_symbolically
from strands_rollout.reward_settings import TOOL_SHAPING_CEILING, RewardSettings

_LOGGER = logging.getLogger(__name__)
_NAMESPACE: Final = "strands_rollout"  # of our settings on args
_LONGEST_INLINE_CHARS: Final = 10_000  # a longer text is read in a thread, so that the loop stays free
_LONGEST_SHOWN_CHARS: Final = 200
_MOST_REPORTED: Final = 50
_ERRORS: Final = {
    "no_label": "the sample has no label",
    "algebra_unavailable": "no symbolic worker could be started; the log says why",
    "algebra_crash": "the symbolic worker ended twice on this answer",
}
_reported: set[str] = set()

RewardDict: TypeAlias = dict[str, float | str]
RewardList: TypeAlias = "list[RewardDict | RewardList]"


async def reward_func(args: object, sample: Any, **kwargs: object) -> RewardDict | RewardList:  # noqa: ANN401
    """Grade the last assistant turn of a sample, or of each sample of a list; slime's `--custom-rm-path`.

    In a list, the siblings of a fan-out (one `rollout_id`) have one outcome, that of their main agent: its sample is
    graded, once, and each gets a copy of its reward. Where the main agent's sample is not in the list, each is graded
    by itself.

    Run slime with `--reward-key score --eval-reward-key acc`.

    Args:
        args: slime's; only `args.strands_rollout["reward"]` is read, see `RewardSettings`.
        sample: slime's Sample, or any object with some of its fields; it is not changed. The text is
            `metadata["strands_rollout"]["final_text"]` where there is one (the last model turn's own text, with
            `final_in_reasoning` true beside it if the prompt had opened `<think>`), else cut out of `response`. `label`
            may be whatever `grading.label_texts` takes. A list may hold lists, as slime's groups of fan-outs do.
        kwargs: Ignored: slime may pass more.

    Returns:
        For each sample, in lists like those given, a dict with the keys `score` (the settings' `correct` or `wrong`,
        perhaps shaped), `acc` (1.0 or 0.0), `pred` (the answer as written, "" for none), `label`, `method` (what
        decided), `error` (why the answer could not be judged, and so counts as wrong; else ""). Raises nothing but
        CancelledError: an exception would end slime's training run.
    """
    del kwargs
    if not isinstance(sample, list | tuple):
        return await _reward(args, sample)
    flat = list(_flat(sample))
    graders = _graders(flat)
    tasks: dict[int, asyncio.Task[RewardDict]] = {}
    async with asyncio.TaskGroup() as group:
        for position in dict.fromkeys(graders):
            tasks[position] = group.create_task(_reward(args, flat[position]))
            await asyncio.sleep(0)  # one sample per turn of the loop: a long list must not hold it
    return _nested(sample, iter([dict(tasks[position].result()) for position in graders]))


def _flat(samples: Sequence[Any]) -> Iterator[object]:
    for sample in samples:
        if isinstance(sample, list | tuple):
            yield from _flat(sample)
        else:
            yield sample


def _nested(samples: Sequence[Any], rewards: Iterator[RewardDict]) -> RewardList:
    """The rewards of the flat samples in the lists that the samples were in."""
    return [_nested(one, rewards) if isinstance(one, list | tuple) else next(rewards) for one in samples]


def _graders(samples: Sequence[object]) -> list[int]:
    """For each sample the position of the one whose reward it gets: its main agent's, else its own."""
    fan_outs = [_fan_out(sample) for sample in samples]
    mains = {key: position for position, (key, part) in enumerate(fan_outs) if part == 0}
    return [position if part is None else mains.get(key, position) for position, (key, part) in enumerate(fan_outs)]


def _fan_out(sample: object) -> tuple[Hashable, int | None]:
    """What siblings share, and which of them the sample is; (None, None) for a sample of no fan-out."""
    try:
        part, rollout_id = fan_out_part(sample), getattr(sample, "rollout_id", None)
        key = (getattr(sample, "group_index", None), rollout_id)
        hash(key)
    except Exception:  # whatever a foreign sample raises when it is read, it is still graded, by itself
        return None, None
    return (None, None) if rollout_id is None else (key, part)


async def _reward(args: object, sample: object) -> RewardDict:
    settings = RewardSettings()
    try:
        settings = _settings(args)
        if settings.style == "slime_strands_example":
            return _slime_example_reward(sample)
        scored = episode_facts(sample).get("environment_score")
        if isinstance(scored, Mapping):
            return _environments_reward(settings, scored, sample)
        return await _default_reward(settings, sample)
    except Exception as e:  # a reward that raises ends slime's training run
        _report(e)
        verdict = Grade(correct=False, pred="", label="", method="error")
        return _as_dict(settings.wrong, verdict, f"{type(e).__name__}: {e}")


def _settings(args: object) -> RewardSettings:
    """The validated settings; the defaults where there are none."""
    ours = getattr(args, _NAMESPACE, None)
    options = ours.get("reward") if isinstance(ours, Mapping) else None
    return RewardSettings() if options is None else RewardSettings.model_validate(options)


def _environments_reward(settings: RewardSettings, score: Mapping[str, Any], sample: object) -> RewardDict:
    """What the episode's environment gave; right is what it says, else a score of at least a right answer's."""
    correct = score["acc"] > 0 if "acc" in score else score["score"] >= settings.correct
    label = _text(getattr(sample, "label", None))
    verdict = Grade(correct=bool(correct), pred="", label=label, method="environment")
    return _as_dict(score["score"], verdict, "") | {"acc": float(score.get("acc", correct))}


async def _default_reward(settings: RewardSettings, sample: object) -> RewardDict:
    response = _text(getattr(sample, "response", None))
    if len(response) > _LONGEST_INLINE_CHARS:
        verdict = await asyncio.to_thread(_grade_sample, sample, response)
    else:
        verdict = _grade_sample(sample, response)
    correct, method = verdict.correct, verdict.method
    for prediction, label in verdict.formulas:
        comparison = await compare_symbolically(prediction, label, settings.symbolic_timeout_s)
        correct, method = comparison.equal, comparison.method
        if correct:
            break
    score = settings.correct if correct else settings.wrong
    if settings.tool_shaping and not correct:
        score += min(TOOL_SHAPING_CEILING, _tool_bonus(sample))
    verdict = Grade(correct=bool(correct), pred=verdict.pred, label=verdict.label, method=method)
    return _as_dict(score, verdict, _ERRORS.get(method, ""))


def _grade_sample(sample: object, response: str) -> Grade:
    facts = episode_facts(sample)
    final_text = facts.get("final_text")
    if isinstance(final_text, str):
        said = spoken_text(final_text, in_reasoning=bool(facts.get("final_in_reasoning")))
    else:
        prompt = getattr(sample, "prompt", None)
        in_reasoning = isinstance(prompt, str) and prompt.rstrip().endswith("<think>")
        said = last_assistant_text(response, in_reasoning=in_reasoning)
    return grade(said, getattr(sample, "label", None))


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


def _tool_iterations(sample: object) -> float:
    found = episode_facts(sample).get("tool_iterations", getattr(sample, "tool_iters", 0))
    is_number = isinstance(found, int | float) and math.isfinite(found)
    return float(found) if is_number else 0.0


def _tool_bonus(sample: object) -> float:
    """What slime's strands example adds to a failure: negative below two iterations."""
    return (_tool_iterations(sample) - 2) / 2 * 0.1


def _report(error: Exception) -> None:
    """Log each kind of failure once with its traceback: a wrong setting would repeat it for every sample."""
    kind = f"{type(error).__name__}: {error}"[:_LONGEST_SHOWN_CHARS]
    if kind not in _reported and len(_reported) < _MOST_REPORTED:
        _reported.add(kind)
        _LOGGER.error("event=reward_failed error=%s", kind, exc_info=error)
