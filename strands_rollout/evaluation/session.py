"""One session of a run: plays the samples that have no score yet, and keeps each result as it comes.

Knows the player, the file and the progress bar; nothing of what results amount to.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.evaluation.episodes import Episodes
from strands_rollout.evaluation.plan import EvalSet, SampleKey
from strands_rollout.evaluation.results_file import ResultsFile, SampleResult
from strands_rollout.evaluation.workers import run_samples

_MOST_ERRORS: Final = 5


@dataclass(slots=True)
class Session:
    """A session under way.

    Attributes:
        sets: What is asked.
        file: Where results go.
        results: The last result of each sample, earlier sessions' included.
        played: Samples of this session.
        sampled_tokens: Of these.
        seconds: That they took together.
        stopped: Why it ended before all were run; None if it did not.
    """

    sets: Sequence[EvalSet]
    file: ResultsFile
    results: dict[SampleKey, SampleResult]
    played: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    stopped: str | None = None

    @classmethod
    def begin(cls, sets: Sequence[EvalSet], file: ResultsFile, on_note: Callable[[str], None]) -> Session:
        """Go on with what the file holds.

        Raises:
            ConfigError: A line of it is not a result of this run.
        """
        if file.dropped_bytes:
            on_note(f"{file.path}: dropped {file.dropped_bytes} bytes of a half-written last line")
        planned = {key for chosen in sets for key in chosen.sample_keys()}
        session = cls(sets, file, {result.key: result for result in file.results(planned)})
        if session.results:
            done = len(session.scored)
            failed = len(session.results) - done
            on_note(f"{done} samples are there already" + (f"; {failed} that failed are tried again" if failed else ""))
        return session

    @property
    def scored(self) -> list[SampleResult]:
        """The results that count."""
        return [result for result in self.results.values() if result.is_scored]

    @property
    def left(self) -> list[SampleKey]:
        """The samples without a score, in order."""
        scored = {result.key for result in self.scored}
        return [key for chosen in self.sets for key in chosen.sample_keys() if key not in scored]

    async def play(self, episodes: Episodes, tell: Callable[[bool | None], None], *, concurrency: int) -> None:
        """Run what is left.

        Args:
            episodes: Plays a sample.
            tell: Told of each whether it is right, None where it has no score.
            concurrency: Episodes at once.

        Raises:
            RolloutError: A result can't be written.
        """

        async def run(key: SampleKey) -> SampleResult:
            result = self.file.append(await episodes.line(key))
            self.results[key] = result
            self.played += 1
            self.sampled_tokens += result.sampled_tokens
            tell(result.is_right if result.is_scored else None)
            return result

        started = time.monotonic()
        self.stopped = await run_samples(self.left, run, concurrency=concurrency)
        self.seconds = time.monotonic() - started

    def errors(self) -> list[str]:
        """The most frequent errors of failed samples, with their numbers."""
        failed = Counter(result.error or result.stop_reason for result in self.results.values() if not result.is_scored)
        return [f"{count} failed: {error}" for error, count in failed.most_common(_MOST_ERRORS)]

    def record(self) -> dict[str, Any]:
        """What depends on the clock, or on where the run was cut; not part of what a run amounts to."""
        lasted = [result.seconds for result in self.scored]
        return {
            "stopped": self.stopped,
            "seconds": round(self.seconds, 3),
            "samples": self.played,
            "samples_per_s": round(self.played / self.seconds, 3) if self.seconds else None,
            "sampled_tokens_per_s": round(self.sampled_tokens / self.seconds, 1) if self.seconds else None,
            "mean_episode_s": round(sum(lasted) / len(lasted), 3) if lasted else None,
            "longest_episode_s": round(max(lasted), 3) if lasted else None,
        }
