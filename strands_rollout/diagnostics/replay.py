"""The commands `drift` and `replay`, which check the recorded tokens of a dump.

`drift` encodes the text of the dump's episodes again, and counts the tokens that change. It also compares each context
with the chat template's rendering.

`replay` samples the turns of one episode again, and compares their tokens and logprobs with the recorded ones. The
request of each turn has exactly the recorded tokens before the turn, including tool results. Therefore no tool runs,
no template is needed, and a turn that differs does not affect later turns.
"""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import httpx
import orjson
from rich.console import Console
from rich.text import Text

from strands_rollout.client.client import SGLangClient
from strands_rollout.client.generate_api import EncodedIds, load_json
from strands_rollout.client.transport import CONNECTION_ERRORS, JSON_HEADERS, create_client
from strands_rollout.diagnostics.template_check import load_tokenizer_folder
from strands_rollout.dump import DumpRecord, TokenTexts, read_dump, recorded_tokenizer
from strands_rollout.dump.record import check_tokenizer
from strands_rollout.dump.terminal import counter, make_console, show_next
from strands_rollout.errors import ConfigError, DumpError, EngineResponseError, EngineUnavailableError
from strands_rollout.files.json_codec import Json
from strands_rollout.model.sampling import turn_params
from strands_rollout.play.engine import check_is_engine, fetch_engine_info, fetch_tokenizer_folder, served_engine
from strands_rollout.play.options import slime_sampling_params
from strands_rollout.play.rows import json_line
from strands_rollout.samples import FinishedSample
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.drift import DriftMeter, DriftTotals, EpisodeDrift, SampledEpisode, totals_of
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer, vocab_size_of
from strands_rollout.tool_parsers import AUTO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class DumpedEpisode(SampledEpisode):
    """A dumped sample that has tokens and at least one turn of the policy."""

    number: int  # index in the dump, from 0
    record: DumpRecord


def read_episode(path: Path, number: int) -> DumpedEpisode:
    """Return the episode at index `number` of a dump, counted from 0.

    Raises:
        ConfigError: The dump has no sample at this index.
        DumpError: The dump can't be read or is empty, or the sample's tokens are missing or malformed.
    """
    count = 0
    for at, record in enumerate(read_dump(path)):
        count += 1
        if at == number:
            episode = to_episode(record, at)
            if episode is None:
                raise DumpError(
                    f"{record.where}: the sample has no tokens of the policy, so it can't be replayed; choose another "
                    "--sample"
                )
            return episode
    if not count:
        raise DumpError(f"{path} has no samples; expected at least one")
    raise ConfigError(f"got --sample {number}; {path} has {count} samples, counted from 0")


def to_episode(record: DumpRecord, number: int) -> DumpedEpisode | None:
    """Return the episode of a dump record; None if the record lacks the tokens, or has no turn.

    Turns come from the episode's facts. If these have no usable turns, each run of trained tokens is a turn.

    Raises:
        DumpError: The tokens are not ids, or `response_length` is negative or more than the number of tokens.
    """
    if not record.has_tokens:
        return None
    sample = record.to_sample()
    if not all(type(token) is int and token >= 0 for token in sample.tokens):
        raise DumpError(
            f"{record.where}: tokens contains values that are not token ids; expected integers of at least 0"
        )
    if not 0 <= sample.response_length <= len(sample.tokens):
        length, count = sample.response_length, len(sample.tokens)
        raise DumpError(f"{record.where}: got response_length {length}; expected 0 to {count}, the sample's tokens")
    turns = FinishedSample(sample, record.facts).turn_bounds
    if turns is None:
        # without a mask, slime trains all tokens of the response
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        turns, end = [], len(sample.tokens) - sample.response_length
        for is_trained, run in groupby(mask):
            start, end = end, end + len(list(run))
            turns += [(start, end)] if is_trained else []
    return DumpedEpisode(sample, record.facts, turns, number, record) if turns else None


