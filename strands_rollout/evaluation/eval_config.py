"""slime's `--eval-config` file, read as slime reads it: which data sets are evaluated, and how each is sampled.

Knows the keys of slime 0.3 (slime/utils/eval_config.py). What can't be done here is refused; what has no meaning here
is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from strands_rollout.errors import ConfigError
from strands_rollout.evaluation.plan import DataFile, EvalSet, Sampling

_OWN_FUNCTIONS: Final = {
    "custom_generate_function_path": "strands_rollout.generate",
    "custom_rm_path": "strands_rollout.reward_func",
}
_REFUSED: Final = (
    "multimodal_keys",
    "apply_chat_template",
    "app_service",
    "message_processor",
    "reward_model",
    "remote_environment",
)
_MEANINGLESS: Final = (
    "rm_type",
    "tool_key",
    "metadata_key",
    "metadata_overrides",
    "eval_task_timeout",
    "min_eval_samples",
    "eval_early_stop_remaining",
    "eval_early_stop_idle_timeout",
)
_FURTHER: Final = (
    "stop",
    "stop_token_ids",
    "skip_special_tokens",
    "no_stop_trim",
    "repetition_penalty",
    "min_new_tokens",
)
_SLICED: Final = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


class DataSetEntry(BaseModel):
    """What an entry of `eval.datasets` may say here; None leaves it to the caller's own choice."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    path: str
    input_key: str | None = None
    label_key: str | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    max_response_len: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = Field(default=None, ge=0)
    repetition_penalty: float | None = Field(default=None, gt=0)
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    @field_validator("top_k")
    @classmethod
    def _keeps_some(cls, top_k: int | None) -> int | None:
        if top_k == 0:
            raise ValueError("-1 for all, or 1 and more")
        return top_k

    def sampling(self, default: Sampling) -> Sampling:
        """How its problems are sampled, the default where it does not say."""
        further = {key: getattr(self, key) for key in _FURTHER if getattr(self, key) is not None}

        def either(own: Any, other: Any) -> Any:  # noqa: ANN401 - a number
            return other if own is None else own

        return Sampling(
            samples=either(self.n_samples_per_eval_prompt, default.samples),
            max_new_tokens=either(self.max_response_len, default.max_new_tokens),
            temperature=either(self.temperature, default.temperature),
            top_p=either(self.top_p, default.top_p),
            top_k=either(self.top_k, default.top_k),
            further={**default.further, **further},
        )

    def data_file(self) -> DataFile:
        """Its file, with slime's `path@[start:stop]`."""
        match = _SLICED.fullmatch(self.path)
        path = match["path"] if match else self.path
        start, stop = (int(match[bound]) if match and match[bound] else None for bound in ("start", "stop"))
        if not path.endswith(".jsonl"):
            raise ConfigError(f"got path={self.path!r} of the data set {self.name!r}; expected a .jsonl file")
        return DataFile(
            self.name,
            Path(path),
            start,
            stop,
            prompt_key=self.input_key or "prompt",
            label_key=self.label_key or "label",
        )


_KNOWN: Final = [*DataSetEntry.model_fields, *_OWN_FUNCTIONS, *_REFUSED, *_MEANINGLESS]


def read_eval_config(
    path: Path, default: Sampling, *, limit: int | None, on_note: Callable[[str], None]
) -> list[EvalSet]:
    """The data sets of a file, loaded.

    As in slime an entry's own key counts, else that of `eval.defaults`, else the default. A prompt and a label are
    looked for under "prompt" and "label" unless `input_key` and `label_key` say otherwise.

    Args:
        path: YAML or JSON.
        default: What the command was asked for.
        limit: Problems of each data set at most; None for all.
        on_note: Told of each key that has no meaning here, once.

    Raises:
        ConfigError: The file can't be read, a key is unknown (the message names the nearest) or asks for what can't be
            done here, or a value is out of range.
        PromptError: A data file can't be used.
    """
    content = _read(path)
    config = content.get("eval", content)
    if not isinstance(config, dict) or not config.get("datasets"):
        raise ConfigError(f"got no eval.datasets in {path}; expected a list of data sets with name and path")
    _check_keys(config, ["defaults", "datasets"], f"{path}: eval")
    defaults = _mapping(config.get("defaults") or {}, f"{path}: eval.defaults")
    _check_keys(defaults, _KNOWN, f"{path}: eval.defaults")
    entries = [{**defaults, **entry} for entry in _entries(config["datasets"], f"{path}: eval.datasets")]
    names = [entry.get("name") for entry in entries]
    if len({*map(str, names)}) < len(names):
        raise ConfigError(f"got the data sets {names!r} in {path}; expected a name of its own for each")
    for note in dict.fromkeys(key for entry in entries for key in _MEANINGLESS if entry.get(key)):
        on_note(f"{path}: {note} has no meaning here and is passed over")
    return [_load(entry, f"{path}: eval.datasets", default, limit) for entry in entries]


def _read(path: Path) -> dict[str, Any]:
    """The file's mapping as slime sees it: OmegaConf's, its interpolations (`${oc.env:DATA_DIR}`) resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as e:
        raise ConfigError(f"can't read {path}: {e}") from e
    return _mapping(content, str(path))


def _load(entry: Mapping[str, Any], where: str, default: Sampling, limit: int | None) -> EvalSet:
    where = f"{where} {entry.get('name')!r}"
    _check_keys(entry, _KNOWN, where)
    _refuse(entry, where)
    try:
        parsed = DataSetEntry.model_validate(dict(entry))
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"]))
        got = "nothing" if first["type"] == "missing" else repr(first["input"])
        raise ConfigError(f"{where}: got {got:.200} for {key}; expected: {first['msg']}") from e
    return EvalSet.load(
        parsed.data_file(),
        parsed.sampling(default),
        limit=limit,
        template_kwargs=parsed.apply_chat_template_kwargs,
    )


def _entries(datasets: object, where: str) -> Iterator[dict[str, Any]]:
    """The entries of a list, or of a mapping by name."""
    if isinstance(datasets, dict):
        datasets = [{"name": name, **_mapping(entry or {}, f"{where}.{name}")} for name, entry in datasets.items()]
    if not isinstance(datasets, list):
        raise ConfigError(f"got {type(datasets).__name__} at {where}; expected a list")
    for number, entry in enumerate(datasets):
        yield _mapping(entry, f"{where}[{number}]")


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"got {value!r:.200} at {where}; expected a mapping")
    return value


def _check_keys(found: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in found:
        if key not in known:
            near = get_close_matches(str(key), known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: got the unknown key {key!r}; {hint}")


def _refuse(entry: Mapping[str, Any], where: str) -> None:
    for key in _REFUSED:
        if entry.get(key):
            raise ConfigError(f"{where}: got {key}={entry[key]!r:.200}, which can't be evaluated here; leave it out")
    for key, own in _OWN_FUNCTIONS.items():
        if entry.get(key) not in (None, own):
            raise ConfigError(f"{where}: got {key}={entry[key]!r}; expected {own!r}, which is what is evaluated here")
