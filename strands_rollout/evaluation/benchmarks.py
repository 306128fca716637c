"""The benchmarks that `data_prep/benchmark.py` prepares: their data sets on the hub and the grading of their answers.

The metadata of a prepared row has the benchmark's name, under `BENCHMARK_KEY`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.slime_plugin.reward import Grading

BENCHMARK_KEY: Final = "strands_rollout_benchmark"
"""Key in a row's metadata; its value is the benchmark's name."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark.

    Attributes:
        rows: Number of problems.
        data_set: Repository on the Hugging Face Hub.
        split: Split of the repository that is the benchmark.
        config: Configuration within the repository; None for the repository's only or default configuration.
        file_stem: Name of the prepared file, without its suffix.
    """

    name: str
    rows: int
    data_set: str
    split: str
    file_stem: str
    grading: Grading = "math"
    config: str | None = None


BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("aime-2024", 30, "zhuzilin/aime-2024", "train", "aime-2024"),
        Benchmark("aime-2025", 30, "MathArena/aime_2025", "train", "aime-2025"),
        Benchmark("hmmt-feb-2025", 30, "MathArena/hmmt_feb_2025", "train", "hmmt-feb-2025"),
        Benchmark("math-500", 500, "HuggingFaceH4/MATH-500", "test", "math-500"),
        Benchmark("gsm8k", 1319, "openai/gsm8k", "test", "gsm8k-test", config="main"),
        Benchmark("gpqa-diamond", 198, "Idavidrein/gpqa", "train", "gpqa-diamond", "choice", "gpqa_diamond"),
        Benchmark("ifeval", 541, "google/IFEval", "train", "ifeval", "ifeval"),
    )
}


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark with this name; for an unknown name, raise a ConfigError that lists the names."""
    if name not in BENCHMARKS:
        raise ConfigError(f"got the benchmark {name!r}; expected one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def benchmark_of(metadata: Sequence[Mapping[str, Any]]) -> Benchmark | None:
    """Return the benchmark of rows with this metadata; None unless all rows name the same, known benchmark."""
    names = {str(row.get(BENCHMARK_KEY)) for row in metadata}
    return BENCHMARKS.get(names.pop()) if len(names) == 1 else None
