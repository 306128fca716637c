"""The command line of the scripts that call `prepare`: the fields of `Request` as options, --data-dir, --force, --json.

The report goes to stdout, with --json as one line of JSON; warnings, errors and progress go to stderr.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from preparation.prepare import prepare
from preparation.report import report_lines, warning_lines
from preparation.request import HUB, Request
from strands_rollout.cli.options import run_command
from strands_rollout.evaluation.benchmarks import BENCHMARKS, Benchmark, find_benchmark

DATA_DIR: Final = Path(__file__).resolve().parents[2] / "data"


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set, with the defaults of the script that prepares it.

    Attributes:
        script: The script's file name.
        hub_id: Repository on the hub.
        id_source: Where `hub_id` is from; shown in the help.
        file_stem: Name of the file in the data folder; `{split}` stands for the split.
        config: Configuration within the repository; None for its default configuration.
        against: Stems of the prepared evaluation files whose problems the data set should not contain.
        benchmark: The benchmark that one split of the data set forms; None if no split is a benchmark.
    """

    script: str
    hub_id: str
    id_source: str
    file_stem: str
    config: str | None = None
    against: tuple[str, ...] = ()
    benchmark: Benchmark | None = None

    @classmethod
    def of_benchmark(cls, benchmark: Benchmark, script: str, id_source: str) -> DataSet:
        """Return the defaults of a script that prepares a benchmark."""
        return cls(
            script=script,
            hub_id=benchmark.data_set,
            id_source=id_source,
            file_stem=benchmark.file_stem,
            config=benchmark.config,
            benchmark=benchmark,
        )

    def out(self, folder: Path, split: str) -> Path:
        """Return the default file of a split."""
        return folder / f"{self.file_stem.format(split=split)}.jsonl"

    def evaluation_files(self, folder: Path, split: str) -> list[Path]:
        """Return the files of `against` in `folder`, except the file of `split` itself, even if `split` is a slice."""
        # a split may be sliced and joined: "train[:90%]+test"
        stems = {self.file_stem.format(split=part.partition("[")[0].strip()) for part in split.split("+")}
        return [folder / f"{stem}.jsonl" for stem in self.against if stems != {stem}]


def run(data_set: DataSet) -> None:
    """Run the script of a data set and exit."""
    run_command(_command(data_set, data_set.script), f"python data_prep/{data_set.script}")


def run_any_benchmark(script: str) -> None:
    """Run a script that prepares any benchmark, and exit."""
    run_command(_command(None, script), f"python data_prep/{script}")


_Name = Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHMARKS)}.", metavar="NAME")]
_DataDir = Annotated[
    Path,
    typer.Option(
        help="Folder of the data sets.", envvar="DATA_DIR", file_okay=False, resolve_path=True, show_default="data/"
    ),
]
_Force = Annotated[bool, typer.Option("--force", help="Prepare the file again even if it exists.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the report.")]


def _command(only: DataSet | None, script: str) -> Callable[..., None]:
    """Return the command of `script`, with the defaults and help of `only`; if it is None, for any benchmark."""

    def command(
        *,
        benchmark: str | None = None,
        data_dir: Path,
        force: bool,
        as_json: bool,
        **options: Any,  # noqa: ANN401 - fields of `Request`
    ) -> None:
        data_set = only or DataSet.of_benchmark(find_benchmark(str(benchmark)), script, "")
        own = data_set.benchmark
        options["dataset"] = options["dataset"] or data_set.hub_id
        options["config"] = options["config"] or data_set.config
        options["split"] = split = options["split"] or (own.split if own and only is None else "train")
        options["endpoint"] = (options["endpoint"] or HUB).rstrip("/")
        options["out"] = options["out"] or data_set.out(data_dir, split)
        options["against"] = options["against"] or data_set.evaluation_files(data_dir, split)
        is_benchmark = own is not None and split.partition("[")[0] == own.split
        request = Request(**options, benchmark=own.name if own and is_benchmark else None)
        _prepare(request, force=force, as_json=as_json)

    command.__doc__ = _any_benchmark_help(script) if only is None else _help(only)
    # Typer reads a command's options from its signature
    parameters = [] if only else [_option("benchmark", _Name, Parameter.empty)]
    defaults = (
        {"dataset": only.hub_id, "config": only.config, "out": None}
        if only
        else dict.fromkeys(("dataset", "config", "split", "out"))
    )
    hidden = {"benchmark"} if only is None else {"benchmark", "seed"}
    parameters += [
        _option(name, Annotated[field.annotation, *field.metadata], defaults.get(name, field.default))
        for name, field in Request.model_fields.items()
        if name not in hidden
    ]
    for name, annotation, default in (
        ("data_dir", _DataDir, DATA_DIR),
        ("force", _Force, False),
        ("as_json", _Json, False),
    ):
        parameters.append(_option(name, annotation, default))
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _option(name: str, annotation: object, default: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _prepare(request: Request, *, force: bool, as_json: bool) -> None:
    prepared = prepare(request, force=force)
    if as_json:
        facts = {"out": str(request.out), "done_before": prepared.done_before, **prepared.manifest}
        typer.echo(json.dumps(facts, ensure_ascii=False))
    else:
        for line in report_lines(prepared.manifest, request, done_before=prepared.done_before):
            typer.echo(line)
    for line in warning_lines(prepared.manifest, request):
        typer.echo(f"warning: {line}", err=True)


def _help(data_set: DataSet) -> str:
    compared = f" Compares the problems with those of {' and '.join(data_set.against)}." if data_set.against else ""
    file_name = f"{data_set.file_stem.format(split='SPLIT')}.jsonl"
    return f"""Prepare {data_set.hub_id} ({data_set.id_source}) as JSONL for slime.

    Writes data/{file_name}, with lines {{"prompt": [...], "label": "34", ...}}, and a manifest. Leaves
    out duplicates, checks each label with the package's reward, and removes the data set's own answer instruction; the
    manifest has the counts.{compared} An existing file with the same settings and an unchanged checksum is kept.
    `datasets` caches its downloads.

    Exit codes: 0 ok, 1 failed, 2 wrong usage.

    Example: python data_prep/{data_set.script} --from ~/Downloads/{data_set.hub_id.rpartition("/")[2]} --json
    """


def _any_benchmark_help(script: str) -> str:
    return f"""Prepare a benchmark as JSONL for `strands-rollout eval --protocol` and slime.

    Writes data/NAME.jsonl (gsm8k-test.jsonl for gsm8k), with lines {{"prompt": [...], "label": "34", "metadata": ...}},
    and a manifest. The metadata names the benchmark and how its answers are graded: mathematics, the letter of a
    choice, or the instructions of IFEval. gpqa-diamond is gated: accept its terms on its page on the hub, then log in
    with `hf auth login` or HF_TOKEN. An existing file with the same settings and an unchanged checksum is kept.

    Exit codes: 0 ok, 1 failed, 2 wrong usage.

    Example: python data_prep/{script} math-500
    """
