"""`drift`: what episodes of a dump would have lost, had their text been encoded again; and how episodes are read."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Final

from rich.text import Text

from strands_rollout.diagnostics.template_check import load_tokenizer_folder
from strands_rollout.dump import DumpRecord, TokenTexts, read_dump
from strands_rollout.dump.terminal import make_console
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.evaluation.display import counter
from strands_rollout.evaluation.rows import json_line
from strands_rollout.samples import FinishedSample
from strands_rollout.settings import read_config_file
from strands_rollout.slime_plugin.retokenisation import DriftMeter, DriftTotals, EpisodeDrift, SampledEpisode, totals_of
from strands_rollout.tool_parsers import AUTO

_MOST_UNKNOWN: Final = 0.1


@dataclass(frozen=True, slots=True)
class SavedEpisode(SampledEpisode):
    """One sample of a dump that has tokens and a policy's turn among them."""

    number: int  # its place in the dump, from 0
    where: str  # file and line, for people
    token_texts: Mapping[int, bytes]  # of token ids, as far as the dump holds them


def nth_episode(path: Path, number: int) -> SavedEpisode:
    """The episode at a place of a dump, from 0."""
    count = 0
    for at, record in enumerate(read_dump(path)):
        count += 1
        if at == number:
            episode = episode_of(record, at)
            if episode is None:
                raise DumpError(f"{record.where}: the policy's tokens are not in it; expected a sample with tokens")
            return episode
    if not count:
        raise DumpError(f"{path} holds no sample; expected one or more")
    raise DumpError(f"{path} has {count} samples; got sample {number}, expected one of 0 to {count - 1}")


def episode_of(record: DumpRecord, number: int) -> SavedEpisode | None:
    """The episode of a record; None where nothing was sampled, or its tokens were not kept.

    Turns are read from the episode's facts; of a foreign sample each run of trained tokens is one.
    """
    if not record.has_tokens:
        return None
    sample = record.to_sample()
    if not all(type(token) is int and token >= 0 for token in sample.tokens):
        raise DumpError(f"{record.where}: tokens holds something else than token ids; expected integers from 0")
    if not 0 <= sample.response_length <= len(sample.tokens):
        lengths = f"response_length {sample.response_length} of {len(sample.tokens)} tokens"
        raise DumpError(f"{record.where}: got {lengths}; expected no more than there are")
    turns = FinishedSample(sample, record.facts).turn_bounds
    if turns is None:
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask  # None: all, in slime
        turns, end = [], len(sample.tokens) - sample.response_length
        for is_trained, run in groupby(mask):
            start, end = end, end + len(list(run))
            turns += [(start, end)] if is_trained else []
    return SavedEpisode(sample, record.facts, turns, number, record.where, record.token_texts) if turns else None


def check_tokenizer(episode: SavedEpisode, texts: TokenTexts, name: str) -> None:
    """Refuse a named tokenizer that lacks the episode's ids, or has other texts for them than the dump."""
    ids = set(episode.tokens)
    unknown = sorted(token for token in ids if token not in texts)
    if len(unknown) > len(ids) * _MOST_UNKNOWN:  # a policy may sample some of the ids that only pad its vocabulary
        raise ConfigError(
            f"{episode.where} has {len(unknown)} ids of {len(ids)} that {name} does not know, such as {unknown[-1]}; "
            "name the tokenizer of the policy that wrote it"
        )
    for token, text in episode.token_texts.items():
        if texts.get(token, text) != text:
            raise ConfigError(
                f"{episode.where} has the token {token} for {text!r}, which is {texts[token]!r} in {name}; name the "
                "tokenizer of the policy that wrote it"
            )


def run_drift(dump: Path, tokenizer: Path, *, config: Path | None, show: int, as_json: bool) -> bool:
    """Measure the episodes of a dump and print the report; whether all context is what the template renders."""
    settings = None if config is None else read_config_file(config)
    thinking = None if settings is None else settings.enable_thinking
    loaded = load_tokenizer_folder(tokenizer)
    texts = TokenTexts(loaded)
    options = {} if thinking is None else {"enable_thinking": thinking}
    meter = DriftMeter(loaded, options, AUTO if settings is None else settings.tool_parser)
    measured = []
    with counter("episodes") as on_done:
        for number, record in enumerate(read_dump(dump)):
            if episode := episode_of(record, number):
                check_tokenizer(episode, texts, str(tokenizer))
                measured.append(meter.measure(episode, number))
                on_done(1)
    if not measured:
        raise DumpError(
            f"{dump} has no whole sample with the policy's tokens; results of eval have them with --save-tokens"
        )
    totals = totals_of(measured)
    if as_json:
        for line in (*map(asdict, measured), {**asdict(totals), "template_fault": meter.template_fault}):
            print(json_line(line).decode(), end="")
    else:
        worst = sorted(measured, key=lambda drift: (-drift.mismatched_tokens, -drift.off_policy, drift.number))
        console = make_console()
        for words, style in (*_totals(totals, meter.template_fault), *chain(*map(_episode, worst[:show]))):
            console.print(Text(words, style=style), soft_wrap=True)
    return not totals.mismatched_episodes


def _totals(totals: DriftTotals, template_fault: str | None) -> Iterator[tuple[str, str]]:
    """Lines about all episodes, each with its style."""
    yield f"{totals.episodes} episodes, {totals.sampled_tokens} sampled tokens", ""
    yield f"drift: in {totals.drifted_episodes} episodes ({totals.drifted_share:.1%})", ""
    yield f"  each turn encoded again:   {totals.turn_drift} tokens change", ""
    yield f"  the whole text encoded again: {totals.text_drift} tokens change", ""
    off_policy = f"{totals.off_policy} sampled tokens ({totals.off_policy_share:.1%})"
    yield f"  off-policy then: {off_policy} come after the first change", ""
    yield f"  by kind: {', '.join(f'{name} {count}' for name, count in totals.classes.items())}", ""
    if totals.mismatched_episodes is None:
        yield f"context: not compared{f': {template_fault}' if template_fault else ''}", "yellow"
    elif totals.mismatched_episodes:
        differing = f"{totals.mismatched_tokens} tokens in {totals.mismatched_episodes} episodes"
        yield f"context: {differing} are not what the chat template renders", "bold red"
    else:
        yield "context: what the chat template renders, token for token", "green"


def _episode(drift: EpisodeDrift) -> Iterator[tuple[str, str]]:
    """Lines about one episode with drift or mismatches, each with its style."""
    if drift.first is None and not drift.mismatches:
        return
    changed = f"{drift.turn_drift} turn by turn, {drift.text_drift} in the whole text, {drift.off_policy} off-policy"
    yield f"\nsample {drift.number} (index {drift.index}): of {drift.sampled_tokens} tokens {changed}", ""
    if first := drift.first:
        place = "in what the policy read" if first.turn is None else f"in turn {first.turn}"
        change = f"{first.got} {first.got_texts} becomes {first.again} {first.again_texts}"
        yield f"  first change at token {first.position}, {place}, after {first.before!r}: {change}", ""
    for found in drift.mismatches or []:
        place = f"{found.tokens} tokens from token {found.position} on"
        yield f"  context differs: {place}: got {found.got!r}, expected {found.expected!r}", "red"
