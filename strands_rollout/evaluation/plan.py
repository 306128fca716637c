"""The plan of an evaluation: its data sets, the sampling of each problem, and each sample's seed.

A data set comes from a file, from the hub, or from an entry of slime's `--eval-config` file. That file is read as slime
0.3 reads it (slime/utils/eval_config.py), with two differences. Unsupported keys are refused, and keys without a
meaning here are ignored with a note.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from strands_rollout.errors import ConfigError, PromptError
from strands_rollout.evaluation.benchmarks import benchmark_of
from strands_rollout.evaluation.protocols import Measurement, Protocol
from strands_rollout.files.yaml_files import yaml_text
from strands_rollout.grading import label_texts
from strands_rollout.play.options import EvalOptions, Sampling
from strands_rollout.play.rows import Row, json_line, load_rows, shipped_rows
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.inputs import to_episode_prompt, with_row_settings
from strands_rollout.slime_plugin.reward import check_row_grading
from strands_rollout.validation import explain_errors

DEFAULT_KS: Final = (1, 4, 8, 16)
_SHIPPED_PROBLEMS: Final = 16
_SLICED: Final = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


@dataclass(frozen=True, slots=True, order=True)
class SampleKey:
    """The identity of a sample: the data set, the problem's number and the sample's number, both from 0."""

    data_set: str
    problem: int
    number: int

    def seed(self, run_seed: int) -> int:
        """Return the sample's sampling seed, from 0 to 2^31 - 1; it depends only on the key and the run's seed."""
        text = f"{run_seed}:{self.data_set}:{self.problem}:{self.number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 33


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of problems, or a data set on the hub.

    Attributes:
        start: The rows from `start` to `stop` are selected, as in a Python slice.
        label_key: The key of the label. None stands for "label"; then rows may lack a label if the reward needs none.
    """

    name: str
    path: Path
    start: int | None = None
    stop: int | None = None
    prompt_key: str = "prompt"
    label_key: str | None = None


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A loaded data set: file, digest, problems, their sampling and template arguments, and the protocol, if any."""

    file: DataFile
    rows: Sequence[Row]
    sha256: str
    sampling: Sampling
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    measurement: Measurement | None = None

    @classmethod
    def load(
        cls,
        file: DataFile,
        sampling: Sampling,
        *,
        limit: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        needs_labels: bool = True,
    ) -> EvalSet:
        """Read at most `limit` problems of a data file; `needs_labels` requires labels that an answer can equal.

        Raises:
            PromptError: The file can't be read; an agent can't answer the prompt of a selected row; or, with
                `needs_labels`, a selected row has no label that an answer can equal.
            ConfigError: No row is selected.
        """
        keys = {"prompt_key": file.prompt_key, "label_key": file.label_key}
        rows = load_rows(file.path, **keys, needs_label=needs_labels)  # type: ignore[arg-type]
        in_range = rows[file.start : file.stop]
        selected = in_range[:limit]
        if not selected:
            bounds = ":".join("" if bound is None else str(bound) for bound in (file.start, file.stop))
            selection = f"limit={limit}" if in_range else f"[{bounds}]"
            raise ConfigError(f"{selection} selects none of the {len(rows)} rows of {file.path}; expected one or more")
        for row in selected:
            where = f"{file.path}:{row.line}"
            try:
                # no template: checking whether the prompt is rendered already needs the run's template
                to_episode_prompt(row.prompt, None, None)
            except PromptError as e:
                raise PromptError(f"{where}: {e}") from e
            texts: tuple[str, ...] = ()
            if needs_labels and not isinstance(row.label, Mapping):
                with suppress(ValueError):  # raised for lists that are nested too deeply
                    texts = label_texts(row.label)
            if needs_labels and not any(map(str.strip, texts)):
                raise PromptError(
                    f"{where}: got the label {row.label!r:.80}, which no answer equals; expected text that is not "
                    "blank, a number, a list of these, or a reward of your own (--reward)"
                )
        # a data set on the hub is not a single file
        content = file.path.read_bytes() if file.path.is_file() else b"".join(json_line(asdict(row)) for row in rows)
        return cls(file, selected, hashlib.sha256(content).hexdigest(), sampling, template_kwargs or {})

    @property
    def name(self) -> str:
        """Name of the data set in results and reports; with the protocol, if there is one, as in "aime-2024@qwen3"."""
        return self.file.name if self.measurement is None else f"{self.file.name}@{self.measurement.label}"

    @property
    def identity(self) -> dict[str, Any]:
        """The values of the data set that identify a run, as JSON; the protocol is not one of them."""
        return {
            "file": self.file.path.resolve().name,
            "sha256": self.sha256,
            "rows": [self.file.start, self.file.stop],
            "problems": len(self.rows),
            "prompt_key": self.file.prompt_key,
            "label_key": self.file.label_key or "label",
            "samples_per_problem": self.sampling.samples,
            "sampling_params": self.sampling.params,
            "chat_template_kwargs": dict(self.template_kwargs),
        }

    def under(self, protocol: Protocol, settings: RolloutSettings, overrides: Mapping[str, Any]) -> EvalSet:
        """Return the data set under a protocol: with the protocol's instructions in its prompts, and its sampling.

        Args:
            protocol: The protocol of the run.
            settings: The settings of the run.
            overrides: Fields of `Sampling` that the user has given, which override the protocol's.

        Raises:
            ConfigError: The protocol can't measure the rows.
        """
        benchmark = benchmark_of([row.metadata for row in self.rows])
        sampling = replace(protocol.sampling_of(benchmark), **overrides)
        changes = [*protocol.sampling_changes(sampling, benchmark), *protocol.setting_changes(settings)]
        if benchmark and len(self.rows) != benchmark.rows:
            changes.append(f"{len(self.rows)} of {benchmark.rows} problems")
        rows = [protocol.with_instruction(row) for row in self.rows]
        return replace(self, rows=rows, sampling=sampling, measurement=Measurement(protocol, benchmark, tuple(changes)))

    def check_grading(self) -> None:
        """Check that each row's answer can be graded.

        Raises:
            ConfigError: A library that the grading needs is missing.
            PromptError: A row's grading or instruction is unknown, its instructions can't be read, or the label of a
                choice is not a letter.
        """
        for row in self.rows:
            try:
                check_row_grading(row.label, row.metadata)
            except PromptError as e:
                raise PromptError(f"{self.file.path}:{row.line}: {e}") from e

    def check_settings(self, settings: RolloutSettings) -> None:
        """Raise ConfigError if a row's own settings don't fit the run's settings; the message names the line."""
        for row in self.rows:
            try:
                with_row_settings(settings, row.metadata)
            except ConfigError as e:
                raise ConfigError(f"{self.file.path}:{row.line}: {e}") from e

    def sample_keys(self) -> Iterator[SampleKey]:
        """Yield the keys of all samples, grouped by problem, so that an engine's prefix cache is used."""
        numbers = product(range(len(self.rows)), range(self.sampling.samples))
        return (SampleKey(self.name, problem, number) for problem, number in numbers)


