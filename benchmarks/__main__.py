"""The benchmarks' command line: `python -m benchmarks table|client|checkouts|engines|sandbox --help`."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strands_rollout.cli.options import run
from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.client import ClientOptions

_TOKENIZER_VARIABLE: Final = "QWEN3_TOKENIZER"
_STARTED_ENGINES: Final = ("embedded", "SGLang")
_CAMEL_NOTE: Final = (
    "note: camel-ai is left out; to include it, run: python -m venv .venv-camel && .venv-camel/bin/pip install "
    "camel-ai numpy sympy; then add --camel-python .venv-camel/bin/python"
)
_Out = Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.", dir_okay=False)]
_Tokenizer = Annotated[
    Path | None,
    typer.Option(help=f"Folder of a tokenizer. Default: ${_TOKENIZER_VARIABLE}, else the shipped model's."),
]
_JsonOnly = Annotated[bool, typer.Option("--json", help="Print only the JSON on stdout.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def _root() -> None:
    """Measure the rollout client, the gateway, episode workers, engines and the code sandbox; compare checkouts.

    Exit codes: 0 success, 1 a measurement failed, 2 wrong usage.
    """


@app.command(epilog="Example: python -m benchmarks table --tokenizer DIR --out table.json")
def table(
    rows: Annotated[
        str | None,
        typer.Option(help="Groups of rows, comma-separated.", show_default="all"),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; figures are medians over them.", min=1)] = 7,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure memory and lag with few episodes, to test the benchmark itself.")
    ] = False,
    tokenizer: _Tokenizer = None,
    out: _Out = None,
    json_only: _JsonOnly = False,
) -> None:
    """Measure the table of docs/performance.md: costs relative to other clients, memory, event-loop lag and start-up.

    Takes about 45 minutes on two idle cores. Prints the medians and quartiles over the rounds. If something that
    a row needs is missing, the row says so. Ctrl-C ends the run and prints what was measured; --out is written after
    each round. Exits with 130 if it was interrupted, else with 1 if a measurement failed.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from benchmarks.table import GROUPS, QUICK_SIZES, Sizes, as_markdown, measure_all, start_run

    groups = _check_choices("--rows", _split_names(rows), GROUPS) if rows else GROUPS
    tokenizer_dir = _tokenizer_dir(tokenizer)
    check_writable(out)
    run = start_run(groups, sizes=QUICK_SIZES if quick else Sizes(), rounds=repeats, tokenizer_dir=tokenizer_dir)

    def write() -> None:
        if out is not None:
            out.write_text(json.dumps(run.result(), indent=1) + "\n")

    is_interrupted = False
    with _progress_bar() as on_step:
        try:
            measure_all(run, tokenizer_dir, on_step, write)
        except KeyboardInterrupt:
            is_interrupted = True
    write()
    print(json.dumps(run.result()) if json_only else as_markdown(run.result()), flush=True)
    for step, message in run.failed.items():
        typer.echo(f"error: {step.label}: {message}", err=True)
    if is_interrupted or run.failed:
        raise typer.Exit(130 if is_interrupted else 1)