def run_drift(
    dump: Path, tokenizer: Path | None, *, settings: RolloutSettings | None, show: int, as_json: bool
) -> bool:
    """Measure the drift of a dump's episodes and print a report.

    Returns:
        False if a context differs from the chat template's rendering; True if none does, or none could be compared.

    Raises:
        ConfigError: The tokenizer can't be loaded, or is not the policy's.
        DumpError: The dump can't be read, a sample's tokens are malformed, or no sample has tokens of the policy.
    """
    thinking = None if settings is None else settings.enable_thinking
    folder = tokenizer or recorded_tokenizer(dump)
    loaded = load_tokenizer_folder(folder)
    texts = TokenTexts(loaded)
    options = {} if thinking is None else {"enable_thinking": thinking}
    meter = DriftMeter(loaded, options, AUTO if settings is None else settings.tool_parser)
    measured = []
    with counter("episodes") as on_done:
        for number, record in enumerate(read_dump(dump)):
            if episode := to_episode(record, number):
                check_tokenizer(record, texts, str(folder))
                measured.append(meter.measure(episode, number))
                on_done(1)
    if not measured:
        raise DumpError(
            f"{dump} has no sample with tokens of the policy; to save the tokens, run eval with --save-tokens"
        )
    totals = totals_of(measured)
    if as_json:
        for line in (*map(asdict, measured), {**asdict(totals), "template_fault": meter.template_fault}):
            print(json_line(line).decode(), end="")
    else:
        worst = sorted(measured, key=lambda drift: (-drift.mismatched_tokens, -drift.off_policy, drift.number))
        console = make_console()
        lines = chain(_format_totals(totals, meter.template_fault), *map(_format_episode, worst[:show]))
        for text, style in lines:
            console.print(Text(text, style=style), soft_wrap=True)
        show_next("view", dump, *(["--tokenizer", tokenizer] if tokenizer else []))
    return not totals.mismatched_episodes


def _format_totals(totals: DriftTotals, template_fault: str | None) -> Iterator[tuple[str, str]]:
    yield f"{totals.episodes} episodes, {totals.sampled_tokens} sampled tokens", ""
    yield f"drift: in {totals.drifted_episodes} episodes ({totals.drifted_share:.1%})", ""
    yield f"  each turn encoded again:   {totals.turn_drift} tokens change", ""
    yield f"  the whole text encoded again: {totals.text_drift} tokens change", ""
    off_policy = f"{totals.off_policy} sampled tokens ({totals.off_policy_share:.1%})"
    yield f"  off-policy: {off_policy} at and after the first change in the whole text", ""
    kinds = ", ".join(f"{name} {count}" for name, count in totals.classes.items())
    yield textwrap.fill(f"  by kind: {kinds}", 80, subsequent_indent="    "), ""
    if totals.mismatched_episodes is None:
        yield f"context: not compared{f': {template_fault}' if template_fault else ''}", "yellow"
    elif totals.mismatched_episodes:
        differing = f"{totals.mismatched_tokens} tokens in {totals.mismatched_episodes} episodes"
        yield f"context: {differing} differ from the chat template's rendering", "bold red"
    else:
        yield "context: equals the chat template's rendering, token for token", "green"


def _format_episode(drift: EpisodeDrift) -> Iterator[tuple[str, str]]:
    if drift.first is None and not drift.mismatches:
        return
    changed = (
        f"{drift.turn_drift} change if each turn is encoded again, {drift.text_drift} if the whole text is; "
        f"{drift.off_policy} are off-policy"
    )
    yield f"\nsample {drift.number} (index {drift.index}): of {drift.sampled_tokens} tokens, {changed}", ""
    if first := drift.first:
        place = "in the context" if first.turn is None else f"in turn {first.turn}"
        change = f"{first.got} {first.got_texts} becomes {first.again} {first.again_texts}"
        yield f"  first change at token {first.position}, {place}, after {first.before!r}: {change}", ""
    for found in drift.mismatches or []:
        place = f"{found.tokens} tokens from token {found.position} on"
        yield f"  context differs: {place}: got {found.got!r}, expected {found.expected!r}", "red"


_SHOWN_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """A recorded turn, and the tokens that the engine samples now."""

    turn: int  # from 0
    start: int  # index of the turn's first token in the sample's tokens
    recorded: list[int]
    again: list[int]  # tokens that the engine samples now; at most as many as recorded
    same: int  # number of equal tokens at the beginning
    finish: str  # the engine's finish reason: "length" if it sampled as many tokens as recorded
    gaps: list[float]  # for each equal token, the logprob now minus the recorded logprob; empty if none were recorded

    @property
    def differs(self) -> bool:
        """True if the engine samples other tokens, or stops earlier."""
        return self.same < len(self.recorded)


async def replay(
    client: SGLangClient, episode: DumpedEpisode, params: Mapping[str, Json]
) -> AsyncIterator[ReplayedTurn]:
    """Yield each turn of an episode, sampled again.

    `params` are SGLang's sampling parameters; each turn derives its own seed from `sampling_seed`, as in an episode.
    """
    tokens = episode.tokens
    logprobs = _recorded_logprobs(episode)
    for turn, (start, end) in enumerate(episode.turns):
        own_params = {**params, "max_new_tokens": end - start}
        if own_params.get("sampling_seed") is not None:
            own_params = turn_params(own_params, turn)
        answer = await client.generate(tokens[:start], own_params)
        recorded, again = tokens[start:end], answer.output_ids
        shorter = min(len(recorded), len(again))
        same = next((at for at in range(shorter) if recorded[at] != again[at]), shorter)
        gaps = [now - then for now, then in zip(answer.logprobs[:same], logprobs[start:end], strict=False)]
        yield ReplayedTurn(turn, start, recorded, again, same, answer.finish_reason.type, gaps)


