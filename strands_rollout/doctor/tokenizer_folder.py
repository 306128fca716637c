"""Can this tokenizer and its chat template be used token-exactly, with tools, and do its special tokens fit together?

The template's probe is the package's own. Added is what only the files of a folder tell: the vocabulary's size, and
where a generation ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import orjson

from strands_rollout.doctor.finding import Finding, error, good, warning
from strands_rollout.doctor.question import Question
from strands_rollout.errors import ConfigError, RolloutError, TemplateError

_TOOL_TOKENS: Final = ("<tool_call>", "</tool_call>")
_USER: Final = [{"role": "user", "content": "question"}]


def check_tokenizer(question: Question) -> list[Finding]:
    """Whether the tokenizer loads, its template only ever appends, and its special tokens are single known ones."""
    folder, prepare = question.tokenizer_dir, question.prepare_model
    fetch = f"fetch the tokenizer again: {prepare}; or name another folder with --tokenizer"
    try:
        tokenizer = load(folder)
    except ConfigError as e:
        return [error("tokenizer", str(e), fetch)]
    size = len(tokenizer)
    findings = [
        good("tokenizer", f"{folder}: {type(tokenizer).__name__}, {size} tokens"),
        *_vocabulary(folder, size, fetch),
    ]
    try:
        template = _template(tokenizer)
    except TemplateError as e:
        remedy = f"name an instruction-tuned model's folder with --tokenizer, or fetch one: {prepare}"
        return [*findings, error("chat template", f"{folder}: {e}", remedy)]
    return [
        *findings,
        _appends(template, tokenizer),
        _tools(template),
        *check_end_of_turn(folder, tokenizer, template.end_of_turn_id, *template.end_ids),
    ]


def load(folder: Path) -> Any:  # noqa: ANN401 - any Hugging Face tokenizer
    """The tokenizer of a folder.

    Raises:
        ConfigError: It can't be loaded; the message names the file.
    """
    from strands_rollout.slime_seam import load_tokenizer

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected one with a tokenizer.json")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; expected a fast tokenizer, which tells control tokens apart"
        )
    try:
        orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as e:
        raise ConfigError(f"{file} can't be read: {e}") from e
    try:
        return load_tokenizer(str(folder))
    except RolloutError:
        raise
    except Exception as e:  # tokenizers raises plain Exceptions, transformers what its parts raise
        raise ConfigError(f"the tokenizer of {folder} can't be loaded: {type(e).__name__}: {e}") from e


def template_of(folder: Path) -> Any:  # noqa: ANN401 - a ChatTemplate, whose import is heavy
    """The chat template of a folder's tokenizer.

    Raises:
        ConfigError: The tokenizer can't be loaded.
        TemplateError: Its template can't be used.
    """
    return _template(load(folder))


def _template(tokenizer: Any) -> Any:  # noqa: ANN401
    from strands_rollout.chat_template import ChatTemplate

    return ChatTemplate(tokenizer)


def _appends(template: Any, tokenizer: Any) -> Finding:  # noqa: ANN401
    end = template.encoder.decode([template.end_of_turn_id])
    thinking = thinking_words(tokenizer, opens_reasoning=template.opens_reasoning)
    return good("chat template", f"append-only; a turn ends with {end}, id {template.end_of_turn_id}; {thinking}")


def thinking_words(tokenizer: Any, *, opens_reasoning: bool, **template_kwargs: Any) -> str:  # noqa: ANN401
    """What `enable_thinking` does to a tokenizer's template.

    Args:
        tokenizer: Any with a template.
        opens_reasoning: Whether its generation prompt does, by itself.
        **template_kwargs: Handed to the template.
    """
    with_thinking, without = (_rendered(tokenizer, enable_thinking=on, **template_kwargs) for on in (True, False))
    if with_thinking == without:
        return f"enable_thinking changes nothing{', answers begin inside <think>' if opens_reasoning else ''}"
    if opens_reasoning:
        return "answers begin inside <think>, unless enable_thinking is false"
    return "enable_thinking: false leaves thinking out"


def _rendered(tokenizer: Any, **template_kwargs: Any) -> str:  # noqa: ANN401
    return str(tokenizer.apply_chat_template(_USER, tokenize=False, add_generation_prompt=True, **template_kwargs))


def _tools(template: Any) -> Finding:  # noqa: ANN401
    tool: dict[str, Any] = {
        "name": "f",
        "description": "a function",
        "parameters": {"type": "object", "properties": {}},
    }
    try:
        template.prompt_ids(_USER, [{"type": "function", "function": tool}])
    except TemplateError as e:
        return error("tools in the template", str(e), "use a model that was trained to call tools, or set tools: []")
    encoder = template.encoder
    split = [text for text in _TOOL_TOKENS if len(encoder.encode_trusted(text)) != 1]
    if split:
        found = f"{' and '.join(split)} are no single tokens: this model was not trained on the format 'hermes'"
        return warning("tools in the template", found, "set tool_parser: auto, or the name of the model's own format")
    ids = [encoder.encode_trusted(text)[0] for text in _TOOL_TOKENS]
    return good("tools in the template", f"shown; {' and '.join(_TOOL_TOKENS)} are tokens {ids}")


def check_end_of_turn(folder: Path, tokenizer: Any, *wanted: int) -> list[Finding]:  # noqa: ANN401
    """Whether a generation stops where a turn ends, at each id `wanted`: engines stop at the ids of three places."""
    places = {
        "tokenizer_config.json": tokenizer.eos_token_id,
        "generation_config.json": _json(folder / "generation_config.json").get("eos_token_id"),
        "config.json": _json(folder / "config.json").get("eos_token_id"),
    }
    ends = {name: ids if isinstance(ids, list) else [ids] for name, ids in places.items() if ids is not None}
    shown = ", ".join(f"{ids} in {name}" for name, ids in ends.items()) or "none"
    known = {token for ids in ends.values() for token in ids}
    for token in dict.fromkeys(wanted):
        if token not in known:
            end = f"id {token}, {tokenizer.decode([token])!r},"
            found = f"a turn ends with {end} but the end-of-sequence ids are {shown}: turns would not stop there"
            remedy = f'add {token} to "eos_token_id" in {folder / "generation_config.json"}'
            return [error("end of turn", found, remedy)]
    all_ends = " and ".join(f"id {token}, {tokenizer.decode([token])!r}," for token in dict.fromkeys(wanted))
    return [good("end of turn", f"{all_ends} ends a generation: {shown}")]


def _vocabulary(folder: Path, size: int, fetch: str) -> list[Finding]:
    """Whether the model has a row for each id; one that it lacks kills a server."""
    rows = _json(folder / "config.json").get("vocab_size")
    if not isinstance(rows, int) or size <= rows:
        return []
    found = f"{folder}: the tokenizer has {size} tokens, the model of its config.json {rows}: they are of two models"
    return [error("vocabulary", found, fetch)]


def _json(file: Path) -> dict[str, Any]:
    """An object of a file; empty where there is none, which the model's own check tells."""
    try:
        value = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
