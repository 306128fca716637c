"""Invented problems in the formats of the hub's data sets, and the results of preparing them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_PREP = Path(__file__).parents[2] / "data_prep"
PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True)
class Result:
    """The manifest, the prepared rows, the rejected rows, and whether an earlier file was reused."""

    manifest: dict[str, Any]
    rows: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    done_before: bool

    @property
    def problems(self) -> list[str]:
        return [row["prompt"][-1]["content"] for row in self.rows]

    @property
    def labels(self) -> list[str]:
        return [row["label"] for row in self.rows]


Prepare = Callable[..., Result]
Main = Callable[..., tuple[int, str, str]]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def problem(number: int) -> str:
    """Return a problem of more than thirteen words that shares no thirteen consecutive words with another number's."""
    return (
        f"A ferry with {number} rows of seats makes {number + 1} crossings before noon. Each row has 4 seats, and all "
        f"are taken {number + 2} times. How many passengers cross?"
    )


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def dapo_row(number: int, label: object = None) -> dict[str, Any]:
    return {
        "prompt": chat(f"{PREFIX}{problem(number)}{SUFFIX}"),
        "label": str(4 * number) if label is None else label,
        "metadata": {"source_name": "invented", "number": number},
    }


def nested_row(number: int) -> dict[str, Any]:
    """Return a row in the format of DAPO's original data set, whose label is nested in a struct."""
    return {
        "data_source": "invented",
        "prompt": chat(f"{PREFIX}{problem(number)}{SUFFIX}"),
        "ability": "MATH",
        "reward_model": {"ground_truth": str(4 * number), "style": "rule"},
        "extra_info": {"index": f"{number:08d}"},
    }


def aime_row(number: int) -> dict[str, Any]:
    return {"ID": number, "Problem": problem(number), "Answer": 4 * number}


def gsm8k_row(number: int) -> dict[str, Any]:
    solution = f"There are 4 seats in each of {number} rows.\n{number}*4=<<{number}*4={4 * number}>>"
    return {"question": problem(number), "answer": f"{solution}\n#### {4 * number:,}"}


def write_parquet(rows: list[dict[str, Any]], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def prepared_file(path: Path, *problems: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": chat(text), "label": "1"}) + "\n" for text in problems))
    return path
