"""The conditions of an episode: all that decides how it goes on from one of its steps, in digests that can be compared.

An episode is continued, from a journal or as an aborted sample, under the conditions that it was begun under; otherwise
it starts afresh. docs/partial-rollouts.md lists what is among them and what is not.
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
from strands_rollout.user_code import source_of

# where an episode is played, when it is given up, how it is kept, and what becomes of it when it is over; of
# `row_tools` only those count that are among the episode's `tools`
_CHANGE_NOTHING: Final = frozenset(
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
# what attempts leave in a row's metadata: facts, slime's mark of a collected sample, and turns for `--log-multi-turn`
_OF_ATTEMPTS: Final = frozenset({METADATA_KEY, "start_rollout_id", "round_number"})
_NAME_CODE: Final = ("agent_factory", "agent_program", "conversation_manager", "hooks", "tools")
# what tokenizers differ in: case, digits, spaces, accents, scripts, bytes, markup
_PROBE: Final = "The quick  brown\n\tfox: 1234567 x**2 — naïve Größe 東京 привет 🦊 <|im_start|></s> [1.5e-3]\n\n"


def episode_conditions(call: GenerateCall, settings: RolloutSettings) -> dict[str, str]:
    """A digest of each condition by its name; `settings` are the episode's own, with those of its row.

    Not the seed: a turn that is sampled later draws anew. Not the prompt, which an aborted sample brings with it.

    Raises:
        ConfigError: There is no usable tokenizer.
    """
    values = settings.model_dump(mode="json", exclude=set(_CHANGE_NOTHING))
    paths = [path for name in _NAME_CODE for path in _paths(values[name])]
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
    """What a data set's row gives an episode, as plain values: the prompt, the label, and its metadata."""
    metadata = sample.metadata if isinstance(sample.metadata, Mapping) else {}
    given = {str(name): value for name, value in metadata.items() if name not in _OF_ATTEMPTS}
    return [sample.prompt, sample.label, given]


def digest_of(value: object) -> str:
    """A short digest of plain values; of others, and of what JSON can't hold, what `repr` says."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS
    try:
        text = orjson.dumps(value, default=repr, option=options)
    except TypeError:  # as for integers above 64 bits, halves of surrogate pairs, and keys that JSON has not
        text = repr(value).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()[:16]


def changed_conditions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of the conditions that differ."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def template_kwargs(args: SlimeArgs, sample: SampleLike) -> Mapping[str, Any]:
    """Slime sets them per data set, on the sample; `--apply-chat-template-kwargs` otherwise."""
    return (
        getattr(sample, "apply_chat_template_kwargs", None) or getattr(args, "apply_chat_template_kwargs", None) or {}
    )


def context_limit(args: SlimeArgs, *, evaluation: bool) -> int | None:
    """Slime's context limit: the configured one, else what a training batch can hold, else only the engine's."""
    for name in ("eval_max_context_len", "rollout_max_context_len") if evaluation else ("rollout_max_context_len",):
        if (limit := getattr(args, name, None)) is not None:
            return int(limit)
    max_tokens_per_gpu = getattr(args, "max_tokens_per_gpu", None)
    if evaluation or max_tokens_per_gpu is None:
        return None
    return int(max_tokens_per_gpu) * int(getattr(args, "context_parallel_size", None) or 1)


def _paths(named: object) -> list[str]:
    """The paths of code among a setting's values; an MCP server is none."""
    given = named if isinstance(named, list) else [named]
    return [one for one in given if isinstance(one, str)]


@functools.lru_cache(maxsize=4)
def _tokenizer_digest(tokenizer: Any) -> str:  # noqa: ANN401 - a foreign class
    template = getattr(tokenizer, "chat_template", None)
    try:
        return digest_of([template, len(tokenizer), tokenizer.encode(_PROBE), tokenizer.special_tokens_map])
    except Exception:  # a tokenizer of a user's own kind may lack what others have
        return digest_of([template])


@functools.lru_cache(maxsize=256)
def _code_digest(path: str) -> str:
    """Of the file that a path names code in, as it is when it is first asked for: this process runs that."""
    with suppress(ToolError, OSError):
        file = source_of(path)
        return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return ""  # the episode fails of it
