"""How an engine is run: the model folder, its names and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from strands_rollout.errors import ConfigError

SHIPPED_MODEL_DIR = Path(__file__).parent / "checkpoint"

_SMALLEST_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine.

    Attributes:
        model_dir: A Qwen3 folder in Hugging Face layout.
        served_model_name: The name at /v1/models; None: the folder's path, as SGLang.
        context_length: The longest sequence in tokens; None: what the model's config says.
        max_running_requests: The most generations that decode together; the others wait.
        prefill_chunk_tokens: The most prompt tokens computed between two decode steps.
        prefix_cache_mb: The most memory that the prefix cache takes.
        random_seed: Makes generations without a sampling_seed repeatable, given the same order of requests; None: not.

    Raises:
        ConfigError: A number is not positive.
    """

    model_dir: Path = SHIPPED_MODEL_DIR
    served_model_name: str | None = None
    context_length: int | None = None
    max_running_requests: int = 32
    prefill_chunk_tokens: int = 256
    prefix_cache_mb: int = 512
    random_seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "prefill_chunk_tokens", "prefix_cache_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.context_length is not None and self.context_length < _SMALLEST_CONTEXT:
            raise ConfigError(f"context_length must be at least {_SMALLEST_CONTEXT}, got {self.context_length}")


class EngineOptions(TypedDict, total=False):
    """The optional settings by name, for functions that take them as keywords; see `EngineSettings`."""

    served_model_name: str | None
    context_length: int | None
    max_running_requests: int
    prefill_chunk_tokens: int
    prefix_cache_mb: int
    random_seed: int | None
