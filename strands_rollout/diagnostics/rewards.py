r"""What a reward gives: for saved samples, beside what they had, and for a data set's own gold answers.

A reward is called as slime would (`--custom-rm-path`: `async def reward(args, sample)`): by its dotted path, sync or
async, with a number or a dict for an answer; one for `--group-rm` takes the samples of a group, and returns as many
rewards. A gold answer is a row's own label, said as the policy would say it: as `\boxed{label}` and in a line
`Answer: label`; both must be right, and of several alternatives each.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Final, cast

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strands_rollout.aio import exits_as_errors
from strands_rollout.dump import DumpRecord, DumpWriter, read_dump
from strands_rollout.dump.terminal import make_console, printable
from strands_rollout.errors import ConfigError, DumpError, PromptError, ToolError, foreign_code
from strands_rollout.evaluation.display import counter
from strands_rollout.evaluation.rows import Row, each_row, json_line
from strands_rollout.files import Json
from strands_rollout.grading import label_texts
from strands_rollout.samples import Sample, finite
from strands_rollout.slime_plugin.reward import reward_func

SAYINGS: Final = ("\\boxed{{label}}", "Answer: {label}")
"""How a gold answer is said; `{label}` stands for it."""
PLACE: Final = "{label}"
_RIGHT: Final = 1.0
_COMPLETED: Final = Sample.Status.COMPLETED
_CALLS_AT_ONCE: Final = 64
_ROWS_AT_ONCE: Final = 500
_SAMPLES_AT_ONCE: Final = 200
_UNSCORED: Final = frozenset({"aborted", "pending"})
_EQUAL_WITHIN: Final = 1e-9
_TEXT_WIDTH: Final = 60


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function and what it is called with."""

    function: Callable[..., object]  # sync or async; sync ones are called in threads
    args: SimpleNamespace  # slime's, as far as this package reads them
    keys: tuple[str, ...]  # where a dict has its number: the first of these that it has
    takes_groups: bool = False  # all samples of a group as a list, as by slime's --group-rm

    @property
    def is_own(self) -> bool:
        """Whether it is this package's, which looks at a sample's label and words alone."""
        return self.function is reward_func

    async def rewards(self, samples: Sequence[Sample]) -> list[object]:
        """The reward of each sample, in order; the exception where it raised one, never a raised one.

        This package's is given all of them at once: siblings of a fan-out have their main agent's reward.
        """
        if self.is_own:
            return cast(list[object], await reward_func(self.args, list(samples)))
        gate = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def ask(given: Sample | list[Sample]) -> object:
            async with gate:
                with foreign_code("a user's reward may raise anything: the other samples still count") as outcome:
                    return await self._reward(given)
            return outcome.error

        groups = _groups(samples) if self.takes_groups else []
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(given)) for given in groups or samples]
        answers = [task.result() for task in asked]
        if not self.takes_groups:
            return answers
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


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Neighbours of one group together; a sample without one is alone."""
    found: list[list[Sample]] = []
    for sample in samples:
        if found and sample.group_index is not None and found[-1][0].group_index == sample.group_index:
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


def _each(answer: object, count: int) -> list[object]:
    """The rewards of a group, one for each of its samples."""
    if isinstance(answer, Exception):
        return [answer] * count
    if not isinstance(answer, list | tuple) or len(answer) != count:
        got = f"{len(answer)}" if isinstance(answer, list | tuple) else f"{answer!r:.200}"
        return [TypeError(f"got {got} for a group; expected a list of {count} rewards")] * count
    return list(answer)


def own_reward() -> RewardCall:
    """This package's, with its defaults; its number says whether an answer is right."""
    return RewardCall(reward_func, SimpleNamespace(), ("acc",))


def load_reward(
    path: str | None, config: Path | None, keys: Sequence[str], *, takes_groups: bool = False
) -> RewardCall:
    """The reward at a dotted path, this package's own for None, with the settings of a configuration.

    Raises:
        ConfigError: There is no such function, or the configuration can't be used.
    """
    # these bring Strands along, which this package's own reward does without
    from strands_rollout.agent.tool_loading import load_function
    from strands_rollout.settings import read_config_file

    settings = None if config is None else read_config_file(config).model_dump(mode="json")
    args = SimpleNamespace(strands_rollout=settings, reward_key=keys[0], eval_reward_key=keys[0])
    try:
        function = reward_func if path is None else load_function(path)
    except ToolError as e:
        raise ConfigError(str(e)) from e
    return RewardCall(function, args, tuple(keys), takes_groups)


@dataclass(frozen=True, slots=True)
class GoldAnswer:
    """One row's prompt and label, the texts that answer it, each of which must be right, and the row's metadata."""

    prompt: Json
    label: Json
    texts: tuple[str, ...]
    metadata: Mapping[str, Json] = field(default_factory=dict)


