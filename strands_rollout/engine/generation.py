"""Generations in flight, the batch that decodes them, sampling, and the response of SGLang's /generate (0.5.23).

A `DecodeBatch` keeps its generations in arrays, row i for generation i. A step works on whole arrays. Python code for a
single generation runs only in these cases: the generation ends, streams, or has stop strings or penalties.

`TextCodec` encodes and decodes text with a model folder's tokenizer, without transformers.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from strands_rollout.engine.qwen3 import MAX_CONFIG_BYTES, Doubles, Floats, Ints, ModelConfig
from strands_rollout.engine.requests import EngineRequest, SamplingParams
from strands_rollout.errors import ConfigError
from strands_rollout.files.safe_files import read_regular

_LONG_TEXT_CHARS = 10_000
_MAX_TOKENIZER_BYTES = 200_000_000


class TextCodec:
    """One model's tokenizer, with its end-of-sequence token."""

    def __init__(self, tokenizer: Tokenizer, eos_token: str | None) -> None:
        self._tokenizer = tokenizer
        self._eos_token = eos_token

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's end-of-sequence token; None if it has none."""
        token_id: int | None = self._tokenizer.token_to_id(self._eos_token) if self._eos_token else None
        return token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; the text of a special token becomes that token."""
        if len(text) < _LONG_TEXT_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # tokenizers releases the GIL for batches only
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def read_text_codec(folder: Path) -> TextCodec:
    """Read tokenizer.json and, if present, tokenizer_config.json.

    Raises:
        ConfigError: tokenizer.json is missing, or one of the files can't be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no tokenizer.json; the embedded engine needs a fast tokenizer")
    config_path = folder / "tokenizer_config.json"
    config: dict[str, Any] = {}
    try:
        tokenizer = Tokenizer.from_buffer(read_regular(path, _MAX_TOKENIZER_BYTES))
        if config_path.exists():
            config = json.loads(read_regular(config_path, MAX_CONFIG_BYTES))
        eos_token = config.get("eos_token")
        eos_token = eos_token["content"] if isinstance(eos_token, dict) else eos_token
    except Exception as e:  # tokenizers raises plain Exceptions for broken files
        raise ConfigError(f"can't read the tokenizer of {folder}: {e}") from e
    return TextCodec(tokenizer, eos_token)


ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
"""Finish reason of a generation aborted while queued, held back or prefilled."""
# If a request does not stream, SGLang's scheduler sends its tokens to the front end in batches of this size
# (SGLANG_FORCE_STREAM_INTERVAL).
_FRONT_END_INTERVAL_TOKENS = 50


