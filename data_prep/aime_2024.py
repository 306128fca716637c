"""Prepare the problems of AIME 2024, for evaluation: `python data_prep/aime_2024.py --help`."""

from preparation.command_line import DataSet, run

from strands_rollout.evaluation.benchmarks import BENCHMARKS

if __name__ == "__main__":
    run(DataSet.of_benchmark(BENCHMARKS["aime-2024"], "aime_2024.py", "the id in slime's documentation"))
