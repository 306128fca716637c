"""How commands show their options; options of several commands, or of a dataclass; `config`, which prints settings."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from datetime import datetime
from inspect import Parameter, Signature, signature
from pathlib import Path
from textwrap import wrap
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeAlias, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo, CommandInfo, OptionInfo, ParameterInfo

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.play.options import Changes
from strands_rollout.secret_mask import MASK, masked_settings
from strands_rollout.validation import expectation

if TYPE_CHECKING:
    from pydantic import BaseModel
    from typer._click import Context, HelpFormatter

    from strands_rollout.settings import RolloutSettings

_GROUPS: Final = {
    "Engine and model": "base-url api-base api-model model model-name tokenizer max-context-length host port",
    "Agent and reward": "config set reward reward-key group-rm",
    "Data": "data eval-config held-out input-key label-key prompt-key limit row answer",
    "Sampling": "samples samples-per-problem k concurrency temperature top-p top-k max-new-tokens seed",
    "Steps": "steps prompts samples-per-prompt extra-prompts async eval-every save-every",
    "Update": "learning-rate lr-decay updates clip-low clip-high loss-mean tis-clip kl entropy threads",
    "Output": "out dump save-tokens audit show text sample json wandb",
}
_GROUP_OF: Final = {f"--{name}": group for group, names in _GROUPS.items() for name in names.split()}
_FEW: Final = 9
_COLUMN: Final = 27
_OF_TYPE: Final = {int: "N", float: "X", datetime: "TIME", bool: None}
_OF_WORD: Final = {"endpoint": "URL", "base": "URL", "urls": "URL", "reward": "PATH", "project": "NAME"}


class GroupedCommand(TyperCommand):
    """A command whose help has its options, where they are many, in groups: an option's own panel, else by its name."""

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """The pieces of the usage line; typer puts a required argument in braces, which a shell would expand."""
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Read the command's words; what typer's pydantic expected of a value is said in our words."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as e:
            from pydantic import ValidationError

            if isinstance(e.__cause__, ValidationError):
                first = e.__cause__.errors()[0]
                is_whole = first["type"] == "value_error"  # typer's own sentence, with what was got
                e.message = ("" if is_whole else f"got {first['input']!r}; expected ") + expectation(first)
            raise

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the arguments, then the groups."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *_GROUPS, "Options")}
        params: list[Any] = self.get_params(ctx)
        for param in params:
            if record := param.get_help_record(ctx):
                group = param.rich_help_panel or (len(params) > _FEW and _GROUP_OF.get(param.opts[0])) or "Options"
                if param.param_type_name == "argument":
                    group, record = "Arguments", (param.metavar, record[1])
                groups.setdefault(group, []).append(record)
        width = min(max(len(first) for rows in groups.values() for first, _ in rows), _COLUMN)
        for name, rows in groups.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl([(first.ljust(width), help_) for first, help_ in rows], col_max=width)


def finish(commands: Iterable[CommandInfo]) -> None:
    """Show their options in groups, each with a name of its value for people, by its type, where it has none."""
    for command in commands:
        command.cls = GroupedCommand
        if command.callback is None:
            continue
        # texts of annotations would be evaluated again, to other objects
        command.callback.__annotations__ = get_type_hints(command.callback, include_extras=True)
        for name, hint in command.callback.__annotations__.items():
            for info in getattr(hint, "__metadata__", ()):
                if isinstance(info, ParameterInfo) and info.metavar is None:
                    info.metavar = _metavar(name, get_args(hint)[0], info)


def run(app: typer.Typer, name: str) -> NoReturn:
    """Run a command line under this name; a RolloutError is shown, and exits with 2 for wrong usage, else with 1."""
    for command in app.registered_commands:
        command.cls = GroupedCommand
    try:
        app(prog_name=name)
    except RolloutError as e:
        from strands_rollout.dump.terminal import printable

        typer.echo(f"error: {printable(str(e))}", err=True)
        sys.exit(2 if isinstance(e, ConfigError) else 1)
    sys.exit(0)


