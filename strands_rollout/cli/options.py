"""Options of several commands, commands whose options are a dataclass, and `config`, which prints settings."""

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from strands_rollout.evaluation.options import BaseUrl as BaseUrl
from strands_rollout.evaluation.options import Model as Model
from strands_rollout.evaluation.options import Tokenizer as Tokenizer

Given: TypeAlias = dict[str, Any]
"""What a command was given for fields of dataclasses, by their names."""


def takes(*kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, after its own parameters, the options that fields of these dataclasses are annotated with.

    Their values are its first argument. A field without a default is None where its option is left out.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = signature(command, eval_str=True).parameters.values()
        names = [one.name for one in own]
        own += [
            Parameter(
                one.name,
                Parameter.KEYWORD_ONLY,
                default=None if one.default is MISSING else one.default,
                annotation=hint,
            )
            for kind in kinds
            for one, hint in zip(fields(kind), get_type_hints(kind, include_extras=True).values(), strict=True)
            if any(isinstance(extra, OptionInfo) for extra in getattr(hint, "__metadata__", ()))
        ]

        @functools.wraps(command)
        def run(**given: object) -> None:
            given = {one.name: one.default for one in own} | given
            command(given, **{name: given.pop(name) for name in names})

        run.__signature__ = Signature(own)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in own}
        return run

    return decorate


Options = TypeVar("Options")


def made(kind: type[Options], given: Given, **more: object) -> Options:
    """The dataclass with those of the given values that are its fields."""
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given}, **more)  # type: ignore[arg-type]


def check_engine(base_url: str | None, model: Path | None) -> None:
    """Raise BadParameter where both an engine and what another one would serve are named."""
    if base_url is not None and model is not None:
        raise typer.BadParameter("--model is what the embedded engine serves; it can't be used with --base-url")


Dump: TypeAlias = Annotated[
    Path, typer.Argument(help="A dump, slime's debug file, results of eval, or a folder of them.", exists=True)
]
JsonLine: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")]
JsonLines: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON instead: a line for each sample, and the totals.")
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="slime's --custom-config-path YAML, whose settings the reward is given.", exists=True, dir_okay=False
    ),
]
RewardPath: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Dotted path of a reward with slime's signature, sync or async; default: this package's."),
]
RewardKey: TypeAlias = Annotated[str | None, typer.Option(help="Where a reward that is a dict has its number.")]
GroupRm: TypeAlias = Annotated[
    bool, typer.Option("--group-rm", help="The reward takes a list, all samples of a group, as slime's --group-rm.")
]


def config(
    file: Annotated[
        Path | None,
        typer.Argument(help="A YAML for slime's --custom-config-path; default: none, which shows the defaults."),
    ] = None,
    as_json: JsonLine = False,
) -> None:
    """Check a configuration and all that it names, and print every setting with its meaning and its value.

    What is printed is itself a valid configuration, with secrets masked. Exits with 2 if the file
    can't be used, or names what is not there.
    """
    from strands_rollout.settings import (
        MASK_NOTE,
        RolloutSettings,
        documented,
        is_masked,
        masked_values,
        read_config_file,
    )

    settings = RolloutSettings() if file is None else read_config_file(file)
    if as_json and is_masked(settings):
        typer.echo(f"note: {MASK_NOTE}", err=True)
    typer.echo(
        json.dumps(masked_values(settings), separators=(",", ":")) if as_json else documented(settings), nl=as_json
    )
    if file is not None:
        from strands_rollout.slime_plugin.config_file import check_names

        asyncio.run(check_names(file, settings))
