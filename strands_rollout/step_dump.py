"""Some samples of each step as a dump, for people who look at a run while it goes on.

Knows finished samples, dumps and the settings; nothing of metrics.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from strands_rollout.config import settings_from_args
from strands_rollout.dump import TokenTexts, write_dump
from strands_rollout.finished_sample import FinishedSample, finished_samples
from strands_rollout.secret_mask import secret_values
from strands_rollout.slime_seam import tokenizer_of

_ODD: Final = re.compile(r"[^\w.-]")


def write_step_dump(args: Any, name: str, rollout_id: int, given: Any) -> Path | None:  # noqa: ANN401
    """Write the step's first samples, whole groups where they fit, to `<dump_dir>/<name>_<rollout_id>.jsonl.gz`.

    A file of that name is of a step that was cut and is done again: it is replaced.

    Args:
        args: slime's, with our settings `dump_dir` and `dump_samples`.
        name: Of what was rolled out; other signs than letters, digits, `.`, `-` and `_` become `_`.
        rollout_id: slime's.
        given: Samples, nested lists of them included.

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
    path = Path(settings.dump_dir) / f"{_ODD.sub('_', name)}_{rollout_id:06d}.jsonl.gz"
    chosen = [one.sample for one in _first_groups(samples, settings.dump_samples)]
    path.unlink(missing_ok=True)
    secrets = secret_values(os.environ, settings.model_dump(mode="json"))
    write_dump(path, chosen, TokenTexts(tokenizer_of(args, chosen[0])), secrets)
    return path


def _first_groups(samples: Sequence[FinishedSample], most: int) -> Sequence[FinishedSample]:
    """As many whole groups as fit, at least the beginning of one."""
    end = min(most, len(samples))
    whole = end
    while 0 < whole < len(samples) and _group(samples[whole]) == _group(samples[whole - 1]):
        whole -= 1
    return samples[: whole or end]


def _group(sample: FinishedSample) -> object:
    return getattr(sample.sample, "group_index", None)
