"""What an evaluation asks: problems, how often and how each is sampled, and the seed of each sample.

Knows slime's sampling parameters; nothing of engines and files of results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strands_rollout.config import RolloutSettings
from strands_rollout.dataset_rows import Row, load_rows
from strands_rollout.errors import ConfigError, PromptError
from strands_rollout.evaluate import slime_sampling_params
from strands_rollout.grading import label_texts
from strands_rollout.prompt_messages import to_episode_prompt
from strands_rollout.row_settings import with_row_settings


@dataclass(frozen=True, slots=True, order=True)
class SampleKey:
    """Which sample of an evaluation.

    Attributes:
        data_set: Its data set's name.
        problem: The problem's place among those that are asked, from 0.
        number: Which of the problem's samples, from 0.
    """

    data_set: str
    problem: int
    number: int

    def seed(self, seed: int) -> int:
        """The sampling seed, from 0 to 2^31 - 1, of this sample in a run with a seed, whatever else is asked."""
        text = f"{seed}:{self.data_set}:{self.problem}:{self.number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 33


@dataclass(frozen=True, slots=True)
class Sampling:
    """How problems are sampled; the defaults are those of slime's evaluation where its arguments are left alone.

    Attributes:
        samples: Of each problem.
        max_new_tokens: Budget of a whole response, tool results included.
        temperature: 0 for greedy.
        top_p: Share of the probability that is kept.
        top_k: Tokens that are kept; -1 for all.
        further: More parameters by SGLang's names; they go before the others.
    """

    samples: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, Any]:
        """What slime hands to `generate` in an evaluation (slime/rollout/sglang_rollout.py)."""
        return {
            **slime_sampling_params(self.temperature, self.max_new_tokens),
            "top_p": self.top_p,
            "top_k": self.top_k,
            **self.further,
        }


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of problems, and which of them are asked.

    Attributes:
        name: Of the data set, in results and reports.
        path: A JSONL file.
        start: The first row, as in a Python slice; None for the file's first.
        stop: The row to stop before, as in a Python slice; None for the file's end.
        prompt_key: Where a row has its prompt.
        label_key: Where a row has its label.
    """

    name: str
    path: Path
    start: int | None = None
    stop: int | None = None
    prompt_key: str = "prompt"
    label_key: str = "label"


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A data set that is evaluated.

    Attributes:
        file: Where it is from.
        rows: The problems that are asked.
        sha256: Of the file's bytes.
        sampling: How each is sampled.
        template_kwargs: Handed to the chat template.
    """

    file: DataFile
    rows: Sequence[Row]
    sha256: str
    sampling: Sampling
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        file: DataFile,
        sampling: Sampling,
        *,
        limit: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> EvalSet:
        """Read a file.

        Args:
            file: Which.
            sampling: How its problems are sampled.
            limit: Problems at most; None for all.
            template_kwargs: Handed to the chat template.

        Raises:
            PromptError: It can't be read, or a row that is asked has no prompt that can be answered, or no label that
                an answer can equal.
            ConfigError: No row is chosen.
        """
        rows = load_rows(file.path, prompt_key=file.prompt_key, label_key=file.label_key)
        chosen = rows[file.start : file.stop][:limit]
        if not chosen:
            raise ConfigError(
                f"got rows [{file.start}:{file.stop}] of {file.path}, which has {len(rows)}; expected one or more"
            )
        for row in chosen:
            _check_row(row, f"{file.path}:{row.line}")
        digest = hashlib.sha256(file.path.read_bytes()).hexdigest()
        return cls(file, chosen, digest, sampling, template_kwargs or {})

    @property
    def name(self) -> str:
        """Of the data set, in results and reports."""
        return self.file.name

    @property
    def identity(self) -> dict[str, Any]:
        """What the results depend on, as JSON."""
        return {
            "file": self.file.path.resolve().name,
            "sha256": self.sha256,
            "rows": [self.file.start, self.file.stop],
            "problems": len(self.rows),
            "prompt_key": self.file.prompt_key,
            "label_key": self.file.label_key,
            "samples_per_problem": self.sampling.samples,
            "sampling_params": self.sampling.params,
            "chat_template_kwargs": dict(self.template_kwargs),
        }

    def check_settings(self, settings: RolloutSettings) -> None:
        """See whether each row's own settings fit those of the run.

        Raises:
            ConfigError: A row's don't; the message names its line.
        """
        for row in self.rows:
            try:
                with_row_settings(settings, row.metadata)
            except ConfigError as e:
                raise ConfigError(f"{self.file.path}:{row.line}: {e}") from e

    def sample_keys(self) -> Iterator[SampleKey]:
        """All its samples; those of a problem follow each other, so that an engine's prefix cache serves them."""
        for problem in range(len(self.rows)):
            for number in range(self.sampling.samples):
                yield SampleKey(self.name, problem, number)


def _check_row(row: Row, where: str) -> None:
    try:
        # the run's own template, which the last of these checks needs, is not there yet
        to_episode_prompt(row.prompt, None, None)
    except PromptError as e:
        raise PromptError(f"{where}: {e}") from e
    if isinstance(row.label, Mapping) or not any(text.strip() for text in label_texts(row.label)):
        raise PromptError(f"{where}: got the label {row.label!r:.80}, which no answer equals; expected text or numbers")
