"""What the `train` command was asked for."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from strands_rollout.client.transport import parse_base_url, redacted

LossMean: TypeAlias = Literal["sample", "token"]
Decay: TypeAlias = Literal["linear", "constant"]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How a batch of samples becomes optimizer steps; the names are slime's where it has one.

    Attributes:
        learning_rate: AdamW's, at the first step.
        decay: "linear": the learning rate falls in a straight line, to 0 after the last step; "constant": it stays.
            slime's `--lr-decay-style`.
        updates: Optimizer steps per batch of rollouts, each on a part of it; slime's `--num-steps-per-rollout`.
        clip_low: slime's `--eps-clip`.
        clip_high: slime's `--eps-clip-high`.
        mean: "sample": the mean over rollouts that train a token (slime counts the others too) of each one's mean over
            its trained tokens, slime's default; "token": the
            mean over all trained tokens, slime's `--calculate-per-token-loss`.
        tis_clip: Truncated importance sampling with this upper bound, slime's `--use-tis --tis-clip`: the trainer's own
            logprobs from before the update are the behaviour policy's, and the rollout's correct for it. None: the
            rollout's logprobs are the behaviour policy's, slime's `--use-rollout-logprobs`.
        kl: Weight of the KL divergence to the first weights, slime's `--kl-loss-coef`; 0 for none.
        entropy: Weight of the entropy bonus, slime's `--entropy-coef`.
        temperature: At which the tokens were sampled.
        max_grad_norm: Gradients are scaled down to this norm.
    """

    learning_rate: float = 2e-4
    decay: Decay = "constant"
    updates: int = 4
    clip_low: float = 0.2
    clip_high: float = 0.28
    mean: LossMean = "sample"
    tis_clip: float | None = None
    kl: float = 0.0
    entropy: float = 0.0
    temperature: float = 1.0
    max_grad_norm: float = 1.0


SHIPPED_POLICY: Final = Path(__file__).parents[1] / "engine" / "checkpoint"

_MAY_CHANGE: Final = frozenset(
    {"out", "steps", "base_url", "concurrency", "gap_limit", "checks", "save_every", "threads", "wandb", "json_only"}
)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """A training run; see the command's --help, whose options have the same names where it has them.

    Attributes:
        rollout: The name of the `TrainingMethod`.
        ablation: What that does wrong on purpose.
        gap_limit: The largest difference of a token's logprob, the trainer's against the rollout's, at the first step.
        checks: Whether a run stops at that, or at a sample that slime would not take.
    """

    out: Path
    steps: int
    seed: int
    model_dir: Path
    data: Path
    held_out: Path
    rollout: str = "tito"
    ablation: str = "none"
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
        """What a resumed run must have in common with the interrupted one."""
        fixed = {"steps"} if self.update.decay == "linear" else set()
        return {name: value for name, value in self.to_json().items() if name not in _MAY_CHANGE - fixed}
