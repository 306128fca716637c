"""Options of the commands that play rows: `demo`, `eval`, `try` and `train`.

A field's annotation declares its command-line option.

This module imports nothing heavy, so that --help answers at once.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from typer import BadParameter, Option

from strands_rollout.errors import ConfigError

SHIPPED_MODEL: Final = Path(__file__).parents[1] / "engine" / "checkpoint"


def check_url(value: str | list[str] | None) -> str | list[str] | None:
    """Return the URLs of an option unchanged; raise BadParameter for a malformed URL."""
    from strands_rollout.client.transport import parse_base_url

    for url in value if isinstance(value, list) else [value] if value is not None else []:
        try:
            parse_base_url(url)
        except ConfigError as e:
            # the message names the argument base_url, which the user has not seen
            raise BadParameter(re.sub("^base_url (is )?", lambda match: "got " if match[1] else "", str(e))) from e
    return value


BaseUrl: TypeAlias = Annotated[
    str | None,
    Option(help="URL of an SGLang server or router. Default: the embedded engine.", callback=check_url),
]
Model: TypeAlias = Annotated[
    Path | None,
    Option(
        "--model",
        help="Folder of the model that the embedded engine serves. Default: the shipped model.",
        exists=True,
        file_okay=False,
    ),
]
Tokenizer: TypeAlias = Annotated[
    Path | None,
    Option(
        "--tokenizer",
        help="Folder of the policy's tokenizer. Default: the tokenizer that the server reports.",
        exists=True,
        file_okay=False,
    ),
]
DATA_HELP: Final = (
    "Prompts and labels: a JSONL, JSON, CSV or Parquet file, or OWNER/NAME[:CONFIG][@SPLIT] on the Hugging Face Hub"
)


def check_data_exists(value: Path | list[Path] | None) -> Path | list[Path] | None:
    """Return the paths of an option unchanged; raise BadParameter if a path does not exist and is no OWNER/NAME."""
    from strands_rollout.play.rows import is_hub_name

    for path in value if isinstance(value, list) else [value] if value else []:
        if not path.exists() and not is_hub_name(path):
            raise BadParameter(f"{path} does not exist; expected a file, or OWNER/NAME on the Hugging Face Hub")
    return value


InputKey: TypeAlias = Annotated[str, Option(help="Key of the prompt in a row; a.b is key b inside a.")]
LabelKey: TypeAlias = Annotated[
    str | None,
    Option(help="Key of the label in a row. Default: label; rows may lack it if the reward needs no label."),
]
RewardPath: TypeAlias = Annotated[
    str | None,
    Option(
        "--reward",
        help="Dotted path of your reward: score(response, label), score(sample), or slime's reward(args, sample).",
    ),
]


def merge_changes(changes: Sequence[str] | None, reward: str | None) -> list[str]:
    """Return the changes of --set, followed by --reward as the change `reward=...`."""
    return [*(changes or ()), *([f"reward={reward}"] if reward else [])]


Changes: TypeAlias = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Override a setting of the settings file; may be repeated."),
]
Workers: TypeAlias = Annotated[
    int,
    Option(help="Number of processes that play episodes, on a local Ray; 0 plays them in this process.", min=0),
]
JsonOnly: TypeAlias = Annotated[bool, Option("--json", help="Print only the line of JSON on stdout.")]


def slime_sampling_params(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Return slime 0.3's sampling parameters in training (slime/rollout/sglang_rollout.py)."""
    return {
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": max_new_tokens,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of the command `demo`."""

    base_url: BaseUrl
    model_dir: Model
    tokenizer_dir: Tokenizer
    data: Annotated[
        Path | None,
        Option(help=f"{DATA_HELP}. Default: the shipped problems.", dir_okay=False, callback=check_data_exists),
    ]
    samples: Annotated[int, Option(help="Number of episodes.", min=1)] = 32
    concurrency: Annotated[int, Option(help="Maximum number of episodes at once.", min=1)] = 16
    temperature: Annotated[float, Option(help="Sampling temperature.", min=0)] = 1.0
    max_new_tokens: Annotated[int, Option(help="Maximum tokens of a response, tool results included.", min=1)] = 1024
    seed: Annotated[
        int | None,
        Option(help="Seed of the first episode; each further seed is 1 higher. Default: random.", min=0),
    ] = None
    dump_dir: Annotated[Path, Option("--dump", help="Folder to write the samples to.", file_okay=False)] = Path(
        "demo_dump"
    )
    json_only: JsonOnly = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TryOptions:
    """Options of the command `try`. At most one of script, you, base_url, model_dir and api_base is set."""

    config: Path | None
    data: Annotated[
        Path | None,
        Option(
            help=f"{DATA_HELP}. Default: train.jsonl beside CONFIG if it exists, else the shipped problems.",
            dir_okay=False,
            callback=check_data_exists,
        ),
    ] = None
    input_key: InputKey = "prompt"
    label_key: LabelKey = None
    reward: RewardPath = None
    row: Annotated[int, Option(help="Index of the row in --data, from 0.", min=0, metavar="N")] = 0
    script: Annotated[
        Path | None,
        Option(
            help="YAML file with a list of the policy's turns: each a text, or a mapping with `text` and `calls`.",
            exists=True,
            dir_okay=False,
            metavar="FILE",
        ),
    ] = None
    you: Annotated[bool, Option("--you", help="Type the policy's turns yourself.")] = False
    api_base: Annotated[
        str | None,
        Option(
            help="URL of an OpenAI-compatible API that plays the policy, such as https://host/v1. The API key is "
            "read from $OPENAI_API_KEY."
        ),
    ] = None
    api_model: Annotated[str | None, Option(help="Name of the model at --api-base.", metavar="NAME")] = None
    base_url: BaseUrl = None
    model_dir: Model = None
    tokenizer_dir: Annotated[
        Path | None,
        Option(
            "--tokenizer",
            help="Folder of the policy's tokenizer. Default: the tokenizer that the server reports, else the "
            "tokenizer of the shipped model.",
            exists=True,
            file_okay=False,
        ),
    ] = None
    temperature: Annotated[float, Option(help="Sampling temperature.", min=0)] = 1.0
    seed: Annotated[int | None, Option(help="Sampling seed. Default: none.")] = None
    tokens: Annotated[bool, Option("--tokens", help="Print the sample's tokens too.")] = False
    changes: Changes = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of an evaluation; temperature, top_p and top_k have the defaults of slime's evaluation.

    Attributes:
        samples: Episodes of each problem.
        max_new_tokens: Budget of a whole response, including tool results.
        extra: Additional parameters by SGLang's names; they override the other parameters.
    """

    samples: Annotated[
        int,
        Option(
            "--samples-per-problem",
            help="Number of episodes per problem. Default: 16, or 4 on the embedded engine.",
            min=1,
        ),
    ]
    max_new_tokens: Annotated[
        int,
        Option(
            help="Maximum tokens of a response, tool results included. Default: 16384, or 1024 on the embedded engine.",
            min=1,
        ),
    ]
    temperature: Annotated[float, Option(help="Sampling temperature.", min=0)] = 1.0
    top_p: Annotated[
        float, Option(help="Sample only from the most likely tokens, up to this total probability; above 0.", max=1)
    ] = 1.0
    top_k: Annotated[int, Option(help="Sample only from this many of the most likely tokens; -1 for all.", min=-1)] = -1
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters that slime passes to `generate` in an evaluation (slime/rollout/sglang_rollout.py)."""
        overrides = {"top_p": self.top_p, "top_k": self.top_k, **self.extra}
        return slime_sampling_params(self.temperature, self.max_new_tokens) | overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Options of the command `eval`. If an option is None, the default in its help applies.

    Attributes:
        sampling_overrides: The fields of `sampling` that the user has given; they override the protocol's values.
        ks: The values of k for pass@k; None for `DEFAULT_KS` of evaluation/plan.py.
    """

    data: Annotated[
        list[Path],
        Option(
            help=f"{DATA_HELP}; may be repeated. Default on the embedded engine: 16 shipped problems.",
            dir_okay=False,
            callback=check_data_exists,
        ),
    ]
    input_key: InputKey = "prompt"
    label_key: LabelKey = None
    reward: RewardPath = None
    protocol: Annotated[
        str | None,
        Option(
            help="Protocol of the evaluation, for comparable results: qwen3 (of Qwen3's technical report, without "
            "tools) or tool (this package's own, with the code tool). Options that you give override it. Default: "
            "none.",
            metavar="qwen3|tool",
        ),
    ] = None
    eval_config: Annotated[
        Path | None,
        Option(
            help="YAML file in the format of slime's --eval-config, instead of --data; its values override options.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    base_url: BaseUrl = None
    model_dir: Model = None
    tokenizer_dir: Tokenizer = None
    config: Annotated[
        Path | None,
        Option(help="Settings file, as for slime's --custom-config-path.", exists=True, dir_okay=False),
    ] = None
    changes: Changes = None
    sampling: Sampling
    sampling_overrides: Mapping[str, Any] = field(default_factory=dict)
    concurrency: Annotated[
        int, Option(help="Maximum number of episodes at once. Default: 64, or 16 on the embedded engine.", min=1)
    ]
    workers: Workers = 0
    max_context_tokens: Annotated[
        int | None,
        Option(
            "--max-context-length",
            help="Maximum tokens of prompt plus response. Default: the engine's limit.",
            min=1,
        ),
    ] = None
    seed: Annotated[
        int | None, Option(help="Seed of the run; each sample derives its sampling seed from it. Default: none.")
    ] = None
    limit: Annotated[int | None, Option(help="Maximum number of problems per data set. Default: all.", min=1)] = None
    ks: Sequence[int] | None = None
    out: Annotated[
        Path,
        Option(
            help="Folder of the run; an interrupted run is resumed. Default: a new folder in eval_results/.",
            file_okay=False,
        ),
    ]
    audits: Annotated[
        bool,
        Option("--audit", help="Check every token of each sample against the engine's traffic; takes CPU time."),
    ] = False
    keeps_tokens: Annotated[
        bool, Option("--save-tokens", help="Save each sample's tokens, loss mask and logprobs too.")
    ] = False
    json_only: JsonOnly = False


LossMean: TypeAlias = Literal["sample", "token"]
Decay: TypeAlias = Literal["linear", "constant"]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Settings of the optimizer steps on a batch of samples, with slime's option for each setting, if there is one.

    Attributes:
        decay: slime's `--lr-decay-style`.
        updates: Optimizer steps per batch of rollouts, each on a part of the batch; slime's `--num-steps-per-rollout`.
        mean: "sample" averages the loss over the trained tokens of each rollout, then over the rollouts that have
            trained tokens. This is slime's default, except that slime also counts rollouts without trained tokens.
            "token" averages over all trained tokens; slime's `--calculate-per-token-loss`.
        tis_clip: Upper bound of the weights of truncated importance sampling; slime's `--use-tis --tis-clip`. The
            policy's ratios then use the trainer's logprobs from before the update, and the rollout's logprobs only
            give the weights. If None, the ratios use the rollout's logprobs; slime's `--use-rollout-logprobs`.
        kl: slime's `--kl-loss-coef`.
        entropy: slime's `--entropy-coef`.
        temperature: Sampling temperature of the tokens.
        max_grad_norm: Maximum norm of gradients; larger gradients are scaled down.
    """

    learning_rate: Annotated[float, Option(help="Learning rate of AdamW at the first step.", min=0)] = 2e-4
    decay: Annotated[
        Decay, Option("--lr-decay", help="Learning rate schedule; linear reaches 0 after the last step.")
    ] = "constant"
    updates: Annotated[int, Option(help="Number of optimizer steps per training step.", min=1)] = 4
    clip_low: Annotated[float, Option(help="Lower clip range, slime's --eps-clip.", min=0)] = 0.2
    clip_high: Annotated[float, Option(help="Upper clip range, slime's --eps-clip-high.", min=0)] = 0.28
    mean: Annotated[
        LossMean,
        Option(
            "--loss-mean",
            help="Mean of the loss: sample (over each episode's trained tokens, then over episodes; slime's default) "
            "or token (over all trained tokens).",
        ),
    ] = "sample"
    tis_clip: Annotated[
        float | None,
        Option(
            help="Upper bound of the weights of truncated importance sampling. Default: no such weights; the loss's "
            "ratios use the rollout's logprobs, not the trainer's."
        ),
    ] = None
    kl: Annotated[float, Option(help="Weight of the KL divergence from the initial weights.", min=0)] = 0.0
    entropy: Annotated[float, Option(help="Weight of the entropy bonus.", min=0)] = 0.0
    temperature: float = 1.0
    max_grad_norm: float = 1.0


_CHANGEABLE_ON_RESUME: Final = frozenset(
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
    """Options of a training run.

    Attributes:
        rollout: Name of the `TrainingMethod`.
        ablation: Name of the deliberate fault in the training method; "none" without a fault.
        gap_limit: Largest allowed difference between the trainer's and the rollout's logprob of a token. It is checked
            at the first step; in a resumed run, at the first step with tokens that the current weights sampled.
        checks: Stop at a difference above `gap_limit`, or at a sample that violates slime's contract.
    """

    steps: Annotated[int, Option(help="Number of training steps, each with a batch of rollouts.", min=1)] = 30
    seed: Annotated[int, Option(help="Seed of the prompt order, and of sampling on an engine that uses seeds.")] = 0
    out: Annotated[
        Path,
        Option(
            help="Folder of the run; an interrupted run is resumed. Default: a new folder in train_runs/.",
            file_okay=False,
        ),
    ]
    base_url: Annotated[
        str | None,
        Option(
            help="URL of an SGLang server that serves --model and can read --out. Default: the embedded engine.",
            callback=check_url,
        ),
    ] = None
    model_dir: Annotated[
        Path,
        Option(
            "--model",
            help="Folder of the model to train. Default: the shipped model.",
            exists=True,
            file_okay=False,
        ),
    ]
    data: Annotated[
        Path,
        Option(
            help=f"{DATA_HELP}. Default: the shipped problems.",
            dir_okay=False,
            callback=check_data_exists,
        ),
    ]
    held_out: Annotated[
        Path,
        Option(
            help="Prompts and labels to evaluate on, in the form of --data. Default: the shipped held-out problems.",
            dir_okay=False,
            callback=check_data_exists,
        ),
    ]
    input_key: InputKey = "prompt"
    label_key: LabelKey = None
    reward: RewardPath = None
    config: Annotated[
        Path | None,
        Option(help="Settings file, as for slime's --custom-config-path.", exists=True, dir_okay=False),
    ] = None
    changes: Changes = None
    rollout: str = "tito"
    ablation: str = "none"
    prompts: Annotated[int, Option(help="Number of prompts per step.", min=1)] = 32
    samples_per_prompt: Annotated[int, Option(help="Number of episodes per prompt.", min=2)] = 8
    extra_prompts: Annotated[
        int,
        Option(
            help="Number of prompts that a step starts in addition to --prompts; unfinished episodes are aborted and "
            "resumed in the next step, as in slime's partial rollouts.",
            min=0,
        ),
    ] = 0
    is_async: Annotated[
        bool, Option("--async", help="Play the next step's episodes while training on the current step's.")
    ] = False
    temperature: Annotated[float, Option(help="Sampling temperature, above 0.")] = 1.0
    max_new_tokens: Annotated[int, Option(help="Maximum tokens of a response, tool results included.", min=1)] = 512
    eval_every: Annotated[int, Option(help="Number of steps between evaluations on --held-out.", min=1)] = 10
    save_every: Annotated[int, Option(help="Number of steps between checkpoints.", min=1)] = 10
    concurrency: Annotated[int, Option(help="Maximum number of episodes at once.", min=1)] = 64
    workers: Workers = 0
    threads: Annotated[int | None, Option(help="Number of CPU threads for torch. Default: torch's choice.", min=1)] = (
        None
    )
    gap_limit: Annotated[
        float,
        Option(help="Maximum difference between the trainer's and the rollout's logprobs at the first step."),
    ] = 1e-3
    checks: bool = True
    update: UpdateSettings = UpdateSettings()
    wandb: Annotated[bool, Option("--wandb", help="Log to wandb too, configured by WANDB_* variables.")] = False
    json_only: JsonOnly = False

    def to_json(self) -> dict[str, Any]:
        """Return all options by name as JSON values that hold no secrets.

        A URL loses its user and password. Of --set, only the keys are listed; `config_sha256` is the hash of the
        settings file and all changes.
        """
        from strands_rollout.client.transport import parse_base_url, redacted

        values = asdict(self)
        if self.base_url is not None:
            values["base_url"] = redacted(parse_base_url(self.base_url))
        changes = values.pop("changes") or []
        if self.config is not None or changes:
            content = (self.config.read_bytes() if self.config else b"") + "\n".join(changes).encode()
            values["config_sha256"] = hashlib.sha256(content).hexdigest()
            values |= {"set": [change.partition("=")[0] for change in changes]} if changes else {}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def identity(self) -> dict[str, Any]:
        """Return the options that a resumed run must share with the interrupted run."""
        fixed = {"steps"} if self.update.decay == "linear" else set()
        return {name: value for name, value in self.to_json().items() if name not in _CHANGEABLE_ON_RESUME - fixed}
