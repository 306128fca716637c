r"""`rescore` scores saved samples with another reward; `validate` checks that a reward accepts a data set's labels.

A reward with slime's signature (`--custom-rm-path`: `async def reward(args, sample)`) is called directly. So is a
reward for `--group-rm`, which takes the samples of a group and returns as many rewards. Any other reward is called
through `reward_func`, like the setting `reward` of a run. `validate` writes each row's ground truth as a policy would:
by default as `\boxed{label}` and as the line `Answer: label`. Each form must score at least 1, for each alternative of
the label. A reward may read the facts of an episode. To such a reward, the answer looks like an episode of one turn
without tool calls.
"""

import asyncio
import copy
import inspect
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strands_rollout.dump import DumpRecord, DumpWriter, read_dump
from strands_rollout.dump.terminal import counter, make_console, printable
from strands_rollout.errors import ConfigError, DumpError, PromptError, RolloutError, ToolError
from strands_rollout.exits import exits_as_errors
from strands_rollout.files.json_codec import Json
from strands_rollout.grading import container_label, label_texts
from strands_rollout.play.options import Changes
from strands_rollout.play.rows import Row, iter_rows, json_line
from strands_rollout.samples import (
    FAILED_METHODS,
    METADATA_KEY,
    METADATA_VERSION,
    EpisodeFacts,
    Sample,
    finite_number,
    question_of,
    reward_details,
)
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.inputs import ROW_SETTINGS_KEY, SLIME_TOOLS_KEY, with_row_settings
from strands_rollout.slime_plugin.reward import check_row_grading, grading_of, reward_func
from strands_rollout.user_code import add_config_folder

ANSWER_FORMS: Final = ("\\boxed{{label}}", "Answer: {label}")
"""Forms of a correct answer; only LABEL_PLACEHOLDER is replaced, so `\\boxed{{label}}` becomes `\\boxed{34}`."""
LABEL_PLACEHOLDER: Final = "{label}"
_CORRECT_SCORE: Final = 1.0
_COMPLETED: Final = Sample.Status.COMPLETED
_MAX_CONCURRENT_CALLS: Final = 64
_ROW_BATCH: Final = 500
_SAMPLE_BATCH: Final = 200
_UNSCORED_STATUSES: Final = frozenset({"aborted", "pending"})
_USER_METHODS: Final = frozenset({"function", "parts", "evaluator"}) | FAILED_METHODS
_TOLERANCE: Final = 1e-9
_TEXT_WIDTH: Final = 60
_MAX_LISTED: Final = 3
# quoted strings, and numbers: reasons that differ only in these are reported together
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|-?\d+(?:\.\d+)?")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function and the arguments to call it with."""

    function: Callable[..., object]  # sync or async; sync functions are called in threads
    args: SimpleNamespace  # the arguments of slime that this package reads
    keys: tuple[str, ...]  # keys of the number in a reward that is a dict; the first one in the dict is used
    takes_groups: bool = False  # True if the function takes the list of a group's samples, as with slime's --group-rm
    grades_labels: bool = False  # True if this package's grading compares answers with the labels
    settings: RolloutSettings | None = None  # the configured settings; if None, settings of rows are not checked

    @property
    def is_reward_func(self) -> bool:
        """True if the function is this package's `reward_func`, which returns a failure as a reward."""
        return self.function is reward_func

    async def rewards(self, samples: Sequence[Sample]) -> list[object]:
        """Return the reward of each sample, in the samples' order.

        If a call raises, the reward of each of the call's samples is an exception. The same holds if a call for a group
        does not return a list with one reward per sample.
        """
        if self.is_reward_func:  # in one call: siblings of a fan-out share their main agent's reward
            return cast(list[object], await reward_func(self.args, list(samples)))
        semaphore = asyncio.Semaphore(_MAX_CONCURRENT_CALLS)

        async def call_or_error(given: Sample | list[Sample]) -> object:
            async with semaphore:
                try:
                    return await self._call(given)
                except Exception as e:  # a user's reward may raise anything; the other samples are still scored
                    return e

        if not self.takes_groups:
            return list(await asyncio.gather(*map(call_or_error, samples)))
        by_group = groupby(
            samples,
            key=lambda sample: id(sample) if sample.group_index is None else ("group", sample.group_index),
        )
        groups = [list(group) for _, group in by_group]
        results = await asyncio.gather(*map(call_or_error, groups))
        return [
            reward
            for group, result in zip(groups, results, strict=True)
            for reward in _split_group_result(result, len(group))
        ]

    def number(self, reward: object) -> float | None:
        """Return the finite number in a reward; None if there is none."""
        if isinstance(reward, Mapping):
            reward = next((reward[key] for key in self.keys if key in reward), None)
        return float(reward) if isinstance(reward, bool) else finite_number(reward)

    async def _call(self, given: Sample | list[Sample]) -> object:
        with exits_as_errors("the reward", RuntimeError):
            if inspect.iscoroutinefunction(self.function):
                return await self.function(self.args, given)
            reward = await asyncio.to_thread(self.function, self.args, given)
            return await reward if inspect.isawaitable(reward) else reward


