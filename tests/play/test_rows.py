"""Rows and results as lines of JSONL."""

import json
import math

import pytest

from strands_rollout.play.rows import json_line


@pytest.mark.parametrize("other", [1, 2**64, "\ud800"], ids=["orjson", "long integer", "surrogate"])
def test_json_line_writes_nan_as_null(other: object) -> None:
    line = json_line({"score": math.nan, "worst": -math.inf, "other": other})
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found == {"score": None, "worst": None, "other": other}
