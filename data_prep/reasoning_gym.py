"""Write rows of reasoning-gym's generators: `python data_prep/reasoning_gym.py --help`."""

import dataclasses
import itertools
import json
import numbers
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer
import yaml
from preparation.command_line import DATA_DIR
from preparation.files import atomic_write
from preparation.rows import PreparationError

from strands_rollout.cli.options import run_command
from strands_rollout.environments.reasoning_gym import reasoning_gym_row
from strands_rollout.errors import ConfigError

_MAX_TRIES_PER_ROW: Final = 20  # generators of small tasks repeat questions


def command(
    tasks: Annotated[str, typer.Option(help="Names of generators, comma-separated, such as chain_sum,countdown.")],
    size: Annotated[int, typer.Option(help="Number of training rows of each task.", min=1)] = 1000,
    held_out: Annotated[int, typer.Option(help="Number of additional rows of each task, for evaluation.", min=0)] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the generators; equal arguments give equal rows.")] = 0,
    level: Annotated[
        int | None, typer.Option(help="Level of each task's curriculum, from 0.", min=0, show_default="no curriculum")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="Option of a generator, such as chain_sum.max_terms=4; can be given several times."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="File of the training rows; the held-out rows go to NAME-held-out.jsonl.",
            dir_okay=False,
            show_default="data/reasoning-gym.jsonl",
        ),
    ] = DATA_DIR / "reasoning-gym.jsonl",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the report.")] = False,
) -> None:
    """Write rows of reasoning-gym's generators as JSONL for slime, with the metadata that their scorers need.

    The questions of the held-out rows don't occur among the training rows. The rows of the tasks alternate.

    Exit codes: 0 ok, 1 failed, 2 wrong usage.

    Example: python data_prep/reasoning_gym.py --tasks chain_sum,countdown --size 500 --held-out 50
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    settings = _options_by_task(names, options or [])
    rows = {name: _draw_rows(name, size + held_out, seed, level, settings[name]) for name in names}
    held_out_file = out.with_name(f"{out.stem}-held-out.jsonl")
    _write(out, [own[held_out:] for own in rows.values()])
    if held_out:
        _write(held_out_file, [own[:held_out] for own in rows.values()])
    counts = {name: len(own) - held_out for name, own in rows.items()}
    if as_json:
        facts = {"out": str(out), "held_out": str(held_out_file) if held_out else None, "rows": counts}
        typer.echo(json.dumps({**facts, "held_out_rows": held_out * len(names), "seed": seed, "level": level}))
        return
    typer.echo(f"{out}: {sum(counts.values())} rows ({', '.join(f'{name} {n}' for name, n in counts.items())})")
    if held_out:
        typer.echo(f"{held_out_file}: {held_out * len(names)} rows")


def _options_by_task(names: list[str], options: list[str]) -> dict[str, dict[str, Any]]:
    factory = _import_factory()
    unknown = [name for name in names if name not in factory.DATASETS]
    if unknown or not names:
        raise ConfigError(
            f"--tasks: got {', '.join(unknown) or 'nothing'}; expected names of reasoning-gym's generators: "
            f"{', '.join(sorted(factory.DATASETS))}"
        )
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for option in options:
        path, equals, value = option.partition("=")
        task, _, key = path.partition(".")
        if not equals or not key or task not in found:
            raise ConfigError(f"--set: got {option!r}; expected TASK.OPTION=VALUE with a task of --tasks")
        found[task][key] = yaml.safe_load(value)
    return found


def _draw_rows(name: str, count: int, seed: int, level: int | None, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `count` rows of a task, with different questions."""
    entries = _draw_entries(name, count * _MAX_TRIES_PER_ROW, seed, level, options)
    rows: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if len(rows) == count:
            break
        row = reasoning_gym_row(entry)
        if level is not None:
            row["metadata"]["level"] = level
        rows.setdefault(entry["question"], row)
    if len(rows) < count:
        raise PreparationError(
            f"{name} gave {len(rows)} different questions in {count * _MAX_TRIES_PER_ROW} tries; expected {count}. "
            "Lower --size and --held-out, or make the task larger with --set or --level"
        )
    return list(rows.values())


def _draw_entries(
    name: str, size: int, seed: int, level: int | None, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    factory = _import_factory()
    config = dict[str, Any]()
    if level is not None:
        if not factory.has_curriculum(name):
            raise ConfigError(
                f"--level {level}: {name} has no curriculum; leave --level out, or use --set {name}.OPTION=VALUE"
            )
        curriculum = factory.create_curriculum(name)
        curriculum.set_global_level(level)
        config = dataclasses.asdict(curriculum.generate_configuration())
    try:
        data_set = factory.create_dataset(name, **{**config, **options, "seed": seed, "size": size})
    except (AssertionError, TypeError, ValueError) as e:  # the generators check their options by assertions
        known = ", ".join(field.name for field in dataclasses.fields(factory.DATASETS[name][1]))
        raise ConfigError(f"{name} refuses an option or its value: {e}; the options of {name}: {known}") from e
    _check_storable(name, data_set)
    for index in range(size):
        yield data_set[index]


def _check_storable(name: str, data_set: Any) -> None:  # noqa: ANN401 - a generator of reasoning-gym
    """Raise ConfigError if storing the task's first row as JSON fails, or changes the score of the row's own answer."""
    entry = data_set[0]
    expected = data_set.score_answer(answer=entry["answer"], entry=entry)
    try:
        stored = data_set.score_answer(answer=entry["answer"], entry=orjson.loads(_as_json(entry)))
    except (TypeError, orjson.JSONEncodeError) as e:
        raise ConfigError(f"{name}: its rows can't be stored as JSON ({e}); leave it out of --tasks") from e
    if stored != expected:
        raise ConfigError(
            f"{name}: the score of its own answer is {expected}, but {stored} after the row is stored as JSON; leave "
            "it out of --tasks"
        )


def _write(path: Path, rows_of_tasks: list[list[dict[str, Any]]]) -> None:
    with atomic_write(path) as file:
        for row in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*rows_of_tasks))):
            file.write(_as_json(row) + b"\n")


def _as_json(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, _number_as_text, orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _number_as_text(value: object) -> str:
    if isinstance(value, numbers.Number):  # such as a Fraction in the metadata of gsm_symbolic
        return str(value)
    raise TypeError(f"got a {type(value).__name__}, which JSON can't store")


def _import_factory() -> Any:  # noqa: ANN401 - a module without type information
    # this script has the library's name, and Python looks in this script's folder first
    here, searched = Path(__file__).resolve().parent, sys.path[:]
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != here]
    try:
        import reasoning_gym.factory
    except ModuleNotFoundError as e:
        raise PreparationError(
            f"the package {e.name!r} is not installed; run: pip install -e '.[reasoning-gym]' (in the repository)"
        ) from e
    finally:
        sys.path[:] = searched
    return reasoning_gym.factory


if __name__ == "__main__":
    run_command(command, "python data_prep/reasoning_gym.py")
