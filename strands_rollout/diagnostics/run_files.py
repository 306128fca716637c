"""Checks of the files that a run reads: the model and its tokenizer, the settings, the prompt data sets.

What large packages bring is imported by the checks themselves: one that can't be imported is a finding.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
import yaml

from strands_rollout.diagnostics import diagnosis
from strands_rollout.diagnostics.diagnosis import Finding, Question, error, good, lacking, skipped, warning
from strands_rollout.errors import ConfigError, PromptError, RolloutError, TemplateError, foreign_code
from strands_rollout.files import MAX_JSON_BYTES, Json, open_regular, read_regular
from strands_rollout.settings import KEY, RolloutSettings, read_config_file, yaml_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from strands_rollout.template.chat_template import ChatTemplate

_GB: Final = 1e9
_TRACKER: Final = "latest_checkpointed_iteration.txt"
_INDEX: Final = "model.safetensors.index.json"
# no file of weights is this small; what git leaves in place of one is
_SMALLEST_WEIGHTS: Final = 1024
_TOOL_TOKENS: Final = ("<tool_call>", "</tool_call>")
_USER: Final = [{"role": "user", "content": "question"}]
_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "a function", "parameters": {"type": "object", "properties": {}}},
}
_IMPORTABLE: Final = "correct it; a module of your own must be installed, or its folder be on PYTHONPATH"
_ROWS: Final = 200
_MAX_HASHED_BYTES: Final = 4_000_000_000
_ONLY_EVALUATED: Final = "aime-2025.jsonl"
_SCRIPTS: Final = {
    "dapo-math-17k": "dapo_math_17k",
    "aime-2024": "aime_2024",
    "aime-2025": "aime_2025",
    "gsm8k": "gsm8k",
}
_NOT_RENDERED: Final = "leave --apply-chat-template off, and prepare the data as chats or plain text"


def check_model(question: Question) -> list[Finding]:
    """Whether the model has its config and all its weights."""
    folder, prepare = question.model, question.prepare_model
    if not folder.is_dir():
        found = f"{folder} is not there: a run starts from it"
        return [lacking("model", found, prepare, training=question.training)]
    index = folder / _INDEX
    try:
        config = orjson.loads(read_regular(folder / "config.json", MAX_JSON_BYTES))
        if index.is_file():
            names = set(orjson.loads(read_regular(index, MAX_JSON_BYTES))["weight_map"].values())
            weights = [folder / name for name in sorted(names)]
        else:
            weights = sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return [error("model", f"{folder} is not a whole model: {type(e).__name__}: {e}", prepare)]
    broken = [path.name for path in weights if not path.is_file() or path.stat().st_size < _SMALLEST_WEIGHTS]
    if broken or not weights:
        missing = ", ".join(broken) or "any *.safetensors"
        return [error("model", f"{folder} lacks weights: {missing}", prepare)]
    size_gb = sum(path.stat().st_size for path in weights) / _GB
    kind = config.get("model_type") if isinstance(config, dict) else None
    return [good("model", f"{folder}: {kind or 'a model'}, {len(weights)} files of weights, {size_gb:.1f} GB")]


def check_converted_model(question: Question) -> list[Finding]:
    """Whether the converted model is whole, as far as its tracker tells."""
    folder, prepare = question.converted_model, question.prepare_model
    if not folder.is_dir():
        found = f"{folder} is not there: Megatron loads it"
        return [lacking("converted model", found, prepare, training=question.training)]
    try:
        iteration = (folder / _TRACKER).read_text().strip()
    except (OSError, ValueError):
        return [error("converted model", f"{folder} has no {_TRACKER}: the conversion did not end", prepare)]
    name = f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration
    if not name or not (folder / name).is_dir():
        found = f"{folder / _TRACKER} names {iteration!r}, but there is no folder {name!r} beside it"
        return [error("converted model", found, prepare)]
    return [good("converted model", f"{folder}: {name}")]


def check_tokenizer(question: Question) -> list[Finding]:
    """Whether the tokenizer loads, its template only ever appends, and its special tokens are single known ones."""
    folder, prepare = question.tokenizer_dir, question.prepare_model
    fetch = f"fetch the tokenizer again: {prepare}; or name another folder with --tokenizer"
    try:
        tokenizer = load_tokenizer_folder(folder)
    except ConfigError as e:
        return [error("tokenizer", str(e), fetch)]
    size, rows = len(tokenizer), _json(folder / "config.json").get("vocab_size")
    findings = [good("tokenizer", f"{folder}: {type(tokenizer).__name__}, {size} tokens")]
    if isinstance(rows, int) and size > rows:  # an id for which the model has no row kills a server
        found = (
            f"{folder}: the tokenizer has {size} tokens, the model of its config.json {rows}: they are of two models"
        )
        findings.append(error("vocabulary", found, fetch))
    try:
        template = _template(tokenizer)
    except TemplateError as e:
        remedy = f"name an instruction-tuned model's folder with --tokenizer, or fetch one: {prepare}"
        return [*findings, error("chat template", f"{folder}: {e}", remedy)]
    end = template.encoder.decode([template.end_of_turn_id])
    thinking = thinking_words(tokenizer, opens_reasoning=template.opens_reasoning)
    return [
        *findings,
        good("chat template", f"append-only; a turn ends with {end}, id {template.end_of_turn_id}; {thinking}"),
        _tools(template),
        *check_end_of_turn(folder, tokenizer, template.end_of_turn_id, *template.end_ids),
    ]


def load_tokenizer_folder(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        ConfigError: It can't be loaded; the message names the file.
    """
    from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected one with a tokenizer.json")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; expected a fast tokenizer, which tells control tokens apart"
        )
    try:
        orjson.loads(read_regular(file, MAX_JSON_BYTES))
    except (OSError, orjson.JSONDecodeError) as e:
        raise ConfigError(f"{file} can't be read: {e}") from e
    with foreign_code("tokenizers raises plain Exceptions, transformers what its parts raise") as outcome:
        return load_tokenizer(str(folder))
    fault = outcome.error
    if isinstance(fault, RolloutError):
        raise fault
    raise ConfigError(f"the tokenizer of {folder} can't be loaded: {type(fault).__name__}: {fault}") from fault