def _split_group_result(result: object, count: int) -> list[object]:
    if isinstance(result, Exception):
        return [result] * count
    if not isinstance(result, list | tuple) or len(result) != count:
        got = f"{len(result)} rewards" if isinstance(result, list | tuple) else f"{result!r:.200}"
        return [TypeError(f"got {got} for a group; expected a list of {count} rewards")] * count
    return list(result)


def load_reward(
    path: str | None, config: Path | None, keys: Sequence[str], *, changes: Changes = None, takes_groups: bool = False
) -> RewardCall:
    """Load the reward at a dotted path, or this package's reward if `path` is None, with a configuration's settings.

    Unless `takes_groups` is true, a function without slime's signature becomes the setting `reward` of this package's
    reward, which calls the function.

    Raises:
        ConfigError: The function can't be loaded, or the configuration is invalid.
    """
    # imported here because they import Strands
    from strands_rollout.agent.tool_loading import load_function
    from strands_rollout.settings import read_config_file
    from strands_rollout.slime_plugin.own_reward import check_reward, takes_args_and_sample

    add_config_folder(config)
    try:
        function: Callable[..., object] = reward_func if path is None else load_function(path)
        if path is not None and not takes_groups and not takes_args_and_sample(function):
            function, changes = reward_func, [*(changes or ()), f"reward={path}"]
        settings = read_config_file(config, changes)
        check_reward(settings.reward)
    except ToolError as e:
        raise ConfigError(str(e)) from e
    values = settings.model_dump(mode="json") | {"max_failed_groups": None}  # failures don't end the grading
    args = SimpleNamespace(strands_rollout=values, reward_key=keys[0], eval_reward_key=keys[0])
    grades_labels = function is reward_func and settings.needs_labels
    return RewardCall(function, args, tuple(keys), takes_groups, grades_labels, settings)


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """A row's prompt, label and metadata, and the texts of the label; each text alone is a correct answer."""

    prompt: Json
    label: Json
    texts: tuple[str, ...]
    metadata: Mapping[str, Json] = field(default_factory=dict)


