"""What the `train` command is asked for: each field with the option of the command line that sets it.

Imports nothing heavy, so that --help answers at once.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from typer import Option

from strands_rollout.evaluation.options import DATA_HELP, Changes, InputKey, JsonOnly, LabelKey, RewardPath, Workers
from strands_rollout.evaluation.options import existing_data as existing

LossMean: TypeAlias = Literal["sample", "token"]
Decay: TypeAlias = Literal["linear", "constant"]
_SHIPPED: Final = "the shipped one"


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How a batch of samples becomes optimizer steps; the names are slime's where it has one.

    Attributes:
        decay: slime's `--lr-decay-style`.
        updates: Each on a part of the batch of rollouts; slime's `--num-steps-per-rollout`.
        mean: "sample": the mean over rollouts that train a token (slime counts the others too) of each one's mean over
            its trained tokens, slime's default; "token": the mean over all trained tokens, slime's
            `--calculate-per-token-loss`.
        tis_clip: The upper bound, slime's `--use-tis --tis-clip`: the trainer's own logprobs from before the update are
            the behaviour policy's, and the rollout's correct for it. None: the rollout's logprobs are the behaviour
            policy's, slime's `--use-rollout-logprobs`.
        kl: slime's `--kl-loss-coef`.
        entropy: slime's `--entropy-coef`.
        temperature: At which the tokens were sampled.
        max_grad_norm: Gradients are scaled down to this norm.
    """

    learning_rate: Annotated[float, Option(help="AdamW's, where it decays at the first step.", min=0)] = 2e-4
    decay: Annotated[Decay, Option("--lr-decay", help="constant, or linear, to 0 after the last step.")] = "constant"
    updates: Annotated[int, Option(help="Optimizer steps per step.", min=1)] = 4
    clip_low: Annotated[float, Option(help="slime's --eps-clip.", min=0)] = 0.2
    clip_high: Annotated[float, Option(help="slime's --eps-clip-high.", min=0)] = 0.28
    mean: Annotated[
        LossMean,
        Option("--loss-mean", help="sample: mean of samples' means, as slime; token: mean over all trained tokens."),
    ] = "sample"
    tis_clip: Annotated[
        float | None,
        Option(help="Truncated importance sampling with this bound; default: none, the rollout's logprobs count."),
    ] = None
    kl: Annotated[float, Option(help="Weight of the KL divergence to the first weights.", min=0)] = 0.0
    entropy: Annotated[float, Option(help="Weight of an entropy bonus.", min=0)] = 0.0
    temperature: float = 1.0
    max_grad_norm: float = 1.0


_MAY_CHANGE: Final = frozenset(
    {
        "out",
        "steps",
        "base_url",
        "concurrency",
        "workers",
        "gap_limit",
        "checks",
        "save_every",
        "threads",
        "wandb",
        "json_only",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """A training run.

    Attributes:
        rollout: The name of the `TrainingMethod`.
        ablation: What that does wrong on purpose.
        gap_limit: The largest difference of a token's logprob, the trainer's against the rollout's, at the first step.
        checks: Whether a run stops at that, or at a sample that slime would not take.
    """

    steps: Annotated[int, Option(help="Batches of rollouts to train on.", min=1)] = 30
    seed: Annotated[
        int, Option(help="Decides the order of prompts, and all sampling on an engine that heeds seeds.")
    ] = 0
    out: Annotated[
        Path,
        Option(
            help="The run's folder, resumed where it was interrupted; default: a new one in train_runs/.",
            file_okay=False,
        ),
    ]
    base_url: Annotated[
        str | None,
        Option(help="An SGLang that serves the model and can read --out; default: the embedded engine is started."),
    ] = None
    model_dir: Annotated[
        Path, Option("--model", help="The policy's folder.", exists=True, file_okay=False, show_default=_SHIPPED)
    ]
    data: Annotated[
        Path,
        Option(help=f"What to train on: {DATA_HELP}.", dir_okay=False, show_default=_SHIPPED, callback=existing),
    ]
    held_out: Annotated[
        Path, Option(help="Likewise, to measure on.", dir_okay=False, show_default=_SHIPPED, callback=existing)
    ]
    input_key: InputKey = "prompt"
    label_key: LabelKey = None
    reward: RewardPath = None
    config: Annotated[
        Path | None,
        Option(
            help="slime's --custom-config-path YAML: the agent, under strands_rollout:.", exists=True, dir_okay=False
        ),
    ] = None
    changes: Changes = None
    rollout: str = "tito"
    ablation: str = "none"
    prompts: Annotated[int, Option(help="Prompts of a step.", min=1)] = 32
    samples_per_prompt: Annotated[int, Option(help="Episodes of each prompt.", min=2)] = 8
    extra_prompts: Annotated[
        int,
        Option(
            help="Prompts begun beyond those of a step: when enough are over, the others are aborted and resumed in "
            "the next step, as slime's partial rollouts.",
            min=0,
        ),
    ] = 0
    is_async: Annotated[
        bool, Option("--async", help="Play the next step's rollouts while this step is trained on.")
    ] = False
    temperature: Annotated[float, Option(help="Sampling temperature, above 0.")] = 1.0
    max_new_tokens: Annotated[int, Option(help="Tokens of a whole response, tool results included.", min=1)] = 512
    eval_every: Annotated[int, Option(help="Steps between measurements on the held-out rows.", min=1)] = 10
    save_every: Annotated[int, Option(help="Steps between checkpoints.", min=1)] = 10
    concurrency: Annotated[int, Option(help="Episodes at once.", min=1)] = 64
    workers: Workers = 0
    threads: Annotated[int | None, Option(help="CPU threads of torch; default: its own choice.", min=1)] = None
    gap_limit: Annotated[
        float,
        Option(help="Largest difference of logprobs, the trainer's against the rollout's, at the first step."),
    ] = 1e-3
    checks: bool = True
    update: UpdateSettings = UpdateSettings()
    wandb: Annotated[bool, Option("--wandb", help="Log to wandb too, as the environment says.")] = False
    json_only: JsonOnly = False

    def to_json(self) -> dict[str, Any]:
        """All of it by name, in values of JSON; without the user and password of a URL."""
        from strands_rollout.client.transport import parse_base_url, redacted

        values = asdict(self)
        if self.base_url is not None:
            values["base_url"] = redacted(parse_base_url(self.base_url))
        changes = values.pop("changes") or []
        if self.config is not None or changes:
            content = (self.config.read_bytes() if self.config else b"") + "\n".join(changes).encode()
            values["config_sha256"] = hashlib.sha256(content).hexdigest()
            values |= {"set": [change.partition("=")[0] for change in changes]} if changes else {}  # may hold secrets
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the interrupted one."""
        fixed = {"steps"} if self.update.decay == "linear" else set()
        return {name: value for name, value in self.to_json().items() if name not in _MAY_CHANGE - fixed}
