"""Asks slime's parsers for their flags: `python probe.py SLIME_CHECKOUT` prints them as JSON.

Runs in a process of its own, with whatever Python can import SGLang and Megatron-LM, so it knows nothing of this
package. slime's own argument files are executed from their source without slime's further imports: those need Ray, a
GPU's libraries and minutes, and no flag depends on them. A system that can't be imported is named under `failed`.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import enum
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

MAIN_ARGUMENTS: Final = "slime/utils/arguments.py"
SGLANG_ARGUMENTS: Final = "slime/backends/sglang_utils/arguments.py"


class Borrowed:
    """SGLang's ServerArgs or the router's RouterArgs, as slime calls them; remembers which flags they added."""

    def __init__(self, package: str, module: str, name: str) -> None:
        self.added: set[str] = set()  # in the form that slime gave them
        self.failure: str | None = None  # why the class can't be imported; then no flag is added
        self.version: str | None = None  # of its package, where it says one
        self._original: Any = None
        try:
            self._original = getattr(importlib.import_module(module), name)
            self.version = getattr(importlib.import_module(package), "__version__", None)
        except (Exception, SystemExit) as e:  # another program's import may raise anything
            self.failure = f"{type(e).__name__}: {e}"

    def add_cli_args(self, parser: argparse.ArgumentParser, **options: Any) -> None:  # noqa: ANN401 - passed on as they are
        """Add the flags of the original."""
        if self._original is not None:
            before = set(parser._option_string_actions)
            self._original.add_cli_args(parser, **options)
            self.added |= set(parser._option_string_actions) - before

    def all_flags(self) -> set[str]:
        """The flags of the original by itself, before slime renames or leaves out any."""
        parser = argparse.ArgumentParser(add_help=False)
        if self._original is not None:
            self._original.add_cli_args(parser)
        return set(parser._option_string_actions)


def definitions(path: Path, **names: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever the file expects to find
    """Execute a file with its imports from the standard library only, and with the given names."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    tree.body = [node for node in tree.body if not _is_foreign_import(node)]
    namespace: dict[str, Any] = {"__name__": path.stem, **names}
    # annotations name classes of the imports that are left out
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags=flags, dont_inherit=True), namespace)  # noqa: S102 - slime's own code
    return namespace


def _is_foreign_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or (node.module or "").split(".")[0] not in sys.stdlib_module_names
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] not in sys.stdlib_module_names for alias in node.names)
    return False


def last_parser(parse: Callable[[], Any]) -> argparse.ArgumentParser:
    """The last parser that a function parses with, given an empty command line."""
    seen: list[argparse.ArgumentParser] = []
    original = argparse.ArgumentParser.parse_known_args

    def remember(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:  # noqa: ANN401 - argparse's own form
        seen.append(parser)
        required = [action for action in parser._actions if action.required]
        for action in required:
            action.required = False
        try:
            return original(parser, [])
        finally:
            for action in required:
                action.required = True

    argparse.ArgumentParser.parse_known_args = remember  # type: ignore[method-assign,assignment]
    try:
        parse()
    finally:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
    return seen[-1]


def main_parser(slime_flags: Callable[[Any], Any]) -> tuple[argparse.ArgumentParser, set[str], str | None]:
    """Megatron-LM's parser with slime's flags, the flags that are Megatron's, and why Megatron could not be asked."""
    own: set[str] = set()

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        own.update(parser._option_string_actions)
        slime_flags(parser)
        return parser

    try:
        megatron = importlib.import_module("megatron.training.arguments")
    except (Exception, SystemExit) as e:  # another program's import may raise anything
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        slime_flags(parser)
        return parser, set(), f"{type(e).__name__}: {e}"
    parsed = last_parser(lambda: megatron.parse_args(extra_args_provider=provider, ignore_unknown_args=True))
    return parsed, own, None


def described(parser: argparse.ArgumentParser, name: str, system_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """The flags of one parser as plain values; `name` is the parser's."""
    return [
        {
            "names": list(action.option_strings),
            "system": system_of(action.option_strings[0]),
            "parser": name,
            "nargs": action.nargs,
            "type": getattr(action.type, "__name__", None) if action.type else None,
            "choices": [one.name if isinstance(one, enum.Enum) else str(one) for one in action.choices or ()],
            "required": action.required,
            "repeats": isinstance(action, argparse._AppendAction),
        }
        for action in parser._actions
        if action.option_strings
    ]


def examine(slime_dir: Path) -> dict[str, Any]:
    """All flags that a training command of this slime can have, and which systems could not be asked."""
    server = Borrowed("sglang", "sglang.srt.server_args", "ServerArgs")
    router = Borrowed("sglang_router", "sglang_router.launch_router", "RouterArgs")
    own = definitions(slime_dir / MAIN_ARGUMENTS, RouterArgs=router)  # up to 0.3.0 the router's flags are added there
    engine = definitions(slime_dir / SGLANG_ARGUMENTS, ServerArgs=server, RouterArgs=router)
    main, megatron_flags, megatron_failure = main_parser(own["get_slime_extra_args_provider"]())
    sglang = last_parser(engine["sglang_parse_args"])
    pre = last_parser(own["_pre_parse_mode"])
    kept = set(sglang._option_string_actions)
    origin = {**dict.fromkeys(megatron_flags, "megatron"), **dict.fromkeys(server.added, "sglang")}
    origin |= dict.fromkeys(router.added, "router")
    parsers = {"main": main, "sglang": sglang, "pre": pre}
    failures = {"megatron": megatron_failure, "sglang": server.failure, "router": router.failure}
    return {
        "flags": [
            row
            for name, parser in parsers.items()
            for row in described(parser, name, lambda flag: origin.get(flag, "slime"))
        ],
        "left_out": sorted(f for f in (f"--sglang-{raw.lstrip('-')}" for raw in server.all_flags()) if f not in kept),
        "abbreviating": sorted(name for name, parser in parsers.items() if parser.allow_abbrev),
        "failed": {system: failure for system, failure in failures.items() if failure},
        "versions": {"sglang": server.version, "router": router.version},
    }


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what imports print must not come between
    checkout = Path(sys.argv[1])
    sys.argv = ["train.py"]
    with answer:
        json.dump(examine(checkout), answer)