def run_command(command: Callable[..., None], name: str) -> NoReturn:
    """Run a script that has one command, as `run` does."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    run(app, name)


def _metavar(name: str, kind: Any, info: ParameterInfo) -> str | None:  # noqa: ANN401 - a type, or what stands for several
    if isinstance(info, ArgumentInfo):
        return name.upper()
    if parts := [part for part in get_args(kind) if part is not NoneType]:  # of a list, a union with None, or a choice
        return "|".join(parts) if isinstance(parts[0], str) else _metavar(name, parts[0], info)
    if kind is Path:
        return "DIR" if not info.file_okay or name.endswith(("dir", "tokenizer")) else "FILE"
    last = name.rpartition("_")[2]
    return _OF_TYPE[kind] if kind in _OF_TYPE else _OF_WORD.get(last, last.upper())


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
DumpTokenizer: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="The policy's tokenizer; default: as the dump records it.", exists=True, file_okay=False),
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
RewardKey: TypeAlias = Annotated[str | None, typer.Option(help="Where a reward that is a dict has its number.")]
GroupRm: TypeAlias = Annotated[
    bool, typer.Option("--group-rm", help="The reward takes a list, all samples of a group, as slime's --group-rm.")
]


def config(
    file: Annotated[
        Path | None,
        typer.Argument(help="A YAML for slime's --custom-config-path; default: none, which shows the defaults."),
    ] = None,
    changes: Changes = None,
    as_json: JsonLine = False,
) -> None:
    """Check a configuration, and print every setting.

    All that it names is looked for; each setting has its meaning and its value. What is printed is itself a valid
    configuration, with secrets masked. Exits with 2 if the file can't be used, or names what is not there.
    """
    from strands_rollout.settings import read_config_file

    settings = read_config_file(file, changes)
    if as_json and is_masked(settings):
        typer.echo(f"note: {_MASK_NOTE}", err=True)
    typer.echo(
        json.dumps(masked_values(settings), separators=(",", ":")) if as_json else documented(settings), nl=as_json
    )
    if file is not None or changes:
        from strands_rollout.slime_plugin.inputs import check_loadable

        asyncio.run(check_loadable(file, settings, changes))
    if file is not None and not as_json:
        _show_further(file, settings)


def _show_further(file: Path, settings: RolloutSettings) -> None:
    """What a configuration's check leaves open, and the next command."""
    from strands_rollout.dump.terminal import show_next
    from strands_rollout.settings import MISSING_CODE_TOOL

    if settings.misses_code_tool:
        typer.echo(f"note: {MISSING_CODE_TOOL}", err=True)
    if any(not isinstance(tool, str) for tool in (*settings.tools, *settings.row_tools)):
        typer.echo("not tried: the MCP servers; `strands-rollout doctor --config FILE` connects to them", err=True)
    if settings.agent_factory or settings.has_program:
        typer.echo("not tried: what plays an episode; `strands-rollout try FILE` runs it", err=True)
    show_next("eval", "--config", file)


_MASK_NOTE: Final = f"Secrets are masked as {MASK}: put them in again before you use this."
_WIDTH: Final = 116
_SECRET: Final = re.compile(r"authorization|token(?!s)|key|password|passphrase|secret|cookie|credential", re.IGNORECASE)


def documented(settings: RolloutSettings) -> str:
    """All settings as a config file: each with its meaning, and its default where the value differs.

    Secrets are masked, and a note at the top says so.
    """
    from strands_rollout.settings import KEY

    notes = [f"# {_MASK_NOTE}"] if is_masked(settings) else []
    return "\n".join([*notes, f"{KEY}:", *_lines(settings, "  ")]) + "\n"


def masked_values(settings: RolloutSettings) -> dict[str, Any]:
    """All settings as values of JSON, with secrets masked."""
    return {name: masked_settings(value, _SECRET) for name, value in settings.model_dump(mode="json").items()}


def is_masked(settings: RolloutSettings) -> bool:
    """Whether a setting holds a secret."""
    return masked_values(settings) != settings.model_dump(mode="json")


def _lines(settings: BaseModel, indent: str) -> Iterator[str]:
    from pydantic import BaseModel, TypeAdapter

    plain = TypeAdapter[Any](Any)
    for name, field in type(settings).model_fields.items():
        value, default = getattr(settings, name), field.get_default(call_default_factory=True)
        if isinstance(value, tuple | dict):  # of MCP servers and parts of a reward what is set
            value, default = (json.loads(plain.dump_json(one, exclude_defaults=True)) for one in (value, default))
        meaning = wrap(str(field.description), _WIDTH - len(indent), break_on_hyphens=False)
        yield from (f"{indent}# {line}" for line in meaning)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            # on one line: JSON is YAML
            note = "" if value == default else f"  # default: {json.dumps(default, default=str)}"
            yield f"{indent}{name}: {json.dumps(masked_settings(value, _SECRET), default=str)}{note}"
