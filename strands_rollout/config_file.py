"""The YAML of slime's `--custom-config-path`: read as slime reads it, and settings written as such a file.

Knows YAML and the settings' own documentation; what the settings mean is `config`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from textwrap import wrap
from types import SimpleNamespace
from typing import Any, Final

import yaml
from pydantic import BaseModel

from strands_rollout.config import RolloutSettings, settings_from_args
from strands_rollout.errors import ConfigError
from strands_rollout.secret_mask import MASK, masked

KEY: Final = "strands_rollout"
MASK_NOTE: Final = f"Secrets are masked as {MASK}: put them in again before you use this."
_WIDTH: Final = 116
_SECRET: Final = re.compile(r"authorization|token(?!s)|key|password|secret|cookie", re.IGNORECASE)


def read_config_file(path: Path) -> RolloutSettings:
    """The settings under `strands_rollout:` of a file; its other keys are slime's, which sets them on its args.

    Raises:
        ConfigError: The file can't be read, is no YAML mapping, lacks the key, or holds a setting that is unknown or
            out of range.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is no YAML: {e}") from e
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds {type(content).__name__}; expected a mapping with the key {KEY}:")
    if KEY not in content:
        near = get_close_matches(KEY, map(str, content), n=1)
        hint = f"did you mean {KEY!r} by {near[0]!r}?" if near else f"got {', '.join(map(str, content)) or 'none'}"
        raise ConfigError(f"{path} has no key {KEY}:; {hint}")
    try:
        return settings_from_args(SimpleNamespace(strands_rollout=content[KEY]))
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def documented(settings: RolloutSettings) -> str:
    """All settings as a config file: each with its meaning, and with its default where it has another value.

    Secrets in it are masked, which it then says at its top.
    """
    lines = list(_lines(settings, "  "))
    notes = [f"# {MASK_NOTE}"] if is_masked(settings) else []
    return "\n".join([*notes, f"{KEY}:", *lines]) + "\n"


def masked_values(settings: RolloutSettings) -> dict[str, Any]:
    """All settings as values of JSON, with secrets masked."""
    values = settings.model_dump(mode="json")
    return {name: masked(value, _SECRET) for name, value in values.items()}


def is_masked(settings: RolloutSettings) -> bool:
    """Whether a setting holds a secret, which is shown masked."""
    return masked_values(settings) != settings.model_dump(mode="json")


def _lines(settings: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(settings).model_fields.items():
        value, default = getattr(settings, name), field.get_default(call_default_factory=True)
        if isinstance(value, tuple):
            value, default = _plain(value), _plain(default)
        meaning = wrap(str(field.description), _WIDTH - len(indent), break_on_hyphens=False)
        yield from (f"{indent}# {line}" for line in meaning)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            note = "" if value == default else f"  # default: {_flow(default)}"
            yield f"{indent}{name}: {_flow(masked(value, _SECRET))}{note}"


def _plain(values: tuple[Any, ...]) -> list[Any]:
    """MCP servers among tools as what is set of them."""
    return [value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value for value in values]


def _flow(value: Any) -> str:  # noqa: ANN401 - whatever a setting holds
    """A value on one line; JSON is YAML."""
    return json.dumps(value, default=str)
