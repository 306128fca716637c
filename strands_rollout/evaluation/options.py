"""What the commands `demo` and `eval` are asked for: each field with the option of the command line that sets it.

Imports nothing heavy, so that --help answers at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from typer import BadParameter, Option

SHIPPED_MODEL: Final = Path(__file__).parents[1] / "engine" / "checkpoint"
BaseUrl: TypeAlias = Annotated[
    str | None, Option(help="An SGLang server or router; default: the embedded engine is started.")
]
Model: TypeAlias = Annotated[
    Path | None,
    Option(
        "--model", help="What the embedded engine serves; default: the shipped model.", exists=True, file_okay=False
    ),
]
Tokenizer: TypeAlias = Annotated[
    Path | None,
    Option(
        "--tokenizer",
        help="The served model's tokenizer; default: as the server names it.",
        exists=True,
        file_okay=False,
    ),
]
DATA_HELP: Final = "JSONL, JSON, CSV or Parquet, or OWNER/NAME[:CONFIG][@SPLIT] of the hub, with prompt and label"


def existing_data(given: Path | list[Path] | None) -> Path | list[Path] | None:
    """The data of an option, each of which is a file or may be on the hub; a BadParameter where it is neither."""
    from strands_rollout.evaluation.rows import is_of_hub

    for path in given if isinstance(given, list) else [given] if given else []:
        if not path.exists() and not is_of_hub(path):
            raise BadParameter(f"{path} does not exist; expected a file, or OWNER/NAME of a data set on the hub")
    return given


InputKey: TypeAlias = Annotated[str, Option(help="Where a row has its prompt; a.b is key b of a.")]
LabelKey: TypeAlias = Annotated[
    str | None,
    Option(help="Where a row has its label; default: label, which a row may lack where a reward of your own scores."),
]
RewardPath: TypeAlias = Annotated[
    str | None,
    Option(
        "--reward",
        help="Your own reward by dotted path: score(response, label), score(sample), or slime's reward(args, sample).",
    ),
]


def all_changes(changes: Sequence[str] | None, reward: str | None) -> list[str]:
    """The settings that --set and --reward change."""
    return [*(changes or ()), *([f"reward={reward}"] if reward else [])]


Changes: TypeAlias = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="A setting in place of --config's; may be given more than once."),
]
Workers: TypeAlias = Annotated[
    int, Option(help="Processes that play the episodes, on a Ray that is started for them; 0: this one.", min=0)
]
JsonOnly: TypeAlias = Annotated[bool, Option("--json", help="Print only the line of JSON on stdout.")]


def slime_sampling_params(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """The sampling parameters that slime 0.3 hands to `generate` in training (slime/rollout/sglang_rollout.py)."""
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
    """What the `demo` command was asked for."""

    base_url: BaseUrl
    model_dir: Model
    tokenizer_dir: Tokenizer
    data: Annotated[
        Path | None,
        Option(help=f"{DATA_HELP}; default: the shipped problems.", dir_okay=False, callback=existing_data),
    ]
    samples: Annotated[int, Option(help="Episodes to run.", min=1)] = 32
    concurrency: Annotated[int, Option(help="Episodes at once.", min=1)] = 16
    temperature: Annotated[float, Option(help="Sampling temperature.", min=0.0)] = 1.0
    max_new_tokens: Annotated[int, Option(help="Tokens of a whole response, tool results included.", min=1)] = 1024
    seed: Annotated[int | None, Option(help="Sampling seed of the first episode; the next one's is one more.")] = None
    dump_dir: Annotated[Path, Option("--dump", help="Folder of the samples that are written.", file_okay=False)] = Path(
        "demo_dump"
    )
    json_only: JsonOnly = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TryOptions:
    """What the `try` command was asked for. At most one of script, you, base_url, model_dir and api_base is given."""

    config: Path | None
    data: Annotated[
        Path | None,
        Option(
            help=f"{DATA_HELP}; default: train.jsonl beside the configuration, else the shipped problems.",
            dir_okay=False,
            callback=existing_data,
        ),
    ] = None
    input_key: InputKey = "prompt"
    label_key: LabelKey = None
    reward: RewardPath = None
    row: Annotated[int, Option(help="Which row of it, from 0.", min=0, metavar="N")] = 0
    script: Annotated[
        Path | None,
        Option(help="The policy's turns, written down as a YAML list.", exists=True, dir_okay=False, metavar="FILE"),
    ] = None
    you: Annotated[bool, Option("--you", help="You type the policy's turns; tools really run.")] = False
    api_base: Annotated[
        str | None,
        Option(help="An OpenAI-compatible API as the policy, such as https://host/v1; its key is OPENAI_API_KEY."),
    ] = None
    api_model: Annotated[str | None, Option(help="The API's model.")] = None
    base_url: BaseUrl = None
    model_dir: Model = None
    tokenizer_dir: Annotated[
        Path | None,
        Option(
            "--tokenizer",
            help="Default: as the server names it; without a server the shipped model's.",
            exists=True,
            file_okay=False,
        ),
    ] = None
    temperature: Annotated[float, Option(help="Sampling temperature of a model.", min=0.0)] = 1.0
    seed: Annotated[int | None, Option(help="Sampling seed of a model.")] = None
    tokens: Annotated[bool, Option("--tokens", help="Also show the sample token for token.")] = False
    changes: Changes = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How problems are sampled; the defaults are those of slime's evaluation where its arguments are left alone.

    `samples` are of each problem, `max_new_tokens` is the budget of a whole response, tool results included. `further`
    are more parameters by SGLang's names; they go before the others.
    """

    samples: Annotated[
        int,
        Option("--samples-per-problem", help="Episodes of each problem; default: 16, on the embedded engine 4.", min=1),
    ]
    max_new_tokens: Annotated[
        int,
        Option(
            help="Tokens of a whole response, tool results included; default: 16384, on the embedded engine 1024.",
            min=1,
        ),
    ]
    temperature: Annotated[float, Option(help="Sampling temperature.", min=0.0)] = 1.0
    top_p: Annotated[float, Option(help="Share of the probability that is kept, above 0.", max=1.0)] = 1.0
    top_k: Annotated[int, Option(help="Tokens that are kept; -1 for all.", min=-1)] = -1
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, Any]:
        """What slime hands to `generate` in an evaluation (slime/rollout/sglang_rollout.py)."""
        own = {"top_p": self.top_p, "top_k": self.top_k, **self.further}
        return slime_sampling_params(self.temperature, self.max_new_tokens) | own


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What the `eval` command was asked for. None leaves a choice to the engine or the package."""

    data: Annotated[
        list[Path],
        Option(
            help=f"{DATA_HELP}; may be given more than once. Default: on the embedded engine 16 of the shipped "
            "problems.",
            dir_okay=False,
            callback=existing_data,
        ),
    ]
    input_key: InputKey = "prompt"
    label_key: LabelKey = None
    reward: RewardPath = None
    eval_config: Annotated[
        Path | None,
        Option(
            help="slime's --eval-config YAML in place of --data; what it sets counts, the options are for the rest.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    base_url: BaseUrl = None
    model_dir: Model = None
    tokenizer_dir: Tokenizer = None
    config: Annotated[
        Path | None,
        Option(
            help="slime's --custom-config-path YAML, with settings under strands_rollout:.", exists=True, dir_okay=False
        ),
    ] = None
    changes: Changes = None
    sampling: Sampling
    concurrency: Annotated[int, Option(help="Episodes at once; default: 64, on the embedded engine 16.", min=1)]
    workers: Workers = 0
    max_context_tokens: Annotated[
        int | None,
        Option(
            "--max-context-length", help="Tokens of an episode, prompt included; default: the engine's limit.", min=1
        ),
    ] = None
    seed: Annotated[int | None, Option(help="Gives each sample a sampling seed of its own.")] = None
    limit: Annotated[int | None, Option(help="Problems of each data set; default: all.", min=1)] = None
    ks: Sequence[int] | None = None
    out: Annotated[
        Path,
        Option(
            help="The run's folder; a run that was cut is resumed; default: a new one in eval_results/.",
            file_okay=False,
        ),
    ]
    audits: Annotated[
        bool,
        Option(
            "--audit", help="Check each sample as the demo does; a proxy then reads every request, which costs CPU."
        ),
    ] = False
    keeps_tokens: Annotated[
        bool, Option("--save-tokens", help="Write whole samples, with tokens, mask and logprobs.")
    ] = False
    json_only: JsonOnly = False
