"""What the commands `demo` and `eval` are asked for: each field with the option of the command line that sets it.

Imports nothing heavy, so that --help answers at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from typer import Option

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
Changes: TypeAlias = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="A setting in place of --config's; may be given more than once."),
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
        Option(help="JSONL with prompt and label; default: the shipped problems.", exists=True, dir_okay=False),
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
            help="JSONL with prompt and label; may be given more than once. Default: on the embedded engine 16 of the "
            "shipped problems.",
            exists=True,
            dir_okay=False,
        ),
    ]
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