async def recorded_gaps(
    http: httpx.AsyncClient, episode: DumpedEpisode, *, vocab_size: int | None
) -> list[float] | None:
    """Return for each sampled token the engine's logprob at temperature 1 minus the recorded logprob.

    Uses SGLang's `logprob_start_len`: the engine reads the whole episode and returns the logprob of each input token
    (`meta_info.input_token_logprobs`, sglang/srt/managers/tokenizer_manager.py). Returns None if no logprobs were
    recorded, or if no token precedes the first sampled token. Also returns None if the engine refuses the request or
    returns no logprobs. The embedded engine refuses the request. Ids must be below `vocab_size`; None skips this check.

    Raises:
        TrajectoryError: An id is outside the vocabulary; nothing was sent.
        EngineUnavailableError: The engine does not answer.
        EngineResponseError: The answer is malformed, or does not belong to these tokens.
    """
    tokens, logprobs = episode.tokens, _recorded_logprobs(episode)
    sampled = [at for start, end in episode.turns for at in range(start, end)]
    if not logprobs or sampled[0] == 0:
        return None
    fields = {
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": sampled[0] - 1,
    }
    body = EncodedIds(tokens, vocab_size=vocab_size).to_json(b'{"input_ids":', b"," + orjson.dumps(fields)[1:])
    try:
        response = await http.post("/generate", content=body, headers=JSON_HEADERS)
    except CONNECTION_ERRORS as e:
        raise EngineUnavailableError(f"no answer to a request for logprobs: {e}") from e
    if response.status_code != httpx.codes.OK:
        return None
    now = _input_logprobs(load_json(response.content), tokens, vocab_size)
    return None if now is None else [now[at] - logprobs[at] for at in sampled]


def _input_logprobs(answer: Json, tokens: Sequence[int], vocab_size: int | None) -> dict[int, float] | None:
    """Return the logprobs of input tokens in the engine's answer, by the token's position; None if there are none.

    SGLang 0.5.23 reports the last id of the vocabulary as the id 0, but with the right logprob
    (sglang/srt/managers/scheduler_components/logprob_result_processor.py).

    Raises:
        EngineResponseError: The answer's entries are malformed, or do not belong to the tokens.
    """
    try:
        entries = [(entry[0], entry[1]) for entry in answer["meta_info"].get("input_token_logprobs") or ()]
    except (TypeError, IndexError, KeyError, AttributeError) as e:
        raise EngineResponseError(
            f"got the answer {answer!r:.200}; expected meta_info.input_token_logprobs, a list of [logprob, token id, "
            "text]; check that base_url is the URL of an SGLang server"
        ) from e
    first = len(tokens) - len(entries)
    last_id = None if vocab_size is None else vocab_size - 1
    pairs = zip(entries, tokens[max(first, 0) :], strict=False)
    if first < 0 or any(reported not in (token, 0 if token == last_id else token) for (_, reported), token in pairs):
        raise EngineResponseError(
            f"got {len(entries)} input logprobs that do not belong to the {len(tokens)} tokens sent; check that no "
            "proxy or cache in front of the engine mixes up answers"
        )
    return {first + at: logprob for at, (logprob, _) in enumerate(entries) if logprob is not None} or None


def _recorded_logprobs(episode: DumpedEpisode) -> list[float]:
    """Return one logprob per token, 0 for tokens of the prompt; empty if none were recorded, or all are 0."""
    recorded = episode.sample.rollout_log_probs
    if not recorded or not any(recorded):  # a sample that is excluded from training has zeros
        return []
    return [0.0] * (len(episode.sample.tokens) - len(recorded)) + list(recorded)


