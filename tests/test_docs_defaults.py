"""The defaults, options, environment variables and configurations that the pages name agree with the code."""

import functools
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel
from typer.main import get_command

from strands_rollout import SGLangModel, settings
from strands_rollout.cli import commands as cli
from strands_rollout.cli.commands import app
from strands_rollout.code_tool import LocalExecutor
from strands_rollout.diagnostics.rewards import ANSWER_FORMS
from strands_rollout.environments.search import DEFAULT_URL, search_tool
from strands_rollout.evaluation.plan import DEFAULT_KS

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = ("benchmarks", "experiments")
PAGES = {path.name: path.read_text() for path in (REPOSITORY / "docs").glob("*.md")}
PAGES |= {name: (REPOSITORY / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
SOURCES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for folder in ("scripts", "strands_rollout", "data_prep", "tests", *PROGRAMS)
    for path in sorted((REPOSITORY / folder).rglob("*"))
    if path.suffix in (".py", ".sh") and path != Path(__file__)
}

NAME = r"`(?P<name>(?:--)?[A-Za-z][\w-]*)(?: [A-Z]+)?`"
NUMBER = r"(?<![\w.-])\d+(?:\.\d+)?(?:e-?\d+)?(?!\w|\.\d|\. )"
VALUE = rf"(?P<value>`[^`]+`|{NUMBER})"
CLAIMS = [
    rf"{NAME}, {VALUE}(?: \w+)? by default",
    rf"{NAME}[^`.(]* \({VALUE}(?: \w+)? by default",
    rf"{NAME}[^`\n]*?[,;] (?:by default|default:?),? {VALUE}",
    rf"{NAME}[^`\n]*\. The default is {VALUE}",
    rf"The default of {NAME} is {VALUE}",
    r"`(?P<name>\w+)(?:: |=)(?P<value>[^`]+)`, the default",
    rf"(?P<value>{NUMBER})(?: [a-z]+){{0,5}} \(`(?P<name>--[\w-]+|\w+_\w+)`",
]
"""The forms in which a page names a default. The last form also matches values that are set elsewhere."""


def unwrapped(text: str) -> str:
    """Return a page without code blocks and generated tables; each paragraph, item and table row is one line."""
    text = re.sub(r"^```.*?^```|<!-- generated: .*?<!-- end of generated -->", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\n +(?=[^ -])|\n(?=[^\s|#*-])", " ", text)


def claims_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each default that a text names."""
    for form in CLAIMS:
        for match in re.finditer(form, unwrapped(text)):
            yield match["name"], match["value"].strip('`"')
    for table in re.findall(r"^\| \w+ \| default \|.*\n(?:\|.*\n?)+", unwrapped(text), re.MULTILINE):
        yield from re.findall(r"^\| `([\w-]+)` \| `?((?<=`)[^`]+|\d+)`? \|", table, re.MULTILINE)


def parameters_of(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command with their defaults, including defaults that only the help text names."""
    for option in command.params:
        named = re.search(r"Default: ([^.]*)", option.help or "")
        shown = getattr(option, "show_default", None)
        values = [option.default, *([shown] if isinstance(shown, str) else [])]
        values += re.findall(r"\d+", named[1]) if named else []
        for name in option.opts:
            yield from ((name, value) for value in values)


def data_prep_command() -> Any:
    """Return the command of data_prep/reasoning_gym.py, without a lasting change of the import path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "data_prep")
        path = REPOSITORY / "data_prep/reasoning_gym.py"
        spec = importlib.util.spec_from_file_location("reasoning_gym_rows", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    one_command = typer.Typer()
    one_command.command()(module.command)
    return get_command(one_command)


@functools.cache
def defaults() -> dict[str, list[Any]]:
    """Return the defaults of each name: a setting, a parameter, an option or an environment variable."""
    found: dict[str, list[Any]] = {"SEARCH_URL": [DEFAULT_URL]}
    for model in vars(settings).values():
        if isinstance(model, type) and issubclass(model, BaseModel):
            for name, field in model.model_fields.items():
                found.setdefault(name, []).append(field.get_default(call_default_factory=True))
    for function in (LocalExecutor, search_tool, SGLangModel):
        for name, parameter in inspect.signature(function).parameters.items():
            found.setdefault(name, []).append(parameter.default)
    commands = get_command(app).commands.values()  # type: ignore[attr-defined]
    for command in (*commands, data_prep_command()):
        for name, value in parameters_of(command):
            found.setdefault(name, []).append(value)
    for name, value in re.findall(
        r'="\$\{([A-Z_]+):-([^}"]*)\}"', SOURCES["strands_rollout/data/project/run_slime.sh"]
    ):
        found.setdefault(name, []).append(value)
    launch = "".join(text for name, text in SOURCES.items() if name.startswith("scripts/"))
    for name, value in re.findall(r'^ *setting ([A-Z0-9_]+) "?([\w.]+)"? ', launch, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def is_default(name: str, value: str) -> bool:
    """Return whether a name has the default that is written as `value`."""
    for default in defaults().get(name, []):
        if isinstance(default, int | float) and not isinstance(default, bool):
            try:
                if float(value) == default:
                    return True
            except ValueError:
                continue
        elif str(default) == value or (list(default) if isinstance(default, tuple) else default) == yaml.safe_load(
            value
        ):
            return True
    return False


def test_defaults_named_in_docs_are_the_codes() -> None:
    claims = [(page, *claim) for page, text in sorted(PAGES.items()) for claim in claims_in(text)]
    assert len(claims) >= 20, claims
    assert [claim for claim in claims if not is_default(*claim[1:])] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`environment_timeout_s`, 300 s by default, limits", ("300", "60")),
        ("repeated for `engine_patience_s` (90 s by default), with", ("90", "30")),
        ("`dump_samples` limits the samples per step (64 by\ndefault).", ("64", "32")),
        ("| `--size` | training rows of each task, by default 1000 |", ("1000", "500")),
        ("| `SEARCH_URL` | a server; default `http://127.0.0.1:8000/retrieve` |", ("8000", "9000")),
        ("Set `tool_parser` to the name.\nThe default is `hermes`, a format.", ("hermes", "mistral")),
        ("The default of `HF_CHECKPOINT` is `/root/models/Qwen3-8B`.", ("8B", "4B")),
        ("| `transient_context: segment`, the default | text |", ("segment", "keep")),
        ("must be equal\nwithin 1e-3 (`--gap-limit`)", ("1e-3", "1e-2")),
        ("repeated for 30 s (`patience_s` of `search_tool`)", ("30", "300")),
        ("or 4 times on the embedded engine (`--samples-per-problem`)", ("4", "8")),
        ("| option | default | meaning |\n|---|---|---|\n| `max_files` | 4096 | files |\n", ("4096", "1024")),
        ("| option | default | meaning |\n|---|---|---|\n| `programs` | `false` | starts |\n", ("false", "true")),
        ("| setting | default | meaning |\n|---|---|---|\n| `MAX_SAMPLE_STALENESS` | 4 | versions |\n", ("4", "8")),
    ],
)
def test_wrong_defaults_are_found(text: str, wrong: tuple[str, str]) -> None:
    ((name, value),) = claims_in(text)
    assert is_default(name, value)
    ((name, value),) = claims_in(text.replace(*wrong))
    assert not is_default(name, value)


def test_help_names_the_defaults_of_the_code() -> None:
    group: Any = get_command(app)
    helps = {
        command: {name: option.help for option in group.commands[command].params for name in option.opts}
        for command in ("eval", "validate")
    }
    names = {"samples": "--samples-per-problem", "concurrency": "--concurrency", "max_new_tokens": "--max-new-tokens"}
    assert names.keys() == cli._SERVER_DEFAULTS.keys() == cli._EMBEDDED_DEFAULTS.keys()
    for key, name in names.items():
        expected = f"Default: {cli._SERVER_DEFAULTS[key]}, or {cli._EMBEDDED_DEFAULTS[key]} on the embedded"
        assert expected in helps["eval"][name]
    assert f"Default: {','.join(map(str, DEFAULT_KS))}." in helps["eval"]["--k"]
    assert f"Default: {' and '.join(ANSWER_FORMS)}." in helps["validate"]["--answer"]


OTHER_PROGRAMS_OPTIONS = {
    *("--allowedTools", "--output-format"),  # Claude Code
    *("--extra-index-url", "--index-url"),  # pip
    *("--env", "--env-config"),  # strands-env
    "--num-cpus",  # Ray
}
USERS_OPTIONS = {"--prompt"}


@functools.cache
def existing_options() -> set[str]:
    """Return the options of this repository's commands and scripts, and the flags of slime, SGLang and Megatron."""
    table = json.loads((REPOSITORY / "strands_rollout/data/slime_flags.json").read_text())
    flags = {name for flag in table["flags"] for name in flag["names"]} | {*table["left_out"]}
    flags |= {name.replace("--sglang-", "--") for name in flags}
    groups: list[Any] = [get_command(importlib.import_module(f"{name}.__main__").app) for name in PROGRAMS]
    commands = [command for group in (get_command(app), *groups) for command in (group, *group.commands.values())]  # type: ignore[attr-defined]
    options = {
        name for command in commands for option in command.params for name in (*option.opts, *option.secondary_opts)
    }
    scripts = "".join(text for name, text in SOURCES.items() if name.startswith(("scripts/", "data_prep/")))
    written = re.findall(r"(?<![\w-])--[a-z][\w-]+", scripts)
    # a launch script's options are named after its settings, a data script's options after parameters or fields
    names = re.findall(r"^ *setting ([A-Z_]+) |^    (\w+): ", scripts, re.MULTILINE)
    return {*flags, *options, *written, *(f"--{''.join(name).lower().replace('_', '-')}" for name in names), "--help"}


@pytest.mark.parametrize("page", PAGES)
def test_options_named_in_docs_exist(page: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", PAGES[page]))
    assert named - existing_options() - OTHER_PROGRAMS_OPTIONS - USERS_OPTIONS == set()


OTHER_PROGRAMS_VARIABLES = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "OTEL_EXPORTER_OTLP_HEADERS",
    *("NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),  # NCCL; the backend of PyTorch's RPC
    "PIP_EXTRA_INDEX_URL",
    "SGLANG_MM_AVOID_RETOKENIZE",
    "WANDB_RESUME",
}
USERS_VARIABLES = {"JUDGE_API_KEY", "MCP_TOKEN", "RUN_A", "RUN_B", "THAT_FOLDER", "THIS_HOST"}
NO_VARIABLES = {"API_KEY", "MAX_TOOL_ITERS", "SYSTEM_PROMPT", "TOOL_PARSER_REGISTRY"}  # parts of names, constants


@functools.cache
def variables_read() -> set[str]:
    """Return the names of environment variables in quotes, after a dollar sign, or of a launch script's setting."""
    reads = r"""(?:["']|\$\{?|\bsetting )([A-Z][A-Z0-9_]+)(?=["' :}\-\[\]/]|$)"""
    return {name for text in SOURCES.values() for name in re.findall(reads, text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES)
def test_environment_variables_named_in_docs_are_read(page: str) -> None:
    named = set(re.findall(r"(?<![\w.<-])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w>(])", PAGES[page]))
    assert named - variables_read() - OTHER_PROGRAMS_VARIABLES - USERS_VARIABLES - NO_VARIABLES == set()


def test_configurations_quoted_in_docs_are_the_files() -> None:
    """A block of YAML below the name of a file in configs/ has the file's values."""
    quoted = []
    for page, text in PAGES.items():
        before, *rest = text.split("```yaml\n")
        for part in rest:
            block, _, after = part.partition("\n```")
            names = re.findall(r"configs/[\w.]+\.yaml", before.strip().rpartition("\n\n")[2])
            before = after
            if names:
                values, file = (yaml.safe_load(source) for source in (block, (REPOSITORY / names[-1]).read_text()))
                assert values["strands_rollout"].items() <= file["strands_rollout"].items(), page
                quoted.append(page)
    assert len(quoted) >= 2
