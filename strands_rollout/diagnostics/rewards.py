r"""`rescore` and `validate`: a reward for saved samples, compared with what they had, and for a data set's own labels.

A reward with slime's own signature (`--custom-rm-path`: `async def reward(args, sample)`) is called as it is; any
other by `reward_func`, as the setting `reward` of a run. One for `--group-rm` takes the samples of a group, and returns
as many rewards. A gold answer is a row's own label as the policy would write it: as `\boxed{label}` and in a line
`Answer: label`; both must be right, and of several alternatives each. To a reward that reads the facts of an episode it
is one that answers in its first turn and calls no tools.
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
from strands_rollout.play.rows import Row, each_row, json_line
from strands_rollout.samples import (
    FAILED_METHODS,
    METADATA_KEY,
    METADATA_VERSION,
    EpisodeFacts,
    Sample,
    finite,
    question_of,
    reward_details,
)
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.inputs import ROW_SETTINGS_KEY, SLIME_TOOLS_KEY, with_row_settings
from strands_rollout.slime_plugin.reward import reward_func
from strands_rollout.user_code import search_beside

SAYINGS: Final = ("\\boxed{{label}}", "Answer: {label}")
"""How a policy may write an answer, with its label in place of `{label}`."""
PLACE: Final = "{label}"
_RIGHT: Final = 1.0
_COMPLETED: Final = Sample.Status.COMPLETED
_CALLS_AT_ONCE: Final = 64
_ROWS_AT_ONCE: Final = 500
_SAMPLES_AT_ONCE: Final = 200
_UNSCORED: Final = frozenset({"aborted", "pending"})
_OF_USERS: Final = frozenset({"function", "parts", "evaluator"}) | FAILED_METHODS
_EQUAL_WITHIN: Final = 1e-9
_TEXT_WIDTH: Final = 60
_FEW: Final = 3
# what an error quotes of its row: texts, numbers, and an answer's own value
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|-?\d+(?:\.\d+)?")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function and what it is called with."""

    function: Callable[..., object]  # sync or async; sync ones are called in threads
    args: SimpleNamespace  # slime's, as far as this package reads them
    keys: tuple[str, ...]  # where a dict has its number: the first of these that it has
    takes_groups: bool = False  # all samples of a group as a list, as by slime's --group-rm
    grades_labels: bool = False  # whether this package's grading compares answers with the labels
    settings: RolloutSettings | None = None  # of the configuration

    @property
    def is_own(self) -> bool:
        """Whether it is this package's, which may ask a function of the settings, and never raises."""
        return self.function is reward_func

    async def rewards(self, samples: Sequence[Sample]) -> list[object]:
        """The reward of each sample, in order; the exception where it raised one, never a raised one."""
        if self.is_own:  # all of them at once: siblings of a fan-out have their main agent's reward
            return cast(list[object], await reward_func(self.args, list(samples)))
        gate = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def ask(given: Sample | list[Sample]) -> object:
            async with gate:
                try:
                    return await self._reward(given)
                except Exception as e:  # a user's reward may raise anything, and the other samples still count
                    return e

        if not self.takes_groups:
            return list(await asyncio.gather(*map(ask, samples)))
        neighbours = groupby(
            samples, key=lambda one: id(one) if one.group_index is None else ("group", one.group_index)
        )
        groups = [list(group) for _, group in neighbours]
        answers = await asyncio.gather(*map(ask, groups))
        return [one for group, answer in zip(groups, answers, strict=True) for one in _each(answer, len(group))]

    def number(self, reward: object) -> float | None:
        """The finite number of a reward; None where it has none."""
        if isinstance(reward, Mapping):
            reward = next((reward[key] for key in self.keys if key in reward), None)
        return float(reward) if isinstance(reward, bool) else finite(reward)

    async def _reward(self, given: Sample | list[Sample]) -> object:
        with exits_as_errors("it", RuntimeError):
            if inspect.iscoroutinefunction(self.function):
                return await self.function(self.args, given)
            found = await asyncio.to_thread(self.function, self.args, given)
            return await found if inspect.isawaitable(found) else found


