"""The keys of SGLang's answers to /generate (0.5.23), and how it says that it has aborted a request."""

from __future__ import annotations

META_KEYS = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_versions",
    "cached_tokens_details",
    "dp_rank",
    "e2e_latency",
    "response_sent_to_client_ts",
}
LOGPROB_KEYS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
# of a request that was aborted before it ran, or after it was put back into the queue
QUEUED_META_KEYS = {
    "id",
    "finish_reason",
    "weight_version",
    "e2e_latency",
    "weight_versions",
    "completion_tokens",
    "response_sent_to_client_ts",
}

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
