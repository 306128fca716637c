"""Prepare GSM8K, grade-school problems: `python data_prep/gsm8k.py --help`; `--split test` for the test split."""

from preparation.command_line import DataSet, run

from strands_rollout.evaluation.benchmarks import BENCHMARKS

if __name__ == "__main__":
    run(
        DataSet(
            script="gsm8k.py",
            hub_id="openai/gsm8k",
            id_source="OpenAI's own",
            file_stem="gsm8k-{split}",
            config="main",
            against=("gsm8k-test",),
            benchmark=BENCHMARKS["gsm8k"],
        )
    )