async def check_ground_truths(
    ground_truths: Sequence[GroundTruth], reward: RewardCall, answer_forms: Sequence[str] = ANSWER_FORMS
) -> list[str]:
    """Return, for each ground truth, the reason why it does not score at least 1; "" if it does.

    Scores each text in each of the `answer_forms`.
    """
    return [refusal.reason for refusal in await _find_refusals(ground_truths, reward, answer_forms)]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The reason why a ground truth does not score at least 1; "" if it does."""

    reason: str = ""
    has_reward_failed: bool = False  # True if the reward raised or failed, so the row may be right


async def _find_refusals(
    ground_truths: Sequence[GroundTruth], reward: RewardCall, answer_forms: Sequence[str]
) -> list[_Refusal]:
    refusals, samples, indices = [], [], []
    for index, truth in enumerate(ground_truths):
        refusals.append(_Refusal("" if truth.texts else f"no answer equals the label {truth.label!r:.80}"))
        common = {"prompt": truth.prompt, "label": truth.label, "status": _COMPLETED}
        for response in (form.replace(LABEL_PLACEHOLDER, text) for text in truth.texts for form in answer_forms):
            facts = {METADATA_KEY: _one_turn_facts(truth.prompt, response).to_metadata()}
            samples.append(Sample(**common, response=response, metadata={**truth.metadata, **facts}))
            indices.append(index)
    for index, sample, answer in zip(indices, samples, await reward.rewards(samples), strict=True):
        if not refusals[index].reason and (reason := _refusal_reason(reward, answer, sample.response)):
            method = answer.get("method") if reward.is_reward_func and isinstance(answer, Mapping) else None
            refusals[index] = _Refusal(reason, isinstance(answer, Exception) or method in FAILED_METHODS)
    return refusals


def _one_turn_facts(prompt: Json, response: str) -> EpisodeFacts:
    question = question_of(cast("Any", prompt)) if isinstance(prompt, str | list) else ""
    messages = [
        {"role": role, "content": [{"text": text}]} for role, text in (("user", question), ("assistant", response))
    ]
    evaluated = {"messages": messages, "tools": [], "system_prompt": None, "state": None, "is_whole": True}
    return EpisodeFacts(
        version=METADATA_VERSION,
        stop_reason="completed",
        final_text=response,
        final_in_reasoning=False,
        turns=1,
        parse_failures=0,
        generate_s=0,
        sampled_tokens=0,
        tool_iterations=0,
        tool_calls=0,
        user_turns=0,
        tool_errors=0,
        tool_timeouts=0,
        unknown_tools=0,
        tool_s=0,
        calls=[],
        duration_s=0,
        segments=1,
        stale_tokens=0,
        dropped_sampled_tokens=0,
        evaluated=evaluated,
        evaluation=True,
    )


def _refusal_reason(reward: RewardCall, answer: object, response: str) -> str:
    if isinstance(answer, Exception):
        return f"the reward raises {type(answer).__name__}: {answer} for {response!r:.200}"
    number = reward.number(answer)
    if number is not None and number >= _CORRECT_SCORE:
        return ""
    if reward.is_reward_func and isinstance(answer, Mapping) and answer["method"] not in _USER_METHODS:
        wrong = f"the reward reads the ground truth as {answer['pred']!r} and grades it as wrong ({answer['method']})"
        return f"{wrong}; {answer['error']}" if answer["error"] else wrong
    if reward.is_reward_func and isinstance(answer, Mapping):
        shown = f"{answer['score']:g}, acc {answer['acc']:g},"
        return answer["error"] or (
            f"the reward gives {shown} for {response!r:.200}; expected 1 or more; to try another form, give --answer"
        )
    return f"the reward gives {answer!r:.200} for {response!r:.200}; expected {_CORRECT_SCORE:g} or more"


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that is unreadable, has invalid settings or grading, or has a ground truth that scores less than 1."""

    line: int  # from 1
    label: Json  # None if the row can't be read
    reason: str


