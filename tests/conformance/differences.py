"""What the embedded engine does otherwise than SGLang 0.5.23, on purpose, and why; each is measured by a test."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        name: What it is about.
        sglang: What SGLang does.
        embedded: What the embedded engine does.
        reason: Why it does not do the same.
    """

    name: str
    sglang: str
    embedded: str
    reason: str


TABLE = "differences between the embedded engine and SGLang"
DIFFERENCES = (
    Difference(
        "ids outside the vocabulary",
        "dies, all of its processes",
        "refuses them with 400 and lives on",
        "a demo should survive a mistake that the client is there to prevent",
    ),
    Difference("an empty text", "dies", "refuses it with 400", "as above"),
    Difference(
        "a broken file of weights",
        "dies, as it does of weights of another shape",
        "refuses both with 400 and keeps its weights",
        "as above",
    ),
    Difference(
        "seeds",
        "ignores sampling_seed unless started with --enable-deterministic-inference",
        "heeds it always, with random numbers of its own",
        "tests and demos can be repeated",
    ),
    Difference(
        "/health during a pause",
        "is not answered, and after 20 s is answered with 503",
        "is answered with 200 at once",
        "nothing needs a demo to look dead during a pause; /ready says 503 on both",
    ),
    Difference(
        "a pause by abort after one in place",
        "is not answered while a frozen request's client is there, nor is what ends the pause",
        "ends what was frozen",
        "SGLang's is a deadlock",
    ),
    Difference(
        "a client that leaves during a pause",
        "has its request started when the pause ends, until its absence is noticed",
        "leaves nothing",
        "nobody wants the answer",
    ),
    Difference(
        "a stream's id",
        "is aborted once more 2 s after the stream's end, whoever has it then",
        "is free when the stream has ended",
        "SGLang's abort hits another request",
    ),
    Difference(
        "/v1/loads",
        "is a snapshot of some steps ago, of before the pause during one, without prompts that are being read",
        "is what runs and waits now, a prompt that is being read included",
        "there is nothing to save",
    ),
    Difference(
        "several sampling_params for one prompt", "500", "400", "500 would make a client try again what can't work"
    ),
    Difference("n null", "500", "means 1, as other nulls mean their defaults", "as above"),
    Difference(
        "further logprobs: logprob_start_len, top_logprobs_num, token_ids_logprob",
        "come in meta_info",
        "are refused with 400",
        "the package never asks for them; leaving them out silently would mislead",
    ),
    Difference(
        "several prompts in one stream", "interleaves them, with an index", "refuses them in an event", "as above"
    ),
    Difference("logit_bias", "is applied", "is refused with 400", "as above"),
    Difference(
        "the hint at --allow-auto-truncate",
        "is in the refusal of a prompt that just fits the context",
        "is not",
        "it has no such flag",
    ),
    Difference(
        "context_length of /server_info",
        "is null unless the server was started with --context-length",
        "is the model's",
        "it knows it; /v1/models tells it on both",
    ),
    Difference(
        "weight_version of /server_info",
        "is that of the start, whatever was loaded since",
        "is not there",
        "a stale version misleads; /model_info tells it on both",
    ),
    Difference(
        "further endpoints, such as /v1/completions", "are there", "are answered with 404", "the package needs none"
    ),
    Difference(
        "calls and reasoning in chats",
        "are parsed if the server was started with --tool-call-parser and --reasoning-parser",
        "are always parsed, without the line feeds around them",
        "a small model's chat works without flags",
    ),
    Difference(
        "tools in a chat's prompt",
        "are written with further fields and in another order than transformers writes them",
        "are written as transformers writes them",
        "so the model was trained",
    ),
    Difference(
        "cached tokens of a chat",
        "are told if the server was started with --enable-cache-report",
        "are always told",
        "it costs nothing",
    ),
    Difference(
        "several choices of a chat (n)", "are made", "are refused with 400", "the package's chats need one answer"
    ),
)
