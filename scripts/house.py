"""Measures the house: how large the package, its files, its tests and its pages are, beside the limits that hold.

    python scripts/house.py            the figures as a table; exit code 1 where one is beyond its ceiling
    python scripts/house.py --walk     also what one tool turn and one whole episode enter, which takes seconds

A figure that has not reached its goal has a ceiling of its own in `LIMITS`: what it was when it was measured last. It
may get better and not worse; a change that makes it better lowers the ceiling, and only one that adds a capability may
raise it, by what is left after its own cuts. A goal that is reached is the ceiling.
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = "strands_rollout"
LONGEST_FUNCTION: Final = 40
LONGEST_FILE: Final = 600
_BROAD: Final = frozenset({"Exception", "BaseException"})


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a figure shall be, and the most that it may be until then, where that is more."""

    goal: float
    ceiling: float = 0

    @property
    def most(self) -> float:
        """Up to this, nothing fails."""
        return max(self.goal, self.ceiling)


LIMITS: Final[Mapping[str, Limit]] = {
    "package: lines": Limit(32_000, 45_950),
    "package: files": Limit(150, 151),
    "package: modules at the top level": Limit(8),
    "package: median lines of a file": Limit(250, 348),
    "package: lines of the longest file": Limit(LONGEST_FILE),
    "package: files over 600 lines": Limit(0),
    "package: functions over 40 lines": Limit(0),
    "package: import lines, %": Limit(5, 5.6),
    "package: import layers": Limit(10),
    "package: noqa: ANN401": Limit(40),
    "package: broad excepts": Limit(20),
    "README: bytes": Limit(12_000),
    "docs: pages": Limit(26),
    "docs: bytes of the largest page": Limit(10_240),
    "tests: lines": Limit(40_000, 42_270),
    "tool turn: files": Limit(18),
    "tool turn: functions": Limit(150),
    "tool turn: switches of file": Limit(70),
    "episode: files": Limit(32),
}


def main() -> int:
    """Print the figures; 1 if one of them is beyond its ceiling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walk", action="store_true", help="also measure what a tool turn and an episode enter")
    figures = measured(REPOSITORY)
    if parser.parse_args().walk:
        figures |= walked()
    worse = [name for name, found in figures.items() if found > LIMITS[name].most]
    print(f"{'figure':<38}{'found':>10}{'ceiling':>10}{'goal':>10}")
    for name, found in figures.items():
        limit = LIMITS[name]
        note = "TOO MUCH" if name in worse else ""
        if found < limit.ceiling:
            note = f"lower the ceiling to {max(found, limit.goal):,.9g}"
        print(f"{name:<38}{found:>10,.9g}{limit.most:>10,.9g}{limit.goal:>10,.9g}  {note}".rstrip())
    for name in worse:
        print(f"error: {name}: got {figures[name]:,.9g}, expected at most {LIMITS[name].most:,.9g}", file=sys.stderr)
    return int(bool(worse))


def measured(repository: Path) -> dict[str, float]:
    """All figures that can be read off the files."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((repository / PACKAGE).rglob("*.py"))}
    lines = {path: source.count("\n") for path, source in sources.items()}
    trees = [ast.parse(source) for source in sources.values()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imports = sum(_length(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    pages = [path.stat().st_size for path in (repository / "docs").rglob("*.md")]
    top_level = [path for path in sources if path.parent.name == PACKAGE and path.name != "__init__.py"]
    return {
        "package: lines": sum(lines.values()),
        "package: files": len(sources),
        "package: modules at the top level": len(top_level),
        "package: median lines of a file": statistics.median(lines.values()),
        "package: lines of the longest file": max(lines.values()),
        "package: files over 600 lines": sum(count > LONGEST_FILE for count in lines.values()),
        "package: functions over 40 lines": sum(_length(node) > LONGEST_FUNCTION for node in _functions(nodes)),
        "package: import lines, %": round(100 * imports / sum(lines.values()), 1),
        "package: import layers": _layers(repository / "pyproject.toml"),
        "package: noqa: ANN401": sum(source.count("noqa: ANN401") for source in sources.values()),
        "package: broad excepts": sum(map(_is_broad, nodes)),
        "README: bytes": (repository / "README.md").stat().st_size,
        "docs: pages": len(pages),
        "docs: bytes of the largest page": max(pages, default=0),
        "tests: lines": sum(path.read_text(encoding="utf-8").count("\n") for path in _tests(repository)),
    }


def walked() -> dict[str, float]:
    """What one warm tool turn and one whole episode enter, in a process of their own."""
    command = [sys.executable, str(REPOSITORY / "tests" / "support" / "walk.py")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)  # noqa: S603
    return {str(name): float(found) for name, found in json.loads(done.stdout.splitlines()[-1]).items()}


def _functions(nodes: list[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_broad(node: ast.AST) -> bool:
    """Whether it catches whatever is raised: `except Exception`, `except (OSError, BaseException)`, `except`."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    if node.type is None:
        return True
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(isinstance(kind, ast.Name) and kind.id in _BROAD for kind in kinds)


def _layers(pyproject: Path) -> int:
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    return sum(len(contract["layers"]) for contract in contracts if contract["type"] == "layers")


def _tests(repository: Path) -> Iterator[Path]:
    return (path for path in (repository / "tests").rglob("*.py") if "checkpoint" not in path.parts)


if __name__ == "__main__":
    sys.exit(main())
