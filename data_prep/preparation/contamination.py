"""Which rows of one prepared file share words with the problems of others, as training must not with evaluation.

A row is contaminated by an evaluation problem if both have `ngram_words` words in a row in common, or if all their
words are the same; the latter is the only way for problems shorter than that. Words are runs of letters and digits, in
any case, so that LaTeX and plain notation compare alike. Words that many different rows have in common are a stock
phrase ("where m and n are relatively prime positive integers, find m + n") and tell nothing; they are not counted.

Knows prepared files; must not know how they were made.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from preparation.chat import problem_of, to_chat
from preparation.errors import PreparationError, RowError
from preparation.instruction import without_instruction
from preparation.output import sha256_of

STOCK_PHRASE_ROWS: Final = 10
"""A run of words that more different rows than this have in common is a stock phrase."""

_WORD: Final = re.compile(r"[^\W_]+")
_SHOWN: Final = 3
_SHOWN_CHARS: Final = 240


@dataclass(frozen=True, slots=True)
class Overlap:
    """A row and the evaluation problem that it was found in.

    Attributes:
        line: Of the row, from 0.
        row: The row's problem.
        problem: The evaluation problem.
        words: What they have in common, or the first of it.
    """

    line: int
    row: str
    problem: str
    words: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one evaluation file has in common with the rows.

    Attributes:
        path: The evaluation file.
        sha256: Of its bytes.
        problems: Different problems in it.
        problems_found: Those of them that contaminate a row.
        stock_phrases: Runs of words that were not counted.
        overlaps: One for each contaminated row, by line.
    """

    path: Path
    sha256: str
    problems: int
    problems_found: int
    stock_phrases: int
    overlaps: tuple[Overlap, ...]

    def facts(self) -> dict[str, Any]:
        """For the manifest: counts and the first examples."""
        return {
            "file": str(self.path),
            "sha256": self.sha256,
            "problems": self.problems,
            "problems_found": self.problems_found,
            "rows": len(self.overlaps),
            "stock_phrases": self.stock_phrases,
            "examples": [
                {"line": one.line + 1, "row": one.row, "problem": one.problem, "words": one.words}
                for one in self.overlaps[:_SHOWN]
            ],
        }


def find_contamination(
    rows: Path, against: Sequence[Path], ngram_words: int, advance: Callable[[int], None] = lambda _rows: None
) -> tuple[Finding, ...]:
    """Compare each row with each evaluation problem, in one reading of the rows.

    Args:
        rows: A prepared file.
        against: Prepared files.
        ngram_words: Words in a row that make an overlap.
        advance: Told how many rows were read.

    Raises:
        PreparationError: A file can't be read, or a line of it has no prompt.
    """
    searches = [_Search(path, ngram_words) for path in against]
    for line, problem in problems_in(rows):
        found = words_of(problem)
        for search in searches:
            search.look_at(line, problem, found)
        advance(1)
    return tuple(search.finding() for search in searches)


def problems_in(path: Path) -> Iterator[tuple[int, str]]:
    """The number of each line that is not blank, from 0, and its problem.

    Raises:
        PreparationError: The file can't be read, or a line has no prompt.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if line.strip():
                    yield number, _problem_on(line, f"{path}:{number + 1}")
    except OSError as e:
        raise PreparationError(f"can't read {path}: {e.strerror}") from e


def words_of(problem: str) -> list[str]:
    """The words of a problem, without the data set's instruction."""
    return _WORD.findall(unicodedata.normalize("NFKC", without_instruction(problem)[0]).casefold())


class _Search:
    """One evaluation file, and what of it was met so far."""

    def __init__(self, path: Path, ngram_words: int) -> None:
        self._path = path
        self._ngram_words = ngram_words
        self._problems: list[str] = []
        self._runs: dict[str, int] = {}
        self._whole: dict[str, int] = {}
        self._met: list[tuple[int, str, str, list[str]]] = []  # line, its problem, its words, the runs in common
        self._rows_with: Counter[str] = Counter()
        self._seen: set[int] = set()
        for _, problem in problems_in(path):
            self._add(problem)

    def look_at(self, line: int, problem: str, words: list[str]) -> None:
        """Note what the row has in common with the file."""
        said = " ".join(words)
        common = list(dict.fromkeys(run for run in _runs(words, self._ngram_words) if run in self._runs))
        if not common and said not in self._whole:
            return
        self._met.append((line, problem, said, common))
        if hash(said) not in self._seen:
            self._seen.add(hash(said))
            self._rows_with.update(common)

    def finding(self) -> Finding:
        """What is left when stock phrases are taken out."""
        overlaps, found = [], set()
        for line, problem, said, common in self._met:
            telling = [run for run in common if self._rows_with[run] <= STOCK_PHRASE_ROWS]
            if said in self._whole:
                match, shared = self._whole[said], said
            elif telling:
                match, shared = self._runs[telling[0]], telling[0]
            else:
                continue
            found.add(match)
            overlaps.append(Overlap(line, _short(problem), _short(self._problems[match]), _short(shared)))
        stock = sum(count > STOCK_PHRASE_ROWS for count in self._rows_with.values())
        return Finding(
            path=self._path,
            sha256=sha256_of(self._path),
            problems=len(self._problems),
            problems_found=len(found),
            stock_phrases=stock,
            overlaps=tuple(overlaps),
        )

    def _add(self, problem: str) -> None:
        words = words_of(problem)
        said = " ".join(words)
        if not words or said in self._whole:
            return
        number = self._whole[said] = len(self._problems)
        self._problems.append(problem)
        for run in _runs(words, self._ngram_words):
            self._runs.setdefault(run, number)


def _runs(words: list[str], length: int) -> Iterator[str]:
    for start in range(len(words) - length + 1):
        yield " ".join(words[start : start + length])


def _problem_on(line: bytes, where: str) -> str:
    try:
        row = orjson.loads(line)
        return problem_of(to_chat(row["prompt"]))
    except (orjson.JSONDecodeError, TypeError, KeyError, RowError) as e:
        raise PreparationError(
            f'{where}: got {line[:80]!r}; expected a prepared row, {{"prompt": [...], "label": "..."}}'
        ) from e


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
