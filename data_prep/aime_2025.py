"""Prepare the problems of AIME 2025, for evaluation: `python data_prep/aime_2025.py --help`."""

from preparation.command_line import DataSet, run

if __name__ == "__main__":
    run(
        DataSet(
            script="aime_2025.py",
            hub_id="MathArena/aime_2025",
            id_source="a common id, not checked against the hub",
            file_stem="aime-2025",
        )
    )