async def gold_refusals(golds: Sequence[GoldAnswer], reward: RewardCall, sayings: Sequence[str] = SAYINGS) -> list[str]:
    """For each gold answer why the reward would not give the point, 1 or more, for it; "" where it does.

    `sayings` are how an answer is said, `{label}` standing for it; all are asked at once.
    """
    said = [
        (number, saying.replace(PLACE, text))
        for number, gold in enumerate(golds)
        for text in gold.texts
        for saying in sayings
    ]
    samples = [
        Sample(prompt=gold.prompt, label=gold.label, response=words, metadata=dict(gold.metadata), status=_COMPLETED)
        for gold, words in ((golds[at], words) for at, words in said)
    ]
    reasons = ["" if gold.texts else f"no answer equals the label {gold.label!r:.80}" for gold in golds]
    for (at, words), answer in zip(said, await reward.rewards(samples), strict=True):
        reasons[at] = reasons[at] or _refusal(reward, answer, words)
    return reasons


def _refusal(reward: RewardCall, answer: object, words: str) -> str:
    if isinstance(answer, Exception):
        return f"the reward raises {type(answer).__name__}: {answer} for {words!r:.200}"
    number = reward.number(answer)
    if number is not None and number >= _RIGHT:
        return ""
    if reward.is_own and isinstance(answer, Mapping):
        wrong = f"the reward reads {answer['pred']!r} in its own gold answer and finds it wrong ({answer['method']})"
        return f"{wrong}; {answer['error']}" if answer["error"] else wrong
    return f"the reward gives {answer!r:.200} for {words!r:.200}; expected {_RIGHT:g} or more"


@dataclass(frozen=True, slots=True)
class Fault:
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
    faults = [Fault(number, None, str(fault).removeprefix(f"{path}:{number}: ")) for number, fault in unread]
    with counter("gold answers") as on_done:
        on_done(len(faults))
        rows = [row for _, row in lines if isinstance(row, Row)]
        faults += [fault async for fault in _wrong(rows, reward, sayings, on_done)]
    faults.sort(key=lambda fault: fault.line)
    right = len(lines) - len(faults)
    if as_json:
        report = {"ok": not faults, "rows": len(lines), "right": right, "faults": [asdict(fault) for fault in faults]}
        print(json_line(report).decode(), end="")
        return not faults
    for fault in faults:
        print(printable(f"{path}:{fault.line}: label {json.dumps(fault.label, default=str)}: {fault.reason}"))
    print(f"{right} of {len(lines)} gold answers are right")
    return not faults


async def _wrong(
    rows: Sequence[Row], reward: RewardCall, sayings: Sequence[str], on_done: Callable[[int], None]
) -> AsyncIterator[Fault]:
    """The rows whose gold answer does not score.

    This package's reward looks at nothing but the label: equal ones are asked once; nothing answers a mapping by it.
    """
    together: dict[object, list[Row]] = {}
    for row in rows:
        together.setdefault(json_line({"label": row.label}) if reward.is_own else row.line, []).append(row)
    groups = list(together.values())
    for start in range(0, len(groups), _ROWS_AT_ONCE):
        chunk = groups[start : start + _ROWS_AT_ONCE]
        golds = []
        for row, *_ in chunk:
            texts = () if reward.is_own and isinstance(row.label, Mapping) else label_texts(row.label)
            golds.append(GoldAnswer(row.prompt, row.label, texts, row.metadata))
        for same, reason in zip(chunk, await gold_refusals(golds, reward, sayings), strict=True):
            for row in same if reason else ():
                yield Fault(row.line, row.label, reason)
            on_done(len(same))


@dataclass(frozen=True, slots=True)
class Rescored:
    """One sample, by its place in the dump, with the numbers of its old and its new reward.

    Its record has the new reward; the old one where there is none, since it could not be scored for a stated error, or
    has no answer to score.
    """

    number: int
    record: DumpRecord
    old: float | None
    new: float | None = None
    error: str | None = None

    @property
    def is_changed(self) -> bool:
        """Whether both rewards have a number, and another."""
        return self.old is not None and self.new is not None and abs(self.new - self.old) > _EQUAL_WITHIN


async def rescore(path: Path, reward: RewardCall) -> AsyncIterator[Rescored]:
    """Score the samples of a dump again, in order; those that were aborted keep what they have, as in slime.

    The reward sees each sample as slime's does, with no reward of its own.
    """
    number = 0
    for records in _together(read_dump(path)):
        asked = [at for at, record in enumerate(records) if record.values.get("status") not in _UNSCORED]
        # copies: what a reward does to a sample is not to be in the new dump
        samples = [
            replace(records[at], values=copy.deepcopy({**records[at].values, "reward": None})).to_sample()
            for at in asked
        ]
        answers = dict(zip(asked, await reward.rewards(samples), strict=True))
        for at, record in enumerate(records):
            unscored = Rescored(number + at, record, reward.number(record.values.get("reward")))
            yield _scored(unscored, answers[at], reward) if at in answers else unscored
        number += len(records)
    if not number:
        raise DumpError(f"{path} holds no sample; expected one or more")


