"""Plans of episodes of every kind: the turns, the engine's faults, and the expected sample."""

from dataclasses import dataclass
from typing import Any

from fake_sglang import Reply
from slime_policy import ANSWER, WRONG, PolicyRequest, call, first_attempt, prompt, turn
from slime_run import CONTEXT_LENGTH

_MULTIPLY = call("multiply", a=17, b=2)
_RESULT = "<tool_response>\n34\n</tool_response>"
_OTHER_RESULT = "<tool_response>\n12\n</tool_response>"
_UNPARSED = "<tool_response>\nError: the tool call could not be parsed"
_FAILED = "<tool_response>\nError: "
_LONG = turn("thinking " * 2 * CONTEXT_LENGTH)


@dataclass(frozen=True)
class Plan:
    turns: list[Any]  # for `slime_policy.Policy`
    stop_reason: str = "completed"
    status: str = "completed"
    trained: bool = True  # whether the sample trains any token
    filler: str = ""  # text that lengthens the prompt
    must_read: str = ""  # text that the policy must read during the episode

    def prompt(self, name: str, number: int) -> str:
        return prompt(name, number, self.filler)


def _not_json(_asked: PolicyRequest) -> Reply:
    return Reply.raw(b"<html>Bad gateway</html>")


def _failed(*turns: Any) -> Plan:
    return Plan(list(turns), "engine_error", "failed", trained=False)


PLANS = {
    # caused by the policy
    "answers": Plan([ANSWER]),
    "errs": Plan([WRONG]),
    "calls": Plan([turn(_MULTIPLY), ANSWER]),
    "parallel": Plan([turn(_MULTIPLY, call("multiply", a=3, b=4)), ANSWER], must_read=f"{_RESULT}\n{_OTHER_RESULT}"),
    "badjson": Plan([turn("<tool_call>\n{not json}\n</tool_call>"), ANSWER], must_read=_UNPARSED),
    "mixed": Plan([turn(_MULTIPLY, "<tool_call>\nx\n</tool_call>"), ANSWER], must_read=f"{_RESULT}\n{_UNPARSED}"),
    "unknown": Plan([turn(call("no_such_tool", x=1)), ANSWER], must_read="Unknown tool: no_such_tool"),
    "wrongtypes": Plan([turn(call("multiply", a="many", b=[])), ANSWER], must_read=_FAILED),
    "cancels": Plan([turn(call("cancel")), ANSWER], must_read=_FAILED),
    "empty": Plan([turn("")]),
    "rambles": Plan([_LONG], "response_length", "truncated"),
    "loops": Plan([turn(_MULTIPLY)], "max_tool_iterations", "truncated"),
    "overlong": Plan([ANSWER], "prompt_too_long", "truncated", trained=False, filler="word " * 2 * CONTEXT_LENGTH),
    # faults of the engine that are overcome
    "busyonce": Plan([(first_attempt(Reply.status(503, "busy")), turn(_MULTIPLY)), ANSWER]),
    "dropsonce": Plan([(first_attempt(Reply.reset()), turn(_MULTIPLY)), (first_attempt(Reply.reset()), ANSWER)]),
    "cutsonce": Plan([turn(_MULTIPLY), (first_attempt(Reply.cut()), ANSWER)]),
    # faults of the engine that last
    "faultylater": _failed(turn(_MULTIPLY), Reply.status(500, "no worker")),
    "garbled": _failed(_not_json),
    "refuses": _failed(turn(_MULTIPLY), Reply.status(422, "no such field")),
    "lies": _failed(Reply.tokens([11, 12, 13], logprob_ids=[11, 12, 14])),
    "foreign": _failed(Reply.tokens([10_000_000])),
    # an aborted turn is continued: until the budget is used up if each abort has tokens, else until the patience ends
    "stopped": Plan([turn(_MULTIPLY), Reply.abort([11, 12] * 64)], "response_length", "truncated"),
    "silent": _failed(Reply.tokens([])),
    "dequeued": Plan([Reply.abort()], "engine_error", "failed", trained=False),
    "dequeuedlater": Plan([turn(_MULTIPLY), Reply.abort()], "engine_error", "failed", trained=False),
}

TURNS = {name: plan.turns for name, plan in PLANS.items()}
