"""Shows some samples of each step: rows of a wandb table, and a dump in files."""

import functools
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strands_rollout.code_tool.sandbox.code_runner import shorten
from strands_rollout.dump import TokenTexts, write_dump
from strands_rollout.samples import FinishedSample, SlimeArgs, finished_samples, finite, kept
from strands_rollout.secret_mask import secret_values, without_values
from strands_rollout.settings import settings_from_args
from strands_rollout.slime_plugin.slime_adapter import tokenizer_of

MAX_ROWS: Final = 8
MAX_PROMPT_CHARS: Final = 2000
MAX_RESPONSE_CHARS: Final = 8000
MAX_LABEL_CHARS: Final = 500
TEXT_COLUMNS: Final = ("prompt", "response", "label")
SAMPLE_COLUMNS: Final = (
    *("index", "group", "status", "stop reason", "reward", "turns", "tool calls", "weight versions"),
    *TEXT_COLUMNS,
)
COLUMNS: Final = ("step", *SAMPLE_COLUMNS[:2], "why", *SAMPLE_COLUMNS[2:])

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def transcript_rows(
    samples: Sequence[FinishedSample], *, step: int, reward_key: str | None, secrets: Collection[str] = ()
) -> list[list[Cell]]:
    """At most `MAX_ROWS` rows of `COLUMNS`, in the order of the samples, with these texts masked.

    Best, worst and median reward, the first failed and truncated, the longest, the slowest and the one with most tool
    calls are shown; the column "why" says which a row is. What room is left goes to others, evenly spread.
    A row that can't be written is left out.

    Args:
        samples: A step's.
        step: slime's.
        reward_key: The entry of a reward that is a dict.
        secrets: Texts that are masked wherever they stand.
    """
    rewards = [sample.reward(reward_key) for sample in samples]
    reasons: dict[int, list[str]] = {}
    for reason, position in _chosen(samples, rewards):
        reasons.setdefault(position, []).append(reason)
    others = [position for position in range(len(samples)) if position not in reasons]
    room = min(MAX_ROWS - len(reasons), len(others))
    shown = [*reasons, *(others[number * len(others) // room] for number in range(room))]
    rows: list[list[Cell]] = []
    for position in sorted(shown):
        cells = functools.partial(sample_row, samples[position], rewards[position], secrets)
        if row := kept("transcripts", cells, of_sample=True):
            rows.append([step, *row[:2], ", ".join(reasons.get(position, [])), *row[2:]])
    return rows


def _chosen(samples: Sequence[FinishedSample], rewards: Sequence[float | None]) -> Iterator[tuple[str, int]]:
    """Reasons to show a sample, each with its position; of equals the first."""
    graded = sorted((reward, position) for position, reward in enumerate(rewards) if reward is not None)
    if graded:
        yield "best", min(graded, key=lambda entry: (-entry[0], entry[1]))[1]
        yield "worst", graded[0][1]
        yield "median", graded[(len(graded) - 1) // 2][1]
    statuses = [sample.status for sample in samples]
    for status in ("failed", "truncated"):
        if status in statuses:
            yield status, statuses.index(status)
    amounts = {
        "longest": [sample.response_length for sample in samples],
        "slowest": [sample.number("duration_s") for sample in samples],
        "most tool calls": [sample.number("tool_calls") for sample in samples],
    }
    for reason, values in amounts.items():
        largest = max((value for value in values if value), default=None)
        if largest is not None:
            yield reason, values.index(largest)


def sample_row(sample: FinishedSample, reward: float | None, secrets: Collection[str] = ()) -> list[Cell]:
    """One sample as a row of `SAMPLE_COLUMNS`, long texts cut in the middle, and these texts masked."""
    raw = sample.sample
    limits = {"prompt": MAX_PROMPT_CHARS, "response": MAX_RESPONSE_CHARS, "label": MAX_LABEL_CHARS}
    return [
        *(_whole(getattr(raw, name, None)) for name in ("index", "group_index")),
        *(sample.status, sample.text("stop_reason"), reward),
        *(_whole(sample.number(name)) for name in ("turns", "tool_calls")),
        ", ".join(sample.weight_versions),
        *(bounded_text(getattr(raw, name, None), most, secrets) for name, most in limits.items()),
    ]


def _whole(value: object) -> int | None:
    number = finite(value)
    return None if number is None else int(number)


def bounded_text(value: object, max_chars: int, secrets: Collection[str] = ()) -> str | None:
    """Head and tail of a text, or of JSON, with secrets masked; a lone surrogate, which no file takes, becomes "?"."""
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # JSON has no form for a value's keys, nor for a value within itself
        text = repr(value)
    return shorten(without_values(text, secrets), max_chars).encode("utf-8", "replace").decode("utf-8")


def write_step_dump(args: SlimeArgs, name: str, rollout_id: int, given: object) -> Path | None:
    """Write the step's first samples, whole groups where they fit, to `<dump_dir>/<name>_<rollout_id>.jsonl.gz`.

    A file of that name is of a step that was cut and is done again: it is replaced.

    In `name`, what is no letter, digit, `.`, `-` or `_` becomes `_`; `given` are samples, maybe in nested lists.

    Returns:
        The file; None where none is asked for, or there is no sample.

    Raises:
        ConfigError: A setting is unknown or out of range.
        DumpError: The file can't be written.
    """
    settings = settings_from_args(args)
    samples = finished_samples(given) if settings.dump_dir is not None else []
    if settings.dump_dir is None or not samples:
        return None
    name = re.sub(r"[^\w.-]", "_", name)
    path = Path(settings.dump_dir) / f"{name}_{rollout_id:06d}.jsonl.gz"
    chosen = [one.sample for one in _first_groups(samples, settings.dump_samples)]
    path.unlink(missing_ok=True)
    secrets = secret_values(os.environ, settings.model_dump(mode="json"))
    write_dump(path, chosen, TokenTexts(tokenizer_of(args, chosen[0])), secrets)
    return path


def _first_groups(samples: Sequence[FinishedSample], most: int) -> Sequence[FinishedSample]:
    """As many whole groups as fit, at least the beginning of one."""
    groups = [getattr(sample.sample, "group_index", None) for sample in samples]
    end = whole = min(most, len(samples))
    while 0 < whole < len(samples) and groups[whole] == groups[whole - 1]:
        whole -= 1
    return samples[: whole or end]