class VersionSpan(NamedTuple):
    """The output tokens start to end - 1, sampled by one weight version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """A snapshot of a generation.

    Attributes:
        output_logprobs: Log probabilities of `output_ids`, of the same length.
        cached_tokens: Number of prompt tokens found in the prefix cache; 0 if the generation never ran.
        retractions: How often a pause moved the generation back to the queue.
        weight_version: Version that sampled the last token. Before the generation finishes, the engine's version.
        weight_spans: The output tokens by version; complete once the generation has finished.
        finish: SGLang's finish_reason object; None until the generation finishes.
    """

    request: EngineRequest
    output_ids: list[int]
    output_logprobs: list[float]
    cached_tokens: int
    retractions: int
    weight_version: str
    weight_spans: tuple[VersionSpan, ...]
    finish: dict[str, Any] | None

    @property
    def ended_in_queue(self) -> bool:
        """True if the generation was aborted while queued, held back or prefilled."""
        return self.finish == ABORTED_IN_QUEUE


@dataclass(slots=True, eq=False)
class InFlightGeneration:
    """A request in flight with its output so far; only the worker's thread changes it. Compared by identity.

    Attributes:
        notify: Called from any thread when the generation finishes or crashes and, for a stream, after each token.
        seed: 64-bit sampling seed; set when the generation is queued.
        output_ids: Sampled ids. While the generation decodes, they are updated only if it streams, or has stop strings
            or penalties.
        output_logprobs: Log probabilities; at least as many as `output_ids`.
        cached_tokens: Number of prompt tokens found in the prefix cache; None before the first prefill.
        finish: Finish reason, set after all other fields are complete.
        crashed: True if the engine failed; `finish` is never set then.
    """

    request: EngineRequest
    notify: Callable[[], object]
    seed: int = 0
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    cached_tokens: int | None = None
    retractions: int = 0
    weight_spans: list[VersionSpan] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    crashed: bool = False

    def close_span(self, version: str, output_count: int) -> None:
        """Add the output tokens up to `output_count` that are in no span yet to a span of `version`."""
        last = self.weight_spans[-1] if self.weight_spans else None
        if last is None:
            self.weight_spans.append(VersionSpan(version, 0, output_count))
        elif last.version == version:
            self.weight_spans[-1] = VersionSpan(version, last.start, output_count)
        elif output_count > last.end:
            self.weight_spans.append(VersionSpan(version, last.end, output_count))

    def drop_unsent_tokens(self) -> None:
        """Drop tokens that SGLang's scheduler would not have sent to its front end yet.

        A request that is aborted in the queue gets only the front end's tokens.
        """
        if self.request.stream:
            return
        sent = len(self.output_ids) // _FRONT_END_INTERVAL_TOKENS * _FRONT_END_INTERVAL_TOKENS
        del self.output_ids[sent:], self.output_logprobs[sent:]
        spans = [span for span in self.weight_spans if span.start < sent or span.start == 0]
        self.weight_spans = [VersionSpan(span.version, span.start, min(span.end, sent)) for span in spans]

    def output(self, current_version: str) -> GenerationOutput:
        """Return a snapshot; safe to call from any thread. An unfinished generation reports `current_version`."""
        # Read `finish` first: if it is set, all other fields are complete. Read ids before logprobs, since there are
        # always at least as many logprobs as ids.
        finish, ids = self.finish, list(self.output_ids)
        return GenerationOutput(
            request=self.request,
            output_ids=ids,
            output_logprobs=self.output_logprobs[: len(ids)],
            cached_tokens=self.cached_tokens or 0,
            retractions=self.retractions,
            weight_version=self.weight_spans[-1].version if finish else current_version,
            weight_spans=tuple(self.weight_spans),
            finish=finish,
        )


def length_finish(length: int) -> dict[str, Any]:
    """Return the finish reason of a generation that reached its maximum of `length` new tokens."""
    return {"type": "length", "length": length}


def abort_finish() -> dict[str, Any]:
    """Return the finish reason of a generation aborted while running."""
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def output_text(output: GenerationOutput, codec: TextCodec) -> str:
    """Return the generated text.

    The text of a finished generation ends before the stop token or string, unless no_stop_trim is set. The text of an
    unfinished generation ends before an incomplete UTF-8 character.
    """
    sampling, ids = output.request.sampling, output.output_ids
    matched = output.finish.get("matched") if output.finish else None
    if isinstance(matched, int) and not sampling.no_stop_trim:
        ids = ids[:-1]
    text = codec.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
    if output.finish is None:
        return text.rstrip("\ufffd")
    if isinstance(matched, str) and matched in text:
        end = text.index(matched) + (len(matched) if sampling.no_stop_trim else 0)
        return text[:end]
    return text


def generate_response(
    output: GenerationOutput, codec: TextCodec, *, latency_s: float, now: float | None
) -> dict[str, Any]:
    """Return the JSON object for one generation, or for one event of its stream.

    `latency_s` counts from the request's arrival. `now` is the time of the answer in seconds since the epoch; pass None
    for all events of a stream except the first.
    """
    request, cached = output.request, output.cached_tokens
    meta_info: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": output.finish,
        **weight_versions(output),
        **_logprobs(output, codec),
        "completion_tokens": len(output.output_ids),
    }
    if not output.ended_in_queue:  # SGLang reports nothing about the prompt then
        meta_info |= {
            "prompt_tokens": len(request.input_ids),
            "num_retractions": output.retractions,
            "reasoning_tokens": 0,
            "cached_tokens": cached,
            "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
            "dp_rank": None,
        }
    if output.finish is not None:
        meta_info["e2e_latency"] = latency_s
    if now is not None:
        meta_info["response_sent_to_client_ts"] = now
    return {"text": output_text(output, codec), "output_ids": output.output_ids, "meta_info": meta_info}


def weight_versions(output: GenerationOutput) -> dict[str, Any]:
    """Return the output's weight version and, if it is finished, its spans by version, as fields of meta_info."""
    fields: dict[str, Any] = {"weight_version": output.weight_version}
    if output.finish is not None:
        fields["weight_versions"] = [span._asdict() for span in output.weight_spans]
    return fields


