"""Fixtures that all tests share: real tokenizers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

_REPOSITORY = Path(__file__).parents[1]
SHIPPED_TOKENIZER = _REPOSITORY / "strands_rollout" / "engine" / "checkpoint"
QWEN3_TOKENIZER = Path(os.environ.get("QWEN3_TOKENIZER", _REPOSITORY.parent / "shared" / "qwen3-8b-tokenizer"))


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def shipped_tokenizer() -> Any:
    """The shipped model's tokenizer."""
    return _load(SHIPPED_TOKENIZER)


@pytest.fixture(scope="session")
def qwen3_tokenizer() -> Any:
    """Qwen3's real vocabulary and Qwen3-8B's chat template, where they are at hand."""
    if not QWEN3_TOKENIZER.is_dir():
        pytest.skip("needs Qwen3's tokenizer: set QWEN3_TOKENIZER to a folder that holds it")
    return _load(QWEN3_TOKENIZER)


@pytest.fixture(scope="session", params=["shipped", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Each real tokenizer in turn."""
    return request.getfixturevalue(f"{request.param}_tokenizer")