def _each(answer: object, count: int) -> list[object]:
    """The rewards of a group, one for each of its samples."""
    if isinstance(answer, Exception):
        return [answer] * count
    if not isinstance(answer, list | tuple) or len(answer) != count:
        got = f"{len(answer)}" if isinstance(answer, list | tuple) else f"{answer!r:.200}"
        return [TypeError(f"got {got} for a group; expected a list of {count} rewards")] * count
    return list(answer)


def load_reward(
    path: str | None, config: Path | None, keys: Sequence[str], *, changes: Changes = None, takes_groups: bool = False
) -> RewardCall:
    """The reward at a dotted path, this package's own for None, with the settings of a configuration.

    Raises:
        ConfigError: There is no such function, or the configuration can't be used.
    """
    # these import Strands, which this package's own reward does without
    from strands_rollout.agent.tool_loading import load_function
    from strands_rollout.settings import read_config_file
    from strands_rollout.slime_plugin.own_reward import check_reward, takes_args_and_sample

    search_beside(config)
    try:
        function: Callable[..., object] = reward_func if path is None else load_function(path)
        if path is not None and not takes_groups and not takes_args_and_sample(function):
            function, changes = reward_func, [*(changes or ()), f"reward={path}"]
        settings = read_config_file(config, changes)
        check_reward(settings.reward)
    except ToolError as e:
        raise ConfigError(str(e)) from e
    values = settings.model_dump(mode="json") | {"max_failed_groups": None}  # each sample is graded
    args = SimpleNamespace(strands_rollout=values, reward_key=keys[0], eval_reward_key=keys[0])
    grades_labels = function is reward_func and settings.needs_labels
    return RewardCall(function, args, tuple(keys), takes_groups, grades_labels, settings)


@dataclass(frozen=True, slots=True)
class GoldAnswer:
    """One row's prompt and label, the texts that answer it, each of which must be right, and the row's metadata."""

    prompt: Json
    label: Json
    texts: tuple[str, ...]
    metadata: Mapping[str, Json] = field(default_factory=dict)


async def gold_refusals(golds: Sequence[GoldAnswer], reward: RewardCall, sayings: Sequence[str] = SAYINGS) -> list[str]:
    """For each gold answer why the reward would not give the point, 1 or more, for it; "" where it does.

    Each text of an answer is tried in each form of `sayings`, all of them at once.
    """
    return [refusal.reason for refusal in await _refusals(golds, reward, sayings)]


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: str = ""
    has_failed: bool = False  # whether the reward has, so that nothing is known of the answer


async def _refusals(golds: Sequence[GoldAnswer], reward: RewardCall, sayings: Sequence[str]) -> list[_Refusal]:
    refusals, samples, places = [], [], []
    for place, gold in enumerate(golds):
        refusals.append(_Refusal("" if gold.texts else f"no answer equals the label {gold.label!r:.80}"))
        about = {"prompt": gold.prompt, "label": gold.label, "status": _COMPLETED}
        for response in (saying.replace(PLACE, text) for text in gold.texts for saying in sayings):
            facts = {METADATA_KEY: _expected_facts(gold.prompt, response).to_metadata()}
            samples.append(Sample(**about, response=response, metadata={**gold.metadata, **facts}))
            places.append(place)
    for place, sample, answer in zip(places, samples, await reward.rewards(samples), strict=True):
        if not refusals[place].reason and (reason := _refusal(reward, answer, sample.response)):
            method = answer.get("method") if reward.is_own and isinstance(answer, Mapping) else None
            refusals[place] = _Refusal(reason, isinstance(answer, Exception) or method in FAILED_METHODS)
    return refusals


def _expected_facts(prompt: Json, response: str) -> EpisodeFacts:
    """The facts of an episode that answers in its first turn, as far as they are known without one."""
    question = question_of(cast("Any", prompt)) if isinstance(prompt, str | list) else ""
    said = [{"role": role, "content": [{"text": text}]} for role, text in (("user", question), ("assistant", response))]
    held = {"messages": said, "tools": [], "system_prompt": None, "state": None, "is_whole": True}
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
        evaluated=held,
        evaluation=True,
    )


