"""A policy written down in advance that can be interrupted anywhere: it answers with the rest of the turn.

From the ids alone it knows the task (a mark like `[[sums/3]]` in the prompt), the turn, and how much of that turn is
there already. What the engine reports of a token follows from task, position and weights, so that a sample can be
checked token by token. Knows Qwen3's chat markup and the fake engine's replies.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

from fake_sglang import Received
from fake_sglang_reply import Reply

LAYERS: Final = 2
TOP_K: Final = 2
_MARK = re.compile(r"\[\[(\w+)/(\d+)\]\]")
ANSWER: Final = "So the product of the two numbers is \\boxed{34}.<|im_end|>"
# what the template may put between "assistant" and the policy's first token
_OPENINGS = ("\n<think>\n\n</think>\n\n", "\n<think>\n", "\n")


def prompt_of(name: str, number: int, text: str = "What is 17 times 2?") -> str:
    return f"[[{name}/{number}]] {text}"


def call(name: str, part: str = "", **arguments: Any) -> str:
    """A tool call that names sample, turn and part."""
    named = {"call": f"@KEY:@TURN{part}", **arguments}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': named})}\n</tool_call>"


def turn(*parts: str) -> str:
    return "\n".join(parts) + "<|im_end|>"


@cache
def version_number(version: str) -> int:
    """A number from 0 to 99 for a weight version, its own if it has one."""
    digits = re.sub(r"\D", "", version)
    return int(digits) % 100 if digits else zlib.crc32(version.encode()) % 100


@dataclass(frozen=True, slots=True)
class TaskFacts:
    task: str

    def logprob(self, position: int, version: str) -> float:
        """Between -1 and -0.001; exact in float32's and JSON's digits."""
        return -(1 + zlib.crc32(f"{self.task}:{position}:{version}".encode()) % 1000) / 1000

    def experts(self, position: int, version: str) -> list[int]:
        """One row: position and version can be read off each number."""
        return [position * 1000 + version_number(version) * 10 + n + 1 for n in range(LAYERS * TOP_K)]

    def kept(self, position: int, version: str, token: int) -> list[int]:
        """One to three ids, the chosen one first."""
        return [token, position, version_number(version)][: 1 + position % 3]


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """One request, as the policy reads it."""

    key: str  # the routing key: which of the task's samples
    name: str
    number: int
    turn: int
    done: int  # tokens of this turn that are in the input already
    rest: int  # tokens of it that are to come
    visit: int  # how many requests of this sample came before
    attempt: int  # 1 for the first of a request

    @property
    def task(self) -> str:
        return f"{self.name}/{self.number}"


Change = Callable[[Reply], Reply]
Disturb = Callable[[PolicyRequest], "Reply | Change | None"]


def abort_after(count: int) -> Change:
    """The engine aborts the request when it has sampled so many tokens."""
    return lambda rest: rest.aborted_after(min(count, len(rest.ids) - 1))


def hold_after(count: int) -> Change:
    """The engine samples so many tokens, and then none until it is told to abort."""
    return lambda rest: rest.held(min(count, len(rest.ids) - 1))


def paced(token_s: float, *, queued_s: float = 0.0) -> Change:
    """The engine takes its time."""
    return lambda rest: rest.paced(token_s, queued_s=queued_s)


def aborted_in_queue(_rest: Reply) -> Reply:
    """The engine aborts the request before its first token."""
    return Reply.abort()


@dataclass
class InterruptiblePolicy:
    """A script for `FakeSGLang`.

    Args:
        plans: Turns by task name; the last is repeated. `@KEY` in a text becomes the sample's routing key, `@TURN` the
            turn.
        disturb: What goes wrong with a request, if anything: another reply, or a change of the right one.

    `violations` tells what no policy can go on from.
    """

    tokenizer: Any
    plans: Mapping[str, Sequence[str]]
    disturb: Disturb = lambda _asked: None
    asked: list[PolicyRequest] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    _visits: dict[str, int] = field(default_factory=dict)
    _planned: dict[tuple[str, str, int], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._assistant = self._encode("<|im_start|>assistant")
        self._openings = [self._encode(text) for text in _OPENINGS]

    def reply(self, received: Received, _number: int) -> Reply:
        """The rest of the turn, cut to what was asked for, or what is to go wrong."""
        ids = tuple(received.input_ids)
        found = _MARK.search(self.tokenizer.decode(ids))
        starts = _occurrences(ids, self._assistant)
        if found is None or not starts:
            return self._lost(f"no task, or no assistant's turn, in {len(ids)} ids")
        key, name, number = str(received.key), found[1], int(found[2])
        planned = self._turn(key, name, len(starts) - 1)
        done = self._done(ids[starts[-1] + len(self._assistant) :], planned)
        if done is None:
            return self._lost(f"turn {len(starts) - 1} of {name}/{number} is open with ids that it never sampled")
        asked = self._note(received, key, name, number, len(starts) - 1, done, len(planned) - done)
        rest = Reply.tokens(planned[done:])
        rest = _with_facts(rest, TaskFacts(asked.task)).limited(received.body["sampling_params"]["max_new_tokens"])
        change = self.disturb(asked)
        if change is None or isinstance(change, Reply):
            return change or rest
        return _with_facts(change(rest), TaskFacts(asked.task))

    def planned_ids(self, key: str, name: str) -> list[tuple[int, ...]]:
        """All turns of a sample, as it will sample them."""
        return [self._turn(key, name, turn) for turn in range(len(self.plans[name]))]

    def _note(self, received: Received, key: str, *facts: Any) -> PolicyRequest:
        visit = self._visits.get(key, 0)
        self._visits[key] = visit + 1
        attempt = int(str(received.rid).partition("-")[2] or 1)
        self.asked.append(PolicyRequest(key, *facts, visit, attempt))
        return self.asked[-1]

    def _turn(self, key: str, name: str, turn: int) -> tuple[int, ...]:
        if (key, name, turn) not in self._planned:
            plan = self.plans[name]
            text = plan[min(turn, len(plan) - 1)].replace("@KEY", key).replace("@TURN", str(turn))
            self._planned[key, name, turn] = self._encode(text)
        return self._planned[key, name, turn]

    def _done(self, opened: tuple[int, ...], planned: tuple[int, ...]) -> int | None:
        """How many tokens of the turn are there, after what the template opens it with; None if others are."""
        for opening in self._openings:
            done = len(opened) - len(opening)
            if 0 <= done < len(planned) and opened == opening + planned[:done]:
                return done
        return None

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _lost(self, words: str) -> Reply:
        self.violations.append(words)
        return Reply.status(400, {"error": {"message": words}})


def _with_facts(reply: Reply, facts: TaskFacts) -> Reply:
    return replace(reply, facts=facts) if reply.kind in ("tokens", "hang", "cut") else reply


def _occurrences(ids: tuple[int, ...], part: tuple[int, ...]) -> list[int]:
    return [n for n in range(len(ids) - len(part) + 1) if ids[n] == part[0] and ids[n : n + len(part)] == part]