def _check_top_k(top_k: int | None) -> int | None:
    if top_k == 0:
        raise ValueError("-1 for all tokens, or at least 1")
    return top_k


def _check_is_absent(value: object) -> object:
    if value:
        raise ValueError("none, since it can't be evaluated here; leave it out")
    return value


_Refused: TypeAlias = Annotated[object, AfterValidator(_check_is_absent)]
_IGNORED_NOTE: Final = "has no meaning here and is ignored"
_Ignored: TypeAlias = Annotated[object, _IGNORED_NOTE]
_EXTRA_PARAMS: Final = frozenset(
    {"stop", "stop_token_ids", "min_new_tokens", "repetition_penalty", "skip_special_tokens", "no_stop_trim"}
)


class DataSetEntry(BaseModel):
    """An entry of `eval.datasets`, merged with `eval.defaults`, with all keys that slime knows.

    A key is None if neither the entry nor `eval.defaults` sets it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    path: str
    input_key: str | None = None
    label_key: str | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    samples: int | None = Field(default=None, ge=1, alias="n_samples_per_eval_prompt")
    max_new_tokens: int | None = Field(default=None, ge=1, alias="max_response_len")
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Annotated[int | None, AfterValidator(_check_top_k)] = Field(default=None, ge=-1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = Field(default=None, ge=0)
    repetition_penalty: float | None = Field(default=None, gt=0)
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    # the command `eval` plays and grades only with this package's own functions
    custom_generate_function_path: Literal["strands_rollout.generate"] | None = None
    custom_rm_path: Literal["strands_rollout.reward_func"] | None = None
    multimodal_keys: _Refused = None
    apply_chat_template: _Refused = None
    app_service: _Refused = None
    message_processor: _Refused = None
    reward_model: _Refused = None
    remote_environment: _Refused = None
    rm_type: _Ignored = None
    tool_key: _Ignored = None
    metadata_key: _Ignored = None
    metadata_overrides: _Ignored = None
    eval_task_timeout: _Ignored = None
    min_eval_samples: _Ignored = None
    eval_early_stop_remaining: _Ignored = None
    eval_early_stop_idle_timeout: _Ignored = None

    def sampling(self, default: Sampling) -> Sampling:
        """Return the sampling of the entry; values that it leaves out come from `default`."""
        fields = {"samples", "max_new_tokens", "temperature", "top_p", "top_k"}
        values = self.model_dump(include=fields, exclude_none=True)
        extra = self.model_dump(include=set(_EXTRA_PARAMS), exclude_none=True)
        return replace(default, **values, extra={**default.extra, **extra})

    def data_file(self) -> DataFile:
        """Return the entry's file, with slime's `path@[start:stop]` parsed.

        Raises:
            ConfigError: The file is neither .jsonl nor .parquet.
        """
        match = _SLICED.fullmatch(self.path)
        path = match["path"] if match else self.path
        start, stop = (int(match[bound]) if match and match[bound] else None for bound in ("start", "stop"))
        if not path.endswith((".jsonl", ".parquet")):
            raise ConfigError(f"got path={self.path!r} of data set {self.name!r}; expected a .jsonl or .parquet file")
        return DataFile(self.name, Path(path), start, stop, self.input_key or "prompt", self.label_key)


_IGNORED_KEYS: Final = [name for name, field in DataSetEntry.model_fields.items() if _IGNORED_NOTE in field.metadata]


def _datasets_as_list(datasets: object) -> object:
    if not isinstance(datasets, dict):
        return datasets
    entries = {name: {} if entry is None else entry for name, entry in datasets.items()}
    return [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in entries.items()]


class _EvalConfig(BaseModel):
    """The mapping under `eval`; the file has the data sets as a list or as a mapping by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    defaults: dict[str, Any] | None = None
    datasets: Annotated[list[dict[str, Any]], BeforeValidator(_datasets_as_list)]