def _together(records: Iterable[DumpRecord]) -> Iterator[list[DumpRecord]]:
    """Some at a time; neighbours of one group, and of one rollout, as a fan-out's siblings are, stay together."""
    found: list[DumpRecord] = []
    for record in records:
        if len(found) >= _SAMPLES_AT_ONCE and not any(
            record.values.get(key) is not None and record.values.get(key) == found[-1].values.get(key)
            for key in ("rollout_id", "group_index")
        ):
            yield found
            found = []
        found.append(record)
    if found:
        yield found


def _scored(unscored: Rescored, answer: object, reward: RewardCall) -> Rescored:
    if isinstance(answer, Exception):
        return replace(unscored, error=f"{type(answer).__name__}: {answer}")
    new = reward.number(answer)
    if new is None:
        expected = f"a number, or a dict with one under {' or '.join(map(repr, reward.keys))} (--reward-key)"
        return replace(unscored, error=f"got the reward {answer!r:.200}; expected {expected}")
    record = replace(unscored.record, values={**unscored.record.values, "reward": answer})
    return replace(unscored, record=record, new=new)


@dataclass(frozen=True, slots=True)
class RewardChange:
    """What another reward changed in a dump.

    `failed` are the samples for which it raised, or gave no number; from `compared` on all is of those with an old and
    a new number. The correlation is Pearson's, None where there are fewer than two, or either are all alike.
    """

    samples: int
    scored: int
    failed: int
    compared: int
    changed: int
    raised: int
    lowered: int
    old_mean: float | None
    new_mean: float | None
    correlation: float | None

    @classmethod
    def of(cls, found: Sequence[Rescored]) -> RewardChange:
        """Of these samples."""
        pairs = [(one.old, one.new) for one in found if one.old is not None and one.new is not None]
        old, new = ([pair[side] for pair in pairs] for side in (0, 1))
        changed = [one for one in found if one.is_changed]
        raised = sum((one.new or 0.0) > (one.old or 0.0) for one in changed)
        varies = len(pairs) > 1 and np.ptp(old) > 0 and np.ptp(new) > 0
        return cls(
            samples=len(found),
            scored=sum(one.new is not None for one in found),
            failed=sum(one.error is not None for one in found),
            compared=len(pairs),
            changed=len(changed),
            raised=raised,
            lowered=len(changed) - raised,
            old_mean=float(np.mean(old)) if old else None,
            new_mean=float(np.mean(new)) if new else None,
            correlation=float(np.corrcoef(old, new)[0, 1]) if varies else None,
        )


async def run_rescore(
    dump: Path, reward: RewardCall, *, out: Path | None = None, show: int = 50, as_json: bool = False
) -> RewardChange:
    """Score, write a new dump where asked, and show; what changed."""
    found: list[Rescored] = []
    with nullcontext() if out is None else DumpWriter(out) as writer, counter("samples") as on_done:
        async for one in rescore(dump, reward):
            if writer is not None:
                writer.write(one.record)
            found.append(_without_tokens(one))
            on_done(1)
    change = RewardChange.of(found)
    if not as_json:
        _show(make_console(), found, change, show)
        return change
    for one in found:
        facts = {"number": one.number, "index": one.record.values.get("index"), "old": one.old, "new": one.new}
        print(json_line({**facts, "changed": one.is_changed, "error": one.error}).decode(), end="")
    print(json_line(asdict(change)).decode(), end="")
    return change


def _without_tokens(one: Rescored) -> Rescored:
    """What is shown of it: a whole dump's tokens need not be held."""
    shown = ("index", "label", "status", "reward", "response")
    values = {name: one.record.values.get(name) for name in shown}
    values["response"] = str(values["response"])[-200:]
    return replace(one, record=replace(one.record, values=values, token_texts={}))


def _show(console: Console, found: Sequence[Rescored], change: RewardChange, show: int) -> None:
    changed = [one for one in found if one.is_changed]
    if changed and show:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for name in ("sample", "index", "status", "label", "old", "new", "the response ends"):
            table.add_column(name, justify="right" if name in ("sample", "index", "old", "new") else "left")
        for one in changed[:show]:
            values = one.record.values
            label = shorten(str(values["label"]), 16, placeholder="...")
            ending = " ".join(str(values["response"]).split())[-_TEXT_WIDTH:]
            cells = (one.number, values["index"], values["status"], label, f"{one.old:g}", f"{one.new:g}", ending)
            table.add_row(*(Text(_printable(str(cell))) for cell in cells))
        console.print(table)
    for one in [one for one in found if one.error][:show]:
        words = f"sample {one.number} could not be scored: {_printable(str(one.error))}"
        console.print(Text(words, style="red"), soft_wrap=True)
    words = f"{change.scored} of {change.samples} samples scored, {change.failed} failed"
    if change.compared:
        correlation = "none: one of them never varies" if change.correlation is None else f"{change.correlation:.3f}"
        words += (
            f"; of {change.compared} with an old reward {change.changed} changed ({change.raised} up, {change.lowered} "
            f"down), mean {change.old_mean:.4g} -> {change.new_mean:.4g}, correlation {correlation}"
        )
    console.print(Text(words), soft_wrap=True)


def _printable(text: str) -> str:
    """A terminal would obey what a model wrote."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