def _refusal(reward: RewardCall, answer: object, response: str) -> str:
    if isinstance(answer, Exception):
        return f"the reward raises {type(answer).__name__}: {answer} for {response!r:.200}"
    number = reward.number(answer)
    if number is not None and number >= _RIGHT:
        return ""
    if reward.is_own and isinstance(answer, Mapping) and answer["method"] not in _OF_USERS:
        wrong = f"the reward reads {answer['pred']!r} in its own gold answer and finds it wrong ({answer['method']})"
        return f"{wrong}; {answer['error']}" if answer["error"] else wrong
    if reward.is_own and isinstance(answer, Mapping):
        shown = f"{answer['score']:g}, acc {answer['acc']:g},"
        return answer["error"] or f"the reward gives {shown} for {response!r:.200}; --answer gives other words"
    return f"the reward gives {answer!r:.200} for {response!r:.200}; expected {_RIGHT:g} or more"


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row whose gold answer does not score: its line, from 1, its label, where the row can be read, and why."""

    line: int
    label: Json
    reason: str


async def run_validate(
    path: Path, reward: RewardCall, *, prompt_key: str, label_key: str, sayings: Sequence[str] = SAYINGS,
    as_json: bool = False,
) -> bool:  # fmt: skip
    """Ask the reward for the gold answer of each row of a JSONL file and show those that do not score; whether all do.

    Raises:
        PromptError: The file can't be read, or is empty.
    """
    lines = list(each_row(path, prompt_key=prompt_key, label_key=label_key))
    unread = [(number, fault) for number, fault in lines if isinstance(fault, PromptError)]
    faults = [RowFault(number, None, str(fault).removeprefix(f"{path}:{number}: ")) for number, fault in unread]
    readable = [row for _, row in lines if isinstance(row, Row)]
    unusable = [(row, fault) for row in readable if (fault := _own_settings_fault(row, reward.settings))]
    faults += [RowFault(row.line, row.label, fault) for row, fault in unusable]
    refused = {row.line for row, _ in unusable}
    rows = [row for row in readable if row.line not in refused]
    failures: list[RowFault] = []
    with counter("gold answers") as on_done:
        on_done(len(faults))
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            for row, refusal in zip(
                some, await _refusals([_gold(row, reward) for row in some], reward, sayings), strict=True
            ):
                if refusal.reason:
                    (failures if refusal.has_failed else faults).append(RowFault(row.line, row.label, refusal.reason))
            on_done(len(some))
    is_reward_at_fault = len(failures) == len(rows) > 0  # then it says nothing of any row
    faults = sorted(faults if is_reward_at_fault else [*faults, *failures], key=lambda fault: fault.line)
    unscored = failures if is_reward_at_fault else []
    notes = _container_notes(rows) if reward.grades_labels else []
    right, ok = len(lines) - len(faults) - len(unscored), not (faults or unscored)
    if as_json:
        listed = [asdict(fault) for fault in faults]
        error = {"error": unscored[0].reason} if unscored else {}
        report = {"ok": ok, "rows": len(lines), "right": right, "unscored": len(unscored), **error, "faults": listed}
        report["notes"] = [asdict(note) for note in notes]
        print(json_line(report).decode(), end="")
        return ok
    shown: list[tuple[int, str]] = []
    for alike in _alike(faults, lambda fault: fault.reason):
        if len(alike) > _FEW:
            named = _named([fault.line for fault in alike])
            words = f"{path}: {len(alike)} rows (lines {named}), as of the first: {alike[0].reason}"
            shown.append((alike[0].line, words))
            continue
        labels = [json.dumps(fault.label, default=str) for fault in alike]
        pairs = zip(alike, labels, strict=True)
        shown += [(one.line, f"{path}:{one.line}: label {label}: {one.reason}") for one, label in pairs]
    for _, words in sorted(shown):
        print(printable(words))
    for note in notes:
        like_it = "" if note.rows == 1 else f" ({note.rows} labels like it)"
        print(printable(f"{path}:{note.line}: note: label {json.dumps(note.label)} {note.meaning}{like_it}"))
    for alike in _alike(unscored, lambda fault: fault.reason):
        named = _named([fault.line for fault in alike])
        print(printable(f"the reward failed for {len(alike)} gold answers (lines {named}): {alike[0].reason}"))
    if unscored:
        print(
            "it failed for each of them, so that nothing is known of the rows; if it reads what only an episode has, "
            "score a dump with strands-rollout rescore"
        )
    print(f"{right} of {len(lines)} gold answers are right" + (f", {len(unscored)} not scored" if unscored else ""))
    return ok


def _own_settings_fault(row: Row, settings: RolloutSettings | None) -> str:
    """Why a row's own settings fail its episode; "" if they don't. Its tools are known from a configuration alone."""
    given, own = row.metadata, row.metadata.get(ROW_SETTINGS_KEY)
    if settings is None or (own is None and not given.get(SLIME_TOOLS_KEY)):
        return ""
    if not {"tools", "row_tools"} & settings.model_fields_set:
        own = {name: value for name, value in own.items() if name != "tools"} if isinstance(own, Mapping) else own
        given = {ROW_SETTINGS_KEY: own}
    try:
        with_row_settings(settings, given)
    except RolloutError as e:
        return f"its own settings can't be used: {e}"
    return ""


def _alike(items: Iterable[T], reason: Callable[[T], str]) -> list[list[T]]:
    """Items by their reasons, less what these quote of each; in the order of the first of each."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(_QUOTED.sub("", reason(item)), []).append(item)
    return list(groups.values())


