"""YAML files of the size of a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from strands_rollout.errors import ConfigError
from strands_rollout.files.safe_files import read_regular

if TYPE_CHECKING:
    import yaml

MAX_DEPTH: Final = 100
Value = TypeVar("Value")


def expanded_size(root: Value, parts: Callable[[Value], tuple[int, Iterable[Value]]]) -> int:
    """How many values there are where each shared part counts as often as it is referred to.

    Each part is visited once, so that this is quick even where visiting every reference would not end.

    Args:
        root: The value.
        parts: Gives the number of values that a container holds directly, and those of them that are containers.

    Raises:
        ValueError: A container holds itself, or they are nested deeper than MAX_DEPTH.
    """
    sizes: dict[int, int] = {}
    entered: set[int] = set()

    def size(container: Value) -> int:
        key = id(container)
        if key in sizes:
            return sizes[key]
        if key in entered:
            raise ValueError("it holds itself")
        if len(entered) >= MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        entered.add(key)
        count, containers = parts(container)
        sizes[key] = 1 + count + sum(map(size, containers))
        entered.discard(key)
        return sizes[key]

    return size(root)


_MAX_YAML_BYTES: Final = 1_000_000
_MAX_YAML_VALUES: Final = 100_000


def yaml_text(path: Path) -> str:
    """The text of a YAML file, which must have a config's size even with each alias (`*name`) written out.

    Raises:
        ConfigError: It can't be read, or is no YAML, or far larger than a config.
    """
    import yaml  # this module is the code tool's too, which runs without libraries

    try:
        text = read_regular(path, _MAX_YAML_BYTES).decode("utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = 0 if root is None else expanded_size(root, _nodes)
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is no YAML: {e}") from e
    if count > _MAX_YAML_VALUES:
        raise ConfigError(f"{path} stands for {count} values, with its aliases written out; expected a config")
    return text


def _nodes(node: yaml.Node) -> tuple[int, list[yaml.Node]]:
    if isinstance(node.value, str):
        return 0, []
    # a mapping's are pairs
    parts = [part for value in node.value for part in (value if isinstance(value, tuple) else (value,))]
    return len(parts), parts