def _logprobs(output: GenerationOutput, codec: TextCodec) -> dict[str, Any]:
    if not output.request.return_logprob:
        return {}
    with_text = output.request.return_text_in_logprobs
    texts = [codec.decode([token]) if with_text else None for token in output.output_ids]
    triples = list(zip(output.output_logprobs, output.output_ids, texts, strict=True))
    return {
        "input_token_logprobs": [],
        "output_token_logprobs": triples,
        "output_token_logprobs_length": len(triples),
    }


_MIN_REPETITION_PENALTY = 1e-6
# `narrowed`: True if top-k, top-p or min-p may exclude tokens; always False for a greedy row
_SAMPLING = np.dtype(
    [("temperature", "f4"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("greedy", "?"), ("narrowed", "?")]
)


class Penalties:
    """The penalties of one generation, and its token counts.

    SGLang's formulas (0.5.23, srt/sampling/penaltylib) count generated tokens only, not the prompt's.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self._params = params
        self._stop_ids = list(stop_ids)
        self._counts = np.zeros(vocab_size, np.float32)
        self._generated = 0

    def observe(self, token: int) -> None:
        """Count a generated token."""
        self._counts[token] += 1
        self._generated += 1

    def apply(self, logits: Floats) -> None:
        """Apply the penalties and `min_new_tokens` to the [vocab_size] logits of the next token, in place."""
        p, seen = self._params, self._counts > 0
        logits -= np.float32(p.frequency_penalty) * self._counts
        logits[seen] -= np.float32(p.presence_penalty)
        if p.repetition_penalty != 1.0:
            # a smaller penalty would be 0 in float32, or make logits infinite
            values, factor = logits[seen], np.float32(max(p.repetition_penalty, _MIN_REPETITION_PENALTY))
            logits[seen] = np.where(values < 0, values * factor, values / factor)
        if self._generated < p.min_new_tokens:
            logits[self._stop_ids] = -np.inf


class SamplingRows:
    """The sampling parameters of `rows` generations, as a structured array."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = np.full(rows, np.array((1, 1, 0, vocab_size, False, False), _SAMPLING))

    def set(self, row: int, params: SamplingParams) -> None:
        """Set the parameters of a row."""
        temperature = min(params.temperature, float(np.finfo(np.float32).max))
        is_greedy = params.top_k == 1
        narrows = params.top_k < self._vocab_size or params.top_p < 1 or params.min_p > 0
        top_k = min(params.top_k, self._vocab_size)
        self._rows[row] = (temperature, params.top_p, params.min_p, top_k, is_greedy, narrows and not is_greedy)

    def move(self, source: int, target: int) -> None:
        """Copy the parameters of row `source` to row `target`."""
        self._rows[target] = self._rows[source]

    def sample(self, rows: slice, logits: Floats, uniforms: Doubles) -> tuple[Ints, Floats]:
        """Sample a token for each row from its logits [n, vocab_size], which are overwritten.

        `uniforms` are [n] random numbers in [0, 1), ignored for greedy rows. Returns [n] token ids and their [n] log
        probabilities under softmax(logits / temperature), without top-k, top-p and min-p, as SGLang reports them.
        """
        settings = self._rows[rows]
        logits /= settings["temperature"][:, None]
        logits -= logits.max(axis=1, keepdims=True)
        weights = np.exp(logits)
        log_totals = np.log(weights.sum(axis=1))
        greedy = settings["greedy"]
        if greedy.all():
            tokens: Ints = logits.argmax(axis=1)
        else:
            if (narrowed := settings["narrowed"]).any():
                limits = settings[narrowed]
                weights[narrowed] = _narrow(weights[narrowed], limits["top_k"], limits["top_p"], limits["min_p"])
            tokens = _draw_tokens(weights, uniforms)
            tokens[greedy] = logits[greedy].argmax(axis=1)
        return tokens, logits[np.arange(len(tokens)), tokens] - log_totals


def _draw_tokens(weights: Floats, uniforms: Doubles) -> Ints:
    edges = weights.astype(np.float64)
    np.add.accumulate(edges, axis=1, out=edges)
    totals = edges[:, -1]
    # Targets are strictly below the total, so that the drawn token never has weight 0.
    targets = np.minimum(uniforms * totals, np.nextafter(totals, 0))
    drawn: Ints = (edges > targets[:, None]).argmax(axis=1)
    return drawn


def _narrow(weights: Floats, top_k: Ints, top_p: Doubles, min_p: Doubles) -> Floats:
    """Set the [n, vocab_size] weights outside top-k, top-p and min-p ([n] each) to zero, and return all weights.

    As in SGLang, each limit is applied to the whole distribution. A token stays if all of this is true:

    - fewer than top-k tokens are ranked before it;
    - the tokens before it have a total probability of at most top-p;
    - its own probability is at least min-p times the greatest probability.
    """
    ranked = -np.sort(-weights, axis=1)
    shares = ranked.astype(np.float64)
    shares /= shares.sum(axis=1, keepdims=True)
    before = np.add.accumulate(shares, axis=1) - shares
    kept = np.arange(weights.shape[1]) < top_k[:, None]
    kept &= before <= top_p[:, None]
    kept &= shares >= shares[:, :1] * min_p[:, None]
    counts = np.count_nonzero(kept, axis=1)
    least = np.take_along_axis(ranked, counts[:, None] - 1, axis=1)
    weights[weights < least] = 0
    for row in np.flatnonzero(np.count_nonzero(weights >= least, axis=1) > counts):
        # Among tokens with the same weight as the last kept token, those with the lowest ids stay.
        tied = np.flatnonzero(weights[row] == least[row])
        surplus = np.count_nonzero(weights[row] >= least[row]) - counts[row]
        weights[row, tied[len(tied) - surplus :]] = 0
    return weights


class DecodeBatch:
    """Up to `rows` generations that decode together; the first len(batch) rows are in use.

    Attributes:
        generations: The generation of each row in use.
        lengths: [rows] numbers of tokens whose keys and values are computed.
        last_tokens: [rows] newest ids, whose keys and values are not computed yet.
    """

    def __init__(self, config: ModelConfig, rows: int, context_length: int, decode: Callable[[list[int]], str]) -> None:
        self.generations: list[InFlightGeneration] = []
        self.lengths = np.zeros(rows, np.int64)
        self.last_tokens = np.zeros(rows, np.int64)
        self._rows = rows
        self._vocab_size = config.vocab_size
        self._eos_ids = config.eos_token_ids
        self._decode = decode
        self._sampling = SamplingRows(rows, config.vocab_size)
        self._counts = np.zeros(rows, np.int64)
        self._limits = np.zeros(rows, np.int64)
        self._is_stop = np.zeros((rows, config.vocab_size), bool)
        self._random_numbers = np.zeros((rows, context_length))
        self._tokens = np.zeros((rows, context_length), np.int64)
        self._logprobs = np.zeros((rows, context_length), np.float32)
        self._watched = np.zeros(rows, bool)  # rows with penalties, stop strings or streaming: checked at each token
        self._penalties: list[Penalties | None] = []

    def __len__(self) -> int:
        return len(self.generations)

    def is_full(self) -> bool:
        """Return True if no further generation can join."""
        return len(self.generations) == self._rows

    def join(self, generation: InFlightGeneration, length: int, seed: int) -> int:
        """Add a generation whose prompt and earlier output (together `length` tokens) are prefilled; return its row."""
        row, request = len(self.generations), generation.request
        params, earlier = request.sampling, len(generation.output_ids)
        stop_ids = set() if params.ignore_eos else {*params.stop_token_ids, *self._eos_ids}
        stop_ids = {token for token in stop_ids if 0 <= token < self._vocab_size}
        penalties = Penalties(params, self._vocab_size, stop_ids) if params.has_penalties else None
        if penalties is not None:
            for token in generation.output_ids:
                penalties.observe(token)
        self.generations.append(generation)
        self._penalties.append(penalties)
        self._sampling.set(row, params)
        self._watched[row] = request.stream or bool(params.stop) or penalties is not None
        self.lengths[row], self._counts[row], self._limits[row] = length, earlier, request.max_new_tokens
        self._is_stop[row] = False
        self._is_stop[row, list(stop_ids)] = True
        left = request.max_new_tokens - earlier
        self._random_numbers[row, earlier : request.max_new_tokens] = _random_numbers(seed, length, left)
        self._tokens[row, :earlier] = generation.output_ids
        self._logprobs[row, :earlier] = generation.output_logprobs
        return row

    def leave(self, row: int) -> int:
        """Remove a row and write its output to its generation; return the old index of the row that takes its place."""
        generation, count = self.generations[row], int(self._counts[row])
        generation.output_logprobs = self._logprobs[row, :count].tolist()
        generation.output_ids = self._tokens[row, :count].tolist()
        last = len(self.generations) - 1
        limit = self._limits[last]
        for columns in (self._tokens, self._logprobs, self._random_numbers):
            columns[row, :limit] = columns[last, :limit]
        for column in (self.lengths, self.last_tokens, self._counts, self._limits, self._is_stop, self._watched):
            column[row] = column[last]
        self._sampling.move(last, row)
        self.generations[row], self._penalties[row] = self.generations[last], self._penalties[last]
        self.generations.pop()
        self._penalties.pop()
        return last

    def tokens(self, row: int) -> Ints:
        """Return the row's prompt and output ids."""
        prompt = np.array(self.generations[row].request.input_ids, np.int64)
        return np.concatenate([prompt, self._tokens[row, : self._counts[row]]])

    def output_count(self, row: int) -> int:
        """Return the number of output tokens of the row's generation."""
        return int(self._counts[row])

    def advance(self, rows: slice, logits: Floats) -> list[tuple[int, dict[str, Any]]]:
        """Sample the next token of each row from its logits [n, vocab_size].

        Returns the rows whose generations end with this token, in ascending order, each with its finish reason.
        """
        for row in np.flatnonzero(self._watched[rows]) + rows.start:
            if (penalties := self._penalties[row]) is not None:
                penalties.apply(logits[row - rows.start])
        index, counts = np.arange(rows.start, rows.stop), self._counts[rows]
        tokens, logprobs = self._sampling.sample(rows, logits, self._random_numbers[index, counts])
        self._tokens[index, counts], self._logprobs[index, counts] = tokens, logprobs
        self.last_tokens[rows] = tokens
        counts += 1
        to_check = self._is_stop[index, tokens] | (counts >= self._limits[rows]) | self._watched[rows]
        checked = [(int(row), self._check_finish(row)) for row in np.flatnonzero(to_check) + rows.start]
        return [(row, finish) for row, finish in checked if finish is not None]

    def _check_finish(self, row: int) -> dict[str, Any] | None:
        """Update a row after its newest token; return the finish reason if the generation ends with it, else None."""
        generation, token = self.generations[row], int(self.last_tokens[row])
        if (penalties := self._penalties[row]) is not None:
            penalties.observe(token)
        if self._watched[row]:
            generation.output_logprobs.append(float(self._logprobs[row, self._counts[row] - 1]))
            generation.output_ids.append(token)
        if strings := generation.request.sampling.stop:
            # Each token has at least one byte, so this window contains any stop string that the last token completes.
            window = max(len(string.encode()) for string in strings)
            tail = self._decode(generation.output_ids[-window:])
            for string in strings:
                if string in tail:
                    return {"type": "stop", "matched": string}
        if self._is_stop[row, token]:
            return {"type": "stop", "matched": token}
        if self._counts[row] >= self._limits[row]:
            return length_finish(generation.request.max_new_tokens)
        if generation.request.stream:
            generation.notify()
        return None


def _random_numbers(seed: int, position: int, count: int) -> Doubles:
    """Return the random numbers that sample `count` tokens from `position` on.

    As in SGLang, the numbers depend only on seed and position: a request that continues a partial output gets the same
    tokens as the uninterrupted generation. SGLang's numbers are different.
    """
    bits = np.random.PCG64(seed)
    bits.advance(position)
    return np.random.Generator(bits).random(count)
