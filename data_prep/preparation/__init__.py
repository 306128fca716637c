"""From a data set of the hub to a JSONL file that slime reads, with a manifest beside it.

`prepare` does it: source -> columns -> labels and instructions -> duplicates -> contamination -> output.
Nothing here is imported by `strands_rollout`; of it, only grading, reward, errors and how a URL is shown are used.
"""
