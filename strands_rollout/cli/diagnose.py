"""The commands about a setup or finished samples.

`doctor`, `check-template` and `validate` look before a run; `drift`, `replay`, `rescore`, `view` and `export` read
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
from strands_rollout.cli.options import Given, check_engine, made, takes
from strands_rollout.diagnostics import Diagnosis, Question, find_repository
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.play.options import DATA_HELP, BaseUrl, Changes, Model, RewardPath, existing_data

if TYPE_CHECKING:
    from strands_rollout.view.sample import Retokeniser


@takes(Question)
def doctor(
    given: Given,
    *,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of slime, after --: only check these.")
    ] = None,
    flags: Annotated[
        Path | None,
        typer.Option(
            help="Only check the arguments that a launch script of this package gives slime, or those in a file or on "
            "stdin (-), quoted as for a shell."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
    as_json: options.JsonLine = False,
) -> None:
    """Look at this machine before a training run.

    Shows what would fail, what may, and what to do about it, in a few seconds. Exits with 1 if something would fail.
    """
    if flags is not None or arguments:
        from strands_rollout.diagnostics.flag_check import report_flags

        places = {name: given[name] for name in ("slime_dir", "megatron_dir")}
        raise typer.Exit(0 if report_flags(flags, arguments or (), as_json=as_json, **places) else 1)
    from strands_rollout.diagnostics.doctor import examine
    from strands_rollout.dump.terminal import PlainConsole

    question = made(Question, given, env=dict(os.environ), repository=find_repository())
    with PlainConsole(stderr=True).status("looking at this machine ..."):
        found = examine(question)
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
        typer.Option(help="A file, or a template of this package by its name, in place of the tokenizer's own."),
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="The format in which the template's calls must be read; auto: whichever fits.")
    ] = "auto",
    episodes: Annotated[int, typer.Option(help="Random episodes to play; 200 take seconds.", min=0)] = 20,
    seed: Annotated[int, typer.Option(help="The first episode's; each further one has the next.", min=0)] = 0,
    as_json: options.JsonLine = False,
) -> None:
    """Look at a chat template: does it only append?

    Shows where it appends, where it rewrites, who reads its calls, and what ends a turn. Then plays random episodes and
    compares what would be sent with the template's own rendering. Exits with 1 if a rule is broken or a token differs;
    then it shows the tokens around the first difference.
    """
    from strands_rollout.diagnostics import template_check

    source = None if chat_template is None else template_check.template_text(chat_template)
    loaded = template_check.read_tokenizer(tokenizer)
    found = template_check.check_template(
        tokenizer, loaded, chat_template=source, tool_parser=tool_parser, episodes=episodes, seed=seed
    )
    _show(Diagnosis(found), as_json=as_json)


def drift(
    dump: options.Dump,
    tokenizer: options.DumpTokenizer = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="The run's YAML, for its tool_parser and enable_thinking; default: what the template writes.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    changes: Changes = None,
    show: Annotated[int, typer.Option(help="Episodes to list, those that lose most first.", min=0)] = 10,
    as_json: options.JsonLines = False,
) -> None:
    """Count tokens that change if episodes are encoded again.

    That is what text in place of tokens would have cost. Also compares the context, which the policy read, with what
    the chat template makes of it: nothing may differ there. Exits with 1 if something does, or if the dump has no
    tokens; with 2 if they are not of this tokenizer.
    """
    from strands_rollout.diagnostics.replay import run_drift
    from strands_rollout.settings import read_config_file

    settings = read_config_file(config, changes) if config or changes else None
    raise typer.Exit(0 if run_drift(dump, tokenizer, settings=settings, show=show, as_json=as_json) else 1)


def replay(
    dump: options.Dump,
    sample: Annotated[int, typer.Option(help="Which of the dump's samples, from 0.", min=0)] = 0,
    base_url: BaseUrl = None,
    model: Model = None,
    tokenizer: options.DumpTokenizer = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; default: as recorded with a seed, else 0; with --seed 1.", min=0.0),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The episode's sampling seed, for an engine whose tokens depend on it; default: recorded."),
    ] = None,
    as_json: options.JsonLine = False,
) -> None:
    """Sample a saved episode again and say where it departs.

    Each turn is sampled on the tokens that it had read. No tool is run: its recorded results are part of those tokens.
    Where the engine returns logprobs of its input, those of the recorded tokens are compared too. Exits with 1 if a
    turn departs.
    """
    check_engine(base_url, model)
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
    dump: options.Dump,
    reward: RewardPath = None,
    config: options.Config = None,
    changes: Changes = None,
    reward_key: options.RewardKey = None,
    group_rm: options.GroupRm = False,
    out: Annotated[
        Path | None, typer.Option(help="A new dump (.jsonl, .jsonl.gz) of all samples, with the new rewards.")
    ] = None,
    show: Annotated[int, typer.Option(help="Changed samples to list.", min=0)] = 50,
    as_json: options.JsonLines = False,
) -> None:
    """Score saved samples again with another reward.

    Shows what changes. Aborted samples keep what they have. Exits with 1 if a sample could not be scored.
    """
    from strands_rollout.diagnostics.rewards import load_reward, run_rescore

    if group_rm and reward is None:
        raise typer.BadParameter("got --group-rm without --reward; expected the reward that takes groups")
    keys = [*([reward_key] if reward_key else []), "score", "acc"]
    called = load_reward(reward, config, keys, changes=changes, takes_groups=group_rm)
    ok = asyncio.run(run_rescore(dump, called, out=out, show=show, as_json=as_json))
    if not as_json and out is not None:
        _next("view", out)
    elif ok and not as_json and reward is not None:
        _next("rescore", dump, "--reward", reward, "--out", "FILE")
    raise typer.Exit(0 if ok else 1)


def validate(
    data: Annotated[Path, typer.Argument(help=f"{DATA_HELP}.", dir_okay=False, callback=existing_data)],
    config: options.Config = None,
    changes: Changes = None,
    reward: RewardPath = None,
    reward_key: options.RewardKey = None,
    label_key: Annotated[str, typer.Option(help="Where a row has its label.")] = "label",
    input_key: Annotated[
        str, typer.Option("--input-key", "--prompt-key", help="Where a row has its prompt; a.b is key b of a.")
    ] = "prompt",
    answer: Annotated[
        list[str] | None,
        typer.Option(
            help="How a policy may write an answer, with {label} in it; may be given more than once, and each must be "
            "right. Default: \\boxed{{label}} and Answer: {label}."
        ),
    ] = None,
    as_json: options.JsonLine = False,
) -> None:
    """Ask the reward for each row's own gold answer.

    Prints the line, the label and the reason of each row whose answer does not score 1: it teaches nothing. Exits with
    1 if there is one.
    """
    from strands_rollout.diagnostics.rewards import PLACE, SAYINGS, load_reward, run_validate

    sayings = answer or SAYINGS
    if any(PLACE not in saying for saying in sayings):
        raise typer.BadParameter(f"got --answer {answer}; expected {PLACE} in each, where the label goes")
    called = load_reward(reward, config, [reward_key] if reward_key else ["acc", "score"], changes=changes)
    keys = {"prompt_key": input_key, "label_key": label_key}
    ok = asyncio.run(run_validate(data, called, **keys, sayings=sayings, as_json=as_json))
    if ok and not as_json:
        given = [("--input-key", input_key, "prompt"), ("--label-key", label_key, "label")]
        keys_given = [word for option, key, default in given if key != default for word in (option, key)]
        changed = [word for change in changes or () for word in ("--set", change)]
        of_reward = [*(["--config", config] if config else []), *changed, *(["--reward", reward] if reward else [])]
        _next("eval", "--data", data, *keys_given, *of_reward)
    raise typer.Exit(0 if ok else 1)


def _next(*words: object) -> None:
    from strands_rollout.dump.terminal import show_next

    show_next(*words)


def view(
    dumps: Annotated[
        list[Path],
        typer.Argument(
            help="A dump, slime's debug file, results of eval, or a folder of them; two or more are compared.",
            metavar="DUMP",
            exists=True,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the page to this file, in place of opening it.")] = None,
    tokenizer: options.DumpTokenizer = None,
    text: Annotated[bool, typer.Option("--text", help="Print the list and the samples to the terminal.")] = False,
    sample: Annotated[
        list[int] | None, typer.Option(help="With --text: print these samples only, from 0.", metavar="N", min=0)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Serve the page at this port and open no browser; 0 for a free one.", min=0, max=65535),
    ] = None,
) -> None:
    """Look at samples, in the browser or the terminal.

    Several runs are shown side by side. The page follows a run that writes. It needs no network. The server listens on
    127.0.0.1 until Ctrl-C.
    """
    if out is not None and (text or port is not None):
        raise typer.BadParameter("got --out beside --text or --port; expected one of them")
    if sample and not text:
        raise typer.BadParameter("got --sample without --text; expected both")
    retokeniser = _retokeniser(tokenizer, dumps)
    if text:
        _print(_named(dumps), set(sample or ()), retokeniser)
        _next("view", *dumps)
    elif out is not None:
        _write(_named(dumps), out, retokeniser)
    else:
        _serve(_named(dumps), port, retokeniser)


def _print(dumps: Mapping[str, Path], samples: Collection[int], retokeniser: Retokeniser | None) -> None:
    from strands_rollout.dump.terminal import make_console
    from strands_rollout.view.terminal import print_dump

    console = make_console()
    for name, dump in dumps.items():
        if len(dumps) > 1:
            console.rule(name)
        print_dump(console, dump, retokeniser, samples)


def _named(dumps: Sequence[Path]) -> dict[str, Path]:
    from strands_rollout.view.page import MAX_RUNS, run_names

    named = dict(zip(run_names(dumps), dumps, strict=True))
    if len(named) < len(dumps) or len(dumps) > MAX_RUNS:
        raise typer.BadParameter(f"got {', '.join(map(str, dumps))}; expected at most {MAX_RUNS} runs, each once")
    return named


def _retokeniser(folder: Path | None, dumps: Sequence[Path]) -> Retokeniser | None:
    """What marks drift, with the recorded tokenizer where it is here; refuses another policy's."""
    from strands_rollout.dump import read_dump, recorded_tokenizer
    from strands_rollout.dump.record import check_tokenizer
    from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
    from strands_rollout.view.sample import Retokeniser

    first = {dump: [record for record in islice(read_dump(dump), 16) if record.has_tokens] for dump in dumps}
    sampled = [dump for dump, records in first.items() if records]
    if folder is None and not sampled:
        return None
    try:
        chosen = folder or recorded_tokenizer(sampled[0])
        retokeniser = Retokeniser(load_tokenizer(str(chosen)))
        for record in chain.from_iterable(first.values()):
            check_tokenizer(record, retokeniser.texts, str(chosen))
    except ConfigError as e:
        if folder is not None:
            raise
        typer.echo(f"note: no drift is shown: {e}", err=True)
        return None
    return retokeniser


