"""Find rows of a prepared file that share words with evaluation problems.

A row is contaminated by an evaluation problem if they share a run of `ngram_words` words, or if all their words are the
same, which is the only way for shorter problems. Words are runs of letters and digits, in any case, so that LaTeX and
plain notation compare alike. Runs of words that many different rows share are stock phrases ("where m and n are
relatively prime positive integers, find m + n") and don't count, unless a row has half of a problem's runs or more:
a problem that is copied many times is not a stock phrase.
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
"""Maximum different rows that share a run of words; a run in more rows is a stock phrase."""

COPY_SHARE: Final = 0.5
"""Minimum share of a problem's runs of words with which a row always counts, even if many other rows have them too."""

_WORD: Final = re.compile(r"[^\W_]+")
_EXAMPLES: Final = 3
_EXAMPLE_CHARS: Final = 240


@dataclass(frozen=True, slots=True)
class Overlap:
    """A contaminated row: its line from 0, its problem, the evaluation problem, and the first shared words."""

    line: int
    row: str
    problem: str
    words: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The overlap of an evaluation file with the rows.

    Of its different problems, `problems_short` have fewer words than a run, so that they are compared as a whole only,
    and `problems_stock` consist of stock phrases only. `stock_phrases` is the number of runs that were not counted;
    `overlaps` has an entry per contaminated row, by line.
    """

    path: Path
    problems: int
    problems_short: int
    problems_stock: int
    stock_phrases: int
    overlaps: tuple[Overlap, ...]

    def facts(self) -> dict[str, Any]:
        """Return counts and the first examples for the manifest."""
        return {
            "file": str(self.path),
            "sha256": sha256_of(self.path),
            "problems": self.problems,
            "problems_found": len({one.problem for one in self.overlaps}),
            "problems_short": self.problems_short,
            "problems_stock": self.problems_stock,
            "rows": len(self.overlaps),
            "stock_phrases": self.stock_phrases,
            "examples": [
                {"line": one.line + 1, "row": _cut(one.row), "problem": _cut(one.problem), "words": _cut(one.words)}
                for one in self.overlaps[:_EXAMPLES]
            ],
        }


def find_contamination(problems: Iterable[str], against: Sequence[Path], ngram_words: int) -> tuple[Finding, ...]:
    """Compare the problem of each row with the problems of evaluation files, reading the rows once.

    Raises:
        PreparationError: A file can't be read, a line of it has no prompt, or it has no line.
    """
    searches = [_Search(path, ngram_words) for path in against]
    for line, problem in enumerate(problems):
        words = words_of(problem)
        for search in searches:
            search.look_at(line, problem, words)
    return tuple(search.finding() for search in searches)


def problems_in(path: Path) -> Iterator[str]:
    """Yield the problem of each line of a prepared file; "" for a blank line.

    Raises:
        PreparationError: The file can't be read, or a line has no prompt.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield _problem_on(line, f"{path}:{number}") if line.strip() else ""
    except OSError as e:
        raise PreparationError(f"can't read {path}: {e.strerror}") from e


def _problem_on(line: bytes, where: str) -> str:
    try:
        return str(to_chat(orjson.loads(line)["prompt"])[-1]["content"])
    except (orjson.JSONDecodeError, TypeError, KeyError, RowError) as e:
        raise PreparationError(
            f'{where}: got {line[:80]!r}; expected a prepared row, {{"prompt": [...], "label": "..."}}'
        ) from e


def words_of(problem: str) -> list[str]:
    """Return the words of a problem, without the data set's instruction."""
    return _WORD.findall(unicodedata.normalize("NFKC", without_instruction(problem)[0]).casefold())


class _Search:
    """An evaluation file, and the rows that share a run of words with it."""

    def __init__(self, path: Path, ngram_words: int) -> None:
        self._path = path
        self._ngram_words = ngram_words
        self._problems: dict[str, str] = {}  # problems by their words
        self._runs: dict[str, list[str]] = {}  # for each run, the words of the problems that have it
        self._sizes: Counter[str] = Counter()  # number of different runs of each problem, by its words
        self._found: list[tuple[int, str, str, list[str]]] = []  # line, its problem, its words, the runs in common
        self._rows_with: Counter[str] = Counter()  # number of different rows with each run
        for problem in problems_in(path):
            words = words_of(problem)
            said = " ".join(words)
            if not words or said in self._problems:
                continue
            self._problems[said] = problem
            for run in self._runs_of(words):
                self._runs.setdefault(run, []).append(said)
                self._sizes[said] += 1
        if not self._problems:
            raise PreparationError(f"{path} has no problem to compare with; prepare it again, or name another file")
        self._seen: set[int] = set()

    def look_at(self, line: int, problem: str, words: list[str]) -> None:
        """Record the runs of words that a row shares with the file."""
        said = " ".join(words)
        common = [run for run in self._runs_of(words) if run in self._runs]
        if not common and said not in self._problems:
            return
        self._found.append((line, problem, said, common))
        if hash(said) not in self._seen:
            self._seen.add(hash(said))
            self._rows_with.update(common)

    def finding(self) -> Finding:
        """Return the overlaps without stock phrases."""
        overlaps = []
        for line, problem, said, common in self._found:
            match = (said, said) if said in self._problems else self._match(common)
            if match:
                overlaps.append(Overlap(line, problem, self._problems[match[0]], match[1]))
        stock = {run for run in self._rows_with if self._is_stock(run)}
        of_stock = Counter(said for run in stock for said in self._runs[run])
        return Finding(
            path=self._path,
            problems=len(self._problems),
            problems_short=len(self._problems) - len(self._sizes),
            problems_stock=sum(of_stock[said] == size for said, size in self._sizes.items()),
            stock_phrases=len(stock),
            overlaps=tuple(overlaps),
        )

    def _match(self, common: list[str]) -> tuple[str, str] | None:
        """Return the problem's words that the shared runs come from, and the first of these runs."""
        shared = Counter(said for run in common for said in self._runs[run])
        for said, count in shared.most_common():
            if count >= COPY_SHARE * self._sizes[said]:
                return said, next(run for run in common if said in self._runs[run])
        return next(((self._runs[run][0], run) for run in common if not self._is_stock(run)), None)

    def _is_stock(self, run: str) -> bool:
        return self._rows_with[run] > STOCK_PHRASE_ROWS

    def _runs_of(self, words: list[str]) -> Iterable[str]:
        """Return the different runs of words, in order."""
        length = self._ngram_words
        return dict.fromkeys(" ".join(words[start : start + length]) for start in range(len(words) - length + 1))


def _cut(text: str) -> str:
    return text if len(text) <= _EXAMPLE_CHARS else f"{text[:_EXAMPLE_CHARS]}..."
