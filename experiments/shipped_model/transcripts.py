"""Transcripts of recorded conversations: read from JSON lines, and tokenized with a tokenizer of one's own."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.shipped_model.conversation import TokenizedEpisode
from strands_rollout.template.tokens import TokenEncoder


@dataclass(frozen=True, slots=True)
class Transcript:
    """One conversation.

    Attributes:
        pieces: Its text with all control tokens, in order, and for each piece whether the model sampled it.
    """

    pieces: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """The whole conversation."""
        return "".join(text for text, _ in self.pieces)


def read_transcripts(path: Path) -> list[Transcript]:
    """One transcript for each line: `{"pieces": [[text, was it sampled], ...]}`.

    Raises:
        ValueError: A line is no such object, or nothing in it was sampled; the message names the line.
    """
    transcripts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            pieces = tuple((str(text), bool(is_sampled)) for text, is_sampled in json.loads(line)["pieces"])
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(
                f'{path} line {number} is {line!r:.80}; expected {{"pieces": [[text, was it sampled], ...]}}'
            ) from e
        if not any(is_sampled for _, is_sampled in pieces):
            raise ValueError(f"nothing in {path} line {number} was sampled; expected something to learn")
        transcripts.append(Transcript(pieces))
    return transcripts


def tokenized(transcript: Transcript, encoder: TokenEncoder) -> TokenizedEpisode:
    """Its ids, piece by piece, and as learned what was sampled."""
    pieces = [(encoder.encode_trusted(text), is_sampled) for text, is_sampled in transcript.pieces]
    return TokenizedEpisode(
        token_ids=tuple(token_id for ids, _ in pieces for token_id in ids),
        is_learned=tuple(is_sampled for ids, is_sampled in pieces for _ in ids),
    )


def transcripts_sha256(transcripts: Sequence[Transcript]) -> str:
    """Of all texts; ties a model to what it was trained on."""
    return hashlib.sha256("\0".join(transcript.text for transcript in transcripts).encode()).hexdigest()
