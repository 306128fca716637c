"""Checks of the files that a run reads: model, tokenizer, settings file, prompt data sets and `--eval-config`.

Each check imports large packages in its own function. An import that fails thus becomes a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
import yaml

from strands_rollout import diagnostics
from strands_rollout.diagnostics import DoctorOptions, Finding, count_of, error, good, missing, skipped, warning
from strands_rollout.errors import ConfigError, PromptError, RolloutError, SandboxError
from strands_rollout.files.json_files import MAX_JSON_BYTES
from strands_rollout.files.safe_files import read_regular
from strands_rollout.files.yaml_files import yaml_text
from strands_rollout.play.rows import Row, iter_rows
from strands_rollout.settings import KEY, RolloutSettings, read_config_file

if TYPE_CHECKING:
    from strands_rollout.template.chat_template import ChatTemplate

_TRACKER_FILE: Final = "latest_checkpointed_iteration.txt"
_INDEX_FILE: Final = "model.safetensors.index.json"
# minimum bytes of a file of weights: Git LFS may have left a smaller pointer file instead
_MIN_WEIGHT_BYTES: Final = 1024
_IMPORT_REMEDY: Final = (
    "correct the name; your own module must be beside the settings file, installed, or on PYTHONPATH"
)
_CONNECT_REMEDY: Final = "start the server, or correct its command or URL"
_MAX_ROWS: Final = 200
_PREPARE_SCRIPTS: Final = {
    "dapo-math-17k": "dapo_math_17k.py",
    "aime-2024": "aime_2024.py",
    "aime-2025": "aime_2025.py",
    "gsm8k-train": "gsm8k.py",
    "gsm8k-test": "gsm8k.py --split test",
}
_PREPARE_REMEDY: Final = 'write a JSON object per line: {"prompt": [{"role": "user", "content": "..."}], "label": "34"}'
_RENDERED_REMEDY: Final = "leave out --apply-chat-template, and prepare the data as messages or plain text"


def check_model(options: DoctorOptions) -> Iterator[Finding]:
    """Check that the model has a config.json and all files of weights."""
    folder, prepare = options.model, options.prepare_model_command
    if not folder.is_dir():
        yield missing("model", f"{folder} does not exist; a run starts from it", prepare, needed=options.training)
        return
    try:
        config = orjson.loads(read_regular(folder / "config.json", MAX_JSON_BYTES))
        weights = sorted(folder.glob("*.safetensors"))
        if (index := folder / _INDEX_FILE).is_file():
            names = set(orjson.loads(read_regular(index, MAX_JSON_BYTES))["weight_map"].values())
            weights = [folder / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        yield error("model", f"{folder} is not a complete model: {type(e).__name__}: {e}", prepare)
        return
    broken = [path.name for path in weights if not path.is_file() or path.stat().st_size < _MIN_WEIGHT_BYTES]
    if broken or not weights:
        present = [name for name in broken if (folder / name).is_file()]  # the script downloads only missing files
        remedy = f"remove {', '.join(present)} from the folder, then run: {prepare}" if present else prepare
        yield error("model", f"{folder} lacks weights: {', '.join(broken) or 'it has no *.safetensors'}", remedy)
        return
    size_gb = sum(path.stat().st_size for path in weights) / 1e9
    kind = config.get("model_type") if isinstance(config, dict) else None
    yield good("model", f"{folder}: {kind or 'a model'}, {len(weights)} files of weights, {size_gb:.1f} GB")


def check_converted_model(options: DoctorOptions) -> Iterator[Finding]:
    """Check that the converted model has the folder named in its tracker file."""
    folder, name, prepare = options.converted_model, "converted model", options.prepare_model_command
    if not folder.is_dir():
        yield missing(name, f"{folder} does not exist; Megatron loads it", prepare, needed=options.training)
        return
    tracker = folder / _TRACKER_FILE
    iteration = tracker.read_text().strip() if tracker.is_file() else ""
    saved = f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration
    if saved and (folder / saved).is_dir():
        yield good(name, f"{folder}: {saved}")
    else:
        missing_tracker = f"{tracker} is missing or empty"
        problem = f"{folder} has no folder {saved}, which {_TRACKER_FILE} names" if saved else missing_tracker
        # the script converts only if the folder does not exist
        yield error(name, f"{problem}: convert the model again", f"remove {folder}, then run: {prepare}")


def check_tokenizer(options: DoctorOptions) -> Iterator[Finding]:
    """Check that the tokenizer loads and fits the model, and that its chat template passes `check-template`."""
    from strands_rollout.diagnostics.template_check import check_template, load_tokenizer_folder, read_json_object

    folder = options.tokenizer_dir
    fetch = f"download the tokenizer again: {options.prepare_model_command}; or name another folder with --tokenizer"
    try:
        tokenizer = load_tokenizer_folder(folder)
    except ConfigError as e:
        yield error("tokenizer", str(e), fetch)
        return
    size, vocab_size = len(tokenizer), read_json_object(folder / "config.json").get("vocab_size")
    yield good("tokenizer", f"{folder}: {type(tokenizer).__name__}, {size} tokens")
    if isinstance(vocab_size, int) and size > vocab_size:  # an id without an embedding crashes a server
        found = f"{folder}: the tokenizer has {size} tokens, but the model's vocab_size in config.json is {vocab_size}"
        yield error("vocabulary", found, fetch)
    parser = settings_or_defaults(options).tool_parser
    rules = {rule.name: rule for rule in check_template(str(folder), tokenizer, tool_parser=parser)}
    faults = [replace(rule, name=f"chat template: {name}") for name, rule in rules.items() if rule.remedy is not None]
    if not faults:
        shown = "; ".join(f"{name}: {rules[name].found}" for name in ("end of turn", "reasoning"))
        yield good("chat template", f"passes all rules of check-template; {shown}")
    yield from faults


def settings_or_defaults(options: DoctorOptions) -> RolloutSettings:
    """Return the configured settings; if they are missing or invalid, the defaults with `tool_parser` "auto"."""
    with contextlib.suppress(ConfigError):  # `check_config` reports the error
        if options.config_file or options.changes:
            return read_config_file(options.config_file, options.changes)
    return RolloutSettings(tool_parser="auto")


def check_config(options: DoctorOptions) -> Iterator[Finding]:
    """Check that the settings are valid, and that the tools, functions and servers in them can be used.

    The requirements of `episode_workers` and `journal_dir` are checked, too.
    """
    path = options.config_file
    if path is None and not options.changes:
        found = "no --config, no ROLLOUT_CONFIG, and no configs/math_code.yaml here: runs use the default settings"
        yield skipped("config", found)
        return
    try:
        settings = read_config_file(path, options.changes)
    except ConfigError as e:
        yield error("config", str(e), "correct the setting; to list all settings, run: strands-rollout config")
        return
    given = ", ".join(sorted(settings.model_fields_set)) or "nothing"
    yield good("config", f"{path or '--set'}: sets {given}; all valid")
    if path and (others := sorted(str(key) for key in yaml.safe_load(yaml_text(path)) if key != KEY)):
        found = f"{path} also sets {', '.join(others)}, which silently override slime's command line"
        yield warning("config: other keys", found, "give them on slime's command line instead")
    yield from _check_names(path, settings)
    yield from _check_workers(settings)


def _check_workers(settings: RolloutSettings) -> Iterator[Finding]:
    workers, cpus = settings.episode_workers, os.cpu_count() or 1
    if workers.is_enabled and find_spec("ray") is None:
        remedy = "pip install 'strands-rollout[ray]', on every node, or set episode_workers: 0"
        yield error("config: episode_workers", "episode workers need Ray, which is not installed here", remedy)
    elif workers.is_enabled:
        here = min(count for count in (workers.count, workers.per_node) if count is not None)
        number = count_of(here, "worker") + " per node" if workers.count is None else count_of(workers.count, "worker")
        requested = f"{number}, {count_of(workers.cpus, 'CPU')} each; this machine has {count_of(cpus, 'CPU')}"
        if here * workers.cpus > cpus:
            found = f"{requested}, and engines and trainer need some of them"
            yield warning("config: episode_workers", found, "check that the job has enough nodes, or use fewer workers")
        else:
            yield good("config: episode_workers", requested)
    if settings.journal_dir is not None:
        folder = Path(settings.journal_dir)
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            yield error("config: journal_dir", f"{folder} can't be written to", "set journal_dir to a writable folder")
        else:
            yield good("config: journal_dir", f"unfinished episodes are saved in {folder}")


def _check_names(path: Path | None, settings: RolloutSettings) -> Iterator[Finding]:
    from strands_rollout.slime_plugin.inputs import find_load_errors
    from strands_rollout.user_code import add_config_folder

    add_config_folder(path)
    faults = asyncio.run(find_load_errors(settings, connects=True))
    for name, fault in faults:
        yield error(
            f"config: {name}", str(fault), _CONNECT_REMEDY if isinstance(fault, SandboxError) else _IMPORT_REMEDY
        )
    if not faults:
        tools = ", ".join(tool if isinstance(tool, str) else tool.shown_name for tool in settings.tools) or "none"
        yield good("config: names", f"tools ({tools}) and all other names in the settings can be loaded")


def check_data(options: DoctorOptions) -> Iterator[Finding]:
    """Check the data files of --data or of the checked command, else the data files of the launch scripts.

    A missing data file is usually a warning. It is an error if --data or the command names the file. With --training,
    it is also an error if a training run needs the file. If the launch scripts' files are checked, the file in
    EVAL_CONFIG is checked too; a fault in this file is always an error.
    """
    if options.data:
        for path in options.data:
            yield from _check_data_file(path, options, needed=True)
        return
    if config := options.path_in_env("EVAL_CONFIG"):
        yield check_eval_config(config)
    sets = "" if config else options.env.get("EVAL_SETS") or "aime-2024"
    evaluated = [options.data_dir / f"{name}.jsonl" for name in sets.split(",") if name]
    for path in (options.path_in_env("PROMPT_DATA") or options.data_dir / "dapo-math-17k.jsonl", *evaluated):
        yield from _check_data_file(path, options, needed=options.training)
    # scripts/eval_aime.sh needs this set, but a training run does not
    aime_2025 = options.data_dir / "aime-2025.jsonl"
    if aime_2025 not in evaluated:
        yield from _check_data_file(aime_2025, options, needed=False)


def check_eval_config(path: Path) -> Finding:
    """Check a file for slime's --eval-config, and the data sets that the file names."""
    from strands_rollout.evaluation.plan import read_eval_config
    from strands_rollout.play.options import Sampling

    try:
        sets = read_eval_config(path, Sampling(samples=1, max_new_tokens=1), limit=None, on_note=lambda _: None)
    except RolloutError as e:
        again = f"EVAL_CONFIG={path} strands-rollout doctor"
        return error("eval config", str(e), f"correct the file; to check it again, run: {again}")
    return good("eval config", f"{path}: {', '.join(data_set.name for data_set in sets)}; all data files can be read")