async def run_validate(
    path: Path, reward: RewardCall, *, prompt_key: str, label_key: str, answer_forms: Sequence[str] = ANSWER_FORMS,
    as_json: bool = False,
) -> bool:  # fmt: skip
    """Score the ground truth of each row of a data file and print the rows that fail; return whether all pass.

    If this package grades the answers, a row with the grading "ifeval" has no ground truth to score; it passes if its
    instructions can be checked.

    Raises:
        ConfigError: A library that a row's grading needs is missing.
        PromptError: The file can't be read, or is empty.
    """
    lines = list(iter_rows(path, prompt_key=prompt_key, label_key=label_key))
    unreadable = [(number, error) for number, error in lines if isinstance(error, PromptError)]
    faults = [RowFault(number, None, str(error).removeprefix(f"{path}:{number}: ")) for number, error in unreadable]
    readable = [row for _, row in lines if isinstance(row, Row)]
    invalid = [(row, reason) for row in readable if (reason := _row_fault(row, reward))]
    faults += [RowFault(row.line, row.label, reason) for row, reason in invalid]
    invalid_lines = {row.line for row, _ in invalid}
    valid = [row for row in readable if row.line not in invalid_lines]
    # leave out rows of IFEval: their label names instructions, and is not an answer
    rows = [row for row in valid if not reward.grades_labels or grading_of(row.metadata) != "ifeval"]
    failures: list[RowFault] = []
    with counter("ground truths") as on_done:
        on_done(len(faults))
        for start in range(0, len(rows), _ROW_BATCH):
            batch = rows[start : start + _ROW_BATCH]
            ground_truths = [_ground_truth(row, reward) for row in batch]
            for row, refusal in zip(batch, await _find_refusals(ground_truths, reward, answer_forms), strict=True):
                if refusal.reason:
                    fault = RowFault(row.line, row.label, refusal.reason)
                    (failures if refusal.has_reward_failed else faults).append(fault)
            on_done(len(batch))
    is_reward_at_fault = len(failures) == len(rows) > 0  # if the reward fails for every row, no row is at fault
    faults = sorted(faults if is_reward_at_fault else [*faults, *failures], key=lambda fault: fault.line)
    unscored = failures if is_reward_at_fault else []
    notes = _container_notes(rows) if reward.grades_labels else []
    right, ok = len(lines) - len(faults) - len(unscored), not (faults or unscored)
    if as_json:
        listed = [asdict(fault) for fault in faults]
        failure = {"error": unscored[0].reason} if unscored else {}
        report = {"ok": ok, "rows": len(lines), "right": right, "unscored": len(unscored), **failure, "faults": listed}
        report["notes"] = [asdict(note) for note in notes]
        print(json_line(report).decode(), end="")
        return ok
    messages: list[tuple[int, str]] = []
    for group in _group_by_reason(faults, lambda fault: fault.reason):
        if len(group) > _MAX_LISTED:
            numbers = _list_numbers([fault.line for fault in group])
            text = f"{path}: {len(group)} rows (lines {numbers}); the first: {group[0].reason}"
            messages.append((group[0].line, text))
            continue
        for fault in group:
            label = json.dumps(fault.label, default=str)
            messages.append((fault.line, f"{path}:{fault.line}: label {label}: {fault.reason}"))
    for _, text in sorted(messages):
        print(printable(text))
    for note in notes:
        similar = "" if note.rows == 1 else f" ({note.rows} such labels)"
        print(printable(f"{path}:{note.line}: note: label {json.dumps(note.label)} {note.meaning}{similar}"))
    for group in _group_by_reason(unscored, lambda fault: fault.reason):
        numbers = _list_numbers([fault.line for fault in group])
        where = (
            f"1 ground truth (line {numbers})" if len(group) == 1 else f"{len(group)} ground truths (lines {numbers})"
        )
        print(printable(f"the reward failed for {where}: {group[0].reason}"))
    if unscored:
        print(
            "the reward failed for every ground truth, so none was scored; if the reward needs facts that only a "
            "played episode has, score a dump with: strands-rollout rescore"
        )
    print(f"{right} of {len(lines)} ground truths are right" + (f", {len(unscored)} not scored" if unscored else ""))
    return ok


def _row_fault(row: Row, reward: RewardCall) -> str:
    """Return why the row is refused; "" if it is not.

    Raises:
        ConfigError: A library that the row's grading needs is missing.
    """
    if reason := _row_settings_fault(row, reward.settings):
        return reason
    try:
        if reward.grades_labels:
            check_row_grading(row.label, row.metadata)
    except PromptError as e:
        return str(e)
    return ""


def _row_settings_fault(row: Row, settings: RolloutSettings | None) -> str:
    """Return the reason why the settings in a row would fail its episode; "" if they are valid."""
    given, own = row.metadata, row.metadata.get(ROW_SETTINGS_KEY)
    if settings is None or (own is None and not given.get(SLIME_TOOLS_KEY)):
        return ""
    if not {"tools", "row_tools"} & settings.model_fields_set:  # don't check the row's tools
        own = {name: value for name, value in own.items() if name != "tools"} if isinstance(own, Mapping) else own
        given = {ROW_SETTINGS_KEY: own}
    try:
        with_row_settings(settings, given)
    except RolloutError as e:
        return f"the row's settings are invalid: {e}"
    return ""


def _group_by_reason(items: Iterable[T], reason: Callable[[T], str]) -> list[list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(_QUOTED.sub("", reason(item)), []).append(item)
    return list(groups.values())


def _list_numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_MAX_LISTED])) + (", ..." if len(numbers) > _MAX_LISTED else "")


