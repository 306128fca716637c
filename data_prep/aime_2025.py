"""Prepare the problems of AIME 2025, for evaluation: `python data_prep/aime_2025.py --help`."""

from preparation.command_line import DataSet, run

from strands_rollout.evaluation.benchmarks import BENCHMARKS

if __name__ == "__main__":
    run(DataSet.of_benchmark(BENCHMARKS["aime-2025"], "aime_2025.py", "MathArena's copy"))
