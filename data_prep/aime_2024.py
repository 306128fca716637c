"""Prepare the problems of AIME 2024, for evaluation: `python data_prep/aime_2024.py --help`."""

from preparation.command_line import DataSet, run

if __name__ == "__main__":
    run(
        DataSet(
            script="aime_2024.py",
            hub_id="zhuzilin/aime-2024",
            id_source="the id in slime's documentation",
            file_stem="aime-2024",
        )
    )
