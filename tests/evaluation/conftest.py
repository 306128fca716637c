"""A whole evaluation on a scripted engine."""

import functools
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import evaluate_on_fake


@pytest.fixture
def run(tmp_path: Path, shipped_tokenizer: Any) -> Any:
    """Runs an evaluation of three small problems in the test's folder; see `evaluated`."""
    return functools.partial(evaluate_on_fake, tmp_path, shipped_tokenizer)
