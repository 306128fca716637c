"""Are the model, and its checkpoint in Megatron's format, where the scripts look for them, and whole?"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import orjson

from strands_rollout.doctor.finding import Finding, error, good, lacking
from strands_rollout.doctor.question import Question

_TRACKER: Final = "latest_checkpointed_iteration.txt"
_INDEX: Final = "model.safetensors.index.json"
_GB: Final = 1e9
# no file of weights is this small; what git leaves in place of one is
_SMALLEST_WEIGHTS: Final = 1024


def check_model(question: Question) -> list[Finding]:
    """Whether the model has its config and all its weights."""
    folder, prepare = question.model, question.prepare_model
    if not folder.is_dir():
        found = f"{folder} is not there: a run starts from it"
        return [lacking("model", found, prepare, training=question.training)]
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
        weights = _weights(folder)
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


def _weights(folder: Path) -> list[Path]:
    """All files of weights that there should be."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    listed: Any = orjson.loads(index.read_bytes())
    return [folder / name for name in sorted(set(listed["weight_map"].values()))]
