"""Write the data sets of a protocol for slime's evaluation: `python -m strands_rollout.evaluation.slime_protocol`.

slime samples each data set with its own parameters (`--eval-config`), but can't append a sentence to prompts or change
the agent. So this module appends the protocol's instruction to each row's prompt, and writes the protocol's settings of
the agent into the row's own settings. The name of a data set, which slime logs, includes the protocol, as in
`aime-2024@qwen3`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.evaluation.benchmarks import BENCHMARKS, Benchmark, benchmark_of
from strands_rollout.evaluation.protocols import Measurement, Protocol, find_protocol
from strands_rollout.files.json_files import read_json, write_json
from strands_rollout.files.safe_files import atomic_replacement
from strands_rollout.play.options import Sampling
from strands_rollout.play.rows import Row, iter_rows
from strands_rollout.settings import RolloutSettings, read_config_file
from strands_rollout.slime_plugin.inputs import ROW_SETTINGS, ROW_SETTINGS_KEY

_CONFIG_NAME: Final = "eval.json"  # OmegaConf reads JSON as YAML


@dataclass(frozen=True, slots=True)
class ProtocolSet:
    """A data set under a protocol, as slime evaluates it.

    Attributes:
        name: Name with the protocol, and with `+modified` if the conditions differ from the protocol's.
        rows: Rows as JSON objects. In a dry run, the file need not exist; then there are no rows.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    sampling: Sampling
    measurement: Measurement

    def entry(self, folder: Path) -> dict[str, Any]:
        """Return the data set's entry in slime's `eval.datasets`."""
        return {
            "name": self.name,
            "path": str(folder / f"{self.name}.jsonl"),
            "n_samples_per_eval_prompt": self.sampling.samples,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "max_response_len": self.sampling.max_new_tokens,
            "input_key": "prompt",
            "label_key": "label",
            "metadata_key": "metadata",
        }


def protocol_set(
    name: str, path: Path, protocol: Protocol, settings: RolloutSettings, overrides: Mapping[str, Any]
) -> ProtocolSet:
    """Return a data set under a protocol.

    Args:
        name: Name of the data set. The name of a benchmark selects the protocol's sampling for that benchmark. For
            another name, the rows select the benchmark if all of them name it in their metadata.
        path: File of the data set. If it does not exist, the result has no rows.
        protocol: The protocol.
        settings: Settings of the training run. The protocol replaces only settings that a row can have.
        overrides: Fields of `Sampling` that the user has given.

    Raises:
        ConfigError: The protocol can't measure a row, or the training run lacks tools that the protocol needs.
        PromptError: A row can't be used.
    """
    rows = []
    for _, row in iter_rows(path, needs_label=False) if path.is_file() else ():
        if not isinstance(row, Row):
            raise row
        rows.append(row)
    benchmark: Benchmark | None = BENCHMARKS.get(name) or benchmark_of([row.metadata for row in rows])
    own = RolloutSettings(**protocol.settings)
    agent = {key: getattr(own, key) for key in ROW_SETTINGS}
    missing = [str(tool) for tool in agent["tools"] if tool not in (*settings.tools, *settings.row_tools)]
    if missing:
        raise ConfigError(
            f"the protocol {protocol.name} needs the tools {missing}, which the training's configuration lacks; add "
            "them to row_tools"
        )
    sampling = replace(protocol.sampling_of(benchmark), **overrides)
    changes = protocol.sampling_changes(sampling, benchmark)
    changes += protocol.setting_changes(settings.model_copy(update=agent))
    if benchmark and rows and len(rows) != benchmark.rows:
        changes.append(f"{len(rows)} of {benchmark.rows} problems")
    measurement = Measurement(protocol, benchmark, tuple(changes))
    agent["tools"] = list(agent["tools"])
    entries = [_to_json(protocol.with_instruction(row), agent) for row in rows]
    return ProtocolSet(
        f"{name}@{measurement.label}",
        entries,
        sampling,
        measurement,
    )


