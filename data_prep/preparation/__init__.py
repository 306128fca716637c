"""From a data set of the hub to a JSONL file that slime reads, with a manifest beside it.

`prepare` is the one way through: source -> columns -> labels and instructions -> duplicates -> output -> contamination.
Nothing here is imported by `strands_rollout`; of it, only grading, reward, errors and how a URL is shown are used.
"""
