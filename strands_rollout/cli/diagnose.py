"""The commands that check a setup or read finished samples.

`doctor`, `check-template` and `validate` check before a run; `drift`, `replay`, `rescore`, `view` and `export` read
dumps.
"""

from __future__ import annotations

import asyncio
import os
import webbrowser
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strands_rollout.cli import options
from strands_rollout.cli.options import OptionValues, add_field_options, build_options, check_engine_options
from strands_rollout.diagnostics import Diagnosis, DoctorOptions, find_repository
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.play.options import DATA_HELP, BaseUrl, Changes, Model, RewardPath, check_data_exists

if TYPE_CHECKING:
    from strands_rollout.view.sample import Retokenizer


@add_field_options(DoctorOptions)
def doctor(
    values: OptionValues,
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of slime, after --."),
    ] = None,
    flags: Annotated[
        Path | None,
        typer.Option(help="Launch script of this package, or file with shell-quoted arguments of slime (- for stdin)."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
    as_json: options.JsonLine = False,
) -> None:
    """Check this machine before a training run.

    Reports errors and warnings with their remedies. This takes up to a minute, or a few minutes with --training.

    With --training, also checks the command of the run, and says what the run will do. The command is --flags plus the
    arguments after --. If neither is given and the model is Qwen3-8B, it is scripts/strands_qwen3_8b.sh. If either
    is given without --training, only the command is checked. Exits with 1 if there is an error or, with --strict, a
    warning.
    """
    if (flags is not None or arguments) and not values["training"]:
        from strands_rollout.diagnostics.flag_check import report_flags

        folders = {name: values[name] for name in ("slime_dir", "megatron_dir")}
        is_ok = report_flags(flags, arguments or (), as_json=as_json, strict=strict, **folders)
        raise typer.Exit(0 if is_ok else 1)
    from strands_rollout.diagnostics.doctor import run_doctor
    from strands_rollout.dump.terminal import PlainConsole

    doctor_options = build_options(DoctorOptions, values, env=dict(os.environ), repository=find_repository())
    preflight = None
    if doctor_options.training:
        from strands_rollout.diagnostics.preflight import read_preflight

        preflight = read_preflight(flags, arguments or (), doctor_options)
    with PlainConsole(stderr=True).status("checking this machine ..."):
        diagnosis = run_doctor(doctor_options, preflight)
    _show_and_exit(diagnosis, as_json=as_json, strict=strict)


def _show_and_exit(diagnosis: Diagnosis, *, as_json: bool, strict: bool = False) -> None:
    from strands_rollout.dump.terminal import PlainConsole

    if as_json:
        typer.echo(diagnosis.to_json(strict=strict))
    else:
        diagnosis.show(PlainConsole())
    raise typer.Exit(0 if diagnosis.ok(strict=strict) else 1)


def check_template(
    tokenizer: Annotated[str, typer.Argument(help="Folder of a tokenizer, or a model's id on the Hugging Face Hub.")],
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Template file, or name of a template of this package. Default: the tokenizer's template."),
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="Tool parser that must read the template's tool calls; auto picks a parser that does.")
    ] = "auto",
    episodes: Annotated[int, typer.Option(help="Number of random episodes to compare; 0 for none.", min=0)] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the first episode; each further seed is 1 higher.", min=0)] = 0,
    as_json: options.JsonLine = False,
) -> None:
    """Check that a chat template is append-only.

    Reports which messages the template appends or rewrites, which tool parser reads its calls, and which tokens end a
    turn. Then renders random episodes, compares the tokens that would be sent with the template's own rendering, and
    prints the tokens around the first difference. Exits with 1 if a token differs, or if the template breaks a rule for
    all conversations. A rule broken for only some conversations is a warning.
    """
    from strands_rollout.diagnostics import template_check

    source = None if chat_template is None else template_check.read_template(chat_template)
    loaded = template_check.read_tokenizer(tokenizer)
    findings = template_check.check_template(
        tokenizer, loaded, chat_template=source, tool_parser=tool_parser, episodes=episodes, seed=seed
    )
    _show_and_exit(Diagnosis(findings), as_json=as_json)


