"""A scripted policy whose reply depends on the task's name, the turn, and the attempt.

It uses the chat markup of Qwen3 and the fake engine's replies.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fake_sglang import Reply
from interruptible_policy import turn

__all__ = ["ANSWER", "WRONG", "Policy", "PolicyRequest", "call", "first_attempt", "prompt", "turn"]

_TASK = re.compile(r"\[\[(\w+)/\d+\]\]")
_TURN = "<|im_start|>assistant"
ANSWER = "The product is \\boxed{34}.<|im_end|>"
WRONG = "The product is \\boxed{35}.<|im_end|>"


@dataclass(frozen=True)
class PolicyRequest:
    """A request as the policy understands it."""

    task: str  # name in the prompt
    turn: int  # 0 for the first
    attempt: int  # 1 for the first attempt of a request
    max_new_tokens: int


def call(name: str, **arguments: Any) -> str:
    """Return a tool call without the end token of its turn."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompt(task: str, number: int, filler: str = "") -> str:
    return f"[[{task}/{number}]] What is 17 times 2? {filler}"


def first_attempt(reply: Reply) -> Callable[[PolicyRequest], Reply | None]:
    """Return a function that replies to the first attempt only; the next entry of its tuple answers later attempts."""
    return lambda asked: reply if asked.attempt == 1 else None


@dataclass
class Policy:
    """Script for the fake engine.

    Args:
        tokenizer: Tokenizer of the model.
        plans: Turns by task name; the last is repeated. A turn is text, a reply, or a function of the request; a tuple
            of them is tried in order until one returns a reply.
    """

    tokenizer: Any
    plans: dict[str, Sequence[Any]]

    def __call__(self, body: dict[str, Any], _number: int) -> Reply:
        asked = self._read(body)
        plan = self.plans[asked.task]
        position = min(asked.turn, len(plan) - 1)
        entry = plan[position]
        entries = entry if isinstance(entry, tuple) else (entry,)
        for choice in entries:
            reply = choice(asked) if callable(choice) else choice
            if reply is not None:
                return self._limited(self._reply(reply), asked)
        raise AssertionError(f"the plan of {asked.task} has no reply for turn {asked.turn}")

    def _read(self, body: dict[str, Any]) -> PolicyRequest:
        text = self.tokenizer.decode(body["input_ids"])
        task = _TASK.findall(text)[0]
        _, _, attempt = str(body.get("rid", "")).partition("-")
        return PolicyRequest(
            task=task,
            turn=text.count(_TURN) - 1,
            attempt=int(attempt or 1),
            max_new_tokens=body["sampling_params"]["max_new_tokens"],
        )

    def _reply(self, reply: Reply | str) -> Reply:
        if isinstance(reply, Reply):
            return reply
        return Reply.tokens(self.tokenizer.encode(reply, add_special_tokens=False))

    def _limited(self, reply: Reply, asked: PolicyRequest) -> Reply:
        """Cut a generation to max_new_tokens; SGLang then ends it by length."""
        if reply.kind != "tokens" or len(reply.ids) <= asked.max_new_tokens:
            return reply
        return Reply.tokens(reply.ids[: asked.max_new_tokens], "length")
