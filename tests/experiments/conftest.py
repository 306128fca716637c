"""Fixtures for tests of the experiments."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def shipped_model() -> Callable[[str], Any]:
    return lambda name: importlib.import_module(f"experiments.shipped_model.{name}")
