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
TRAINING_GPUS: Final = 8
_PREPARE: Final = "bash scripts/prepare_model.sh"


@dataclass(frozen=True, slots=True)
class Question:
    """What to look at.

    Attributes:
        env: The environment variables of the run.
        repository: Where data/, models/ and checkpoints/ are unless `env` says otherwise.
        isolation: What the code sandbox must enforce.
        base_urls: SGLang servers or routers.
        tokenizer: A folder with a tokenizer; None for the model's, if it is there, else the shipped one.
        config: The YAML of slime's --custom-config-path; None for ROLLOUT_CONFIG, else the repository's.
        data: Prompt data sets; none for those that the scripts use.
        slime_dir: slime's checkout; None for SLIME_DIR, else the importable one.
        megatron_dir: Megatron-LM's checkout; None for MEGATRON_DIR, else the importable one.
        gpus: How many GPUs there must be; None for NUM_GPUS, else what training needs.
        training: Whether a training run is to start here, so that what it can't do without is an error.
        model_name: Of the model, or its id on the hub; None for MODEL, else Qwen3-8B.
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
    training: bool = False
    model_name: str | None = None
    max_context_length: int | None = None

    @property
    def data_dir(self) -> Path:
        """Where the prompt data sets are."""
        return self._path("DATA_DIR", self.repository / "data")

    @property
    def training_data(self) -> tuple[Path, ...]:
        """What a training run reads: its prompts, and the sets that it is evaluated on."""
        prompts = self._path("PROMPT_DATA", self.data_dir / "dapo-math-17k.jsonl")
        sets = "" if self.env.get("EVAL_CONFIG") else self.env.get("EVAL_SETS") or "aime-2024"
        return (prompts, *(self.data_dir / f"{name}.jsonl" for name in sets.split(",") if name))

    @property
    def config_file(self) -> Path | None:
        """The run's settings; None where this package was installed without the repository's."""
        default = self.repository / "configs" / "math_code.yaml"
        named = self.config or self._path("ROLLOUT_CONFIG", default)
        return named if named != default or default.is_file() else None

    @property
    def model_dir(self) -> Path:
        """Where the models are."""
        return self._path("MODEL_DIR", self.repository / "models")

    @property
    def model_id(self) -> str:
        """The model's id on the hub."""
        name = self.model_name or self.env.get("MODEL") or MODEL_NAME
        return name if "/" in name else f"Qwen/{name}"

    @property
    def model(self) -> Path:
        """The model that a run starts from."""
        return self._path("HF_CHECKPOINT", self.model_dir / self.model_id.rpartition("/")[2])

    @property
    def converted_model(self) -> Path:
        """The same in Megatron's format."""
        return self._path("REF_LOAD", Path(f"{self.model}_torch_dist"))

    @property
    def prepare_model(self) -> str:
        """The command that fetches and converts the model."""
        return _PREPARE if self.model_id == f"Qwen/{MODEL_NAME}" else f"{_PREPARE} --model {self.model_id}"

    @property
    def checkpoint_dir(self) -> Path:
        """Below which runs save."""
        return self._path("SAVE_DIR", self.repository / "checkpoints")

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

    def _path(self, variable: str, default: Path) -> Path:
        """What a variable of the environment names; the default where it is not set, or empty."""
        return Path(self.env.get(variable) or default)


def find_repository() -> Path:
    """The checkout that this package is installed from; the current folder where it was installed without one."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() else Path.cwd()