def _template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    from strands_rollout.template.chat_template import ChatTemplate

    return ChatTemplate(tokenizer)


def thinking_words(tokenizer: PreTrainedTokenizerBase, *, opens_reasoning: bool, **template_kwargs: Json) -> str:
    """What `enable_thinking` does to a template whose generation prompt, by itself, opens reasoning or does not."""
    with_thinking, without = (
        tokenizer.apply_chat_template(
            _USER, tokenize=False, add_generation_prompt=True, enable_thinking=on, **template_kwargs
        )
        for on in (True, False)
    )
    if with_thinking == without:
        return f"enable_thinking changes nothing{', answers begin inside <think>' if opens_reasoning else ''}"
    if opens_reasoning:
        return "answers begin inside <think>, unless enable_thinking is false"
    return "enable_thinking: false leaves thinking out"


def _tools(template: ChatTemplate) -> Finding:
    try:
        template.prompt_ids(_USER, [_TOOL])
    except TemplateError as e:
        return error("tools in the template", str(e), "use a model that was trained to call tools, or set tools: []")
    ids = {text: template.encoder.encode_trusted(text) for text in _TOOL_TOKENS}
    split = [text for text in _TOOL_TOKENS if len(ids[text]) != 1]
    if split:
        found = f"{' and '.join(split)} are no single tokens: this model was not trained on the format 'hermes'"
        return warning("tools in the template", found, "set tool_parser: auto, or the name of the model's own format")
    shown = f"shown; {' and '.join(_TOOL_TOKENS)} are tokens {[ids[text][0] for text in _TOOL_TOKENS]}"
    return good("tools in the template", shown)


def check_end_of_turn(folder: Path, tokenizer: PreTrainedTokenizerBase, *wanted: int) -> list[Finding]:
    """Whether a generation stops where a turn ends, at each id `wanted`: engines stop at the ids of three places."""
    places = {
        "tokenizer_config.json": tokenizer.eos_token_id,
        "generation_config.json": _json(folder / "generation_config.json").get("eos_token_id"),
        "config.json": _json(folder / "config.json").get("eos_token_id"),
    }
    ends = {name: ids if isinstance(ids, list) else [ids] for name, ids in places.items() if ids is not None}
    shown = ", ".join(f"{ids} in {name}" for name, ids in ends.items()) or "none"
    known = {token for ids in ends.values() for token in ids}
    names = {token: f"id {token}, {tokenizer.decode([token])!r}," for token in wanted}
    for token, end in names.items():
        if token not in known:
            found = f"a turn ends with {end} but the end-of-sequence ids are {shown}: turns would not stop there"
            remedy = f'add {token} to "eos_token_id" in {folder / "generation_config.json"}'
            return [error("end of turn", found, remedy)]
    return [good("end of turn", f"{' and '.join(names.values())} ends a generation: {shown}")]


