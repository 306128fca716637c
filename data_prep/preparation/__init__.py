"""Convert a data set of the Hugging Face Hub to a JSONL file for slime, with a manifest.

`prepare` runs the stages: source, columns, labels and instructions, duplicates, contamination, output.
`strands_rollout` imports nothing from here. This package imports only these parts of `strands_rollout`: grading,
rewards, the table of benchmarks, errors, URL masking, the version, and `run_command` of its command line.
"""
