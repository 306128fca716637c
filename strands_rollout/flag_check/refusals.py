"""What slime refuses of settings that it takes one by one.

Source: slime_validate_args and _resolve_eval_datasets in slime/utils/arguments.py, slime/ray/rollout.py,
slime/rollout/fully_async_rollout.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from strands_rollout.flag_check.findings import Finding
from strands_rollout.flag_check.settings import Settings

_NORMALIZED: Final = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
_FULLY_ASYNC: Final = "slime.rollout.fully_async_rollout."
_OVERRIDE: Final = ", unless the file of --custom-config-path says otherwise"


def refusals(settings: Settings) -> Iterator[Finding]:
    """What is refused at the start, or at the first evaluation."""
    yield from _sampling(settings)
    yield from _distillation(settings)
    yield from _evaluation(settings)
    yield from _engines(settings)
    for finding in _after_overrides(settings):
        yield finding if settings.lacks("--custom-config-path") else finding.doubted(_OVERRIDE)


def _sampling(settings: Settings) -> Iterator[Finding]:
    temperature = settings.number("--rollout-temperature")
    if temperature is not None and temperature <= 0:
        yield settings.finding("--rollout-temperature", f"got {temperature:g}; expected a number above 0")
    estimator = settings.text("--advantage-estimator")
    if estimator in _NORMALIZED and settings.lacks("--normalize-advantages"):
        yield settings.finding("--advantage-estimator", f"{estimator} needs --normalize-advantages; add it")


def _distillation(settings: Settings) -> Iterator[Finding]:
    kind, has_teacher = settings.text("--opd-type"), settings.has("--opd-teacher-load")
    if has_teacher and settings.lacks("--use-opd"):
        yield settings.finding("--opd-teacher-load", "it is refused without --use-opd; add that, or leave it out")
    if not settings.has("--use-opd"):
        return
    if settings.lacks("--opd-type"):
        yield settings.finding("--use-opd", "it needs --opd-type sglang or megatron; add it")
    if kind == "megatron" and settings.lacks("--opd-teacher-load"):
        yield settings.finding("--opd-type", "megatron needs --opd-teacher-load; add it")
    if kind == "sglang" and has_teacher:
        yield settings.finding("--opd-teacher-load", "it is refused with --opd-type sglang; leave it out")


def _evaluation(settings: Settings) -> Iterator[Finding]:
    words = settings.count("--eval-prompt-data")
    if words is not None and words > 1 and words % 2 and settings.lacks("--eval-config"):
        yield settings.finding("--eval-prompt-data", f"got {words} words; expected pairs of a name and a path")
    rollout, evaluates = settings.text("--rollout-function-path"), settings.text("--eval-function-path")
    if settings.lacks("--eval-function-path"):
        evaluates = rollout
    if settings.has("--eval-interval") and (evaluates or "").startswith(_FULLY_ASYNC):
        problem = f"{evaluates} has no evaluation; leave it out, or name another --eval-function-path"
        yield settings.finding("--eval-interval", problem)


def _engines(settings: Settings) -> Iterator[Finding]:
    gpus, each = settings.number("--rollout-num-gpus"), settings.number("--rollout-num-gpus-per-engine")
    elsewhere = not settings.lacks("--sglang-config", "--rollout-external-engine-addrs")
    if gpus and each and gpus % each and not elsewhere:
        problem = f"got {gpus:g}, no multiple of --rollout-num-gpus-per-engine {each:g}: {gpus % each:g} stay unused"
        yield settings.finding("--rollout-num-gpus", problem, "warning")


def _after_overrides(settings: Settings) -> Iterator[Finding]:
    """What slime looks at after it has read the file of --custom-config-path."""
    prompt, context = settings.number("--rollout-max-prompt-len"), settings.number("--rollout-max-context-len")
    if prompt is not None and context is not None and prompt >= context:
        problem = f"got {prompt:g}; expected less than --rollout-max-context-len {context:g}"
        yield settings.finding("--rollout-max-prompt-len", problem)
    transport = settings.text("--update-weight-transport")
    if transport == "disk" and settings.lacks("--update-weight-disk-dir"):
        yield settings.finding("--update-weight-transport", "disk needs --update-weight-disk-dir; add it")
    if settings.text("--update-weight-mode") != "delta":
        return
    if (transport or "disk") != "disk" or settings.lacks("--update-weight-transport"):
        yield settings.finding("--update-weight-mode", "delta needs --update-weight-transport disk")
    if settings.has("--colocate") and settings.lacks("--debug-rollout-only"):
        yield settings.finding("--update-weight-mode", "delta is refused with --colocate; leave one of them out")
    if settings.lacks("--update-weight-local-checkpoint-dir"):
        yield settings.finding("--update-weight-mode", "delta needs --update-weight-local-checkpoint-dir; add it")
