"""The command `strands-rollout drift`: its arguments and its exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


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
    # transformers would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from strands_rollout.config_file import read_config_file
    from strands_rollout.dataset_rows import json_line
    from strands_rollout.doctor.tokenizer_folder import load
    from strands_rollout.dump import TokenTexts
    from strands_rollout.errors import DumpError
    from strands_rollout.inspection.drift_table import print_drift
    from strands_rollout.inspection.saved_episode import check_tokenizer, read_episodes
    from strands_rollout.report import counter, make_console
    from strands_rollout.retokenisation.meter import DriftMeter, as_json_value, totals_of

    settings = None if config is None else read_config_file(config)
    thinking = None if settings is None else settings.enable_thinking
    policys = load(tokenizer)
    texts = TokenTexts(policys)
    meter = DriftMeter(
        policys,
        {} if thinking is None else {"enable_thinking": thinking},
        "auto" if settings is None else settings.tool_parser,
    )
    measured = []
    with counter("episodes") as on_done:
        for episode in read_episodes(dump):
            check_tokenizer(episode, texts, str(tokenizer))
            measured.append(meter.measure(episode, episode.number))
            on_done(1)
    if not measured:
        raise DumpError(
            f"{dump} has no whole sample with the policy's tokens; results of eval have them with --save-tokens"
        )
    totals = totals_of(measured)
    if as_json:
        for one in measured:
            typer.echo(json_line(as_json_value(one)), nl=False)
        typer.echo(json_line({**as_json_value(totals), "template_fault": meter.template_fault}), nl=False)
    else:
        print_drift(make_console(), measured, totals, meter.template_fault, show=show)
    raise typer.Exit(1 if totals.mismatched_episodes else 0)
