"""Find rows of a prepared file that share words with evaluation problems.

A row is contaminated by an evaluation problem if both contain the same run of `ngram_words` words, or if both consist
of the same words; a problem with fewer words than a run can match only as a whole. Words are sequences of letters and
digits, so that LaTeX and plain notation compare alike; case is ignored. Runs shared by many different rows are
stock phrases ("where m and n are relatively prime positive integers, find m + n"). They don't count, unless a row has
at least half of a problem's runs: a problem that was copied many times is not a stock phrase.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from preparation.files import sha256_of
from preparation.instruction import without_instruction
from preparation.rows import PreparationError, RowError, to_chat

STOCK_PHRASE_ROWS: Final = 10
"""A run shared by more than this number of different rows is a stock phrase."""

COPY_SHARE: Final = 0.5
"""A row with at least this share of a problem's runs counts, even if these runs are stock phrases."""

_WORD: Final = re.compile(r"[^\W_]+")
_EXAMPLES: Final = 3
_EXAMPLE_CHARS: Final = 240


@dataclass(frozen=True, slots=True)
class Overlap:
    """A contaminated row.

    Attributes:
        line: The row's line in the file, from 0.
        row: The problem of the row.
        problem: The evaluation problem.
        words: The first run of words that both contain, or all words if both consist of the same words.
    """

    line: int
    row: str
    problem: str
    words: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The overlap of an evaluation file with the rows of a prepared file.

    Attributes:
        path: The evaluation file.
        problems: The number of different problems in the evaluation file.
        problems_short: The number of problems with fewer words than a run. They are compared only as a whole.
        problems_stock: The number of problems that consist of stock phrases only.
        stock_phrases: The number of shared runs that are stock phrases.
        overlaps: The contaminated rows, by line.
    """

    path: Path
    problems: int
    problems_short: int
    problems_stock: int
    stock_phrases: int
    overlaps: tuple[Overlap, ...]

    def facts(self) -> dict[str, Any]:
        """Return the manifest's entry: the evaluation file and its checksum, counts, and the first examples."""
        return {
            "file": str(self.path),
            "sha256": sha256_of(self.path),
            "problems": self.problems,
            "problems_found": len({overlap.problem for overlap in self.overlaps}),
            "problems_short": self.problems_short,
            "problems_stock": self.problems_stock,
            "rows": len(self.overlaps),
            "stock_phrases": self.stock_phrases,
            "examples": [
                {
                    "line": overlap.line + 1,
                    "row": _shorten(overlap.row),
                    "problem": _shorten(overlap.problem),
                    "words": _shorten(overlap.words),
                }
                for overlap in self.overlaps[:_EXAMPLES]
            ],
        }


def find_contamination(problems: Iterable[str], against: Sequence[Path], ngram_words: int) -> tuple[Finding, ...]:
    """Return a finding for each evaluation file: the rows whose problem shares words with one of its problems.

    Reads the rows once.

    Raises:
        PreparationError: An evaluation file can't be read, has a line without a prompt, or has no problem.
    """
    searches = [_Search(path, ngram_words) for path in against]
    for line, problem in enumerate(problems):
        words = words_of(problem)
        for search in searches:
            search.add_row(line, problem, words)
    return tuple(search.finding() for search in searches)


def problems_in(path: Path) -> Iterator[str]:
    """Yield the problem of each line of a prepared file; "" for a blank line.

    Raises:
        PreparationError: The file can't be read, or a line has no prompt.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield _read_problem(line, f"{path}:{number}") if line.strip() else ""
    except OSError as e:
        raise PreparationError(f"can't read {path}: {e.strerror}") from e


def _read_problem(line: bytes, where: str) -> str:
    try:
        return str(to_chat(orjson.loads(line)["prompt"])[-1]["content"])
    except (orjson.JSONDecodeError, TypeError, KeyError, RowError) as e:
        raise PreparationError(
            f'{where}: got {line[:80]!r}; expected a prepared row, {{"prompt": [...], "label": "..."}}'
        ) from e


def words_of(problem: str) -> list[str]:
    """Return the words of a problem in order, case-folded and without the data set's answer instruction."""
    return _WORD.findall(unicodedata.normalize("NFKC", without_instruction(problem)[0]).casefold())


class _Search:
    """Collection of the rows that share a run of words with an evaluation file.

    Problems and runs are identified by their words, joined with spaces.
    """

    def __init__(self, path: Path, ngram_words: int) -> None:
        self._path = path
        self._ngram_words = ngram_words
        self._problems: dict[str, str] = {}  # the problems as written, by their words
        self._runs: dict[str, list[str]] = {}  # for each run, the words of the problems that contain it
        self._run_counts: Counter[str] = Counter()  # number of different runs of each problem, by its words
        self._candidates: list[tuple[int, str, str, list[str]]] = []  # line, problem and words of a row; shared runs
        self._rows_by_run: Counter[str] = Counter()  # number of different rows that contain each run
        self._seen: set[int] = set()  # hashes of the words of rows that `_rows_by_run` counts
        for problem in problems_in(path):
            words = words_of(problem)
            joined_words = " ".join(words)
            if not words or joined_words in self._problems:
                continue
            self._problems[joined_words] = problem
            for run in self._runs_of(words):
                self._runs.setdefault(run, []).append(joined_words)
                self._run_counts[joined_words] += 1
        if not self._problems:
            raise PreparationError(f"{path} has no problem to compare with; prepare this file again, or name another")

    def add_row(self, line: int, problem: str, words: list[str]) -> None:
        joined_words = " ".join(words)
        common = [run for run in self._runs_of(words) if run in self._runs]
        if not common and joined_words not in self._problems:
            return
        self._candidates.append((line, problem, joined_words, common))
        if hash(joined_words) not in self._seen:
            self._seen.add(hash(joined_words))
            self._rows_by_run.update(common)

    def finding(self) -> Finding:
        overlaps = []
        for line, problem, joined_words, common in self._candidates:
            match = (joined_words, joined_words) if joined_words in self._problems else self._match(common)
            if match:
                overlaps.append(Overlap(line, problem, self._problems[match[0]], match[1]))
        stock = {run for run in self._rows_by_run if self._is_stock(run)}
        stock_counts = Counter(joined_words for run in stock for joined_words in self._runs[run])
        return Finding(
            path=self._path,
            problems=len(self._problems),
            problems_short=len(self._problems) - len(self._run_counts),
            problems_stock=sum(stock_counts[key] == count for key, count in self._run_counts.items()),
            stock_phrases=len(stock),
            overlaps=tuple(overlaps),
        )

    def _match(self, common: list[str]) -> tuple[str, str] | None:
        """Return the words of the problem that contaminates a row with these runs, and the first run that both contain.

        None if the row has less than `COPY_SHARE` of each problem's runs, and all runs in `common` are stock phrases.
        """
        shared = Counter(joined_words for run in common for joined_words in self._runs[run])
        for joined_words, count in shared.most_common():
            if count >= COPY_SHARE * self._run_counts[joined_words]:
                return joined_words, next(run for run in common if joined_words in self._runs[run])
        return next(((self._runs[run][0], run) for run in common if not self._is_stock(run)), None)

    def _is_stock(self, run: str) -> bool:
        return self._rows_by_run[run] > STOCK_PHRASE_ROWS

    def _runs_of(self, words: list[str]) -> Iterable[str]:
        length = self._ngram_words
        return dict.fromkeys(" ".join(words[start : start + length]) for start in range(len(words) - length + 1))


def _shorten(text: str) -> str:
    return text if len(text) <= _EXAMPLE_CHARS else f"{text[:_EXAMPLE_CHARS]}..."