@dataclass(frozen=True, slots=True)
class LabelNote:
    """A note on labels that look like the text of a container, such as a Python list."""

    kind: str
    rows: int  # number of rows with such a label
    line: int  # line of the first such row
    label: str  # label of the first such row
    meaning: str


def _container_notes(rows: Sequence[Row]) -> list[LabelNote]:
    found = [(row, container) for row in rows if (container := container_label(row.label))]
    counts = Counter(container.kind for _, container in found)
    firsts = {container.kind: (row, container.meaning) for row, container in reversed(found)}
    notes = [LabelNote(kind, counts[kind], row.line, row.label, meaning) for kind, (row, meaning) in firsts.items()]
    return sorted(notes, key=lambda note: note.line)


def _ground_truth(row: Row, reward: RewardCall) -> GroundTruth:
    # a label that this package's reward refuses has no texts: a mapping, or a label that makes `label_texts` raise
    texts: tuple[str, ...] = ()
    if not (reward.is_reward_func and isinstance(row.label, Mapping)):
        with suppress(ValueError):
            texts = label_texts(row.label)
    return GroundTruth(row.prompt, row.label, texts, row.metadata)


@dataclass(frozen=True, slots=True)
class Rescored:
    """A sample of a dump with its old and new reward as numbers; None if the reward failed or has no number.

    A sample without a new number was not scored: its status is aborted or pending, or `error` says why.
    """

    number: int  # index in the dump, from 0
    index: Json
    status: Json
    label: Json
    ending: str  # the end of the response
    old: float | None
    new: float | None = None
    error: str | None = None

    @property
    def is_changed(self) -> bool:
        """True if both rewards have a number, and the numbers differ."""
        return self.old is not None and self.new is not None and abs(self.new - self.old) > _TOLERANCE


async def rescore(path: Path, reward: RewardCall) -> AsyncIterator[tuple[DumpRecord, Rescored]]:
    """Yield a dump's samples, in its order, with the new reward; a sample that can't be scored keeps its old reward.

    The reward function receives each sample as slime passes it, without a reward. Aborted samples are not scored, as in
    slime, nor are pending samples.

    Raises:
        DumpError: The dump can't be read, or has no samples.
    """
    number = 0
    for records in _batches(read_dump(path)):
        # copies: a reward may change the sample that it gets, and the new dump must not contain the change
        samples = {
            i: replace(record, values=copy.deepcopy({**record.values, "reward": None})).to_sample()
            for i, record in enumerate(records)
            if record.values.get("status") not in _UNSCORED_STATUSES
        }
        rewards = dict(zip(samples, await reward.rewards(list(samples.values())), strict=True))
        for i, record in enumerate(records):
            index, status, label = (record.values.get(name) for name in ("index", "status", "label"))
            ending = " ".join(str(record.values.get("response"))[-200:].split())[-_TEXT_WIDTH:]
            details = reward_details(record.to_sample())
            has_failed = details.get("method") in FAILED_METHODS  # a failed reward must not be compared
            old = None if has_failed else reward.number(record.values.get("reward"))
            unscored = Rescored(number + i, index, status, label, ending, old)
            yield _with_new_reward(record, unscored, rewards[i], reward) if i in rewards else (record, unscored)
        number += len(records)
    if not number:
        raise DumpError(f"{path} has no samples; expected at least one")


def _batches(records: Iterable[DumpRecord]) -> Iterator[list[DumpRecord]]:
    """Yield batches of records, without splitting consecutive records of a group or a fan-out."""

    def group_of(record: DumpRecord) -> tuple[str, Json]:
        keys = ((key, record.values.get(key)) for key in ("group_index", "rollout_id"))
        return next((pair for pair in keys if pair[1] is not None), ("alone", record.where))

    batch: list[DumpRecord] = []
    for _, group in groupby(records, key=group_of):
        batch += group
        if len(batch) >= _SAMPLE_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _with_new_reward(
    record: DumpRecord, unscored: Rescored, answer: object, reward: RewardCall
) -> tuple[DumpRecord, Rescored]:
    if isinstance(answer, Exception):
        return record, replace(unscored, error=f"{type(answer).__name__}: {answer}")
    if reward.is_reward_func and isinstance(answer, Mapping) and answer["method"] in FAILED_METHODS:
        return record, replace(unscored, error=answer["error"])
    new = reward.number(answer)
    if new is None:
        expected = f"a number, or a dict with one under {' or '.join(map(repr, reward.keys))} (--reward-key)"
        return record, replace(unscored, error=f"got the reward {answer!r:.200}; expected {expected}")
    return replace(record, values={**record.values, "reward": answer}), replace(unscored, new=new)


