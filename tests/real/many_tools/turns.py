"""What the policy says in each conversation, by the question that it opens with.

Knows nothing of tools or engines: an episode's script reads here what should have been said.
"""

import json
import re
from typing import Final

END: Final = "<|im_end|>"


_QUESTION: Final = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


def question_of(conversation: str) -> str:
    """The question that a rendered conversation opens with."""
    found = _QUESTION.search(conversation)
    assert found is not None, f"no question in {conversation}"
    return found[1]


def call(name: str, **arguments: object) -> str:
    """A tool call as the policy writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _calls(*calls: str) -> str:
    return "\n".join(calls) + END


MALFORMED: Final = '<tool_call>\n{"name": "stock", "arguments": {"item": "nuts"}\n</tool_call>'
DRAFT: Final = f"<think>\nPerhaps this:\n{call('stock', item='rivets')}\nNo, bolts.\n</think>\n\n"
ENDLESS: Final = "and one more, " * 40

TURNS: Final[dict[str, tuple[str, ...]]] = {
    "Say hello.": (f"Hello to you.{END}",),
    "Count for ever.": (ENDLESS,),
    "How many bolts?": (f"{DRAFT}{_calls(call('stock', item='bolts'))}", f"There are \\boxed{{120}} bolts.{END}"),
    "How many nuts?": (
        f"{MALFORMED}{END}",
        _calls(call("stock", item="nuts")),
        f"There are \\boxed{{75}} nuts.{END}",
    ),
    "How many washers?": (_calls(call("count_washers")), f"Nobody can tell.{END}"),
    "How many bolts and nuts?": (
        _calls(call("stock", item="bolts"), call("stock", item="nuts")),
        f"There are 120 bolts and 75 nuts, \\boxed{{195}} in all.{END}",
    ),
    "How many bolts, tubes and screws?": (
        _calls(call("stock", item="bolts"), call("stock", item="tubes"), call("stock", item="screws")),
        f"There are 120 bolts and 9 screws, \\boxed{{129}} in all, and no tubes.{END}",
    ),
    # a hook cancels the first call, rewrites the second one's result and the third one's arguments
    "Throw the bolts away.": (_calls(call("throw_away", item="bolts")), f"That is not allowed.{END}"),
    "How many screws?": (_calls(call("stock", item="screws")), f"There are \\boxed{{1000}} screws.{END}"),
    "How many pins?": (_calls(call("stock", item="pins")), f"There are \\boxed{{75}} of them.{END}"),
    # agents that tools start
    "Ask an expert for the weight of all bolts.": (
        _calls(call("ask_expert", question="What do all bolts weigh?")),
        f"The expert says \\boxed{{1440}} grams.{END}",
    ),
    "What do all bolts weigh?": (_calls(call("stock", item="bolts")), f"120 bolts weigh 1440 grams.{END}"),
    "Ask two experts for the weights of a nut and a screw.": (
        _calls(
            call("ask_expert", question="What does a nut weigh?"),
            call("ask_expert", question="What does a screw weigh?"),
        ),
        f"Together they weigh \\boxed{{8}} grams.{END}",
    ),
    "What does a nut weigh?": (f"A nut weighs 5 grams.{END}",),
    "What does a screw weigh?": (f"A screw weighs 3 grams.{END}",),
    "Have the nuts packed.": (_calls(call("pack", item="nuts")), f"\\boxed{{75}} nuts are packed.{END}"),
    "Have the screws packed.": (_calls(call("pack", item="screws")), f"\\boxed{{9}} screws are packed.{END}"),
    # structured output: an invalid first try; an answer in words first; by `Agent.structured_output`, valid and not
    "Pack the nuts.": (
        _calls(call("Box", item="nuts", count="many")),
        _calls(call("Box", item="nuts", count=75)),
    ),
    "Pack the screws.": (f"The screws are packed.{END}", _calls(call("Box", item="screws", count=9))),
    "Describe the box of bolts.": (_calls(call("Box", item="bolts", count=120)),),
    "Describe the box of tubes.": (_calls(call("Box", item="tubes", count="none")),),
    # strands-agents-tools
    "What is 1234 * 5678?": (
        _calls(call("calculator", expression="1234 * 5678")),
        f"The product is \\boxed{{7006652}}.{END}",
    ),
    # an MCP server
    "Add 2 and 40.": (_calls(call("add", a=2, b=40)), f"The sum is \\boxed{{42}}.{END}"),
    "Divide 1 by 0.": (_calls(call("divide", a=1, b=0)), f"It can't be divided.{END}"),
    "Draw a dot.": (_calls(call("draw")),),
    "Fetch the key.": (_calls(call("fetch")), f"Nothing came.{END}"),
    "Stop the server.": (
        _calls(call("stop")),
        _calls(call("add", a=1, b=1)),
        f"The server is gone.{END}",
    ),
}
