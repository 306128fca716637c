"""What of the package an episode enters, in order: the path that a reader follows, as files and functions.

python tests/support/walk.py    the figures of one warm tool turn and of one whole episode, as a line of JSON
"""

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from turn_costs import play_tool_turns

import strands_rollout

PACKAGE: Final = Path(strands_rollout.__file__).parent
_WARM_UP_TURNS: Final = 2
_TURNS: Final = 5
# frames of their own up to Python 3.11, and never a function that a reader looks for
_COMPREHENSIONS: Final = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>"})


@dataclass(frozen=True, slots=True)
class Walk:
    """Functions of the package in the order in which they were entered."""

    entered: Sequence[CodeType]

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.entered})

    @property
    def functions(self) -> int:
        return len(set(self.entered))

    @property
    def switches(self) -> int:
        """How often the next function is in another file."""
        return sum(one.co_filename != other.co_filename for one, other in itertools.pairwise(self.entered))

    def __str__(self) -> str:
        stays = itertools.groupby(self.entered, key=lambda code: code.co_filename)
        return "\n".join(
            f"{Path(name).relative_to(PACKAGE).as_posix():<42} {', '.join(code.co_qualname for code in codes)}"
            for name, codes in stays
        )


@dataclass(slots=True)
class _Steps:
    """What was entered so far, and where in it each request to the engine was."""

    entered: list[CodeType] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)


async def walks(tokenizer: Any) -> tuple[Walk, Walk]:
    """A tool turn, from one request to the next, and the whole episode around it; what is done once was done before."""
    await play_tool_turns(tokenizer, _WARM_UP_TURNS, contextlib.nullcontext())
    steps = _Steps()
    await play_tool_turns(tokenizer, _TURNS, _noting(steps), asked=lambda: steps.requests.append(len(steps.entered)))
    turns = [Walk(steps.entered[start:end]) for start, end in itertools.pairwise(steps.requests)]
    # a timer makes single turns longer only
    return min(turns[1:], key=lambda turn: len(turn.entered)), Walk(steps.entered)


@contextlib.contextmanager
def _noting(steps: _Steps) -> Iterator[None]:
    """Notes functions of the package that this thread enters; a coroutine that goes on is not entered again."""
    known: set[FrameType] = set()
    root = f"{PACKAGE}/"

    def called(frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(root) or code.co_name in _COMPREHENSIONS:
            return
        if frame not in known:
            known.add(frame)
            steps.entered.append(code)

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(before)


def figures(turn: Walk, episode: Walk) -> dict[str, int]:
    """By the names of `scripts/house.py`."""
    return {
        "tool turn: files": turn.files,
        "tool turn: functions": turn.functions,
        "tool turn: switches of file": turn.switches,
        "episode: files": episode.files,
    }


if __name__ == "__main__":
    from transformers import AutoTokenizer

    print(json.dumps(figures(*asyncio.run(walks(AutoTokenizer.from_pretrained(PACKAGE / "engine" / "checkpoint"))))))