def totals_of(found: Sequence[Rescored]) -> dict[str, int | float | None]:
    """Return counts of a rescored dump, the means of its old and new numbers, and their correlation.

    `failed` counts the samples whose reward failed or gave no number. `compared` and all keys after it are
    about the samples with an old and a new number; of these, `raised` have a higher new number. The correlation is
    Pearson's; None for fewer than two samples, or if all old or all new numbers are equal. The means are None if no
    sample has both numbers.
    """
    pairs = [(sample.old, sample.new) for sample in found if sample.old is not None and sample.new is not None]
    old, new = ([pair[side] for pair in pairs] for side in (0, 1))
    changed = [sample for sample in found if sample.is_changed]
    raised = sum((sample.new or 0.0) > (sample.old or 0.0) for sample in changed)
    varies = len(pairs) > 1 and np.ptp(old) > 0 and np.ptp(new) > 0
    return {
        "samples": len(found),
        "scored": sum(sample.new is not None for sample in found),
        "failed": sum(sample.error is not None for sample in found),
        "compared": len(pairs),
        "changed": len(changed),
        "raised": raised,
        "lowered": len(changed) - raised,
        "old_mean": float(np.mean(old)) if old else None,
        "new_mean": float(np.mean(new)) if new else None,
        "correlation": float(np.corrcoef(old, new)[0, 1]) if varies else None,
    }


async def run_rescore(
    dump: Path, reward: RewardCall, *, out: Path | None = None, show: int = 50, as_json: bool = False
) -> bool:
    """Rescore a dump, write a new dump to `out` if it is not None, and print what changed.

    Returns:
        False if the reward failed or gave no number for a sample, else True.
    """
    found: list[Rescored] = []
    with nullcontext() if out is None else DumpWriter(out) as writer, counter("samples") as on_done:
        async for record, rescored in rescore(dump, reward):
            if writer is not None:
                writer.write(record)
            found.append(rescored)
            on_done(1)
    totals = totals_of(found)
    if as_json:
        for rescored in found:
            facts = {name: getattr(rescored, name) for name in ("number", "index", "old", "new", "error")}
            print(json_line({**facts, "changed": rescored.is_changed}).decode(), end="")
        print(json_line(totals).decode(), end="")
    else:
        _show(make_console(), found, totals, show)
    return not totals["failed"]


def _show(console: Console, found: Sequence[Rescored], totals: Mapping[str, int | float | None], show: int) -> None:
    changed = [sample for sample in found if sample.is_changed]
    if changed and show:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for name in ("sample", "index", "status", "label", "old", "new", "the response ends"):
            table.add_column(name, justify="right" if name in ("sample", "index", "old", "new") else "left")
        for sample in changed[:show]:
            label = shorten(str(sample.label), 16, placeholder="...")
            old, new = f"{sample.old:g}", f"{sample.new:g}"
            cells = (sample.number, sample.index, sample.status, label, old, new, sample.ending)
            table.add_row(*(Text(printable(str(cell))) for cell in cells))  # escaped first, so that the widths fit
        console.print(table)
    for group in _group_by_reason((sample for sample in found if sample.error), lambda sample: str(sample.error))[
        :show
    ]:
        several = f"{len(group)} samples ({_list_numbers([sample.number for sample in group])})"
        name = f"sample {group[0].number}" if len(group) == 1 else several
        console.print(Text(f"{name} could not be scored: {group[0].error}", style="red"), soft_wrap=True)
    summary = "{scored} of {samples} samples scored, {failed} failed"
    if totals["compared"]:
        summary += "; {changed} of {compared} with an old reward changed ({raised} up, {lowered} down), "
        summary += "mean {old_mean:.4g} -> {new_mean:.4g}, correlation "
        undefined = "undefined, because all old or all new rewards are equal"
        summary += undefined if totals["correlation"] is None else "{correlation:.3f}"
    console.print(Text(summary.format(**totals)), soft_wrap=True)
