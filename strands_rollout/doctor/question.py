"""What a diagnosis is asked: which servers, files and folders, and in which environment.

Knows where the scripts of this repository put things; reads no environment by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from strands_rollout.sandbox.sandbox_processes import Isolation

MODEL_NAME: Final = "Qwen3-8B"
DATA_NAMES: Final = ("dapo-math-17k.jsonl", "aime-2024.jsonl")


@dataclass(frozen=True, slots=True)
class Question:
    """What to look at.

    Attributes:
        env: The environment variables of the run.
        repository: Where data/, models/ and checkpoints/ are unless `env` says otherwise.
        isolation: What the code sandbox must enforce.
        base_urls: SGLang servers or routers.
        tokenizer: A folder with a tokenizer; None for the model's, if it is there, else the shipped one.
        config: The YAML of slime's --custom-config-path.
        data: Prompt data sets; none for those that the scripts use.
        slime_dir: slime's checkout; None for SLIME_DIR, else the importable one.
        megatron_dir: Megatron-LM's checkout; None for MEGATRON_DIR, else the importable one.
        gpus: How many GPUs there must be; None where it does not matter.
        max_context_length: Tokens that the servers must take.
    """

    env: Mapping[str, str]
    repository: Path
    isolation: Isolation = "full"
    base_urls: tuple[str, ...] = ()
    tokenizer: Path | None = None
    config: Path | None = None
    data: tuple[Path, ...] = field(default=())
    slime_dir: Path | None = None
    megatron_dir: Path | None = None
    gpus: int | None = None
    max_context_length: int | None = None

    @property
    def data_dir(self) -> Path:
        """Where the prompt data sets are."""
        return Path(self.env.get("DATA_DIR") or self.repository / "data")

    @property
    def model_dir(self) -> Path:
        """Where the models are."""
        return Path(self.env.get("MODEL_DIR") or self.repository / "models")

    @property
    def model(self) -> Path:
        """The model that a run starts from."""
        return Path(self.env.get("HF_CHECKPOINT") or self.model_dir / MODEL_NAME)

    @property
    def converted_model(self) -> Path:
        """The same in Megatron's format."""
        return Path(self.env.get("REF_LOAD") or f"{self.model}_torch_dist")

    @property
    def checkpoint_dir(self) -> Path:
        """Below which runs save."""
        return Path(self.env.get("SAVE_DIR") or self.repository / "checkpoints")

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of the tokenizer that is looked at."""
        if self.tokenizer is not None:
            return self.tokenizer
        return self.model if (self.model / "tokenizer.json").is_file() else self.shipped_tokenizer_dir

    @property
    def shipped_tokenizer_dir(self) -> Path:
        """The folder of the tokenizer that comes along."""
        return Path(__file__).parents[1] / "engine" / "checkpoint"


def find_repository() -> Path:
    """The checkout that this package is installed from; the current folder where it was installed without one."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() else Path.cwd()
