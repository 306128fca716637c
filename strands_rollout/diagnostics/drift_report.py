"""Episodes of a dump: each with its place there.

Knows dumps and samples; nothing of tokenizers and engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from strands_rollout.dump import DumpRecord, TokenTexts, read_dump
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.finished_sample import FinishedSample
from strands_rollout.retokenisation.sampled_episode import SampledEpisode

_MOST_UNKNOWN: Final = 0.1


@dataclass(frozen=True, slots=True)
class SavedEpisode(SampledEpisode):
    """One sample of a dump that has tokens and a policy's turn among them.

    Attributes:
        number: Its place in the dump, from 0.
        where: File and line, for people.
        token_texts: Bytes of token ids, as far as the dump holds them.
    """

    number: int
    where: str
    token_texts: Mapping[int, bytes]

    @property
    def name(self) -> dict[str, Any]:
        """How a report names it: its place in the dump, and the sample's own index."""
        return {"number": self.number, "index": self.sample.index}


def read_episodes(path: Path) -> Iterator[SavedEpisode]:
    """The episodes of a dump, one at a time; samples in which nothing was sampled are left out.

    Raises:
        DumpError: See `read_dump`.
    """
    for number, record in enumerate(read_dump(path)):
        episode = episode_of(record, number)
        if episode is not None:
            yield episode


def nth_episode(path: Path, number: int) -> SavedEpisode:
    """The episode at a place of a dump, from 0.

    Raises:
        DumpError: There is none, or it has no tokens.
    """
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

    Raises:
        DumpError: Its tokens are no token ids, or fewer than its response has.
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
        turns = _runs(mask, len(sample.tokens) - sample.response_length)
    return SavedEpisode(sample, record.facts, turns, number, record.where, record.token_texts) if turns else None


def check_tokenizer(episode: SavedEpisode, texts: TokenTexts, name: str) -> None:
    """See whether the tokens can be of a tokenizer: ids that it has, with the texts that the dump tells.

    Args:
        episode: As it was saved.
        texts: Of the tokenizer.
        name: Of the tokenizer, for the message.

    Raises:
        ConfigError: They can't.
    """
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


def _runs(mask: Sequence[int], start: int) -> list[tuple[int, int]]:
    """Where the runs of 1 in a response's mask begin and end in all tokens."""
    found, at = [], start
    for is_trained, run in groupby(mask):
        end = at + len(list(run))
        found += [(at, end)] if is_trained else []
        at = end
    return found
