"""A scripted policy that can be interrupted at any token: it answers with the rest of the current turn.

It reads the state from the ids of the request: the task (a mark like `[[sums/3]]` in the prompt), the turn, and how
many tokens of that turn exist already. Logprobs, experts and top-p ids depend only on task, position, weight version
and sampled id, so a sample can be checked token by token. The policy uses the chat markup of Qwen3.
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
# text that the template may put between "assistant" and the policy's first token
_OPENINGS = ("\n<think>\n\n</think>\n\n", "\n<think>\n", "\n")


def prompt_of(name: str, number: int, text: str = "What is 17 times 2?") -> str:
    return f"[[{name}/{number}]] {text}"


def call(name: str, part: str = "", **arguments: Any) -> str:
    """Return a tool call with an argument `call` that names sample, turn and part."""
    named = {"call": f"@KEY:@TURN{part}", **arguments}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': named})}\n</tool_call>"


def turn(*parts: str) -> str:
    return "\n".join(parts) + "<|im_end|>"


@cache
def version_number(version: str) -> int:
    """Return a number from 0 to 99 for a weight version: from its digits if it has any, else from a checksum."""
    digits = re.sub(r"\D", "", version)
    return int(digits) % 100 if digits else zlib.crc32(version.encode()) % 100


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """Values that the engine reports for the tokens of a task, computed from position and weight version."""

    task: str

    def logprob(self, position: int, version: str) -> float:
        """Return a logprob between -1 and -0.001, with three decimals."""
        return -(1 + zlib.crc32(f"{self.task}:{position}:{version}".encode()) % 1000) / 1000

    def experts(self, position: int, version: str) -> list[int]:
        """Return the expert row of a position; each number encodes position and version."""
        return [position * 1000 + version_number(version) * 10 + n + 1 for n in range(LAYERS * TOP_K)]

    def top_p_ids(self, position: int, version: str, token: int) -> list[int]:
        """Return the kept top-p ids, one to three, the sampled id first."""
        return [token, position, version_number(version)][: 1 + position % 3]


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A request as the policy understands it."""

    key: str  # routing key, which identifies the sample
    name: str
    number: int
    turn: int
    done: int  # number of this turn's tokens that are in the input
    rest: int  # number of this turn's tokens that are missing
    visit: int  # number of earlier requests of this sample
    attempt: int  # 1 for the first attempt of a request, 2 for its first retry

    @property
    def task(self) -> str:
        return f"{self.name}/{self.number}"


Change = Callable[[Reply], Reply]
Disturb = Callable[[PolicyRequest], "Reply | Change | None"]


def abort_after(count: int) -> Change:
    """Return a change: the engine aborts the request after `count` tokens, but before its last token."""
    return lambda rest: rest.aborted_after(min(count, len(rest.ids) - 1))


def hold_after(count: int) -> Change:
    """Return a change: the engine samples `count` tokens, but never the last, and then waits for an abort."""
    return lambda rest: rest.held(min(count, len(rest.ids) - 1))


def paced(token_s: float, *, queued_s: float = 0.0) -> Change:
    """Return a change: the engine samples with a delay per token, after a wait in the queue."""
    return lambda rest: rest.paced(token_s, queued_s=queued_s)


def aborted_in_queue(_rest: Reply) -> Reply:
    """Abort the request at the engine before its first token."""
    return Reply.abort()


@dataclass
class InterruptiblePolicy:
    """A script for `FakeSGLang`.

    Args:
        tokenizer: Tokenizer with Qwen3's markup.
        plans: Turns by task name; the last turn is repeated. `@KEY` in a text becomes the routing key of the sample,
            `@TURN` the number of the turn.
        disturb: Function that returns a fault for a request: another reply, or a change of the correct reply.

    Attributes:
        requests: Requests so far.
        violations: Messages for requests that the policy can't continue.
    """

    tokenizer: Any
    plans: Mapping[str, Sequence[str]]
    disturb: Disturb = lambda _request: None
    requests: list[PolicyRequest] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    _visits: dict[str, int] = field(default_factory=dict)
    _planned: dict[tuple[str, str, int], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._assistant = self._encode("<|im_start|>assistant")
        self._openings = [self._encode(text) for text in _OPENINGS]

    def reply(self, received: Received, _number: int) -> Reply:
        """Return the rest of the turn, limited to `max_new_tokens`, or the fault that `disturb` chose."""
        ids = tuple(received.input_ids)
        mark = _MARK.search(self.tokenizer.decode(ids))
        starts = _occurrences(ids, self._assistant)
        if mark is None or not starts:
            return self._refuse(f"no task mark, or no assistant's turn, in {len(ids)} ids")
        key, name, number = str(received.key), mark[1], int(mark[2])
        planned = self._turn_ids(key, name, len(starts) - 1)
        done = self._sampled_count(ids[starts[-1] + len(self._assistant) :], planned)
        if done is None:
            return self._refuse(f"turn {len(starts) - 1} of {name}/{number} has ids that do not begin the planned turn")
        request = self._note(received, key, name, number, len(starts) - 1, done, len(planned) - done)
        rest = Reply.tokens(planned[done:])
        rest = _add_facts(rest, TaskFacts(request.task)).limited(received.body["sampling_params"]["max_new_tokens"])
        change = self.disturb(request)
        if change is None or isinstance(change, Reply):
            return change or rest
        return _add_facts(change(rest), TaskFacts(request.task))

    def planned_ids(self, key: str, name: str) -> list[tuple[int, ...]]:
        """Return the ids of all turns of a sample."""
        return [self._turn_ids(key, name, turn) for turn in range(len(self.plans[name]))]

    def _note(self, received: Received, key: str, *facts: Any) -> PolicyRequest:
        visit = self._visits.get(key, 0)
        self._visits[key] = visit + 1
        attempt = int(str(received.rid).partition("-")[2] or 1)
        self.requests.append(PolicyRequest(key, *facts, visit, attempt))
        return self.requests[-1]

    def _turn_ids(self, key: str, name: str, turn: int) -> tuple[int, ...]:
        if (key, name, turn) not in self._planned:
            plan = self.plans[name]
            text = plan[min(turn, len(plan) - 1)].replace("@KEY", key).replace("@TURN", str(turn))
            self._planned[key, name, turn] = self._encode(text)
        return self._planned[key, name, turn]

    def _sampled_count(self, opened: tuple[int, ...], planned: tuple[int, ...]) -> int | None:
        """Return how many tokens of `planned` are in `opened` after the template's opening.

        Return None if other tokens follow the opening, or if all of `planned` follows it.
        """
        for opening in self._openings:
            done = len(opened) - len(opening)
            if 0 <= done < len(planned) and opened == opening + planned[:done]:
                return done
        return None

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _refuse(self, message: str) -> Reply:
        self.violations.append(message)
        return Reply.status(400, {"error": {"message": message}})


def _add_facts(reply: Reply, facts: TaskFacts) -> Reply:
    return replace(reply, facts=facts) if reply.kind in ("tokens", "hang", "cut") else reply


def _occurrences(ids: tuple[int, ...], part: tuple[int, ...]) -> list[int]:
    return [n for n in range(len(ids) - len(part) + 1) if ids[n] == part[0] and ids[n : n + len(part)] == part]
