"""Print pip constraints: the lowest allowed version of each dependency in pyproject.toml and in its extra `data`."""

import re
import tomllib
from pathlib import Path

pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
project = pyproject["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["data"]]:
    bound = re.match(r"([A-Za-z0-9_.-]+)(?:\[.*?\])?>=([^,]+)", requirement)
    if bound is None:
        raise SystemExit(f"got the dependency {requirement!r}; expected a lower bound (>=)")
    print(f"{bound[1]}=={bound[2]}")
