"""The generations that decode together, as columns: row i of every column belongs to generation i.

A decode step touches columns, not generations; Python runs per generation only where one ends, streams, has stop
strings or penalties. Knows nothing of queues, threads or keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from strands_rollout.engine.generation import out_of_length, stopped
from strands_rollout.engine.penalties import Penalties
from strands_rollout.engine.sampler import SamplingRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands_rollout.engine.generation import Generation
    from strands_rollout.engine.model_config import ModelConfig

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class DecodeBatch:
    """Up to `rows` generations; the first len(batch) rows are in use."""

    def __init__(self, config: ModelConfig, rows: int, context_length: int, decode: Callable[[list[int]], str]) -> None:
        self.generations: list[Generation] = []
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
        self._uniforms = np.zeros((rows, context_length))
        self._tokens = np.zeros((rows, context_length), np.int64)
        self._logprobs = np.zeros((rows, context_length), np.float32)
        self._watched = np.zeros(rows, bool)
        self._penalties: list[Penalties | None] = []

    def __len__(self) -> int:
        return len(self.generations)

    def is_full(self) -> bool:
        """Whether no further generation can join."""
        return len(self.generations) == self._rows

    def join(self, generation: Generation, length: int, seed: int) -> int:
        """Add a generation whose prompt and earlier output, `length` tokens, are prefilled; returns its row."""
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
        self._uniforms[row, earlier : request.max_new_tokens] = _uniforms(seed, length, left)
        self._tokens[row, :earlier] = generation.output_ids
        self._logprobs[row, :earlier] = generation.output_logprobs
        return row

    def leave(self, row: int) -> int:
        """Remove `row`, whose generation gets its whole output; returns the row that took its place."""
        self._publish(row)
        last = len(self.generations) - 1
        limit = self._limits[last]
        for columns in (self._tokens, self._logprobs, self._uniforms):
            columns[row, :limit] = columns[last, :limit]
        for column in (self.lengths, self.last_tokens, self._counts, self._limits, self._is_stop, self._watched):
            column[row] = column[last]
        self._sampling.move(last, row)
        self.generations[row], self._penalties[row] = self.generations[last], self._penalties[last]
        self.generations.pop()
        self._penalties.pop()
        return last

    def _publish(self, row: int) -> None:
        generation, count = self.generations[row], int(self._counts[row])
        generation.output_logprobs = self._logprobs[row, :count].tolist()
        generation.output_ids = self._tokens[row, :count].tolist()

    def tokens(self, row: int) -> Ints:
        """The row's prompt and output."""
        prompt = np.array(self.generations[row].request.input_ids, np.int64)
        return np.concatenate([prompt, self._tokens[row, : self._counts[row]]])

    def output_count(self, row: int) -> int:
        """How many tokens the row's generation has."""
        return int(self._counts[row])

    def advance(self, rows: slice, logits: Floats) -> list[tuple[int, dict[str, Any]]]:
        """Sample the next token of each of `rows` from its logits [n, vocab_size].

        Returns:
            The rows whose generations end with this token, ascending, each with its finish reason.
        """
        for row in np.flatnonzero(self._watched[rows]) + rows.start:
            if (penalties := self._penalties[row]) is not None:
                penalties.apply(logits[row - rows.start])
        index, counts = np.arange(rows.start, rows.stop), self._counts[rows]
        tokens, logprobs = self._sampling.sample(rows, logits, self._uniforms[index, counts])
        self._tokens[index, counts], self._logprobs[index, counts] = tokens, logprobs
        self.last_tokens[rows] = tokens
        counts += 1
        to_settle = self._is_stop[index, tokens] | (counts >= self._limits[rows]) | self._watched[rows]
        settled = [(int(row), self._settle(row)) for row in np.flatnonzero(to_settle) + rows.start]
        return [(row, finish) for row, finish in settled if finish is not None]

    def _settle(self, row: int) -> dict[str, Any] | None:
        """Do a row's own work after a token; returns why its generation ends, or None."""
        generation, token = self.generations[row], int(self.last_tokens[row])
        if (penalties := self._penalties[row]) is not None:
            penalties.observe(token)
        if self._watched[row]:
            generation.output_logprobs.append(float(self._logprobs[row, self._counts[row] - 1]))
            generation.output_ids.append(token)
        matched = self._matched_stop_string(generation)
        if matched is not None:
            return stopped(matched)
        if self._is_stop[row, token]:
            return stopped(token)
        if self._counts[row] >= self._limits[row]:
            return out_of_length(generation.request.max_new_tokens)
        if generation.request.stream:
            generation.notify()
        return None

    def _matched_stop_string(self, generation: Generation) -> str | None:
        strings = generation.request.sampling.stop
        if not strings:
            return None
        # Every token has at least one byte, so this window holds any stop string that the last token completes.
        window = max(len(string.encode()) for string in strings)
        tail = self._decode(generation.output_ids[-window:])
        return next((string for string in strings if string in tail), None)


def _uniforms(seed: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """The random numbers of tokens at `position`, position + 1, ... in a sequence that is sampled with `seed`.

    They depend on seed and position only, as in SGLang, whose numbers are others: whoever continues a sequence from its
    own partial output gets those that the rest would have had.
    """
    bits = np.random.PCG64(seed)
    bits.advance(position)
    return np.random.Generator(bits).random(count)