def _to_json(row: Row, agent: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": row.prompt, "label": row.label, "metadata": {**row.metadata, ROW_SETTINGS_KEY: dict(agent)}}


def model_positions(model: Path) -> int | None:
    """Return the context length in tokens that SGLang takes from a model's `config.json`; None if that is unknown.

    A model that also reads images has the number in `text_config`. The number is multiplied by the `factor` of
    `rope_scaling`, unless `rope_scaling` has the `rope_type` "llama3" or names `original_max_position_embeddings`
    (SGLang's srt/utils/hf_transformers, `get_context_length`).

    Raises:
        ConfigError: The file can't be read as JSON.
    """
    file = model / "config.json"
    try:
        if not file.is_file():
            return None
    except OSError:  # such as a name that is too long
        return None
    config: Mapping[str, Any] = read_json(file, advice="convert or download the model again")
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    positions, scaling = config.get("max_position_embeddings"), config.get("rope_scaling")
    if not isinstance(positions, int):
        return None
    if not isinstance(scaling, Mapping) or "original_max_position_embeddings" in scaling:
        return positions
    factor = 1 if scaling.get("rope_type") == "llama3" else scaling.get("factor", 1)
    return int(positions * factor) if isinstance(factor, int | float) else positions


def check_context(sets: Sequence[ProtocolSet], prompt_tokens: int, model: Path | None) -> int:
    """Check that the longest response and prompt fit into the model's context; return the tokens of both together.

    Args:
        sets: The data sets.
        prompt_tokens: Maximum tokens of a prompt.
        model: Folder of the model. Without a folder, or without a context length in its `config.json`, nothing is
            checked.

    Raises:
        ConfigError: The model's context is shorter than the longest response and prompt together.
    """
    longest = max(each.sampling.max_new_tokens for each in sets)
    positions = model_positions(model) if model else None
    if positions and prompt_tokens >= positions:
        raise ConfigError(
            f"got --prompt-room {prompt_tokens}; expected less than the {positions} positions of the model, so that "
            "tokens are left for a response. Lower --prompt-room (the scripts set it to MAX_CONTEXT_LEN - "
            "MAX_RESPONSE_LEN, so lower MAX_CONTEXT_LEN there), or extend the model's context"
        )
    if positions and longest + prompt_tokens > positions:
        raise ConfigError(
            f"a response of {longest} tokens and a prompt of {prompt_tokens} need {longest + prompt_tokens} positions; "
            f"the model has {positions}. Set EVAL_MAX_RESPONSE_LEN={positions - prompt_tokens}, which adds +modified "
            "to the protocol's name in the results, or extend the model's context"
        )
    return longest + prompt_tokens


def files_folder(sets: Sequence[ProtocolSet], out: Path) -> Path:
    """Return the folder in `out` for the files of these sets.

    The folder's name is a hash of the files' content. slime reads the files long after they are written, and another
    job, with other samples or problems, must not replace them.
    """
    content = [[each.entry(out), list(each.rows)] for each in sets]
    return out / hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def write_sets(sets: Sequence[ProtocolSet], folder: Path) -> None:
    """Write the data sets and slime's configuration to a folder.

    Raises:
        ConfigError: A file can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in sets:
            with atomic_replacement(folder / f"{each.name}.jsonl") as temporary:
                temporary.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in each.rows))
    except OSError as e:
        raise ConfigError(f"can't write to {folder}: {e.strerror}; choose another folder with --out") from e
    write_json(folder / _CONFIG_NAME, {"eval": {"datasets": [each.entry(folder) for each in sets]}})


def _read_sets(given: Sequence[str], *, must_exist: bool) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for entry in given:
        name, _, path = entry.partition("=")
        if not path or not re.fullmatch(r"[\w.+-]+", name) or name in paths:
            raise ConfigError(
                f"got {entry!r}; expected NAME=PATH, with a different name for each data set; names have only letters, "
                "digits and the characters _ . + -"
            )
        if must_exist and not Path(path).is_file():
            raise ConfigError(f"got {entry!r}, but {path} is not a file; expected the file of a data set")
        paths[name] = Path(path)
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Write an evaluation's data sets and configuration, unless --dry-run; print slime's arguments, one per line."""
    parser = argparse.ArgumentParser(
        prog="python -m strands_rollout.evaluation.slime_protocol", description=main.__doc__
    )
    parser.add_argument("--protocol", required=True, help="name of the protocol")
    parser.add_argument("--config", type=Path, help="settings file of the training run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the data sets and slime's configuration")
    parser.add_argument("--model", type=Path, help="folder of the model, to check its context length")
    parser.add_argument("--prompt-room", type=int, default=2048, help="maximum tokens of a prompt; default: 2048")
    parser.add_argument("--samples", type=int, help="samples per problem instead of the protocol's")
    parser.add_argument("--temperature", type=float, help="sampling temperature instead of the protocol's")
    parser.add_argument("--top-p", type=float, help="top-p instead of the protocol's")
    parser.add_argument("--top-k", type=int, help="top-k instead of the protocol's")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help="maximum tokens of a response, tool results included, instead of the protocol's",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the arguments, but write no files")
    parser.add_argument("sets", nargs="+", metavar="NAME=PATH", help="names and files of the data sets")
    given = parser.parse_args(arguments)
    names = ("samples", "temperature", "top_p", "top_k", "max_new_tokens")
    overrides = {name: value for name in names if (value := getattr(given, name)) is not None}
    try:
        protocol, settings = find_protocol(given.protocol), read_config_file(given.config)
        paths = _read_sets(given.sets, must_exist=not given.dry_run)
        sets = [protocol_set(name, path, protocol, settings, overrides) for name, path in paths.items()]
        context, folder = check_context(sets, given.prompt_room, given.model), files_folder(sets, given.out)
        if not given.dry_run:
            write_sets(sets, folder)
    except RolloutError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    for each in sets:
        changes = "; ".join(each.measurement.changes)
        note = changes or each.measurement.comparability
        print(f"{each.name}: {note}", file=sys.stderr)
    longest = max(each.sampling.max_new_tokens for each in sets)
    lengths = ["--eval-max-response-len", str(longest), "--eval-max-context-len", str(context)]
    print("\n".join(["--eval-config", str(folder / _CONFIG_NAME), *lengths]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
