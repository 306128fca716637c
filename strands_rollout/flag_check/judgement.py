"""A command's words and a table of flags -> what is wrong with the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from strands_rollout.flag_check.contradictions import contradictions
from strands_rollout.flag_check.findings import Finding, Findings, gathered
from strands_rollout.flag_check.flag_table import FlagTable, read_record, recorded_table
from strands_rollout.flag_check.launch_text import Command, Reading, is_placeholder
from strands_rollout.flag_check.shell_words import Word
from strands_rollout.flag_check.uses import Use, uses_of
from strands_rollout.flag_check.value_check import check_values

# What is to be set instead of a flag of SGLang's that slime keeps to itself (slime/backends/sglang_utils).
_INSTEAD: Final = {
    "--sglang-model-path": "--hf-checkpoint",
    "--sglang-model": "--hf-checkpoint",
    "--sglang-tp-size": "--rollout-num-gpus-per-engine",
    "--sglang-tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "--sglang-random-seed": "--seed",
    "--sglang-enable-memory-saver": "--offload-rollout",
    "--sglang-enable-return-routed-experts": "--use-rollout-routing-replay",
    "--sglang-no-experts-shared-outer-loras": "--no-sglang-experts-shared-outer-loras",
    "--sglang-no-lora-strict-loading": "--no-sglang-lora-strict-loading",
}
# a script may add values to an array's last flag elsewhere
_ANYTHING: Final = Word("", dynamic=True, splits=True)


def check_command(
    words: Sequence[str | Word], *, table: FlagTable | None = None, program: str = "train.py"
) -> Findings:
    """Judge the arguments of slime's train.py.

    Args:
        words: What follows train.py, as the shell would pass it on.
        table: The known flags; the recorded ones if None.
        program: "train.py" or "train_async.py".
    """
    read = tuple(word if isinstance(word, Word) else Word(word) for word in words)
    return judge(Command(program, read), table or recorded_table(read_record()))


def judge_reading(reading: Reading, table: FlagTable) -> Findings:
    """Judge all commands of a script."""
    return gathered([judge(command, table) for command in reading.commands])


def judge(command: Command, table: FlagTable) -> Findings:
    """Judge one command, and the words that may be added to it."""
    before, uses = uses_of(command.words, table)
    findings = [_stray(word) for word in before if not _is_left_open(word)]
    findings += _check_uses(uses, table)
    further = [use for words in command.further for use in uses_of((*words, _ANYTHING), table)[1]]
    findings += _check_uses(further, table)
    findings += _duplicates(uses, table)
    if command.program is not None:
        findings += contradictions(command, [*uses, *further], uses, table)
    return gathered([Findings(len(uses) + len(further), tuple(findings))])


def _is_left_open(word: Word) -> bool:
    return word.splits or is_placeholder(word)


def _stray(word: Word) -> Finding:
    return Finding("error", word.text, word.place, "no flag before it takes this word; slime drops it without a word")


def _check_uses(uses: Sequence[Use], table: FlagTable) -> list[Finding]:
    findings: list[Finding] = []
    for use, after in zip(uses, [*uses[1:], None], strict=False):
        findings += _check_use(use, after, table)
        if after is not None and _swallows(use, after, table):
            problem = f"with a blank in it, it is a value to {use.name} before it; write it as two words"
            findings.append(Finding("error", after.name, after.where, problem))
    return findings


def _swallows(use: Use, after: Use, table: FlagTable) -> bool:
    """Whether argparse takes the flag after a use for one of its values.

    A word with a blank is a flag only to the parser that knows the flag; slime's others read the same words.
    """
    if after.joined is None or " " not in after.joined:
        return False
    readers = {flag.parser for flag in table.find(after.name)}
    return any(
        flag.parser not in readers and (flag.nargs in ("*", "+") or (flag.nargs == "?" and not use.values))
        for flag in table.find(use.name)
        if use.joined is None
    )


def _check_use(use: Use, after: Use | None, table: FlagTable) -> Iterator[Finding]:
    if use.name == "--" or "$" in use.name:
        if use.name == "--":
            yield Finding("error", "--", use.where, "argparse takes no flag after it; remove it")
        return
    flags = table.find(use.name)
    for flag in flags:
        yield from check_values(use, flag, Word(after.name) if after else None)
    if not flags:
        yield _unknown(use, table)


def _unknown(use: Use, table: FlagTable) -> Finding:
    problem, nearest = _what_is_unknown(use.name, table)
    return Finding("error", use.name, use.where, problem, nearest)


def _what_is_unknown(name: str, table: FlagTable) -> tuple[str, str | None]:
    """Why a name is no flag, and the flag that was likely meant."""
    if name in table.left_out:
        instead = _INSTEAD.get(name, "")
        known = instead if table.find(instead) else None
        hint = f"use {known}" if known else "leave it out"
        return f"SGLang has this flag, but slime sets it itself and drops yours; {hint}", known
    read_as = table.abbreviated_by(name)
    if len(read_as) == 1:
        return (
            f"it is no flag; SGLang's parser takes it for {read_as[0]}, until another begins so; write that",
            read_as[0],
        )
    nearest = table.nearest(name)
    meant = f"; nearest known: {nearest} ({table.title_of(nearest)})" if nearest else ""
    if read_as:
        few = ", ".join(read_as[:3])
        return f"it begins {len(read_as)} flags ({few} ...): SGLang's parser stops{meant}", nearest
    return f"no parser knows it, and slime drops it without a word{meant}", nearest


def _duplicates(uses: Sequence[Use], table: FlagTable) -> Iterator[Finding]:
    """Flags that are given more than once, under whatever name."""
    seen: dict[tuple[str, ...], list[Use]] = {}
    for use in uses:
        for flag in table.find(use.name)[:1]:
            if not flag.repeats:
                seen.setdefault(flag.names, []).append(use)
    for same in seen.values():
        if len(same) > 1:
            places = ", ".join(dict.fromkeys(use.where for use in same if use.where))
            last = " ".join([same[-1].joined or "", *(word.text for word in same[-1].values)]).strip()
            given = f"given {len(same)} times" + (f" ({places})" if places else "")
            wins = f"; the last wins: {same[-1].shown(last)}" if last else "; once is enough"
            yield Finding("warning", same[-1].name, same[-1].where, given + wins)
