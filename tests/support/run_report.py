"""Sections that the test run prints at its end: the engines that tests ran on, and tables of measurements.

The `report_row` fixture adds a row to a table. Rows travel with the report of their test, so they also arrive from
worker processes of pytest-xdist.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_ENGINE = "ran on"
_ROW = "found"


def note_engine(item: pytest.Item, engine: str) -> None:
    """Record the engine or router on which a test runs."""
    item.user_properties.append((_ENGINE, engine))


@pytest.fixture
def report_row(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that adds a row to a table: `report_row("faults", fault="killed", episodes=8, lost=0)`."""

    def add(table: str, **row: Any) -> None:
        cells = "  ".join(f"{name}={value}" for name, value in row.items())
        request.node.user_properties.append((_ROW, (table, cells)))

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    engines = Counter(f"{engine}, {report.outcome}" for report, engine in _properties(reports, _ENGINE))
    tables: dict[str, list[str]] = {}
    for _, (table, cells) in _properties(reports, _ROW):
        tables.setdefault(table, []).append(cells)
    for name, rows in sorted(tables.items()):
        terminalreporter.section(name)
        for cells in rows:
            terminalreporter.write_line(cells)
    if engines:
        terminalreporter.section("engines")
        for engine, count in sorted(engines.items()):
            terminalreporter.write_line(f"{count:5} tests ran on {engine}")


def _properties(reports: list[Any], name: str) -> Iterator[tuple[Any, Any]]:
    for report in reports:
        if report.when == "call":
            for key, value in report.user_properties:
                if key == name:
                    yield report, value
