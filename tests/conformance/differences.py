"""Intended differences between the embedded engine and SGLang 0.5.23, with their reasons."""

from typing import NamedTuple


class Difference(NamedTuple):
    """The behavior of SGLang, that of the embedded engine, and the reason for the difference."""

    sglang: str
    embedded: str
    reason: str


TABLE = "differences between the embedded engine and SGLang"
DIFFERENCES = {
    "ids outside the vocabulary": Difference(
        "dies, with all of its processes", "refuses them with 400 and lives on", "a demo should survive mistakes"
    ),
    "an empty text": Difference("dies", "refuses it with 400", "a demo should survive mistakes"),
    "a broken file of weights": Difference(
        "dies, as it does of weights of another shape", "refuses both with 400 and keeps its weights",
        "a demo should survive mistakes",
    ),
    "seeds": Difference(
        "ignores sampling_seed unless started with --enable-deterministic-inference",
        "heeds it always, with random numbers of its own", "tests and demos can be repeated",
    ),
    "/health during a pause": Difference(
        "is not answered, and after 20 s is answered with 503", "is answered with 200 at once",
        "nothing needs a demo to look dead during a pause; /ready says 503 on both",
    ),
    "a pause by abort after one in place": Difference(
        "is not answered while the client of a frozen request is connected, nor is the request to end the pause",
        "ends the frozen requests", "SGLang's behavior is a deadlock",
    ),
    "a client that leaves during a pause": Difference(
        "has its request run after the pause, until SGLang notices that the client has left", "leaves nothing",
        "nobody wants the answer",
    ),
    "a stream's id": Difference(
        "is aborted once more 2 s after the stream's end, whoever has it then", "is free when the stream has ended",
        "SGLang's abort hits another request",
    ),
    "/v1/loads": Difference(
        "is a snapshot of some steps ago (during a pause: from before it), without prompts that are being read",
        "is what runs and waits now, a prompt that is being read included", "a current report costs nothing",
    ),
    "several sampling_params for one prompt": Difference(
        "500", "400", "500 would make a client try again what can't work"
    ),
    "n null": Difference(
        "500", "means 1, as other nulls mean their defaults", "500 would make a client try again what can't work"
    ),
    "more logprobs: logprob_start_len, top_logprobs_num, token_ids_logprob": Difference(
        "come in meta_info", "are refused with 400",
        "the package never asks for them; leaving them out silently would mislead",
    ),
    "several prompts in one stream": Difference(
        "interleaves them, with an index", "refuses them in an event", "the package never asks for them"
    ),
    "logit_bias": Difference(
        "is applied", "is refused with 400", "leaving it out silently would mislead"
    ),
    "the hint at --allow-auto-truncate": Difference(
        "is in the refusal of a prompt that just fits the context", "is not there",
        "the embedded engine has no such flag",
    ),
    "context_length of /server_info": Difference(
        "is null unless the server was started with --context-length", "is the model's",
        "the engine knows it; /v1/models reports it on both",
    ),
    "weight_version of /server_info": Difference(
        "is that of the start, whatever was loaded since", "is not there",
        "a stale version misleads; /model_info reports the current one on both",
    ),
    "other endpoints, such as /v1/completions": Difference(
        "are there", "are answered with 404", "the package needs none"
    ),
}  # fmt: skip
