"""What the `eval` command was asked for, and the data sets and settings that this names.

Knows where they are read from; nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strands_rollout.config import RolloutSettings
from strands_rollout.config_file import read_config_file
from strands_rollout.dataset_rows import shipped_rows
from strands_rollout.errors import ConfigError
from strands_rollout.evaluation.eval_config import read_eval_config
from strands_rollout.evaluation.plan import DataFile, EvalSet, Sampling
from strands_rollout.served_engine import SHIPPED_MODELS_EXECUTOR

DEFAULT_KS: Final = (1, 4, 8, 16)
_SHIPPED_PROBLEMS: Final = 16


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What the `eval` command was asked for; see its --help.

    Attributes:
        data: JSONL files, each a data set with its file's name.
        eval_config: slime's file in their place.
        base_url: An engine that runs already; None to start the embedded one.
        model_dir: What the embedded engine serves; None for the shipped model.
        tokenizer_dir: The served model's tokenizer; None to take the folder that the engine names.
        config: slime's custom config with our settings; None for the defaults.
        sampling: Where the file of data sets does not say.
        max_context_tokens: Of an episode; None for the engine's own limit.
        concurrency: Episodes at once.
        seed: Of the whole run; None for none.
        limit: Problems of each data set at most.
        ks: For pass@k; None for `DEFAULT_KS`.
        out: The run's folder.
        audits: Check every sample against its contract and the wire.
        keeps_tokens: Write whole samples.
        json_only: Print nothing on stdout but the line of JSON.
    """

    data: Sequence[Path]
    eval_config: Path | None
    base_url: str | None
    model_dir: Path | None
    tokenizer_dir: Path | None
    config: Path | None
    sampling: Sampling
    max_context_tokens: int | None
    concurrency: int
    seed: int | None
    limit: int | None
    ks: Sequence[int] | None
    out: Path
    audits: bool
    keeps_tokens: bool
    json_only: bool


def load_sets(options: EvalOptions, on_note: Callable[[str], None]) -> list[EvalSet]:
    """The data sets that are asked for.

    Args:
        options: The command's.
        on_note: Told of keys of the file of data sets that have no meaning here.

    Raises:
        ConfigError: There are none, or two of one name, or their file can't be used.
        PromptError: A data file can't be used.
    """
    if options.eval_config is not None:
        if options.data:
            raise ConfigError("got --data and --eval-config; expected one of them")
        return read_eval_config(options.eval_config, options.sampling, limit=options.limit, on_note=on_note)
    if not options.data and options.base_url is not None:
        raise ConfigError("got neither --data nor --eval-config; expected one of them with --base-url")
    limit = options.limit if options.data else options.limit or _SHIPPED_PROBLEMS
    files = [DataFile(path.stem, path) for path in options.data or [shipped_rows()]]
    names = [file.name for file in files]
    if len({*names}) < len(names):
        raise ConfigError(
            f"got the data sets {', '.join(names)}; expected files with different names, or --eval-config"
        )
    return [EvalSet.load(file, options.sampling, limit=limit) for file in files]


def load_settings(options: EvalOptions) -> RolloutSettings:
    """The settings that are asked for.

    Raises:
        ConfigError: The file can't be used.
    """
    settings = RolloutSettings() if options.config is None else read_config_file(options.config)
    runs_own_code = options.base_url is None and options.model_dir is None
    if runs_own_code and "executor" not in settings.model_fields_set:
        return settings.model_copy(update={"executor": SHIPPED_MODELS_EXECUTOR})
    return settings


def idle_ks(ks: Sequence[int], sets: Sequence[EvalSet]) -> list[str]:
    """Each k that is asked for where there are not so many samples, in words."""
    return [
        f"{chosen.name}: no pass@{k}, since each problem has {chosen.sampling.samples} samples"
        for chosen in sets
        for k in ks
        if k > chosen.sampling.samples
    ]