def _named(numbers: Sequence[int]) -> str:
    """The first of them."""
    return ", ".join(map(str, numbers[:_FEW])) + (", ..." if len(numbers) > _FEW else "")


@dataclass(frozen=True, slots=True)
class LabelNote:
    """Labels of one kind that look like the text of a container: how many rows have one, and the first of them."""

    kind: str
    rows: int
    line: int
    label: str
    meaning: str


def _container_notes(rows: Sequence[Row]) -> list[LabelNote]:
    found = [(row, told) for row in rows if (told := container_label(row.label))]
    counts = Counter(told.kind for _, told in found)
    firsts = {told.kind: (row, told.meaning) for row, told in reversed(found)}
    notes = [LabelNote(kind, counts[kind], row.line, row.label, meaning) for kind, (row, meaning) in firsts.items()]
    return sorted(notes, key=lambda note: note.line)


def _gold(row: Row, reward: RewardCall) -> GoldAnswer:
    # this package's reward finds no answer equal to a mapping, or to lists in lists in lists
    texts: tuple[str, ...] = ()
    if not (reward.is_own and isinstance(row.label, Mapping)):
        with suppress(ValueError):
            texts = label_texts(row.label)
    return GoldAnswer(row.prompt, row.label, texts, row.metadata)


@dataclass(frozen=True, slots=True)
class Rescored:
    """One sample of a dump with the numbers of its old and its new reward, as far as it has them.

    A sample without a new number was not scored: it was aborted, or `error` says why.
    """

    number: int  # its place in the dump, from 0
    index: Json
    status: Json
    label: Json
    ending: str  # of the response
    old: float | None
    new: float | None = None
    error: str | None = None

    @property
    def is_changed(self) -> bool:
        """Whether both rewards have a number, and another."""
        return self.old is not None and self.new is not None and abs(self.new - self.old) > _EQUAL_WITHIN


async def rescore(path: Path, reward: RewardCall) -> AsyncIterator[tuple[DumpRecord, Rescored]]:
    """Score the samples of a dump again, in order; each record has the new reward, the old one where there is none.

    The reward is given each sample as slime gives it, with no reward of its own. Aborted samples keep what they have,
    as in slime.
    """
    number = 0
    for records in _batches(read_dump(path)):
        # copies: what a reward does to a sample is not to be in the new dump
        samples = {
            at: replace(record, values=copy.deepcopy({**record.values, "reward": None})).to_sample()
            for at, record in enumerate(records)
            if record.values.get("status") not in _UNSCORED
        }
        answers = dict(zip(samples, await reward.rewards(list(samples.values())), strict=True))
        for at, record in enumerate(records):
            index, status, label = (record.values.get(name) for name in ("index", "status", "label"))
            ending = " ".join(str(record.values.get("response"))[-200:].split())[-_TEXT_WIDTH:]
            told = reward_details(record.to_sample())  # a reward that had failed is no number to compare with
            old = None if told.get("method") in FAILED_METHODS else reward.number(record.values.get("reward"))
            unscored = Rescored(number + at, index, status, label, ending, old)
            yield _scored(record, unscored, answers[at], reward) if at in answers else (record, unscored)
        number += len(records)
    if not number:
        raise DumpError(f"{path} holds no sample; expected one or more")