async def run_replay(
    dump: Path,
    *,
    sample: int = 0,
    base_url: str | None = None,
    model_dir: Path | None = None,
    tokenizer_dir: Path | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    as_json: bool = False,
) -> bool:
    """Replay an episode and print the result; return whether the engine samples every turn as recorded."""
    episode = read_episode(dump, sample)
    if episode.sample.multimodal_train_inputs is not None:
        raise DumpError(
            f"{episode.record.where} has images, which replay does not send; choose a sample without images"
        )
    params = _replay_params(episode, temperature, seed)
    async with served_engine(base_url, model_dir) as url:
        check_is_engine(await fetch_engine_info(url), url)
        recorded = episode.record.tokenizer and episode.record.tokenizer.folder
        folder = tokenizer_dir or recorded or await fetch_tokenizer_folder(url)
        tokenizer = load_tokenizer(str(folder))
        check_tokenizer(episode.record, TokenTexts(tokenizer), str(folder))
        vocab_size = vocab_size_of(SimpleNamespace(hf_checkpoint=str(folder))) or len(tokenizer)
        async with create_client(url) as http:
            turns = [turn async for turn in replay(SGLangClient(http, vocab_size=vocab_size), episode, params)]
            gaps = await recorded_gaps(http, episode, vocab_size=vocab_size)
    report = {
        "number": episode.number,
        "index": episode.sample.index,
        "temperature": params["temperature"],
        "seed": params.get("sampling_seed"),
        "same": not any(turn.differs for turn in turns),
        "turns": [_turn_report(turn, episode, tokenizer) for turn in turns],
        "recorded_tokens": _summarize_gaps(gaps),
    }
    if as_json:
        print(json_line(report).decode(), end="")
    else:
        if not _is_deterministic(_recorded_params(episode)):
            note = (
                "note: the episode was sampled without a seed, or its parameters were not recorded, so turns may "
                "differ by chance; compare the logprobs instead"
            )
            make_console(stderr=True).print(note, soft_wrap=True)
        _print_report(make_console(), report)
        show_next("view", dump, "--text", "--sample", sample)
    return bool(report["same"])


def _replay_params(episode: DumpedEpisode, temperature: float | None, seed: int | None) -> dict[str, Json]:
    own = _recorded_params(episode)
    if _is_deterministic(own) and temperature is None and seed is None:
        return {**slime_sampling_params(1.0, 1), **own}
    if temperature is None:
        temperature = 0.0 if seed is None else 1.0
    return slime_sampling_params(temperature, 1) | ({} if seed is None else {"sampling_seed": seed})


def _recorded_params(episode: DumpedEpisode) -> Mapping[str, Json]:
    return episode.facts.sampling_params or {}


def _is_deterministic(params: Mapping[str, Json]) -> bool:
    """Return whether these parameters determine the sampled tokens on an engine that uses seeds."""
    return params.get("sampling_seed") is not None or params.get("temperature") == 0


def _turn_report(turn: ReplayedTurn, episode: DumpedEpisode, tokenizer: PreTrainedTokenizerBase) -> dict[str, Json]:
    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    departure = None
    if turn.differs:
        at = turn.start + turn.same
        recorded, again = (ids[turn.same : turn.same + _SHOWN_TOKENS] for ids in (turn.recorded, turn.again))
        departure = {
            "token": turn.same,
            "position": at,
            "before": text(episode.tokens[max(0, at - _SHOWN_TOKENS) : at]),
            "recorded": {"ids": recorded, "text": text(recorded)},
            "again": {"ids": again, "text": text(again), "finish": turn.finish},
        }
    facts = {"turn": turn.turn, "tokens": len(turn.recorded), "same_tokens": turn.same}
    return {**facts, "logprobs": _summarize_gaps(turn.gaps), "departure": departure}


def _summarize_gaps(gaps: Sequence[float] | None) -> dict[str, float] | None:
    if not gaps:
        return None
    sizes = [abs(gap) for gap in gaps]
    return {"tokens": len(sizes), "largest_gap": max(sizes), "mean_gap": sum(sizes) / len(sizes)}


def _print_report(console: Console, report: dict[str, Json]) -> None:
    for turn in report["turns"]:
        gaps, departure = turn["logprobs"], turn["departure"]
        logprobs = "" if gaps is None else f"; logprobs differ by {gaps['largest_gap']:.2g} at most"
        line = f"turn {turn['turn']}: {turn['same_tokens']} of {turn['tokens']} tokens are the same{logprobs}"
        console.print(Text(line, style="green" if departure is None else "red"), soft_wrap=True)
        if departure is not None:
            then, now = departure["recorded"], departure["again"]
            ends = f"{now['ids']} {now['text']!r}" if now["ids"] else f"the end ({now['finish']})"
            lines = (
                f"  differs at token {departure['token']} of the turn ({departure['position']} of the sample), after "
                f"{departure['before']!r}:\n  recorded {then['ids']} {then['text']!r}\n  now      {ends}"
            )
            console.print(Text(lines), soft_wrap=True)
    recorded = report["recorded_tokens"]
    if recorded is None:
        line = "recorded tokens: not compared; this engine returns no logprobs of its input, or none were recorded"
    else:
        gaps = f"{recorded['largest_gap']:.2g} at most, {recorded['mean_gap']:.2g} on average"
        line = f"recorded tokens: the engine's logprobs differ from the recorded logprobs by {gaps}"
    console.print(Text(line), soft_wrap=True)
