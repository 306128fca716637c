"""Commands about a setup or finished samples: `doctor`, `check-template`, `drift`, `replay`, `rescore`, `validate`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from strands_rollout.cli.options import BaseUrl, Config, GroupRm, Model, RewardKey, RewardPath, Tokenizer, check_engine

if TYPE_CHECKING:
    from strands_rollout.diagnostics.diagnosis import Diagnosis

Dump: TypeAlias = Annotated[
    Path, typer.Argument(help="A dump, slime's debug file, results of eval, or a folder of them.", exists=True)
]
Line: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")]
Servers: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="An SGLang server or router to ask; may be given more than once.")
]
Context: TypeAlias = Annotated[
    int | None, typer.Option(help="Tokens of prompt and response that the servers must take.", min=1)
]
TokenizerFolder: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder of the tokenizer; default: the model's, else the shipped one.")
]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option(help="The model's name or id on the hub, such as Qwen/Qwen3-4B; default: MODEL, else Qwen3-8B."),
]
RunConfig: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="The YAML for slime's --custom-config-path; default: ROLLOUT_CONFIG, else configs/math_code.yaml."
    ),
]
DataSets: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(help="A prompt data set; may be given more than once; default: those that the scripts use."),
]
SlimeDir: TypeAlias = Annotated[
    Path | None, typer.Option(help="slime's checkout; default: SLIME_DIR, else the importable one.")
]
MegatronDir: TypeAlias = Annotated[
    Path | None, typer.Option(help="Megatron-LM's; default: MEGATRON_DIR, else beside slime or importable.")
]
Gpus: TypeAlias = Annotated[
    int | None, typer.Option(help="How many GPUs there must be; default: NUM_GPUS, else 8 with --training.", min=0)
]
Training: TypeAlias = Annotated[
    bool, typer.Option("--training", help="Fail on all that a training run on this machine can't do without.")
]
IsolationName: TypeAlias = Annotated[
    str, typer.Option(help="What the code sandbox must enforce: full, seccomp or rlimits.")
]
Flags: TypeAlias = Annotated[
    Path | None, typer.Option(help="Only check the flags that this script, or the command on stdin (-), gives slime.")
]
Strict: TypeAlias = Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")]


def _silence_transformers() -> None:
    # it would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def doctor(
    base_url: Servers = None,
    max_context_length: Context = None,
    tokenizer: TokenizerFolder = None,
    model_name: ModelName = None,
    config: RunConfig = None,
    data: DataSets = None,
    slime_dir: SlimeDir = None,
    megatron_dir: MegatronDir = None,
    gpus: Gpus = None,
    training: Training = False,
    isolation: IsolationName = "full",
    flags: Flags = None,
    strict: Strict = False,
    as_json: Line = False,
) -> None:
    """Look at this machine before a training run: what would fail, what may, and what to do about it.

    Exits with 1 if something would fail. Takes a few seconds and changes nothing.
    """
    _silence_transformers()
    if flags is not None:
        from strands_rollout.diagnostics.flag_check import report_flags

        known = report_flags(flags, as_json=as_json, slime_dir=slime_dir, megatron_dir=megatron_dir)
        raise typer.Exit(0 if known else 1)
    from strands_rollout.diagnostics import diagnosis, doctor, machine
    from strands_rollout.dump.terminal import PlainConsole

    question = diagnosis.Question(
        env=dict(os.environ), repository=diagnosis.find_repository(), isolation=machine.to_isolation(isolation),
        base_urls=tuple(base_url or ()), tokenizer=tokenizer, config=config, data=tuple(data or ()),
        slime_dir=slime_dir, megatron_dir=megatron_dir, gpus=gpus, training=training, model_name=model_name,
        max_context_length=max_context_length,
    )  # fmt: skip
    with PlainConsole(stderr=True).status("looking at this machine ..."):
        found = doctor.examine(question)
    _show(found, as_json=as_json, strict=strict)


def _show(found: Diagnosis, *, as_json: bool, strict: bool = False) -> None:
    """Print it and exit."""
    from strands_rollout.dump.terminal import PlainConsole

    if as_json:
        typer.echo(found.to_json(strict=strict))
    else:
        found.show(PlainConsole())
    raise typer.Exit(0 if found.ok(strict=strict) else 1)


def check_template(
    tokenizer: Annotated[str, typer.Argument(help="A folder with a tokenizer, or a model's id on the hub.")],
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A template to look at in place of the tokenizer's own.", exists=True, dir_okay=False),
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="The format in which the template's calls must be read; auto: whichever fits.")
    ] = "auto",
    as_json: Line = False,
) -> None:
    """Look at a chat template: where it appends, where it rewrites, who reads its calls, what ends a turn.

    Exits with 1 if a rule is broken; then it shows the tokens around the first difference.
    """
    _silence_transformers()
    from strands_rollout.diagnostics import template_check
    from strands_rollout.diagnostics.diagnosis import Diagnosis

    source = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    loaded = template_check.read_tokenizer(tokenizer)
    found = template_check.check_template(tokenizer, loaded, chat_template=source, tool_parser=tool_parser)
    _show(Diagnosis(tuple(found)), as_json=as_json)


def drift(
    dump: Annotated[
        Path,
        typer.Argument(help="A dump of ours, slime's debug file, results of eval, or a folder of them.", exists=True),
    ],
    tokenizer: Annotated[Path, typer.Option(help="The policy's tokenizer.", exists=True, file_okay=False)],
    config: Annotated[
        Path | None,
        typer.Option(
            help="The run's YAML, for its tool_parser and enable_thinking; default: what the template writes.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    show: Annotated[int, typer.Option(help="Episodes to tell of one by one, those that lose most first.", min=0)] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead: a line for each episode, and the totals.")
    ] = False,
) -> None:
    """Measure what text would have cost: tokens that change when episodes are decoded and encoded again.

    Also holds the context, which the policy read, against what the chat template makes of it: there nothing may differ.
    Exits with 1 if something does, or if the dump has no tokens; with 2 if they are not of this tokenizer.
    """
    _silence_transformers()
    from strands_rollout.diagnostics.drift_report import run_drift

    raise typer.Exit(0 if run_drift(dump, tokenizer, config=config, show=show, as_json=as_json) else 1)


def replay(
    dump: Dump,
    sample: Annotated[int, typer.Option(help="Which of the dump's samples, from 0.", min=0)] = 0,
    base_url: BaseUrl = None,
    model: Model = None,
    tokenizer: Tokenizer = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; default: as recorded with a seed, else 0; with --seed 1.", min=0.0),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The episode's sampling seed, for an engine whose tokens depend on it; default: recorded."),
    ] = None,
    as_json: Line = False,
) -> None:
    """Run a saved episode again, turn by turn, on the tokens that it had read, and say where it departs.

    No tool is run: its recorded results are part of those tokens. Where the engine tells the logprobs of its input,
    those of the recorded tokens are compared too. Exits with 1 if a turn departs.
    """
    check_engine(base_url, model)
    _silence_transformers()
    from strands_rollout.diagnostics.replay import run_replay

    same = run_replay(
        dump,
        sample=sample,
        base_url=base_url,
        model_dir=model,
        tokenizer_dir=tokenizer,
        temperature=temperature,
        seed=seed,
        as_json=as_json,
    )
    raise typer.Exit(0 if asyncio.run(same) else 1)


def rescore(
    dump: Dump,
    reward: RewardPath = None,
    config: Config = None,
    reward_key: RewardKey = None,
    group_rm: GroupRm = False,
    out: Annotated[
        Path | None, typer.Option(help="A new dump (.jsonl, .jsonl.gz) of all samples, with the new rewards.")
    ] = None,
    show: Annotated[int, typer.Option(help="Changed samples to list.", min=0)] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead: a line for each sample, and the totals.")
    ] = False,
) -> None:
    """Score saved samples again with another reward, and show what changes.

    Aborted samples keep what they have. Exits with 1 if a sample could not be scored.
    """
    from strands_rollout.diagnostics.rewards import load_reward, run_rescore

    if group_rm and reward is None:
        raise typer.BadParameter("got --group-rm without --reward; expected the reward that takes groups")
    keys = [*([reward_key] if reward_key else []), "score", "acc"]
    called = load_reward(reward, config, keys, takes_groups=group_rm)
    change = asyncio.run(run_rescore(dump, called, out=out, show=show, as_json=as_json))
    raise typer.Exit(1 if change.failed else 0)


def validate(
    data: Annotated[Path, typer.Argument(help="JSONL with prompt and label.", exists=True, dir_okay=False)],
    config: Config = None,
    reward: RewardPath = None,
    reward_key: RewardKey = None,
    label_key: Annotated[str, typer.Option(help="Where a row has its label.")] = "label",
    prompt_key: Annotated[str, typer.Option(help="Where a row has its prompt.")] = "prompt",
    answer: Annotated[
        list[str] | None,
        typer.Option(
            help="How a gold answer is said, {label} standing for it; may be given more than once, and each must be "
            "right. Default: \\boxed{{label}} and Answer: {label}."
        ),
    ] = None,
    as_json: Line = False,
) -> None:
    """Ask the reward for each row's own gold answer: a label that can't score teaches nothing.

    Prints the line, the label and the reason of each row whose answer does not score 1. Exits with 1 if there is one.
    """
    from strands_rollout.diagnostics.rewards import PLACE, SAYINGS, load_reward, run_validate

    sayings = answer or SAYINGS
    if any(PLACE not in saying for saying in sayings):
        raise typer.BadParameter(f"got --answer {answer}; expected {PLACE} in each, where the label goes")
    called = load_reward(reward, config, [reward_key] if reward_key else ["acc", "score"])
    keys = {"prompt_key": prompt_key, "label_key": label_key}
    ok = asyncio.run(run_validate(data, called, **keys, sayings=sayings, as_json=as_json))
    raise typer.Exit(0 if ok else 1)