def _write(dumps: Mapping[str, Path], out: Path, retokeniser: Retokeniser | None) -> None:
    from strands_rollout.dump.terminal import counter
    from strands_rollout.view.page import DumpView, view_dump, write_page

    with counter("samples") as on_read:
        views = {name: view_dump(dump, retokeniser, on_read) for name, dump in dumps.items()}
    page = write_page(DumpView.side_by_side(views), " | ".join(dumps))
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"can't write {out}: {e.strerror}; choose another --out") from e
    typer.echo(f"{out}: {len(page.encode()) / 1e6:.1f} MB")


def _serve(dumps: Mapping[str, Path], port: int | None, retokeniser: Retokeniser | None) -> None:
    from strands_rollout.dump import read_dump
    from strands_rollout.view.server import LiveDump, live_server

    live, title = LiveDump(dumps, retokeniser), " | ".join(dumps)
    for dump in dumps.values():
        next(read_dump(dump), None)  # a file that is no dump is refused here, the rest is shown on the page

    async def serve() -> None:
        async with live_server(live, title, port or 0) as url:
            typer.echo(f"{url}  (Ctrl-C ends)")
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
        typer.Option(help="otel: a trace per sample, to a collector; wandb: a table of the samples, in a run."),
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(help="otel: the collector's URL, OTLP over HTTP; default: OTEL_EXPORTER_OTLP_ENDPOINT."),
    ] = None,
    start: Annotated[
        datetime | None,
        typer.Option(
            help="otel: when the episodes began, UTC without a zone; default: when the file was last written.",
            formats=["%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"],
        ),
    ] = None,
    project: Annotated[str | None, typer.Option(help="wandb: the project; default: WANDB_PROJECT.")] = None,
    reward_key: Annotated[str, typer.Option(help="Where a reward that is a dict has its number.")] = "score",
    contents: Annotated[
        bool, typer.Option("--contents", help="Send texts too: prompts, responses, labels, errors.")
    ] = False,
) -> None:
    """Send samples to where you look at traces or tables.

    Texts stay here unless --contents is given.
    """
    if to == "otel" and project is not None:
        raise typer.BadParameter("got --project with --to otel; expected it with --to wandb")
    if to == "wandb" and (endpoint is not None or start is not None):
        raise typer.BadParameter("got --endpoint or --start with --to wandb; expected them with --to otel")
    if to == "otel":
        typer.echo(_to_otel(dump, endpoint, start, reward_key, with_contents=contents))
    else:
        typer.echo(_to_wandb(dump, project, reward_key, with_contents=contents))
    _next("view", dump)


def _to_otel(dump: Path, endpoint: str | None, start: datetime | None, reward_key: str, *, with_contents: bool) -> str:
    from strands_rollout.integrations.traces import otlp_exporter, send_dump

    if start is not None and start.tzinfo is None:
        start = start.replace(tzinfo=UTC)
    exporter = otlp_exporter(endpoint)
    start_s = None if start is None else start.timestamp()
    try:
        samples, spans = send_dump(dump, exporter, start_s=start_s, reward_key=reward_key, with_contents=with_contents)
    finally:
        exporter.shutdown()
    _refuse_none(samples, dump)
    return f"{samples} samples, {spans} spans"


def _to_wandb(dump: Path, project: str | None, reward_key: str, *, with_contents: bool) -> str:
    from strands_rollout.integrations import table as tables

    tables.check_wandb("--to wandb")
    table = tables.sample_table(dump, reward_key=reward_key, with_contents=with_contents)
    _refuse_none(len(table.rows), dump)
    tables.log_table(table, project, dump.resolve().name)
    return f"{len(table.rows)} samples"


def _refuse_none(samples: int, dump: Path) -> None:
    if not samples:
        raise DumpError(f"{dump} holds no sample; expected one or more")
