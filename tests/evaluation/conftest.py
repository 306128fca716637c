"""The fixture of the evaluation tests: a whole evaluation on a scripted engine."""

import functools
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import evaluate_on_fake


@pytest.fixture
def run(tmp_path: Path, shipped_tokenizer: Any) -> Any:
    """Return a function that evaluates three small problems in the test's folder; see `evaluate_on_fake`."""
    return functools.partial(evaluate_on_fake, tmp_path, shipped_tokenizer)
