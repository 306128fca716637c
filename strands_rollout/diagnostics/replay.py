"""A saved episode run again on an engine: does it sample the same tokens, at the same logprobs?

Each turn is asked for with exactly the tokens that the policy had read and written before it, tool results included: no
tool is run, no template is needed, and a turn that departs does not hide what the next one does. Knows episodes and
SGLang's `/generate`; nothing of text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from strands_rollout.errors import EngineResponseError, EngineUnavailableError
from strands_rollout.generation import Generation, load_json
from strands_rollout.inspection.saved_episode import SavedEpisode
from strands_rollout.sglang_client import SGLangClient
from strands_rollout.sglang_exchange import CONNECTION_ERRORS, JSON_HEADERS
from strands_rollout.sglang_request import EncodedIds
from strands_rollout.turn_params import turn_params


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """One turn beside what the engine makes of it now.

    Attributes:
        turn: From 0.
        start: Index in the sample's tokens of its first one.
        recorded: Its tokens as they were sampled.
        again: What the engine samples now; as many at most.
        same: Tokens at their beginning that are the same.
        finish: Why the engine stopped: "length" where it reached as many tokens.
        gaps: Of the same tokens, the engine's logprob now less the recorded one; empty where none were recorded.
    """

    turn: int
    start: int
    recorded: list[int]
    again: list[int]
    same: int
    finish: str
    gaps: list[float]

    @property
    def departs(self) -> bool:
        """Whether it samples something else, or stops before."""
        return self.same < len(self.recorded)


def recorded_params(episode: SavedEpisode) -> dict[str, Any] | None:
    """The episode's own sampling parameters, where they decide what is sampled: at a seed, or greedily; else None."""
    params = episode.facts.get("sampling_params")
    if not isinstance(params, Mapping):
        return None
    decides = params.get("sampling_seed") is not None or params.get("temperature") == 0
    return dict(params) if decides else None


async def replay(client: SGLangClient, episode: SavedEpisode, params: Mapping[str, Any]) -> AsyncIterator[ReplayedTurn]:
    """Ask for each turn of an episode again.

    Args:
        client: Of an engine with the policy's vocabulary.
        episode: As it was saved.
        params: SGLang's sampling parameters; of a `sampling_seed` each turn has its own, as in an episode.

    Raises:
        EngineError: The engine can't be reached, or refuses the request.
    """
    tokens = episode.tokens
    logprobs = _recorded_logprobs(episode)
    for turn, (start, end) in enumerate(episode.turns):
        asked = {**params, "max_new_tokens": end - start}
        if asked.get("sampling_seed") is not None:
            asked = turn_params(asked, turn)
        answer = await client.generate(tokens[:start], asked)
        yield _beside(turn, start, tokens[start:end], answer, logprobs[start:end])


async def recorded_gaps(
    http: httpx.AsyncClient, episode: SavedEpisode, *, vocab_size: int | None
) -> list[float] | None:
    """For each sampled token the engine's logprob at temperature 1 of that very token, less the recorded one.

    Asked for as SGLang's `logprob_start_len`: the engine reads the whole episode and tells the logprob of each token of
    its input (`meta_info.input_token_logprobs`, sglang/srt/managers/tokenizer_manager.py).

    Args:
        http: The engine's.
        episode: As it was saved.
        vocab_size: Ids must be below it; None: not checked.

    Returns:
        None where none were recorded, or the engine gives no logprobs of its input, as the embedded one.

    Raises:
        TrajectoryError: An id is not of the vocabulary; nothing was sent.
        EngineUnavailableError: Nothing answers.
        EngineResponseError: The answer is not of these tokens.
    """
    tokens, logprobs = episode.tokens, _recorded_logprobs(episode)
    sampled = [at for start, end in episode.turns for at in range(start, end)]
    if not logprobs or sampled[0] == 0:
        return None
    asked = {
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": sampled[0] - 1,
    }
    body = EncodedIds(tokens, vocab_size=vocab_size).to_json(b'{"input_ids":', b"," + orjson.dumps(asked)[1:])
    try:
        response = await http.post("/generate", content=body, headers=JSON_HEADERS)
    except CONNECTION_ERRORS as e:
        raise EngineUnavailableError(f"no answer to a request for logprobs: {e}") from e
    if response.status_code != httpx.codes.OK:
        return None
    told = _input_logprobs(load_json(response.content), tokens, vocab_size)
    return None if told is None else [told[at] - logprobs[at] for at in sampled]


def _input_logprobs(
    answer: Any,  # noqa: ANN401 - foreign JSON
    tokens: Sequence[int],
    vocab_size: int | None,
) -> dict[int, float] | None:
    """By position, the logprobs of the input's last tokens; None where there are none.

    SGLang 0.5.23 names the vocabulary's last id as 0 there, beside that id's own logprob
    (sglang/srt/managers/scheduler_components/logprob_result_processor.py).
    """
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    entries = (meta or {}).get("input_token_logprobs") or []
    first = len(tokens) - len(entries)
    if not entries:
        return None
    try:
        ids = [entry[1] for entry in entries]
        found = {first + at: float(entry[0]) for at, entry in enumerate(entries) if entry[0] is not None}
    except (TypeError, IndexError, ValueError) as e:
        raise EngineResponseError("input_token_logprobs: expected a list of [logprob, token id, text]") from e
    last_id = None if vocab_size is None else vocab_size - 1
    named = zip(ids, tokens[max(first, 0) :], strict=False)
    if first < 0 or any(told not in (token, 0 if token == last_id else token) for told, token in named):
        raise EngineResponseError("the engine's input logprobs are of other tokens than those that it was sent")
    return found


def _recorded_logprobs(episode: SavedEpisode) -> list[float]:
    """One for each token, prompt included; empty where none were recorded."""
    recorded = episode.sample.rollout_log_probs
    if not recorded or not any(recorded):  # a sample that is kept out of training has zeros
        return []
    return [0.0] * (len(episode.sample.tokens) - len(recorded)) + list(recorded)


def _beside(turn: int, start: int, recorded: list[int], answer: Generation, logprobs: Sequence[float]) -> ReplayedTurn:
    again = answer.output_ids
    shorter = min(len(recorded), len(again))
    same = next((at for at in range(shorter) if recorded[at] != again[at]), shorter)
    gaps = [now - then for now, then in zip(answer.logprobs[:same], logprobs, strict=False)]
    return ReplayedTurn(turn, start, recorded, again, same, answer.finish_reason.type, gaps)