def drift(
    dump: options.Dump,
    tokenizer: options.DumpTokenizer = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Settings file of the run, read for tool_parser and enable_thinking. Without it, the tool parser is "
            "auto, and enable_thinking has the chat template's default.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    changes: Changes = None,
    show: Annotated[
        int,
        typer.Option(
            help="Number of episodes to list: those with the most tokens that differ from the template, then those "
            "with the most off-policy tokens.",
            min=0,
        ),
    ] = 10,
    as_json: options.JsonLines = False,
) -> None:
    """Count tokens that re-encoding the text would change.

    A rollout that keeps text instead of tokens would train on the changed tokens. Also compares the context that the
    policy read with the chat template's rendering: both must be equal. Exits with 1 if they differ or the dump has no
    tokens. Exits with 2 if the tokens are not from this tokenizer.
    """
    from strands_rollout.diagnostics.replay import run_drift
    from strands_rollout.settings import read_config_file

    settings = read_config_file(config, changes) if config or changes else None
    raise typer.Exit(0 if run_drift(dump, tokenizer, settings=settings, show=show, as_json=as_json) else 1)


def replay(
    dump: options.Dump,
    sample: Annotated[int, typer.Option(help="Index of the sample in the dump, from 0.", min=0)] = 0,
    base_url: BaseUrl = None,
    model: Model = None,
    tokenizer: options.DumpTokenizer = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature. Default: 1 with --seed, else the recorded temperature if a seed was recorded, "
            "else 0.",
            min=0,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Sampling seed of the episode, for an engine that uses seeds. Default: the recorded seed, or none if "
            "--temperature is given."
        ),
    ] = None,
    as_json: options.JsonLine = False,
) -> None:
    """Sample a saved episode again and compare the turns.

    Samples each turn from the tokens of its recorded request. No tool runs: the recorded results are part of these
    tokens. If the engine returns logprobs of input tokens, the logprobs of the recorded tokens are compared too. Exits
    with 1 if a turn differs.
    """
    check_engine_options(base_url, model)
    from strands_rollout.diagnostics.replay import run_replay

    replayed = run_replay(
        dump,
        sample=sample,
        base_url=base_url,
        model_dir=model,
        tokenizer_dir=tokenizer,
        temperature=temperature,
        seed=seed,
        as_json=as_json,
    )
    raise typer.Exit(0 if asyncio.run(replayed) else 1)


def rescore(
    dump: options.Dump,
    reward: RewardPath = None,
    config: options.Config = None,
    changes: Changes = None,
    reward_key: options.RewardKey = None,
    group_rm: options.GroupRm = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Dump to write all samples with their new rewards to: a .jsonl or .jsonl.gz file."),
    ] = None,
    show: Annotated[int, typer.Option(help="Number of changed samples to list.", min=0)] = 50,
    as_json: options.JsonLines = False,
) -> None:
    """Score saved samples again with another reward.

    Lists the samples whose score changes. Aborted and pending samples keep their score. Exits with 1 if a sample can't
    be scored.
    """
    from strands_rollout.diagnostics.rewards import load_reward, run_rescore

    if group_rm and reward is None:
        raise typer.BadParameter(
            "got --group-rm without --reward; expected a --reward that takes a list of all samples of a group"
        )
    keys = [*([reward_key] if reward_key else []), "score", "acc"]
    loaded = load_reward(reward, config, keys, changes=changes, takes_groups=group_rm)
    ok = asyncio.run(run_rescore(dump, loaded, out=out, show=show, as_json=as_json))
    if not as_json and out is not None:
        _show_next("view", out)
    elif ok and not as_json and reward is not None:
        _show_next("rescore", dump, "--reward", reward, "--out", "FILE")
    raise typer.Exit(0 if ok else 1)


def validate(
    data: Annotated[Path, typer.Argument(help=f"{DATA_HELP}.", dir_okay=False, callback=check_data_exists)],
    config: options.Config = None,
    changes: Changes = None,
    reward: RewardPath = None,
    reward_key: options.RewardKey = None,
    label_key: Annotated[str, typer.Option(help="Key of the label in a row.")] = "label",
    input_key: Annotated[
        str, typer.Option("--input-key", "--prompt-key", help="Key of the prompt in a row; a.b is key b inside a.")
    ] = "prompt",
    answer: Annotated[
        list[str] | None,
        typer.Option(
            help="Form of a correct answer, with {label} where the label goes; may be repeated: each form must score "
            "at least 1. Default: \\boxed{{label}} and Answer: {label}."
        ),
    ] = None,
    as_json: options.JsonLine = False,
) -> None:
    """Check that each row's ground truth scores at least 1.

    A row fails if even the correct answer scores less than 1, or if the row can't be used. Prints which rows fail, and
    why. Exits with 1 if a row fails, or if the reward itself fails for every row.
    """
    from strands_rollout.diagnostics.rewards import ANSWER_FORMS, LABEL_PLACEHOLDER, load_reward, run_validate

    forms = answer or ANSWER_FORMS
    if any(LABEL_PLACEHOLDER not in form for form in forms):
        raise typer.BadParameter(
            f"got --answer {answer}; expected {LABEL_PLACEHOLDER} in each form, where the label goes"
        )
    loaded = load_reward(reward, config, [reward_key] if reward_key else ["acc", "score"], changes=changes)
    keys = {"prompt_key": input_key, "label_key": label_key}
    ok = asyncio.run(run_validate(data, loaded, **keys, answer_forms=forms, as_json=as_json))
    if ok and not as_json:
        key_options = [("--input-key", input_key, "prompt"), ("--label-key", label_key, "label")]
        key_arguments = [word for option, key, default in key_options if key != default for word in (option, key)]
        set_arguments = [word for change in changes or () for word in ("--set", change)]
        config_arguments = ["--config", config] if config else []
        reward_arguments = ["--reward", reward] if reward else []
        _show_next("eval", "--data", data, *key_arguments, *config_arguments, *set_arguments, *reward_arguments)
    raise typer.Exit(0 if ok else 1)


