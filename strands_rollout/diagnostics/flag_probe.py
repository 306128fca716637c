"""Print the flags of slime's parsers as JSON: `python flag_probe.py SLIME_CHECKOUT`.

This file runs in its own process. The process's Python should have SGLang and the packages that Megatron-LM imports.
It may lack strands_rollout, so nothing is imported from strands_rollout here. slime's argument files are executed
without their imports from outside the standard library. These imports need Ray and GPU libraries, take minutes, and
affect no flag. If the flags of SGLang, its router or Megatron-LM can't be read, the error is listed under `failed`.
"""

import __future__

import argparse
import ast
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

MAIN_ARGUMENTS: Final = "slime/utils/arguments.py"
SGLANG_ARGUMENTS: Final = "slime/backends/sglang_utils/arguments.py"


class RecordFailure:
    """Context manager that suppresses an error or exit of another package's code, and records it in `failed`."""

    def __init__(self, system: str, failed: dict[str, str]) -> None:
        self._system, self._failed = system, failed

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        if not isinstance(error, (Exception, SystemExit)):
            return False
        self._failed[self._system] = f"{type(error).__name__}: {error}"
        return True


class ArgumentsStandIn:
    """Stand-in for SGLang's ServerArgs or the router's RouterArgs, which records the flags of the original class.

    Adds no flags if the original class can't be imported.
    """

    def __init__(self, system: str, module: str, name: str, failed: dict[str, str]) -> None:
        self.added: set[str] = set()  # the flags as slime spells them
        self.version: str | None = None  # version of the package, if it has one
        self._original: Any = None
        with RecordFailure(system, failed):
            self._original = getattr(importlib.import_module(module), name)
            self.version = getattr(importlib.import_module(module.partition(".")[0]), "__version__", None)

    def add_cli_args(self, parser: argparse.ArgumentParser, **options: object) -> None:
        """Add the flags of the original class."""
        before = set(parser._option_string_actions)
        if self._original is not None:
            self._original.add_cli_args(parser, **options)
        self.added |= set(parser._option_string_actions) - before


def execute_file(path: Path, **names: object) -> dict[str, Any]:
    """Execute a file with `names` as additional globals, and return its namespace.

    Top-level imports from outside the standard library are skipped.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    tree.body = [node for node in tree.body if _imported_packages(node) <= sys.stdlib_module_names]
    namespace: dict[str, Any] = {"__name__": path.stem, **names}
    # annotations name classes from the skipped imports, so they must not be evaluated
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags=flags, dont_inherit=True), namespace)  # noqa: S102 - slime's own code
    return namespace


def _imported_packages(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ImportFrom):
        return {"." if node.level else str(node.module).split(".")[0]}
    return {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()


def capture_parser(parse: Callable[[], object]) -> argparse.ArgumentParser:
    """Run `parse` and return the last parser whose `parse_known_args` it calls; nothing is parsed.

    Each call of `parse_known_args` returns the parser's defaults instead.
    """
    seen: list[argparse.ArgumentParser] = []

    def remember(parser: argparse.ArgumentParser, *_: object, **__: object) -> tuple[argparse.Namespace, list[str]]:
        seen.append(parser)
        # if several flags have the same destination, argparse uses the default of the first flag
        defaults = {action.dest: action.default for action in reversed(parser._actions)}
        return argparse.Namespace(**{**defaults, **parser._defaults}), []

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", remember):
        parse()
    return seen[-1]


def main_parser(
    slime_flags: Callable[[argparse.ArgumentParser], object], failed: dict[str, str]
) -> tuple[argparse.ArgumentParser, set[str]]:
    """Return Megatron-LM's parser after slime has added its flags, and the set of Megatron's own flags.

    If Megatron-LM's parser can't be built, return a parser with slime's flags only, and an empty set.
    """
    megatron_flags: set[str] = set()

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        megatron_flags.update(parser._option_string_actions)
        slime_flags(parser)
        return parser

    with RecordFailure("megatron", failed):
        megatron = importlib.import_module("megatron.training.arguments")
        parser = capture_parser(lambda: megatron.parse_args(extra_args_provider=provider, ignore_unknown_args=True))
        return parser, megatron_flags
    megatron_flags.clear()
    return provider(argparse.ArgumentParser(add_help=False, allow_abbrev=False)), megatron_flags


def describe_flags(parser: argparse.ArgumentParser, name: str, systems: dict[str, str]) -> list[dict[str, Any]]:
    """Return a dict for each flag of `parser`, to be written as JSON.

    `name` is the parser's name in these dicts. `systems` maps each flag that is not slime's to its package.
    """
    return [
        {
            "names": list(action.option_strings),
            "system": systems.get(action.option_strings[0], "slime"),
            "parser": name,
            "nargs": action.nargs,
        }
        for action in parser._actions
        if action.option_strings
    ]


def read_all_flags(slime_dir: Path) -> dict[str, Any]:
    """Return all flags that this slime's parsers know, and an error for each package with unreadable flags.

    Also returns the parsers that accept abbreviations, SGLang's flags left out by slime, and the versions of SGLang and
    its router.
    """
    failed: dict[str, str] = {}
    server = ArgumentsStandIn("sglang", "sglang.srt.server_args", "ServerArgs", failed)
    router = ArgumentsStandIn("router", "sglang_router.launch_router", "RouterArgs", failed)
    # slime up to 0.3.0 adds the router's flags in its main file
    slime_module = execute_file(slime_dir / MAIN_ARGUMENTS, RouterArgs=router)
    sglang_module = execute_file(slime_dir / SGLANG_ARGUMENTS, ServerArgs=server, RouterArgs=router)
    main, megatron_flags = main_parser(slime_module["get_slime_extra_args_provider"](), failed)
    sglang = capture_parser(sglang_module["sglang_parse_args"])
    pre_parser = capture_parser(slime_module["_pre_parse_mode"])
    systems = {**dict.fromkeys(megatron_flags, "megatron"), **dict.fromkeys(server.added, "sglang")}
    systems |= dict.fromkeys(router.added, "router")
    parsers = {"main": main, "sglang": sglang, "pre": pre_parser}
    unchanged_sglang = argparse.ArgumentParser(add_help=False)  # slime renames some flags and leaves out others
    server.add_cli_args(unchanged_sglang)
    all_sglang_flags = {f"--sglang-{flag.lstrip('-')}" for flag in unchanged_sglang._option_string_actions}
    return {
        "flags": [row for name, parser in parsers.items() for row in describe_flags(parser, name, systems)],
        "left_out": sorted(all_sglang_flags - set(sglang._option_string_actions)),
        "abbreviating": sorted(name for name, parser in parsers.items() if parser.allow_abbrev),
        "failed": failed,
        "versions": {"sglang": server.version, "router": router.version},
    }


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of imports must not mix with the JSON
    checkout = Path(sys.argv[1])
    sys.argv = ["train.py"]
    with answer:
        json.dump(read_all_flags(checkout), answer)
