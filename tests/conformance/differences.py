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
        "dies, all of its processes", "refuses them with 400 and lives on",
        "a demo should survive a mistake that the client is there to prevent",
    ),
    "an empty text": Difference("dies", "refuses it with 400", "as above"),
    "a broken file of weights": Difference(
        "dies, as it does of weights of another shape", "refuses both with 400 and keeps its weights", "as above"
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
        "is not answered while a frozen request's client is there, nor is what ends the pause",
        "ends what was frozen", "SGLang's is a deadlock",
    ),
    "a client that leaves during a pause": Difference(
        "has its request started when the pause ends, until its absence is noticed", "leaves nothing",
        "nobody wants the answer",
    ),
    "a stream's id": Difference(
        "is aborted once more 2 s after the stream's end, whoever has it then", "is free when the stream has ended",
        "SGLang's abort hits another request",
    ),
    "/v1/loads": Difference(
        "is a snapshot of some steps ago, of before the pause during one, without prompts that are being read",
        "is what runs and waits now, a prompt that is being read included", "there is nothing to save",
    ),
    "several sampling_params for one prompt": Difference(
        "500", "400", "500 would make a client try again what can't work"
    ),
    "n null": Difference("500", "means 1, as other nulls mean their defaults", "as above"),
    "further logprobs: logprob_start_len, top_logprobs_num, token_ids_logprob": Difference(
        "come in meta_info", "are refused with 400",
        "the package never asks for them; leaving them out silently would mislead",
    ),
    "several prompts in one stream": Difference(
        "interleaves them, with an index", "refuses them in an event", "as above"
    ),
    "logit_bias": Difference("is applied", "is refused with 400", "as above"),
    "the hint at --allow-auto-truncate": Difference(
        "is in the refusal of a prompt that just fits the context", "is not", "it has no such flag"
    ),
    "context_length of /server_info": Difference(
        "is null unless the server was started with --context-length", "is the model's",
        "it knows it; /v1/models tells it on both",
    ),
    "weight_version of /server_info": Difference(
        "is that of the start, whatever was loaded since", "is not there",
        "a stale version misleads; /model_info tells it on both",
    ),
    "further endpoints, such as /v1/completions": Difference(
        "are there", "are answered with 404", "the package needs none"
    ),
}  # fmt: skip