def _json(file: Path) -> dict[str, Json]:
    """An object of a file; empty where there is none, which the model's own check tells."""
    try:
        value = orjson.loads(read_regular(file, MAX_JSON_BYTES))
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def check_config(question: Question) -> list[Finding]:
    """Whether the YAML for slime's --custom-config-path is right, and what it names can be loaded."""
    default = question.repository / "configs" / "math_code.yaml"
    path = question.config or question.named("ROLLOUT_CONFIG") or (default if default.is_file() else None)
    if path is None:
        return [skipped("config", "no --config, and no configs/math_code.yaml here: the defaults hold")]
    try:
        settings = read_config_file(path)
    except ConfigError as e:
        return [error("config", str(e), "correct it; all settings with their meaning: strands-rollout config")]
    given = ", ".join(sorted(settings.model_fields_set)) or "no setting"
    findings = [good("config", f"{path}: {given} set, all valid")]
    if others := sorted(str(key) for key in yaml.safe_load(yaml_text(path)) if key != KEY):
        found = f"{path} also sets {', '.join(others)}: slime lets these override its command line, in silence"
        findings.append(warning("config: other keys", found, "give them on slime's command line instead"))
    return [*findings, *_load_named(settings)]


def _load_named(settings: RolloutSettings) -> list[Finding]:
    """An error for each setting whose named thing can't be loaded; the tools first, which may register parsers."""
    from strands_rollout.agent import tool_loading
    from strands_rollout.code_tool.executors import make_executor
    from strands_rollout.slime_plugin.slime_adapter import load_should_abort
    from strands_rollout.tool_parsers import AUTO, get_parser

    load = tool_loading.load_function
    steps: dict[str, Callable[[], object]] = {
        "tools": lambda: tool_loading.load_tools(settings.tools),
        "row_tools": lambda: tool_loading.load_tools(settings.row_tools),
        "agent_factory": lambda: settings.agent_factory and load(settings.agent_factory, "an agent"),
        "environment": lambda: settings.environment and load(settings.environment, "an environment"),
        "resources": lambda: [load(path, "a resource") for path in settings.resources.values()],
        "hooks": lambda: tool_loading.load_hooks(settings.hooks),
        "conversation_manager": lambda: tool_loading.load_conversation_manager(settings.conversation_manager),
        "should_abort": lambda: isinstance(settings.should_abort, str) and load_should_abort(settings.should_abort),
        "tool_parser": lambda: settings.tool_parser == AUTO or get_parser(settings.tool_parser),
        "executor": lambda: asyncio.run(make_executor(settings.executor).aclose()),
    }
    findings = []
    for name, step in steps.items():
        try:
            step()
        except RolloutError as e:
            findings.append(error(f"config: {name}", str(e), _IMPORTABLE))
    tools = ", ".join(tool if isinstance(tool, str) else tool.shown_name for tool in settings.tools) or "none"
    return findings or [good("config: names", f"tools {tools} and all else that the settings name can be loaded")]


def check_data(question: Question) -> list[Finding]:
    """Each data file that is named; else those that the scripts use, which may be missing."""
    if question.data:
        return [finding for path in question.data for finding in _check_file(path, question, needed=True)]
    prompts = question.named("PROMPT_DATA") or question.data_dir / "dapo-math-17k.jsonl"
    sets = "" if question.env.get("EVAL_CONFIG") else question.env.get("EVAL_SETS") or "aime-2024"
    files = [prompts, *(question.data_dir / f"{name}.jsonl" for name in sets.split(",") if name)]
    findings = [found for path in files for found in _check_file(path, question, needed=question.training)]
    further = question.data_dir / _ONLY_EVALUATED
    if further in files:
        return findings
    if further.is_file():
        return [*findings, *_check_file(further, question, needed=False)]
    missing = f"{further} is not there: scripts/eval_aime.sh needs it"
    return [*findings, warning(f"data: {further.name}", missing, _prepare(further))]


