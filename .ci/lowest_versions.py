"""Prints pip constraints that pin each dependency of this package to the lowest version that pyproject.toml allows."""

import re
import tomllib
from pathlib import Path

pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
for requirement in pyproject["project"]["dependencies"]:
    bound = re.match(r"([A-Za-z0-9_.-]+)(?:\[.*?\])?>=([^,]+)", requirement)
    if bound is None:
        raise SystemExit(f"got the dependency {requirement!r}; expected a lower bound (>=)")
    print(f"{bound[1]}=={bound[2]}")
