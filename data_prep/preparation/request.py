"""The settings of one preparation.

Knows what was asked for; must not know how it is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import httpx
from pydantic import BaseModel, ConfigDict

from strands_rollout.sglang_connection import redacted

HUB: Final = "https://huggingface.co"
# a problem that says more than 13 words of another one, in a row, was taken from it or from its source
NGRAM_WORDS: Final = 13


class Request(BaseModel):
    """What to prepare, and where to.

    Attributes:
        dataset: Repository of the hub; with `path` only a name.
        config: Configuration of the repository; None for its only or default one.
        split: Split to read; of no meaning where `path` is a single file.
        revision: Branch, tag or commit.
        path: File or folder to read instead of the hub.
        endpoint: The hub, or its mirror.
        prompt_column: Column of the prompt; None to find it. A dot leads into a struct.
        label_column: Column of the label, likewise.
        instruction: What becomes of the data set's own answer instruction.
        keep_duplicates: Whether repeated rows stay.
        allow_rejected: Whether any number of rows may be left out.
        drop_contaminated: Whether rows that share words with an evaluation problem are left out.
        ngram_words: How many words in a row they share.
        limit: Rows to write at most.
        against: Evaluation files to compare with.
        out: File to write.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str = "main"
    path: Path | None = None
    endpoint: str = HUB
    prompt_column: str | None = None
    label_column: str | None = None
    instruction: Literal["remove", "keep"] = "remove"
    keep_duplicates: bool = False
    allow_rejected: bool = False
    drop_contaminated: bool = False
    ngram_words: int = NGRAM_WORDS
    limit: int | None = None
    against: tuple[Path, ...] = ()
    out: Path

    @property
    def rejected_file(self) -> Path:
        """Where rows go that can't be used."""
        return self.out.with_name(f"{self.out.name}.rejected.jsonl")

    @property
    def manifest_file(self) -> Path:
        """Where the manifest goes."""
        return self.out.with_name(f"{self.out.name}.manifest.json")

    @property
    def shown_endpoint(self) -> str:
        """The hub or its mirror as people and manifests see it: without user, password and query."""
        return redacted(httpx.URL(self.endpoint))

    def arguments(self) -> dict[str, Any]:
        """The settings that decide the file's content, as JSON values; `manifest` adds those of the other files."""
        endpoint = self.shown_endpoint if self.path is None else None
        return {**self.model_dump(mode="json", exclude={"out", "against"}), "endpoint": endpoint}
