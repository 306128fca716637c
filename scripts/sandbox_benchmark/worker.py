"""The process in which one contender is measured: takes orders on stdin and answers on stdout, a line of JSON each.

Orders: `{"do": "one_at_a_time", ...arguments}`, likewise "at_once", "memory" and "start". Answers: `{"value": ...}` or
`{"error": "..."}`. The first answer, without an order, comes when the contender has started. It ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, TextIO

from sandbox_benchmark import measures
from sandbox_benchmark.contenders import Contender, make_contender

_MEASURES: Final[dict[str, Callable[..., Awaitable[Any]]]] = {
    "one_at_a_time": measures.one_at_a_time,
    "at_once": measures.at_once,
    "memory": measures.memory,
}


def main() -> None:
    """Run as a process: arguments are the contender's name and its places in JSON."""
    name, places = sys.argv[1], json.loads(sys.argv[2])
    orders, answers = _take_streams()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        contender = make_contender(name, places)
        loop.run_until_complete(contender.start())
    except Exception as e:  # whatever it is, it is the answer
        _say(answers, {"error": f"{type(e).__name__}: {e}"})
        return
    _say(answers, {"value": contender.keeps_sessions})
    for line in orders:
        try:
            _say(answers, {"value": loop.run_until_complete(_carry_out(name, contender, json.loads(line)))})
        except Exception as e:  # as above
            _say(answers, {"error": f"{type(e).__name__}: {e}"})
    loop.run_until_complete(contender.stop())
    loop.close()


async def _carry_out(name: str, contender: Contender, order: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    do = order.pop("do")
    if do == "start":
        return await measures.start(name)
    return await _MEASURES[do](contender, **order)


def _take_streams() -> tuple[TextIO, TextIO]:
    """Keep stdin and stdout for orders and answers: what runs here inherits the numbers 0 and 1, and may use them."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return orders, answers


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
