"""What the `train` command was asked for."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from strands_rollout.sglang_connection import parse_base_url, redacted
from strands_rollout.train.update_settings import UpdateSettings

RolloutKind: TypeAlias = Literal["tito", "retokenised", "openai"]
Ablation: TypeAlias = Literal[
    "none", "train-tool-tokens", "shifted-logprobs", "aborted-as-completed", "tool-output-rewarded"
]

SHIPPED_POLICY: Final = Path(__file__).parents[1] / "engine" / "checkpoint"

_MAY_CHANGE: Final = frozenset(
    {"out", "steps", "base_url", "concurrency", "gap_limit", "checks", "save_every", "threads", "wandb", "json_only"}
)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """A training run; see the command's --help.

    Attributes:
        out: The run's folder.
        steps: Batches of rollouts to train on, the first being step 0.
        seed: Decides the order of prompts and the sampling seeds.
        rollout: How a sample's tokens come about.
        ablation: What is done wrong on purpose.
        base_url: An SGLang that serves the model; None for the embedded engine.
        model_dir: The policy's folder.
        data: Rows to train on.
        held_out: Rows to measure accuracy on.
        config: The agent's settings, a YAML with `strands_rollout:`; None for those of the shipped model.
        prompts: Prompts of a step.
        samples_per_prompt: Episodes of each.
        extra_prompts: Prompts begun beyond these; those not over in time are aborted and gone on with in the next step.
        concurrency: Episodes at once.
        temperature: Of sampling.
        max_new_tokens: Budget of a whole response, tool results included.
        update: How a batch becomes optimizer steps.
        is_async: Whether a step's rollouts run while the step before is trained on; not with `extra_prompts`.
        eval_every: Steps between measurements on the held-out rows.
        gap_limit: The largest difference of a token's logprob, the trainer's against the rollout's, at the first step.
        checks: Whether a run stops at that, or at a sample that slime would not take.
        save_every: Steps between checkpoints.
        threads: Of torch; None for its own choice.
        wandb: Whether to log to wandb.
        json_only: Print nothing on stdout but the line of JSON.
    """

    out: Path
    steps: int
    seed: int
    model_dir: Path
    data: Path
    held_out: Path
    rollout: RolloutKind = "tito"
    ablation: Ablation = "none"
    base_url: str | None = None
    config: Path | None = None
    prompts: int = 32
    samples_per_prompt: int = 8
    extra_prompts: int = 0
    concurrency: int = 64
    temperature: float = 1.0
    max_new_tokens: int = 512
    update: UpdateSettings = field(default_factory=UpdateSettings)
    is_async: bool = False
    eval_every: int = 10
    gap_limit: float = 1e-3
    checks: bool = True
    save_every: int = 10
    threads: int | None = None
    wandb: bool = False
    json_only: bool = False

    def to_json(self) -> dict[str, Any]:
        """All of it by name, in values of JSON; without the user and password of a URL."""
        values = asdict(self)
        if self.base_url is not None:
            values["base_url"] = redacted(parse_base_url(self.base_url))
        if self.config is not None:
            values["config_sha256"] = hashlib.sha256(self.config.read_bytes()).hexdigest()
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def identity(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that was cut."""
        fixed = {"steps"} if self.update.decay == "linear" else set()
        return {name: value for name, value in self.to_json().items() if name not in _MAY_CHANGE - fixed}