def read_eval_config(
    path: Path, default: Sampling, *, limit: int | None, on_note: Callable[[str], None], needs_labels: bool = True
) -> list[EvalSet]:
    """Read and load the data sets of an `--eval-config` file, YAML or JSON.

    As in slime, an entry's own key takes precedence over `eval.defaults`, and `eval.defaults` over `default`. Prompts
    are read from the key "prompt", or from the key in `input_key`. Labels are read from "label", or from the key in
    `label_key`. `on_note` receives a sentence for each ignored key.

    Raises:
        ConfigError: The file can't be read or names no data set; two data sets have the same name; a key is not
            supported, or unknown (the message names the nearest known key); a value is invalid; a data file is neither
            .jsonl nor .parquet; or a selection has no rows.
        PromptError: A data file can't be used.
    """
    content = _read_config(path)
    config = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(config, dict) or not config.get("datasets"):
        raise ConfigError(f"{path} has no eval.datasets; expected a list of data sets with name and path")
    eval_config = validated(_EvalConfig, config, f"{path}: eval")
    merged = [{**(eval_config.defaults or {}), **entry} for entry in eval_config.datasets]
    entries = [validated(DataSetEntry, entry, f"{path}: eval.datasets {entry.get('name')!r}") for entry in merged]
    names = [entry.name for entry in entries]
    if len({*names}) < len(names):
        raise ConfigError(f"got the data sets {names!r} in {path}; expected different names")
    for key in dict.fromkeys(key for entry in entries for key in _IGNORED_KEYS if getattr(entry, key)):
        on_note(f"{path}: {key} {_IGNORED_NOTE}")
    load = functools.partial(EvalSet.load, limit=limit, needs_labels=needs_labels)
    return [
        load(entry.data_file(), entry.sampling(default), template_kwargs=entry.apply_chat_template_kwargs)
        for entry in entries
    ]