@app.command(epilog="Example: python -m benchmarks client --turns 5,20 --out bench.json")
def client(
    turns: Annotated[str, typer.Option(help="Tool turns of an episode, comma-separated.")] = "1,5,20,80",
    concurrency: Annotated[str, typer.Option(help="Concurrent episodes, comma-separated.")] = "64",
    episodes: Annotated[
        int | None, typer.Option(help="Number of measured episodes. Default: depends on the turns.", min=1)
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Rounds; figures are medians over them. Slow measurements have one round.", min=1)
    ] = 3,
    variants: Annotated[
        str, typer.Option(help="Clients to measure, comma-separated.")
    ] = "ours,floor,strands-sglang,openai",
    measures: Annotated[
        str,
        typer.Option(
            help="Comma-separated: cpu (and bytes), turns (CPU of a turn), lag, code (lag with the code tool), memory, "
            "profile."
        ),
    ] = "cpu,lag,code,memory",
    code_episodes: Annotated[int, typer.Option(help="Concurrent episodes with the real code tool.", min=1)] = 256,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder of a tokenizer. Default: ${_TOKENIZER_VARIABLE}, else the shipped model's.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    collector: Annotated[
        str,
        typer.Option(
            help="Garbage collector: own (the variant's setting), frozen (gc.freeze for all), unfrozen (for none)."
        ),
    ] = "own",
    out: _Out = None,
    json_only: _JsonOnly = False,
) -> None:
    """Measure what an episode costs its client, compared with other clients and with the requests alone.

    A scripted engine on its own core answers immediately. Each variant plays the same tokens in fresh processes, and
    every token is checked. Prints tables in Markdown. Exits with 1 if a measurement failed, for example because a
    variant does not play its script.

    The JSON has `versions`, `machine`, `command`, `tokenizer` and `collector`; `medians`, a row per measurement (kind,
    variant, turns, concurrency, episodes, rounds, and figures whose names contain the unit); `ratios`, medians over the
    rounds; and `measurements`, the figures of each round.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from benchmarks.client import MEASURES, ClientOptions, playable_variants
    from benchmarks.variants import Collector

    can_play, notes = playable_variants(_split_names(variants))
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    options = ClientOptions(
        turns=_parse_numbers("--turns", turns),
        concurrency=_parse_numbers("--concurrency", concurrency),
        episodes=episodes,
        repeats=repeats,
        variants=tuple(can_play),
        measures=tuple(_check_choices("--measures", _split_names(measures), MEASURES)),
        tokenizer_dir=_tokenizer_dir(tokenizer),
        code_episodes=code_episodes,
        collector=cast("Collector", _check_choices("--collector", [collector], get_args(Collector))[0]),
    )
    _run_client(options, out, json_only=json_only)


@app.command(epilog="Example: python -m benchmarks engines --engine mine=http://127.0.0.1:30000")
def engines(
    engine: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of an engine that nobody else uses; may be repeated.")
    ] = None,
    sglang: Annotated[
        bool | None,
        typer.Option(help="Start SGLang on this CPU too. Default: only if STRANDS_ROLLOUT_SGLANG_VENV is set."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; figures are medians over them.", min=1)] = 3,
    out: _Out = None,
    json_only: _JsonOnly = False,
) -> None:
    """Measure the speed of the embedded engine, of running engines and, on this CPU, of SGLang.

    Prints a table in Markdown; the JSON is a list with a row for each workload and engine.
    """
    urls = _urls_by_name(engine or [])
    from benchmarks.engines import (
        ComparedEngines,
        EngineBenchmark,
        has_sglang,
        rows_as_json,
        rows_as_markdown,
        run_engine_benchmark,
    )

    compared = ComparedEngines(urls, sglang=has_sglang() if sglang is None else sglang)
    check_writable(out)
    with _progress_bar() as on_step:
        rows = run_engine_benchmark(
            EngineBenchmark(rounds=repeats), compared, on_step=lambda done, total: on_step("engines", done, total)
        )
    if out is not None:
        out.write_text(rows_as_json(rows) + "\n")
    print(rows_as_json(rows) if json_only else rows_as_markdown(rows), flush=True)


@app.command(epilog="Example: python -m benchmarks sandbox --camel-python .venv-camel/bin/python --out bench.json")
def sandbox(
    camel_python: Annotated[
        Path | None,
        typer.Option(help="Python of an environment with camel-ai, numpy and sympy.", exists=True, dir_okay=False),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Rounds; figures are medians over them.", min=1, show_default="5, or 1 if quick")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Make few calls, to test the benchmark itself.")] = False,
    out: _Out = None,
    json_only: _JsonOnly = False,
) -> None:
    """Measure LocalExecutor, compared with camel-ai's interpreter, `python -c` and SubprocessExecutor.

    Takes about ten minutes on two idle CPUs. Reports memory and the CPU time of all processes if /proc is available.
    Exits with 1 if a contender fails.
    """
    from benchmarks.sandbox import CONTENDERS, QUICK_PLAN, Plan, measure, table

    plan = QUICK_PLAN if quick else Plan()
    plan = plan if repeats is None else replace(plan, repeats=repeats)
    pythons = dict.fromkeys(CONTENDERS, sys.executable)
    if camel_python is None:
        del pythons["camel"]
        typer.echo(_CAMEL_NOTE, err=True)
    else:
        pythons["camel"] = str(camel_python)
    check_writable(out)
    with _progress_bar() as on_step:
        result = measure(pythons, plan, on_step)
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")
    if json_only:
        print(json.dumps(result), flush=True)
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(result))


@app.command(epilog="Example: git worktree add ../before HEAD~1; python -m benchmarks checkouts ../before .")
def checkouts(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Checkouts of this repository; ratios are to the first.")
    ],
    turns: Annotated[str, typer.Option(help="Tool turns of an episode, comma-separated.")] = "5,20,80",
    concurrency: Annotated[int, typer.Option(help="Concurrent episodes.", min=1)] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds in each checkout.", min=1)] = 15,
    episodes: Annotated[
        int | None, typer.Option(help="Episodes of a round of cpu. Default: as many as take about a second.", min=1)
    ] = None,
    agent: Annotated[
        str,
        typer.Option(help="plain, hook (with a hook on every event), factory (an agent factory) or gateway."),
    ] = "plain",
    measure: Annotated[str, typer.Option(help="Measurement: cpu, or memory of concurrent episodes.")] = "cpu",
    settings: Annotated[str, typer.Option(help="Additional rollout settings, as JSON.")] = "{}",
    tokenizer: _Tokenizer = None,
    out: _Out = None,
    json_only: _JsonOnly = False,
) -> None:
    """Compare the cost of an episode between checkouts of this repository.

    The checkouts run on this environment's libraries, and play the same tokens in turn. Prints the median of each
    figure over the rounds, and the median and quartiles of the rounds' ratios to the first checkout.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from benchmarks.checkouts import AGENTS, MEASURES, Comparison, compare, table

    comparison = Comparison(
        checkouts=[folder.resolve() for folder in folders],
        turns=_parse_numbers("--turns", turns),
        concurrency=concurrency,
        rounds=repeats,
        episodes=episodes,
        agent=_check_choices("--agent", [agent], AGENTS)[0],
        settings=_parse_settings(settings),
        tokenizer_dir=_tokenizer_dir(tokenizer).resolve(),
        measure=_check_choices("--measure", [measure], MEASURES)[0],
    )
    check_writable(out)
    with _progress_bar() as on_step:
        rows = compare(comparison, on_step)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows) if json_only else table(rows), flush=True)


