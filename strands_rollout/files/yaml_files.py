"""Read YAML settings files of bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from strands_rollout.errors import ConfigError
from strands_rollout.files.safe_files import read_regular

if TYPE_CHECKING:
    import yaml

_MAX_BYTES: Final = 1_000_000
_MAX_VALUES: Final = 50_000
_MAX_DEPTH: Final = 100


def yaml_text(path: Path) -> str:
    """Return the text of a YAML file, after checking its size with all aliases (`*name`) expanded.

    Raises:
        ConfigError: The file can't be read; is not YAML; has more than 1 MB or 50,000 values; nests values too deeply;
            or has a value that contains itself.
    """
    import yaml  # imported on use: the local executor uses this package too, and needs no third-party library

    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = 0 if root is None else _expanded_size(root)
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} can't be read as YAML: {e}") from e
    if count > _MAX_VALUES:
        raise ConfigError(f"{path} has {count} values after its aliases are expanded; expected at most {_MAX_VALUES}")
    return text


def _expanded_size(root: yaml.Node) -> int:
    """Count the values of a document with all aliases expanded.

    Each node is visited once, so counting is fast even if the expanded document would not fit into memory.
    """
    sizes: dict[int, int] = {}
    entered: set[int] = set()

    def size(node: yaml.Node) -> int:
        key = id(node)
        if key in sizes:
            return sizes[key]
        if key in entered:
            raise ValueError("an alias refers to a value that contains it")
        if len(entered) >= _MAX_DEPTH:
            raise ValueError(f"values are nested more than {_MAX_DEPTH} levels deep")
        entered.add(key)
        values = () if isinstance(node.value, str) else node.value
        # a mapping's items are pairs
        parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
        sizes[key] = 1 + sum(map(size, parts))
        entered.discard(key)
        return sizes[key]

    return size(root)
