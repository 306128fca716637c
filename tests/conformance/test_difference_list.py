"""The list of differences: each one is measured by a test that tells of it."""

from __future__ import annotations

from pathlib import Path

from differences import DIFFERENCES

MODULES = ("test_conformance_differences.py", "test_fatal_requests.py")


def test_every_difference_is_told_by_a_test():
    tests = "".join(Path(__file__).with_name(name).read_text() for name in MODULES)
    assert [difference.name for difference in DIFFERENCES if f'"{difference.name}"' not in tests] == []
    assert len({difference.name for difference in DIFFERENCES}) == len(DIFFERENCES)
