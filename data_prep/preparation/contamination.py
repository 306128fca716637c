"""Which rows of one prepared file share words with the problems of others, as training must not with evaluation.

A row is contaminated by an evaluation problem if both have `ngram_words` words in a row in common, or if all their
words are the same; the latter is the only way for problems shorter than that. Words are runs of letters and digits, in
any case, so that LaTeX and plain notation compare alike. Words that many different rows have in common are a stock
phrase ("where m and n are relatively prime positive integers, find m + n") and tell nothing; they are not counted,
unless a row has half of a problem's runs of words or more: many copies of a problem are copies, not a phrase.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from preparation.instruction import without_instruction
from preparation.output import sha256_of
from preparation.rows import PreparationError, RowError, problem_of, to_chat

STOCK_PHRASE_ROWS: Final = 10
"""A run of words that more different rows than this have in common is a stock phrase."""

LARGE_SHARE: Final = 0.5
"""Share of a problem's runs of words with which a row counts, however many other rows have them too."""

_WORD: Final = re.compile(r"[^\W_]+")
_SHOWN: Final = 3
_SHOWN_CHARS: Final = 240


@dataclass(frozen=True, slots=True)
class Overlap:
    """A row, by its line from 0 and its problem; the evaluation problem in it; and the first words in common."""

    line: int
    row: str
    problem: str
    words: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one evaluation file has in common with the rows.

    Of its different problems, `problems_short` have fewer words than a run, so that they are compared whole only, and
    `problems_stock` consist of stock phrases only. `stock_phrases` counts the runs of words that were not counted;
    `overlaps` has one entry for each contaminated row, by line.
    """

    path: Path
    sha256: str
    problems: int
    problems_short: int
    problems_stock: int
    stock_phrases: int
    overlaps: tuple[Overlap, ...]

    def of_first(self, rows: int | None) -> Finding:
        """The finding in the first rows alone; None for all."""
        return self if rows is None else replace(self, overlaps=tuple(one for one in self.overlaps if one.line < rows))

    def facts(self) -> dict[str, Any]:
        """For the manifest: counts and the first examples."""
        return {
            "file": str(self.path),
            "sha256": self.sha256,
            "problems": self.problems,
            "problems_found": len({overlap.problem for overlap in self.overlaps}),
            "problems_short": self.problems_short,
            "problems_stock": self.problems_stock,
            "rows": len(self.overlaps),
            "stock_phrases": self.stock_phrases,
            "examples": [
                {"line": one.line + 1, **{name: _short(getattr(one, name)) for name in ("row", "problem", "words")}}
                for one in self.overlaps[:_SHOWN]
            ],
        }


def find_contamination(
    rows: Iterable[tuple[int, str]],
    against: Sequence[Path],
    ngram_words: int,
    advance: Callable[[int], None] = lambda _rows: None,
) -> tuple[Finding, ...]:
    """Compare each row, a number from 0 and its problem, with each problem of some prepared files, in one reading.

    Args:
        rows: Of a prepared file, `problems_in` it.
        against: Prepared files.
        ngram_words: Words in a row that make an overlap.
        advance: Told how many rows were read.

    Raises:
        PreparationError: A file can't be read, a line of it has no prompt, or it has no line.
    """
    searches = [_Search(path, ngram_words) for path in against]
    for line, problem in rows:
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
        self._sizes: list[int] = []  # different runs of each problem
        self._runs: dict[str, list[int]] = {}
        self._whole: dict[str, int] = {}
        self._met: list[tuple[int, str, str, list[str]]] = []  # line, its problem, its words, the runs in common
        self._rows_with: Counter[str] = Counter()
        self._seen: set[int] = set()
        for _, problem in problems_in(path):
            self._add(problem)
        if not self._problems:
            raise PreparationError(f"{path} has no problem to compare with; prepare it again, or name another file")

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
        overlaps = []
        for line, problem, said, common in self._met:
            found = (self._whole[said], said) if said in self._whole else self._match(common)
            if found:
                overlaps.append(Overlap(line, problem, self._problems[found[0]], found[1]))
        stock = {run for run, count in self._rows_with.items() if count > STOCK_PHRASE_ROWS}
        of_stock = Counter(number for run in stock for number in self._runs[run])
        return Finding(
            path=self._path,
            sha256=sha256_of(self._path),
            problems=len(self._problems),
            problems_short=self._sizes.count(0),
            problems_stock=sum(of_stock[number] == size for number, size in enumerate(self._sizes) if size),
            stock_phrases=len(stock),
            overlaps=tuple(overlaps),
        )

    def _match(self, common: list[str]) -> tuple[int, str] | None:
        """The problem that runs in common tell of, and the first of those runs."""
        shared = Counter(number for run in common for number in self._runs[run])
        for number, count in shared.most_common():
            if count >= LARGE_SHARE * self._sizes[number]:
                return number, next(run for run in common if number in self._runs[run])
        telling = next((run for run in common if self._rows_with[run] <= STOCK_PHRASE_ROWS), None)
        return (self._runs[telling][0], telling) if telling else None

    def _add(self, problem: str) -> None:
        words = words_of(problem)
        said = " ".join(words)
        if not words or said in self._whole:
            return
        number = self._whole[said] = len(self._problems)
        self._problems.append(problem)
        runs = set(_runs(words, self._ngram_words))
        self._sizes.append(len(runs))
        for run in runs:
            self._runs.setdefault(run, []).append(number)


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
