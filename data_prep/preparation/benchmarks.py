"""Convert the columns of benchmarks whose rows are more than a prompt and a label, and mark the rows of all benchmarks.

Layouts on the hub, as their cards describe them: MathArena/aime_2025 and MathArena/hmmt_feb_2025 have problem_idx,
problem, answer and problem_type; HuggingFaceH4/MATH-500 has problem, solution, answer, subject, level and unique_id;
openai/gsm8k (configuration main) has question and answer, which ends in `#### 42`; Idavidrein/gpqa (configuration
gpqa_diamond, gated) has Question, Correct Answer, Incorrect Answer 1 to 3 and many more; google/IFEval has key, prompt,
instruction_id_list and kwargs.
"""

import hashlib
import random
from collections.abc import Mapping
from typing import Any, Final

from preparation.rows import PreparationError
from strands_rollout.evaluation.benchmarks import BENCHMARK_KEY, Benchmark
from strands_rollout.grading.ifeval import METADATA_KEY as INSTRUCTIONS_KEY
from strands_rollout.slime_plugin.reward import GRADING_KEY

_LETTERS: Final = "ABCD"
_GPQA_CHOICES: Final = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_COLUMNS: Final = {
    "choice": ("Question", *_GPQA_CHOICES),
    "ifeval": ("key", "prompt", "instruction_id_list", "kwargs"),
}


def convert_rows(rows: Any, benchmark: Benchmark, seed: int) -> Any:  # noqa: ANN401 - a datasets.Dataset
    """Return rows with a prompt and a label, and for IFEval metadata; return rows of mathematics unchanged.

    Raises:
        PreparationError: The source lacks a column.
    """
    if benchmark.grading == "math":
        return rows
    needed = _COLUMNS[benchmark.grading]
    if missing := [name for name in needed if name not in rows.column_names]:
        raise PreparationError(
            f"the source has no {', '.join(missing)}: got the columns {', '.join(rows.column_names)}; expected "
            f"{', '.join(needed)}, as {benchmark.data_set} has them"
        )
    source = rows.select_columns(list(needed))
    is_choice = benchmark.grading == "choice"
    return type(rows).from_list([_choice_row(row, seed) if is_choice else _instructions_row(row) for row in source])


def benchmark_metadata(row: Mapping[str, Any], benchmark: Benchmark) -> dict[str, Any]:
    """Return a row's metadata, with the benchmark's name and, unless it is mathematics, the grading of its answers."""
    metadata = row.get("metadata")
    grading = {} if benchmark.grading == "math" else {GRADING_KEY: benchmark.grading}
    return {**(metadata if isinstance(metadata, Mapping) else {}), BENCHMARK_KEY: benchmark.name, **grading}


def _choice_row(row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return a question with its choices in an order that depends on the seed and the question alone."""
    question, choices = str(row["Question"]).strip(), [str(row[name]).strip() for name in _GPQA_CHOICES]
    key = hashlib.blake2b(f"{seed}:{question}".encode(), digest_size=8).digest()
    order = list(range(len(choices)))
    random.Random(int.from_bytes(key)).shuffle(order)  # noqa: S311 - nothing secret
    listed = "\n".join(f"({letter}) {choices[number]}" for letter, number in zip(_LETTERS, order, strict=True))
    prompt = f"{question}\n\n{listed}\n\nAnswer with the letter of the right choice."
    return {"prompt": prompt, "label": _LETTERS[order.index(0)]}


def _instructions_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt with its instructions; the label lists their names for readers of a report."""
    ids, kwargs = list(row["instruction_id_list"]), [dict(given or {}) for given in row["kwargs"]]
    instructions = {"key": row["key"], "instruction_id_list": ids, "kwargs": kwargs}
    return {"prompt": row["prompt"], "label": ", ".join(ids), "metadata": {INSTRUCTIONS_KEY: instructions}}