def _show_next(*words: object) -> None:
    from strands_rollout.dump.terminal import show_next

    show_next(*words)


def view(
    dumps: Annotated[
        list[Path],
        typer.Argument(
            help="A dump, a debug file of slime, a results file of eval, or a folder of these. With several, the page "
            "compares them.",
            metavar="DUMP",
            exists=True,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="File to write the page to, instead of opening it.")] = None,
    tokenizer: options.DumpTokenizer = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the samples in the terminal instead of opening the page.")
    ] = False,
    sample: Annotated[
        list[int] | None,
        typer.Option(help="Index of a sample to print, from 0, with --text; may be repeated.", metavar="N", min=0),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port to serve the page on, without opening a browser; 0 picks a free port.", min=0, max=65535
        ),
    ] = None,
) -> None:
    """View samples in the browser or the terminal.

    Shows several runs side by side, and new samples of a run as they are written. The server listens on 127.0.0.1
    until Ctrl-C; the page needs no network.
    """
    if out is not None and (text or port is not None):
        raise typer.BadParameter("got --out with --text or --port; expected only one of them")
    if sample and not text:
        raise typer.BadParameter("got --sample without --text; expected both")
    from strands_rollout.evaluation.protocols import refuse_several_protocols

    refuse_several_protocols(dumps)
    retokenizer = _load_retokenizer(tokenizer, dumps)
    if text:
        _print_dumps(_name_dumps(dumps), set(sample or ()), retokenizer)
        _show_next("view", *dumps)
    elif out is not None:
        _write_page(_name_dumps(dumps), out, retokenizer)
    else:
        _serve_page(_name_dumps(dumps), port, retokenizer)


def _print_dumps(dumps: Mapping[str, Path], samples: Collection[int], retokenizer: Retokenizer | None) -> None:
    from strands_rollout.dump.terminal import make_console
    from strands_rollout.view.terminal import print_dump

    console = make_console()
    for name, dump in dumps.items():
        if len(dumps) > 1:
            console.rule(name)
        print_dump(console, dump, retokenizer, samples)


def _name_dumps(dumps: Sequence[Path]) -> dict[str, Path]:
    from strands_rollout.view.page import MAX_RUNS, run_names

    by_name = dict(zip(run_names(dumps), dumps, strict=True))
    if len(by_name) < len(dumps) or len(dumps) > MAX_RUNS:
        raise typer.BadParameter(f"got {', '.join(map(str, dumps))}; expected at most {MAX_RUNS} runs, each once")
    return by_name


def _load_retokenizer(folder: Path | None, dumps: Sequence[Path]) -> Retokenizer | None:
    """Return the object that marks drift, with the tokenizer in `folder`, else of the first dump with tokens.

    Without `folder`, return None if no tokenizer can be used, or if the dumps have different tokenizers. Only the first
    16 samples of a dump are searched for tokens.

    Raises:
        ConfigError: The tokenizer in `folder` can't be loaded, or is another policy's.
    """
    from strands_rollout.dump import read_dump, recorded_tokenizer
    from strands_rollout.dump.record import check_tokenizer
    from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
    from strands_rollout.view.sample import Retokenizer

    first_records = {dump: [record for record in islice(read_dump(dump), 16) if record.has_tokens] for dump in dumps}
    with_tokens = [dump for dump, records in first_records.items() if records]
    if folder is None and not with_tokens:
        return None
    try:
        chosen = folder or recorded_tokenizer(with_tokens[0])
        retokenizer = Retokenizer(load_tokenizer(str(chosen)))
        for record in chain.from_iterable(first_records.values()):
            check_tokenizer(record, retokenizer.texts, str(chosen))
    except ConfigError as e:
        if folder is not None:
            raise
        typer.echo(f"note: drift is not shown: {e}", err=True)
        return None
    return retokenizer


