"""Prepare a benchmark for `strands-rollout eval`: `python data_prep/benchmark.py --help`."""

from preparation.command_line import run_any_benchmark

if __name__ == "__main__":
    run_any_benchmark("benchmark.py")
