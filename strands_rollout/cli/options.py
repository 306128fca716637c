"""Options of the command line: their format in --help, options from dataclass fields, and shared options.

Also has `run` and `run_command`, which run a command line and exit, and the command `config`.
"""

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
from strands_rollout.secret_mask import MASK, mask_settings
from strands_rollout.validation import expectation

if TYPE_CHECKING:
    from pydantic import BaseModel
    from typer._click import Context, HelpFormatter

    from strands_rollout.settings import RolloutSettings

_OPTION_GROUPS: Final = {
    "Engine and model": "base-url api-base api-model model model-name tokenizer max-context-length host port",
    "Agent and reward": "config set reward reward-key group-rm",
    "Data": "data eval-config held-out input-key label-key prompt-key limit row answer",
    "Sampling": "protocol samples samples-per-problem k concurrency temperature top-p top-k max-new-tokens seed",
    "Steps": "steps prompts samples-per-prompt extra-prompts async eval-every save-every",
    "Update": "learning-rate lr-decay updates clip-low clip-high loss-mean tis-clip kl entropy threads",
    "Output": "out dump save-tokens audit show text sample json wandb",
}
_GROUP_BY_OPTION: Final = {f"--{name}": group for group, names in _OPTION_GROUPS.items() for name in names.split()}
_MAX_UNGROUPED: Final = 9
"""A command with more parameters than this shows its options in groups."""
_MAX_NAME_WIDTH: Final = 27
"""Maximum width of the help's first column, in characters."""
_METAVAR_BY_TYPE: Final = {int: "N", float: "X", datetime: "TIME", bool: None}
_METAVAR_BY_WORD: Final = {"endpoint": "URL", "base": "URL", "urls": "URL", "reward": "PATH", "project": "NAME"}


class GroupedCommand(TyperCommand):
    """A command whose help lists options in groups: by `rich_help_panel` or, if there are many, by name."""

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """Return the pieces of the usage line without typer's braces around arguments, which a shell would expand."""
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments; rephrase the pydantic errors that typer raises for values as "got ...; expected ..."."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as e:
            from pydantic import ValidationError

            if isinstance(e.__cause__, ValidationError):
                first = e.__cause__.errors()[0]
                is_sentence = first["type"] == "value_error"  # typer's own message, which names the value
                e.message = ("" if is_sentence else f"got {first['input']!r}; expected ") + expectation(first)
            raise

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the arguments, then the groups of options."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *_OPTION_GROUPS, "Options")}
        params: list[Any] = self.get_params(ctx)
        for param in params:
            if record := param.get_help_record(ctx):
                group = param.rich_help_panel or "Options"
                if group == "Options" and len(params) > _MAX_UNGROUPED:
                    group = _GROUP_BY_OPTION.get(param.opts[0], group)
                if param.param_type_name == "argument":
                    group, record = "Arguments", (param.metavar or record[0], record[1])
                groups.setdefault(group, []).append(record)
        width = min(max(len(name) for rows in groups.values() for name, _ in rows), _MAX_NAME_WIDTH)
        for group, rows in groups.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)


def set_help_format(commands: Iterable[CommandInfo]) -> None:
    """Have commands show their options in groups, and give each option a metavar for its type if it has none."""
    for command in commands:
        command.cls = GroupedCommand
        if command.callback is None:
            continue
        # resolve string annotations only once: typer would resolve them again, and lose the metavars set below
        command.callback.__annotations__ = get_type_hints(command.callback, include_extras=True)
        for name, hint in command.callback.__annotations__.items():
            for info in getattr(hint, "__metadata__", ()):
                if isinstance(info, ParameterInfo) and info.metavar is None:
                    info.metavar = _metavar(name, get_args(hint)[0], info)


def run(app: typer.Typer, name: str) -> NoReturn:
    """Run a command line under `name` and exit.

    If a RolloutError is raised, print it; the exit code is then 2 for a ConfigError, else 1.
    """
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
    """Run `command` as a command line of its own, called `name`, and exit; see `run`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    run(app, name)


def _metavar(name: str, kind: Any, info: ParameterInfo) -> str | None:  # noqa: ANN401 - a type or a typing construct
    """Return the name of an option's value in --help, such as FILE; None leaves it to typer."""
    if isinstance(info, ArgumentInfo):
        return name.upper()
    if parts := [part for part in get_args(kind) if part is not NoneType]:  # a list, a union with None, or a Literal
        return "|".join(parts) if isinstance(parts[0], str) else _metavar(name, parts[0], info)
    if kind is Path:
        return "DIR" if not info.file_okay or name.endswith(("dir", "tokenizer")) else "FILE"
    last_word = name.rpartition("_")[2]
    return _METAVAR_BY_TYPE[kind] if kind in _METAVAR_BY_TYPE else _METAVAR_BY_WORD.get(last_word, last_word.upper())


OptionValues: TypeAlias = dict[str, Any]
"""Values of a command's options by the names of their dataclass fields."""


def add_field_options(*kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options in these dataclasses' field annotations to a command.

    The command receives the values of these options as its first argument, a dict by field name. The command keeps its
    own parameters. The value of a field without a default is None if its option is left out.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *parameters = signature(command, eval_str=True).parameters.values()
        own_names = [parameter.name for parameter in parameters]
        parameters += [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=None if field.default is MISSING else field.default,
                annotation=hint,
            )
            for kind in kinds
            for field, hint in zip(fields(kind), get_type_hints(kind, include_extras=True).values(), strict=True)
            if any(isinstance(extra, OptionInfo) for extra in getattr(hint, "__metadata__", ()))
        ]

        @functools.wraps(command)
        def run(**values: object) -> None:
            values = {parameter.name: parameter.default for parameter in parameters} | values
            command(values, **{name: values.pop(name) for name in own_names})

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


