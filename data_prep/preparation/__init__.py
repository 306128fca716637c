"""Convert a data set of the Hugging Face Hub to a JSONL file for slime, with a manifest.

`prepare` runs the stages: source, columns, labels and instructions, duplicates, contamination, output.
`strands_rollout` imports nothing from here; this package imports only its grading, rewards, table
of benchmarks, errors and URL masking.
"""