def _run_client(options: "ClientOptions", out: Path | None, *, json_only: bool) -> None:
    from benchmarks.client import run_client_benchmark
    from benchmarks.report import result_tables

    check_writable(out)
    with _progress_bar() as on_step:
        result = run_client_benchmark(options, on_step)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if json_only else result_tables(result), flush=True)


def check_writable(path: Path | None) -> None:
    """Check before the measurements, which take minutes, that an output file can be written; create its folder.

    Raises:
        ConfigError: The folder can't be created, or the file can't be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"can't create the folder of {path}: {e.strerror}; choose another --out") from e
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"can't write {path}; choose another --out")


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar; yield a function that moves it, given a label and the numbers of finished and all steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # draw the bar only at each step: a drawing thread would use time of the measured core
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda label, done, total: bar.update(task, description=label, completed=done, total=total, refresh=True)


def _urls_by_name(named: list[str]) -> dict[str, str]:
    urls: dict[str, str] = {}
    for engine in named:
        name, _, url = engine.partition("=")
        if not name or not url:
            raise typer.BadParameter(f"got --engine {engine!r}; expected NAME=URL")
        if name in urls or name in _STARTED_ENGINES:
            raise typer.BadParameter(f"got --engine {engine!r}; expected another name, because {name!r} is taken")
        urls[name] = url
    return urls


def _split_names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _parse_numbers(option: str, given: str, *, minimum: int = 1) -> tuple[int, ...]:
    names = _split_names(given)
    if not names or not all(name.isdecimal() and int(name) >= minimum for name in names):
        raise typer.BadParameter(f"got {option} {given!r}; expected whole numbers of at least {minimum}, as in 1,5,20")
    return tuple(int(name) for name in names)


def _parse_settings(given: str) -> dict[str, Any]:
    try:
        settings = json.loads(given)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise typer.BadParameter(
            f"got --settings {given!r}; expected a JSON object, such as '{{\"tool_timeout_s\": 60}}'"
        )
    return settings


def _check_choices(option: str, names: list[str], known: tuple[str, ...]) -> list[str]:
    if not set(names) <= set(known):
        raise typer.BadParameter(f"got {option} {','.join(names)!r}; expected some of {', '.join(known)}")
    return names


def _tokenizer_dir(given: Path | None) -> Path:
    """Return `given`, else the folder in the environment variable, else the folder of the shipped tokenizer."""
    from benchmarks.client import SHIPPED_TOKENIZER_DIR

    named = os.environ.get(_TOKENIZER_VARIABLE)
    found = given or (Path(named) if named else SHIPPED_TOKENIZER_DIR)
    if not found.is_dir():
        raise ConfigError(
            f"got the tokenizer {found}; expected a folder; name another with --tokenizer or {_TOKENIZER_VARIABLE}"
        )
    return found


def main() -> None:
    """Run the command line and exit."""
    run(app, "python -m benchmarks")


if __name__ == "__main__":
    main()
