"""A pytest plugin that breaks the embedded engine in one way, which $BROKEN names: the conformance suite must see it.

BROKEN="top p ignored" python -m pytest -p broken_engine tests/conformance
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from strands_rollout.engine import chat, decode_batch, generation, http_server, scheduler
from strands_rollout.engine.decode_batch import DecodeBatch, Penalties, SamplingRows
from strands_rollout.engine.kv_cache import KvRows, PrefixCache
from strands_rollout.engine.qwen3 import Qwen3
from strands_rollout.engine.scheduler import Scheduler

ENVIRONMENT_VARIABLE = "BROKEN"
BREAKS: dict[str, Callable[[], None]] = {}


def pytest_configure() -> None:
    if name := os.environ.get(ENVIRONMENT_VARIABLE):
        BREAKS[name]()


def way(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a way to break the engine."""

    def register(breaks: Callable[[], None]) -> Callable[[], None]:
        BREAKS[name] = breaks
        return breaks

    return register


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around`, which is given the old one first."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(old, *args, **kwargs))


def _params(**changes: Any) -> None:
    """Let rows sample by other parameters than were asked for."""
    _wrap(SamplingRows, "set", lambda old, rows, row, params: old(rows, row, replace(params, **changes)))


def _answers(change: Callable[[dict[str, Any]], None]) -> None:
    """Change each answer of /generate."""

    def around(old: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        answer = copy.deepcopy(old(*args, **kwargs))
        change(answer)
        return answer

    _wrap(http_server, "generate_response", around)


def _sampled(logprobs: Callable[..., Any]) -> None:
    """Report other logprobs: of (parameters' rows, logits before, tokens, logprobs)."""

    def around(old: Callable[..., Any], rows: Any, which: slice, logits: Any, uniforms: Any) -> Any:
        before = logits.copy()
        tokens, told = old(rows, which, logits, uniforms)
        return tokens, logprobs(rows, which, before, tokens, told)

    _wrap(SamplingRows, "sample", around)


def _log_softmax(logits: Any, tokens: Any) -> Any:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted[np.arange(len(tokens)), tokens] - np.log(np.exp(shifted).sum(axis=1))


@way("logprobs at temperature 1")
def _() -> None:
    _sampled(lambda _rows, _which, before, tokens, _told: _log_softmax(before, tokens))


@way("logprobs of the narrowed distribution")
def _() -> None:
    def narrowed(rows: Any, which: slice, before: Any, tokens: Any, told: Any) -> Any:
        ranked = -np.sort(-before / rows._temperature[which], axis=1)
        weights = np.exp(ranked - ranked[:, :1])
        kept = np.arange(weights.shape[1]) < rows._top_k[which][:, None]
        shares = np.where(kept, weights, 0).sum(axis=1) / weights.sum(axis=1)
        return np.where(rows._top_k[which] > 1, told - np.log(shares), told).astype(told.dtype)

    _sampled(narrowed)


@way("logprobs of the token before")
def _() -> None:
    def shift(answer: dict[str, Any]) -> None:
        entries = answer["meta_info"].get("output_token_logprobs", [])
        moved = [entries[max(at - 1, 0)][0] for at in range(len(entries))]
        answer["meta_info"]["output_token_logprobs"] = [
            (logprob, *entry[1:]) for logprob, entry in zip(moved, entries, strict=True)
        ]

    _answers(shift)


@way("the stop token left out")
def _() -> None:
    def leave_out(answer: dict[str, Any]) -> None:
        if isinstance((answer["meta_info"]["finish_reason"] or {}).get("matched"), int):
            answer["output_ids"].pop()

    _answers(leave_out)


@way("the stop string kept")
def _() -> None:
    def around(old: Callable[..., Any], output: Any, codec: Any) -> str:
        sampling = replace(output.request.sampling, no_stop_trim=True)
        return old(replace(output, request=replace(output.request, sampling=sampling)), codec)

    _wrap(generation, "output_text", around)


@way("another abort")
def _() -> None:
    scheduler.aborted = lambda: {"type": "abort", "message": "Aborted by the client"}


@way("an abort without its tokens")
def _() -> None:
    def empty(answer: dict[str, Any]) -> None:
        if (answer["meta_info"]["finish_reason"] or {}).get("type") == "abort":
            answer["output_ids"].clear()

    _answers(empty)


@way("an abort of exactly one id")
def _() -> None:
    def exactly(old: Callable[..., Any], self: Scheduler, rid: str | None) -> None:
        found = [g for g in self.in_flight() if rid is None or g.request.rid == rid]
        self._doomed.update(g for g in found if g in self._running())
        self._end([g for g in found if g in self._waiting])

    _wrap(Scheduler, "abort", exactly)


@way("a disconnect unnoticed")
def _() -> None:
    Scheduler.withdraw = lambda _self, _generation: None


@way("the first weight version for all")
def _() -> None:
    def old_version(answer: dict[str, Any]) -> None:
        answer["meta_info"]["weight_version"] = "default"
        if "weight_versions" in answer["meta_info"]:
            spans = [{"version": "default", "start": 0, "end": len(answer["output_ids"])}]
            answer["meta_info"]["weight_versions"] = spans

    _answers(old_version)


@way("the cache kept over new weights")
def _() -> None:
    _wrap(Scheduler, "flush", lambda old, self: old(self) if self.weight_version == "default" else True)


@way("one cached token too many")
def _() -> None:
    def more(answer: dict[str, Any]) -> None:
        if answer["meta_info"].get("cached_tokens"):
            answer["meta_info"]["cached_tokens"] += 1

    _answers(more)


@way("keys and values of another prefix")
def _() -> None:
    _wrap(PrefixCache, "match", lambda old, self, tokens: [-block for block in old(self, tokens)])


@way("a flush while busy")
def _() -> None:
    _wrap(Scheduler, "flush", lambda old, self: old(self) or True)


@way("the finish's length")
def _() -> None:
    _wrap(decode_batch, "out_of_length", lambda old, length: old(length + 1))


@way("one token too many")
def _() -> None:
    def longer(old: Callable[..., Any], self: DecodeBatch, generation: Any, *rest: Any) -> int:
        row = old(self, generation, *rest)
        self._limits[row] = min(self._limits[row] + 1, self._uniforms.shape[1])
        return row

    _wrap(DecodeBatch, "join", longer)


@way("seeds ignored")
def _() -> None:
    rng = np.random.default_rng()

    def unseeded(old: Callable[..., Any], self: Scheduler, generation: Any) -> None:
        old(self, generation)
        generation.seed = int(rng.integers(2**63))

    _wrap(Scheduler, "submit", unseeded)


@way("temperature ignored in sampling")
def _() -> None:
    def lukewarm(old: Callable[..., Any], rows: SamplingRows, which: slice, logits: Any, uniforms: Any) -> Any:
        temperature = rows._temperature.copy()
        scaled = logits / temperature[which]
        rows._temperature[which] = 1
        tokens, _ = old(rows, which, logits, uniforms)
        rows._temperature = temperature
        return tokens, _log_softmax(scaled, tokens)

    _wrap(SamplingRows, "sample", lukewarm)


@way("top p ignored")
def _() -> None:
    _params(top_p=1.0)


@way("min p ignored")
def _() -> None:
    _params(min_p=0.0)


@way("top k one too large")
def _() -> None:
    def wider(old: Callable[..., Any], rows: SamplingRows, row: int, params: Any) -> None:
        old(rows, row, replace(params, top_k=params.top_k + (params.top_k > 1)))

    _wrap(SamplingRows, "set", wider)


@way("penalties ignored")
def _() -> None:
    _wrap(Penalties, "apply", lambda _old, _self, _logits: None)


@way("positions one too far when decoding")
def _() -> None:
    def decode(old: Callable[..., Any], self: Qwen3, kv: KvRows, tokens: Any, lengths: Any) -> Any:
        self._rotations = np.roll(self._rotations, -1, axis=0)
        logits = old(self, kv, tokens, lengths)
        self._rotations = np.roll(self._rotations, 1, axis=0)
        return logits

    _wrap(Qwen3, "decode", decode)


@way("another id")
def _() -> None:
    def rename(answer: dict[str, Any]) -> None:
        answer["meta_info"]["id"] += "0"

    _answers(rename)


@way("calls without an index")
def _() -> None:
    def around(old: Callable[..., Any], *args: Any) -> dict[str, Any]:
        return {key: value for key, value in old(*args).items() if key != "index"}

    _wrap(chat, "_call", around)