def _check_data_file(path: Path, options: DoctorOptions, *, needed: bool) -> Iterator[Finding]:
    """Check that a data file exists, and that its first rows have usable prompts and all needed labels."""
    from strands_rollout.diagnostics.template_check import load_tokenizer_folder
    from strands_rollout.grading import container_label
    from strands_rollout.template.chat_template import ChatTemplate

    scripts = (
        f"python data_prep/{script}" for start, script in _PREPARE_SCRIPTS.items() if path.name.startswith(start)
    )
    name, prepare = f"data: {path.name}", next(scripts, _PREPARE_REMEDY)
    if not path.is_file():
        yield missing(name, f"{path} does not exist", prepare, needed=needed)
        return
    try:
        template = ChatTemplate(load_tokenizer_folder(options.tokenizer_dir))
    except RolloutError:  # `check_tokenizer` reports the error
        template = ChatTemplate(load_tokenizer_folder(diagnostics.SHIPPED_TOKENIZER))
    settings = settings_or_defaults(options)
    try:
        prompt_key, label_key = options.prompt_key, options.label_key
        found = iter_rows(path, prompt_key=prompt_key, label_key=label_key, needs_label=settings.needs_labels)
        rows = list(islice(found, _MAX_ROWS))
    except PromptError as e:
        yield error(name, str(e), prepare)
        return
    faults = [f"line {line}: {fault}" for line, row in rows if (fault := _row_fault(row, template, settings))]
    if faults:
        more = f" (and {len(faults) - 1} more of the first {len(rows)} rows)" if len(faults) > 1 else ""
        yield error(name, f"{path}: {faults[0]}{more}", _RENDERED_REMEDY if "render" in faults[0] else prepare)
        return
    labeled = [row for _, row in rows if isinstance(row, Row) and settings.needs_labels]
    containers = [(row, container) for row in labeled if (container := container_label(row.label))]
    notes = [f"line {row.line}: the label {row.label!r:.80} {container.meaning}" for row, container in containers]
    if any(container.kind == "unreadable" for _, container in containers):
        yield warning(name, f"{path}: {'; '.join(notes[:3])}", prepare)
    else:
        yield good(name, "; ".join([f"{path}: the first {len(rows)} rows are usable", *notes[:1]]))


def _row_fault(row: Row | PromptError, template: ChatTemplate, settings: RolloutSettings) -> str | None:
    from strands_rollout.grading import label_texts
    from strands_rollout.slime_plugin.inputs import to_episode_prompt, with_row_settings

    if isinstance(row, PromptError):
        return str(row)
    prompt, label = row.prompt, row.label
    try:
        to_episode_prompt(prompt, None, template)
        with_row_settings(settings, row.metadata)
    except (PromptError, ConfigError) as e:
        return str(e)
    contents = [message["content"] for message in prompt] if isinstance(prompt, list) else []
    if any(isinstance(text, str) and template.looks_rendered(text) for text in contents):
        return "a message of the prompt was already rendered by a chat template"
    if not settings.needs_labels:
        return None
    if any(isinstance(text, dict | bool) for text in (label if isinstance(label, list) else (label,))):
        return f"the label is {label!r}; expected text, a number, or a list of them"
    try:
        texts = label_texts(label)
    except ValueError as e:
        return str(e)
    if not any(text.strip() for text in texts):
        return f"the label {label!r} is empty, so every answer is wrong"
    return None