def _check_file(path: Path, question: Question, *, needed: bool) -> list[Finding]:
    name = f"data: {path.name}"
    if not path.is_file():
        return [lacking(name, f"{path} is not there", _prepare(path), training=needed)]
    try:
        template = _template(load_tokenizer_folder(question.tokenizer_dir))
    except RolloutError:  # which is another check's to say
        template = _template(load_tokenizer_folder(diagnosis.SHIPPED_TOKENIZER))
    try:
        return [_check_rows(path, template), check_manifest(path)]
    except OSError as e:
        return [error(name, f"{path} can't be read: {e.strerror or e}", f"check who may read it: ls -l {path}")]


def _prepare(path: Path) -> str:
    for name, script in _SCRIPTS.items():
        if path.name.startswith(name):
            return f"python data_prep/{script}.py"
    return 'make it one JSON object a line: {"prompt": [{"role": "user", "content": "..."}], "label": "34"}'


def _check_rows(path: Path, template: ChatTemplate) -> Finding:
    """Whether the first rows of a file can be trained on, with prompts that the template did not render yet."""
    with open_regular(path) as file:
        found = [_row_fault(line, template) for line in islice((line for line in file if line.strip()), _ROWS)]
    faults = [f"row {number}: {fault}" for number, fault in enumerate(found, start=1) if fault]
    count = len(found)
    name = f"data: {path.name}"
    if not count:
        return error(name, f"{path} has no rows; expected one JSON object a line", _prepare(path))
    if not faults:
        return good(name, f"{path}: the first {count} rows have usable prompts and labels")
    more = f" (and {len(faults) - 1} more of the first {count} rows)" if len(faults) > 1 else ""
    return error(name, f"{path}: {faults[0]}{more}", _NOT_RENDERED if "render" in faults[0] else _prepare(path))


def _row_fault(line: bytes, template: ChatTemplate) -> str | None:
    """What is wrong with a row."""
    from strands_rollout.grading import label_texts
    from strands_rollout.slime_plugin.row import to_episode_prompt

    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        return f"not JSON: {e}"
    if not isinstance(row, dict) or not {"prompt", "label"} <= row.keys():
        return f"got {line[:80]!r}; expected a JSON object with prompt and label"
    prompt, label = row["prompt"], row["label"]
    try:
        to_episode_prompt(prompt, None, template)
    except PromptError as e:
        return str(e)
    contents = [message["content"] for message in prompt] if isinstance(prompt, list) else []
    if any(isinstance(text, str) and template.is_rendered(text) for text in contents):
        return "a message of the prompt was already rendered by a chat template"
    if any(isinstance(text, dict | bool) for text in (label if isinstance(label, list) else (label,))):
        return f"the label is {label!r}; expected text, a number, or a list of them"
    if not any(text.strip() for text in label_texts(label)):
        return f"the label is {label!r}: with an empty label every answer is wrong"
    return None


def check_manifest(path: Path, max_bytes: int = _MAX_HASHED_BYTES) -> Finding:
    """Whether a data file is still the one whose manifest lies beside it; one larger than `max_bytes` is not read."""
    name, manifest_path = f"manifest: {path.name}", Path(f"{path}.manifest.json")
    if not manifest_path.is_file():
        return skipped(name, f"no {manifest_path.name}: where {path.name} comes from is not known")
    try:
        manifest = orjson.loads(manifest_path.read_bytes())
        rows, sha256 = int(manifest["rows"]), str(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        return error(name, f"{manifest_path} can't be read: {type(e).__name__}: {e}", _prepare(path))
    if path.stat().st_size > max_bytes:
        return skipped(name, f"{path} is larger than {max_bytes / 1e9:g} GB: not compared with its manifest")
    digest, got_rows = hashlib.sha256(), 0
    with open_regular(path) as file:
        for line in file:
            digest.update(line)
            got_rows += 1
    got_sha256 = digest.hexdigest()
    if got_sha256 != sha256:
        found = f"{path} is not the file that was prepared: {got_rows} rows, sha256 {got_sha256[:12]}..."
        return error(name, f"{found}; its manifest tells {rows} rows, sha256 {sha256[:12]}...", _prepare(path))
    if got_rows != rows:
        return error(name, f"{path} has {got_rows} rows; its manifest tells {rows}", _prepare(path))
    source = f"{manifest.get('dataset')} at {str(manifest.get('revision') or 'an unknown revision')[:12]}"
    return good(name, f"{rows} rows of {source}, unchanged since they were prepared")