def _batches(records: Iterable[DumpRecord]) -> Iterator[list[DumpRecord]]:
    """Some at a time; neighbours of a group, and a fan-out's siblings, which have one rollout, stay together."""

    def group_of(record: DumpRecord) -> tuple[str, Json]:
        named = ((key, record.values.get(key)) for key in ("group_index", "rollout_id"))
        return next((one for one in named if one[1] is not None), ("alone", record.where))

    batch: list[DumpRecord] = []
    for _, group in groupby(records, key=group_of):
        batch += group
        if len(batch) >= _SAMPLES_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _scored(record: DumpRecord, unscored: Rescored, answer: object, reward: RewardCall) -> tuple[DumpRecord, Rescored]:
    if isinstance(answer, Exception):
        return record, replace(unscored, error=f"{type(answer).__name__}: {answer}")
    if reward.is_own and isinstance(answer, Mapping) and answer["method"] in FAILED_METHODS:
        return record, replace(unscored, error=answer["error"])
    new = reward.number(answer)
    if new is None:
        expected = f"a number, or a dict with one under {' or '.join(map(repr, reward.keys))} (--reward-key)"
        return record, replace(unscored, error=f"got the reward {answer!r:.200}; expected {expected}")
    return replace(record, values={**record.values, "reward": answer}), replace(unscored, new=new)


def totals_of(found: Sequence[Rescored]) -> dict[str, int | float | None]:
    """What another reward changed in a dump.

    `failed` are the samples for which it raised, or gave no number; from `compared` on all is of those with an old and
    a new number. The correlation is Pearson's, None where there are fewer than two, or either are all alike.
    """
    pairs = [(one.old, one.new) for one in found if one.old is not None and one.new is not None]
    old, new = ([pair[side] for pair in pairs] for side in (0, 1))
    changed = [one for one in found if one.is_changed]
    raised = sum((one.new or 0.0) > (one.old or 0.0) for one in changed)
    varies = len(pairs) > 1 and np.ptp(old) > 0 and np.ptp(new) > 0
    return {
        "samples": len(found),
        "scored": sum(one.new is not None for one in found),
        "failed": sum(one.error is not None for one in found),
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
    """Score, write a new dump where asked, and show what changed; whether all samples could be scored."""
    found: list[Rescored] = []
    with nullcontext() if out is None else DumpWriter(out) as writer, counter("samples") as on_done:
        async for record, one in rescore(dump, reward):
            if writer is not None:
                writer.write(record)
            found.append(one)
            on_done(1)
    totals = totals_of(found)
    if as_json:
        for one in found:
            facts = {name: getattr(one, name) for name in ("number", "index", "old", "new", "error")}
            print(json_line({**facts, "changed": one.is_changed}).decode(), end="")
        print(json_line(totals).decode(), end="")
    else:
        _show(make_console(), found, totals, show)
    return not totals["failed"]


def _show(console: Console, found: Sequence[Rescored], totals: Mapping[str, int | float | None], show: int) -> None:
    changed = [one for one in found if one.is_changed]
    if changed and show:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for name in ("sample", "index", "status", "label", "old", "new", "the response ends"):
            table.add_column(name, justify="right" if name in ("sample", "index", "old", "new") else "left")
        for one in changed[:show]:
            label = shorten(str(one.label), 16, placeholder="...")
            cells = (one.number, one.index, one.status, label, f"{one.old:g}", f"{one.new:g}", one.ending)
            table.add_row(*(Text(printable(str(cell))) for cell in cells))  # the width counts what is shown
        console.print(table)
    for alike in _alike((one for one in found if one.error), lambda one: str(one.error))[:show]:
        many = f"{len(alike)} samples ({_named([one.number for one in alike])})"
        name = f"sample {alike[0].number}" if len(alike) == 1 else many
        console.print(Text(f"{name} could not be scored: {alike[0].error}", style="red"), soft_wrap=True)
    words = "{scored} of {samples} samples scored, {failed} failed"
    if totals["compared"]:
        words += "; of {compared} with an old reward {changed} changed ({raised} up, {lowered} down), "
        words += "mean {old_mean:.4g} -> {new_mean:.4g}, correlation "
        words += "none: one of them never varies" if totals["correlation"] is None else "{correlation:.3f}"
    console.print(Text(words.format(**totals)), soft_wrap=True)
