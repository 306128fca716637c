"""Prepare DAPO-Math-17k, problems to train on: `python data_prep/dapo_math_17k.py --help`."""

from preparation.command_line import DataSet, run

if __name__ == "__main__":
    run(
        DataSet(
            script="dapo_math_17k.py",
            hub_id="zhuzilin/dapo-math-17k",
            id_source="the id in slime's documentation",
            file_stem="dapo-math-17k",
            against=("aime-2024", "aime-2025"),
        )
    )
