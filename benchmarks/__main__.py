"""The command `strands-rollout bench`: its arguments and its exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, cast, get_args

import typer

from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    from strands_rollout.bench.job import Collector

_TOKENIZER_VARIABLE: Final = "QWEN3_TOKENIZER"
_STARTED_ENGINES: Final = ("embedded", "SGLang")


def bench(
    turns: Annotated[str, typer.Option(help="Tool turns of an episode, one number or several.")] = "1,5,20,80",
    concurrency: Annotated[str, typer.Option(help="Episodes at once, one number or several.")] = "64",
    episodes: Annotated[
        int | None, typer.Option(help="Measured episodes; default: a number that fits the turns.", min=1)
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Rounds; figures are medians over them. What takes minutes is measured once.", min=1)
    ] = 3,
    variants: Annotated[str, typer.Option(help="Who plays.")] = "ours,floor,strands-sglang,openai",
    measures: Annotated[
        str, typer.Option(help="What is measured: CPU and bytes, loop lag, that with the code tool, memory.")
    ] = "cpu,lag,code,memory",
    code_episodes: Annotated[int, typer.Option(help="Episodes at once with the real code tool.", min=1)] = 256,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder of a tokenizer; default: ${_TOKENIZER_VARIABLE}, else the shipped model's.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.", dir_okay=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw CPU by turns to this PNG; needs matplotlib.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also show where the CPU time goes, by package.")] = False,
    collector: Annotated[
        str,
        typer.Option(
            help="Garbage collector: own, as each variant has it; frozen, gc.freeze for all; unfrozen, for none."
        ),
    ] = "own",
    json_only: Annotated[bool, typer.Option("--json", help="Print only the JSON on stdout.")] = False,
    engines: Annotated[
        bool, typer.Option("--engines", help="Measure engines instead: the embedded one, and those that are named.")
    ] = False,
    engine: Annotated[
        list[str] | None, typer.Option(help="With --engines: NAME=URL of an engine that nobody else uses; repeatable.")
    ] = None,
    sglang: Annotated[
        bool | None,
        typer.Option(help="With --engines: start SGLang on this CPU too; default: if its environment is there."),
    ] = None,
) -> None:
    """Measure what an episode costs its client, beside a client without an agent and other ways to run it.

    A scripted engine on a core of its own answers at once; each variant plays the same tokens, in fresh processes, and
    every token is checked. Prints tables in Markdown. Exits with 1 if a variant does not play what the script says.

    The JSON has versions, machine, command, tokenizer and collector; medians, a row for each thing that was measured
    (kind cpu, lag, rss, traced or profile; variant, turns, concurrency, episodes, rounds; figures with their units in
    their names); ratios, with the rounds' median as value; and measurements, each round's own.
    """
    if engines:
        if plot is not None or profile:
            raise typer.BadParameter("--plot and --profile are of episodes; leave them out with --engines")
        _compare_engines(engine or [], sglang=sglang, rounds=repeats, out=out, json_only=json_only)
        return
    if engine or sglang:
        raise typer.BadParameter("--engine and --sglang need --engines")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from strands_rollout.bench.bench_options import BenchOptions
    from strands_rollout.bench.bench_plot import check_plot
    from strands_rollout.bench.bench_variants import playable_variants

    if plot is not None:
        check_plot(plot)
    can_play, missing = playable_variants(_names(variants))
    for sentence in missing:
        typer.echo(sentence, err=True)
    options = BenchOptions(
        turns=_numbers("--turns", turns),
        concurrency=_numbers("--concurrency", concurrency),
        episodes=episodes,
        repeats=repeats,
        variants=tuple(can_play),
        measures=(*_measures(measures), *(["profile"] if profile else [])),
        tokenizer_dir=_tokenizer_dir(tokenizer),
        code_episodes=code_episodes,
        collector=_collector(collector),
    )
    from strands_rollout.bench.bench_report import run_and_report

    run_and_report(options, out=out, plot=plot, json_only=json_only)


def _compare_engines(named: list[str], *, sglang: bool | None, rounds: int, out: Path | None, json_only: bool) -> None:
    urls = _urls_by_name(named)
    from strands_rollout.bench.bench_report import run_and_report_engines
    from strands_rollout.bench.engines import ComparedEngines, EngineBenchmark, has_sglang

    compared = ComparedEngines(urls, sglang=has_sglang() if sglang is None else sglang)
    run_and_report_engines(EngineBenchmark(rounds=rounds), compared, out=out, json_only=json_only)


def _urls_by_name(named: list[str]) -> dict[str, str]:
    urls: dict[str, str] = {}
    for one in named:
        name, _, url = one.partition("=")
        if not name or not url:
            raise typer.BadParameter(f"got --engine {one!r}; expected NAME=URL")
        if name in urls or name in _STARTED_ENGINES:
            raise typer.BadParameter(f"got --engine {one!r}; expected another name, that one is taken")
        urls[name] = url
    return urls


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _numbers(option: str, given: str) -> tuple[int, ...]:
    names = _names(given)
    if not names or not all(name.isdecimal() and int(name) > 0 for name in names):
        raise typer.BadParameter(f"got {option} {given!r}; expected numbers above 0, as in 1,5,20")
    return tuple(int(name) for name in names)


def _measures(given: str) -> list[str]:
    from strands_rollout.bench.bench_options import MEASURES

    names = _names(given)
    if not set(names) <= set(MEASURES):
        raise typer.BadParameter(f"got --measures {given!r}; expected some of {', '.join(MEASURES)}")
    return names


def _collector(given: str) -> Collector:
    from strands_rollout.bench.job import Collector

    if given not in get_args(Collector):
        raise typer.BadParameter(f"got --collector {given!r}; expected one of {', '.join(get_args(Collector))}")
    return cast("Collector", given)


def _tokenizer_dir(given: Path | None) -> Path:
    """The option's, the variable's, else the shipped model's."""
    from strands_rollout.bench.bench_options import SHIPPED_TOKENIZER_DIR

    named = os.environ.get(_TOKENIZER_VARIABLE)
    found = given or (Path(named) if named else SHIPPED_TOKENIZER_DIR)
    if not found.is_dir():
        raise ConfigError(f"got {_TOKENIZER_VARIABLE}={named!r}; expected the folder of a tokenizer")
    return found