def _read_config(path: Path) -> object:
    """Return the content of a file as slime reads it: with OmegaConf's interpolations (`${oc.env:DATA_DIR}`) resolved.

    Raises:
        ConfigError: The file can't be read or is not YAML, or an interpolation can't be resolved.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(yaml_text(path))), resolve=True)
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as e:
        missing = re.search(r"Environment variable '(\w+)' not found", str(e))
        near = get_close_matches(missing[1], os.environ, n=1) if missing else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"can't read {path}: {str(e).partition(chr(10))[0]}{hint}") from e


_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], value: object, where: str) -> _Model:
    """Validate a value as a model.

    Raises:
        ConfigError: The value is invalid. The message names `where` and the key; for an unknown key, also the nearest
            known key, or all known keys if none is near.
    """
    try:
        return model.model_validate(value)
    except ValidationError as e:
        raise ConfigError(f"{where}: {explain_errors(e, model)}") from e


def load_sets(
    options: EvalOptions, settings: RolloutSettings, on_note: Callable[[str], None], protocol: Protocol | None = None
) -> list[EvalSet]:
    """Load the requested data sets; `on_note` receives a sentence for each ignored key of the `--eval-config` file.

    If none of --data, --eval-config and --base-url is given, load the first shipped problems: as many as --limit says,
    else 16.

    Raises:
        ConfigError: Two options exclude each other; no data set is named, or two have the same name; a selection has no
            rows; or the protocol or the `--eval-config` file can't be used.
        PromptError: A data file can't be used.
    """
    if options.eval_config is not None:
        if options.data:
            raise ConfigError("got --data and --eval-config; expected only one of them")
        if protocol is not None:
            raise ConfigError("got --protocol and --eval-config, which has its own sampling; expected only one of them")
        if options.label_key is not None or options.input_key != "prompt":
            raise ConfigError(
                "got --input-key or --label-key with --eval-config; set input_key and label_key in that file instead"
            )
        return read_eval_config(
            options.eval_config,
            options.sampling,
            limit=options.limit,
            on_note=on_note,
            needs_labels=settings.needs_labels,
        )
    if not options.data and options.base_url is not None:
        raise ConfigError("--base-url is given without data sets; expected --data or --eval-config")
    limit = options.limit if options.data else options.limit or _SHIPPED_PROBLEMS
    input_key, label_key = options.input_key, options.label_key
    files = [DataFile(path.stem, path, None, None, input_key, label_key) for path in options.data or []]
    files = files or [DataFile("demo", shipped_rows())]
    names = [file.name for file in files]
    if len({*names}) < len(names):
        raise ConfigError(
            f"got the data sets {', '.join(names)}; expected files with different names, or --eval-config"
        )
    needs_labels = settings.needs_labels
    sets = [EvalSet.load(file, options.sampling, limit=limit, needs_labels=needs_labels) for file in files]
    return sets if protocol is None else [each.under(protocol, settings, options.sampling_overrides) for each in sets]
