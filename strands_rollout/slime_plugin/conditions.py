"""The conditions of an episode: digests of settings, code, limits and more that must be the same to continue it.

An episode is continued, from a journal or as an aborted sample, only under the conditions of its start. Otherwise, the
episode starts from scratch. For an aborted sample, `resume` allows some conditions to change. docs/partial-rollouts.md
lists the conditions.
"""

import functools
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import orjson

from strands_rollout import __version__
from strands_rollout.errors import ToolError
from strands_rollout.samples import METADATA_KEY, SampleLike, SlimeArgs
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.slime_adapter import GenerateCall, tokenizer_of
from strands_rollout.user_code import source_file

# settings that are not conditions. They determine which processes play an episode, when it gives up, how it is saved
# and resumed, and what happens to its samples. `row_tools` only offers tools: a row's choice from it becomes part of
# `tools`, which is a condition
_IGNORED_SETTINGS: Final = frozenset(
    {
        "episode_workers",
        "should_abort",
        "journal_dir",
        "repeat_interrupted_tools",
        "resume_aborted",
        "freeze_gc",
        "engine_patience_s",
        "abort_grace_s",
        "on_engine_abort",
        "max_failed_groups",
        "dump_dir",
        "dump_samples",
        "mismatch_check",
        "fan_out",
        "reward",
        "max_staleness",
        "max_sample_staleness",
        "row_tools",
    }
)
# keys of metadata that do not belong to the row: an attempt's facts, the rollout in which slime collected the aborted
# sample, and the number of turns for `--log-multi-turn`
_ATTEMPT_KEYS: Final = frozenset({METADATA_KEY, "start_rollout_id", "round_number"})
_CODE_SETTINGS: Final = (
    "agent_factory",
    "agent_program",
    "conversation_manager",
    "environment_factory",
    "hooks",
    "tools",
)
# a text that different tokenizers probably encode differently: case, digits, spaces, accents, scripts, bytes, markup
_PROBE_TEXT: Final = "The quick  brown\n\tfox: 1234567 x**2 — naïve Größe 東京 привет 🦊 <|im_start|></s> [1.5e-3]\n\n"


def episode_conditions(call: GenerateCall, settings: RolloutSettings) -> dict[str, str]:
    """Return the digest of each condition by its name.

    The seed is not a condition, since it affects only future tokens. The prompt is not a condition either, since an
    aborted sample contains its prompt.

    Args:
        call: The call of `generate`.
        settings: The settings of this episode, including the row's.

    Raises:
        ConfigError: There is no usable tokenizer.
    """
    values = settings.model_dump(mode="json", exclude=set(_IGNORED_SETTINGS))
    paths = [path for name in _CODE_SETTINGS for path in _code_paths(values[name])]
    conditions: dict[str, object] = {
        "strands_rollout": __version__,
        "hf_checkpoint": str(getattr(call.args, "hf_checkpoint", None)),
        "the tokenizer or its template": _tokenizer_digest(tokenizer_of(call.args, call.sample)),
        "chat_template_kwargs": template_kwargs(call.args, call.sample),
        "the context limit": context_limit(call.args, evaluation=call.evaluation),
        **{str(name): value for name, value in dict(call.sampling_params).items() if name != "sampling_seed"},
        **{f"the code of {path}": _code_digest(path) for path in paths},
        **values,
    }
    return {name: digest_of(value) for name, value in conditions.items()}


def row_values(sample: SampleLike) -> list[object]:
    """Return a data set's row as plain values: prompt, label, and metadata without `_ATTEMPT_KEYS`."""
    metadata = sample.metadata if isinstance(sample.metadata, Mapping) else {}
    row_metadata = {str(name): value for name, value in metadata.items() if name not in _ATTEMPT_KEYS}
    return [sample.prompt, sample.label, row_metadata]


def digest_of(value: object) -> str:
    """Return the digest (16 hex digits) of a value's JSON; if JSON can't hold the value, the digest of its `repr`."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS
    try:
        text = orjson.dumps(value, default=repr, option=options)
    except TypeError:  # integers above 64 bits, lone surrogates, keys such as tuples
        text = repr(value).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()[:16]


def changed_conditions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the sorted names of the conditions that differ."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def template_kwargs(args: SlimeArgs, sample: SampleLike) -> Mapping[str, Any]:
    """Return the chat template's keyword arguments from the sample or, if it has none, from `args`.

    slime puts a data set's own arguments on its samples.
    """
    return (
        getattr(sample, "apply_chat_template_kwargs", None) or getattr(args, "apply_chat_template_kwargs", None) or {}
    )


def context_limit(args: SlimeArgs, *, evaluation: bool) -> int | None:
    """Return slime's context limit in tokens; None if only the engine limits the context.

    In training: `rollout_max_context_len`, else `max_tokens_per_gpu` times `context_parallel_size`, the tokens of the
    longest sample that the trainer can hold. In an evaluation: `eval_max_context_len`, else `rollout_max_context_len`.
    """
    for name in ("eval_max_context_len", "rollout_max_context_len") if evaluation else ("rollout_max_context_len",):
        if (limit := getattr(args, name, None)) is not None:
            return int(limit)
    max_tokens_per_gpu = getattr(args, "max_tokens_per_gpu", None)
    if evaluation or max_tokens_per_gpu is None:
        return None
    return int(max_tokens_per_gpu) * int(getattr(args, "context_parallel_size", None) or 1)


def _code_paths(value: object) -> list[str]:
    """Return the dotted paths in a setting's value, without its MCP servers."""
    entries = value if isinstance(value, list) else [value]
    return [entry for entry in entries if isinstance(entry, str)]


@functools.lru_cache(maxsize=4)
def _tokenizer_digest(tokenizer: Any) -> str:  # noqa: ANN401 - a class of transformers or of the user
    template = getattr(tokenizer, "chat_template", None)
    try:
        return digest_of([template, len(tokenizer), tokenizer.encode(_PROBE_TEXT), tokenizer.special_tokens_map])
    except Exception:  # a user's own tokenizer class may lack these attributes
        return digest_of([template])


@functools.lru_cache(maxsize=256)
def _code_digest(path: str) -> str:
    # Cache the digest: the process never reloads the code of a changed file
    with suppress(ToolError, OSError):
        file = source_file(path)
        return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return ""  # the episode fails with the reason when it loads the code