def _write_page(dumps: Mapping[str, Path], out: Path, retokenizer: Retokenizer | None) -> None:
    from strands_rollout.dump.terminal import counter
    from strands_rollout.view.page import DumpView, view_dump, write_page

    with counter("samples") as on_read:
        views = {name: view_dump(dump, retokenizer, on_read) for name, dump in dumps.items()}
    page = write_page(DumpView.side_by_side(views), " | ".join(dumps))
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"can't write {out}: {e.strerror}; choose another --out") from e
    typer.echo(f"{out}: {len(page.encode()) / 1e6:.1f} MB")


def _serve_page(dumps: Mapping[str, Path], port: int | None, retokenizer: Retokenizer | None) -> None:
    from strands_rollout.dump import read_dump
    from strands_rollout.view.server import LiveDump, live_server

    live, title = LiveDump(dumps, retokenizer), " | ".join(dumps)
    for dump in dumps.values():
        next(read_dump(dump), None)  # raises if the path is not a dump; later errors appear on the page

    async def serve() -> None:
        async with live_server(live, title, port or 0) as url:
            typer.echo(f"{url}  (Ctrl-C stops the server)")
            if port is None:
                webbrowser.open(url)
            await asyncio.Event().wait()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        typer.echo("")


def export(
    dump: options.Dump,
    to: Annotated[
        Literal["otel", "wandb"],
        typer.Option(help="Destination: otel (a trace per sample, over OTLP) or wandb (a table of samples)."),
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(help="URL of the OTLP/HTTP collector, with --to otel. Default: $OTEL_EXPORTER_OTLP_ENDPOINT."),
    ] = None,
    start: Annotated[
        datetime | None,
        typer.Option(
            help="Start time of the episodes, such as 2026-01-31T09:30:00+01:00, with --to otel; UTC if it has no time "
            "zone. Default: the file's modification time.",
            formats=["%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"],
        ),
    ] = None,
    project: Annotated[
        str | None, typer.Option(help="Name of the wandb project, with --to wandb. Default: $WANDB_PROJECT.")
    ] = None,
    reward_key: Annotated[str, typer.Option(help="Key of the score in a reward that is a dict.")] = "score",
    contents: Annotated[
        bool, typer.Option("--contents", help="Send prompts, responses, labels and error messages too.")
    ] = False,
) -> None:
    """Export samples to OpenTelemetry or Weights & Biases.

    Sends no prompts, responses, labels or error messages unless --contents is given.
    """
    if to == "otel" and project is not None:
        raise typer.BadParameter("got --project with --to otel; expected it only with --to wandb")
    if to == "wandb" and (endpoint is not None or start is not None):
        raise typer.BadParameter("got --endpoint or --start with --to wandb; expected them only with --to otel")
    if to == "otel":
        typer.echo(_send_traces(dump, endpoint, start, reward_key, with_contents=contents))
    else:
        typer.echo(_log_table(dump, project, reward_key, with_contents=contents))
    _show_next("view", dump)


def _send_traces(
    dump: Path, endpoint: str | None, start: datetime | None, reward_key: str, *, with_contents: bool
) -> str:
    from strands_rollout.integrations.traces import otlp_exporter, send_dump

    if start is not None and start.tzinfo is None:
        start = start.replace(tzinfo=UTC)
    exporter = otlp_exporter(endpoint)
    start_s = None if start is None else start.timestamp()
    try:
        samples, spans = send_dump(dump, exporter, start_s=start_s, reward_key=reward_key, with_contents=with_contents)
    finally:
        exporter.shutdown()
    _check_not_empty(samples, dump)
    return f"{samples} samples, {spans} spans"


def _log_table(dump: Path, project: str | None, reward_key: str, *, with_contents: bool) -> str:
    from strands_rollout.integrations import table as tables

    tables.check_wandb("--to wandb")
    table = tables.sample_table(dump, reward_key=reward_key, with_contents=with_contents)
    _check_not_empty(len(table.rows), dump)
    tables.log_table(table, project, dump.resolve().name)
    return f"{len(table.rows)} samples"


def _check_not_empty(count: int, dump: Path) -> None:
    if not count:
        raise DumpError(f"{dump} has no samples; expected at least one")
