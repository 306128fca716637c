"""Flags that contradict each other, or leave out what slime asks for when it starts.

Only what a command line alone decides: a file named by --custom-config-path may still change any argument.
Source: slime_validate_args in slime/utils/arguments.py, train_async.py, slime/utils/dp_schedule.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strands_rollout.flag_check.findings import Finding
from strands_rollout.flag_check.flag_table import FlagTable
from strands_rollout.flag_check.launch_text import Command, is_placeholder
from strands_rollout.flag_check.refusals import refusals
from strands_rollout.flag_check.settings import Settings
from strands_rollout.flag_check.uses import Use


def contradictions(
    command: Command, possible: Sequence[Use], certain: Sequence[Use], table: FlagTable
) -> Iterator[Finding]:
    """The contradictions of a command.

    Args:
        command: The command.
        possible: Its uses of flags, and those that may be added.
        certain: Its uses of flags.
        table: The known flags.
    """
    open_ended = not command.exact or any(map(is_placeholder, command.words))
    settings = Settings(certain, complete=not open_ended)
    given = {use.name for use in possible}
    for flag in table.flags:
        if flag.required and not open_ended and not given.intersection(flag.names):
            yield settings.finding(flag.names[0], "it is not given, and slime stops without it; add it")
    yield from _pairs(settings, command.program)
    yield from _what_is_lacking(settings)
    yield from refusals(settings)
    if command.exact:
        yield from _batches(settings)


def _pairs(settings: Settings, program: str | None) -> Iterator[Finding]:
    if settings.has("--use-tis", "--use-rollout-logprobs"):
        yield settings.finding("--use-rollout-logprobs", "it can't be set with --use-tis; leave one of them out")
    if program == "train_async.py" and settings.has("--colocate"):
        yield settings.finding("--colocate", "train_async.py refuses it; use train.py, or leave it out")
    if settings.number("--kl-coef") and settings.number("--kl-loss-coef"):
        yield settings.finding("--kl-loss-coef", "it can't be set with --kl-coef; leave one of them out")
    generate = settings.text("--custom-generate-function-path") or ""
    if settings.has("--apply-chat-template") and generate.startswith("strands_rollout."):
        yield settings.finding(
            "--apply-chat-template",
            f"{generate} renders messages itself and refuses prompts that are rendered; leave it out",
        )


def _what_is_lacking(settings: Settings) -> Iterator[Finding]:
    if settings.has("--eval-interval") and settings.lacks("--eval-prompt-data", "--eval-config"):
        yield settings.finding("--eval-interval", "it needs data: add --eval-prompt-data NAME PATH, or --eval-config")
    if settings.has("--save-interval") and settings.lacks("--save"):
        yield settings.finding("--save-interval", "it needs a folder: add --save")
    if settings.has("--use-dynamic-batch-size") and settings.lacks("--max-tokens-per-gpu"):
        yield settings.finding("--use-dynamic-batch-size", "it needs --max-tokens-per-gpu")
    if settings.lacks("--num-rollout", "--num-epoch"):
        yield settings.finding("--num-rollout", "neither it nor --num-epoch is given, and slime stops without; add one")


def _batches(settings: Settings) -> Iterator[Finding]:
    prompts, begun = settings.number("--rollout-batch-size"), settings.number("--over-sampling-batch-size")
    if prompts and begun and begun < prompts:
        yield settings.finding(
            "--over-sampling-batch-size", f"got {begun:g}; expected at least --rollout-batch-size {prompts:g}"
        )
    each, batch = settings.number("--n-samples-per-prompt"), settings.number("--global-batch-size")
    steps = settings.number("--num-steps-per-rollout")
    if not (prompts and each and batch) or settings.number("--num-rollout") == 0:  # 0: slime only evaluates
        return
    samples = prompts * each
    if steps and samples // steps != batch:
        yield settings.finding(
            "--global-batch-size",
            f"got {batch:g}; expected {samples // steps:g}, as --num-steps-per-rollout {steps:g} says",
        )
    elif samples < batch:
        yield settings.finding(
            "--global-batch-size",
            f"got {batch:g}; expected at most the {samples:g} samples of a rollout, or training stops",
        )
    elif samples % batch:
        rest = f"the last {samples % batch:g} are not trained on"
        problem = f"a rollout has {samples:g} samples, no multiple of {batch:g}: {rest}"
        yield settings.finding("--global-batch-size", problem, "warning")