Options = TypeVar("Options")


def build_options(kind: type[Options], values: OptionValues, **more: object) -> Options:
    """Build the dataclass `kind` from the values of its fields, and from `more`."""
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values}, **more)  # type: ignore[arg-type]


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the user has given the option with this parameter name, rather than left it at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_engine_options(base_url: str | None, model: Path | None) -> None:
    """Raise BadParameter if --base-url is combined with --model."""
    if base_url is not None and model is not None:
        raise typer.BadParameter(
            "got --base-url with --model; expected only one of them: --model names the model of the embedded engine"
        )


Dump: TypeAlias = Annotated[
    Path,
    typer.Argument(help="A dump, a debug file of slime, a results file of eval, or a folder of these.", exists=True),
]
DumpTokenizer: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the policy's tokenizer. Default: the tokenizer recorded in the dump.",
        exists=True,
        file_okay=False,
    ),
]
JsonLine: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the report.")]
JsonLines: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of the report: one line per sample, then the totals.")
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Settings file with the reward's settings, as for slime's --custom-config-path.",
        exists=True,
        dir_okay=False,
    ),
]
RewardKey: TypeAlias = Annotated[
    str | None, typer.Option(help="Key of the score in a reward that is a dict. Default: score or acc.")
]
GroupRm: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--group-rm", help="Call the reward with a list of all samples of a group, as with slime's --group-rm."
    ),
]


def config(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Settings file, as for slime's --custom-config-path. Without it, all settings have their defaults.",
            metavar="CONFIG",
        ),
    ] = None,
    changes: Changes = None,
    as_json: JsonLine = False,
) -> None:
    """Check a configuration and print every setting.

    Loads all functions and classes that the file names, and prints each setting with its description and value. The
    output is a valid configuration; secrets are masked. Exits with 2 if the file is invalid or names something that
    can't be loaded.
    """
    from strands_rollout.settings import read_config_file

    settings = read_config_file(file, changes)
    if as_json and has_secrets(settings):
        typer.echo(f"note: {_MASK_NOTE}", err=True)
    if as_json:
        typer.echo(json.dumps(mask_secrets(settings), separators=(",", ":")))
    else:
        typer.echo(format_settings(settings), nl=False)
    if file is not None or changes:
        from strands_rollout.slime_plugin.inputs import check_loadable

        asyncio.run(check_loadable(file, settings, changes))
    if file is not None and not as_json:
        _show_notes(file, settings)


def _show_notes(file: Path, settings: RolloutSettings) -> None:
    from strands_rollout.dump.terminal import show_next
    from strands_rollout.settings import MISSING_CODE_TOOL

    if settings.lacks_code_tool:
        typer.echo(f"note: {MISSING_CODE_TOOL}", err=True)
    if any(not isinstance(tool, str) for tool in (*settings.tools, *settings.row_tools)):
        typer.echo(
            "not checked: the MCP servers; to connect to them, run: strands-rollout doctor --config FILE", err=True
        )
    if settings.agent_factory or settings.has_program:
        typer.echo("not checked: whether an episode runs; to play one, run: strands-rollout try FILE", err=True)
    show_next("eval", "--config", file)


_MASK_NOTE: Final = f"Secrets are masked as {MASK}; fill them in before you use this configuration."
_COMMENT_WIDTH: Final = 116
_SECRET_KEY: Final = re.compile(
    r"authorization|token(?!s)|key|password|passphrase|secret|cookie|credential", re.IGNORECASE
)


def format_settings(settings: RolloutSettings) -> str:
    """Return all settings as the text of a settings file.

    Each setting has its description as a comment, and its default if its value differs. Secrets are masked; if there
    are any, a comment at the top says so.
    """
    from strands_rollout.settings import KEY

    notes = [f"# {_MASK_NOTE}"] if has_secrets(settings) else []
    return "\n".join([*notes, f"{KEY}:", *_format_fields(settings, "  ")]) + "\n"


def mask_secrets(settings: RolloutSettings) -> dict[str, Any]:
    """Return all settings as JSON values, with secrets masked."""
    return {name: mask_settings(value, _SECRET_KEY) for name, value in settings.model_dump(mode="json").items()}


def has_secrets(settings: RolloutSettings) -> bool:
    """Return whether `mask_secrets` masks a value."""
    return mask_secrets(settings) != settings.model_dump(mode="json")


def _format_fields(settings: BaseModel, indent: str) -> Iterator[str]:
    """Yield the lines of a model's fields: comments, then `name: value` with the value as JSON, which is YAML too."""
    from pydantic import BaseModel, TypeAdapter

    adapter = TypeAdapter[Any](Any)
    for name, field in type(settings).model_fields.items():
        value, default = getattr(settings, name), field.get_default(call_default_factory=True)
        if isinstance(value, tuple | dict):  # MCP servers and reward parts: leave out fields at their defaults
            value, default = (json.loads(adapter.dump_json(item, exclude_defaults=True)) for item in (value, default))
        description = wrap(str(field.description), _COMMENT_WIDTH - len(indent), break_on_hyphens=False)
        yield from (f"{indent}# {line}" for line in description)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _format_fields(value, indent + "  ")
        else:
            note = "" if value == default else f"  # default: {json.dumps(default, default=str)}"
            yield f"{indent}{name}: {json.dumps(mask_settings(value, _SECRET_KEY), default=str)}{note}"
