"""Answers a program that was started again from the record of its earlier, aborted attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from strands_rollout.model.context import first_prompt
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.branch import Branch, Node, Reply, StrandsMessages
from strands_rollout.record.client_request import ClientRequest, reply_of
from strands_rollout.record.tokens import Turn

_OTHER_HEAD: Final = "the system prompt or the tools are others"


class Replay:
    """The main conversation of an earlier attempt, which a program repeats after it was started again.

    As long as the program repeats its requests, they are answered from the record. The first request that goes beyond
    the record ends the replay, and the first one that differs from it leaves it (`Session` then begins afresh).

    Args:
        model: The model, which was resumed with that conversation.
        messages: The conversation's messages, with the policy's usage in their metadata.

    Attributes:
        conversation: The resumed conversation.
        branch: Its only branch.
        is_over: True once the record is used up or left.
        position: `Node.position` of the last turn that was answered from the record; None before the first.
    """

    def __init__(self, model: SGLangModel, messages: StrandsMessages) -> None:
        self._template = model.template
        self.conversation = model.conversation
        self.branch: Branch = model.conversation.branch
        self.is_over = False
        self.position: int | None = None
        for node in self.branch.nodes:
            turn = self.branch.trajectory.turns[node.turn]
            if turn.finish_reason != "abort" and node.position < len(messages):
                message = messages[node.position]
                usage = message.get("metadata", {}).get("usage")
                node.reply = reply_of_turn(message["content"], turn, usage)

    def note_repeat(self, node: Node) -> None:
        """Note that a turn was answered from the record."""
        self.position = max(node.position, self.position or 0)

    @property
    def is_repeated_to_the_end(self) -> bool:
        """True if the program has repeated all of the record."""
        return self.position is not None and self.position + 1 == len(self.branch.messages) and not self.branch.is_open

    async def difference(self, asked: ClientRequest) -> str:
        """Describe where a request leaves the record; "" if it repeats it, goes beyond it, or is beside it."""
        branch = self.branch
        if branch.head is None:  # the first repeated request tells the system prompt and the tools
            first = min((node.position for node in branch.nodes if node.reply), default=len(branch.messages))
            beginning = branch.history()[:first]
            prompt_ids = await first_prompt(self._template, Branch(), asked.head, beginning)
            if self.is_over:  # another request has ended it meanwhile
                return ""
            if prompt_ids != branch.prompt_ids:
                has_calls = any("toolUse" in block for _, content in branch.messages for block in content)
                shares_nothing = not asked.match(self.conversation, branch).length
                is_beside = not asked.head.tools and (has_calls or shares_nothing)
                return "" if is_beside else _OTHER_HEAD
            branch.head = asked.head
        match = asked.match(self.conversation, branch)
        if not match.has_same_head:
            is_at_end = match.length == len(branch.messages)
            # the agent's own next request, before the end; one without tools is beside an agent that has some
            goes_on = self.position is not None and match.length > self.position
            is_agents = goes_on and bool(asked.head.tools or not branch.head.tools)
            return _OTHER_HEAD if is_at_end or is_agents else ""
        if match.extends:
            self.is_over = True
        elif match.length < len(match.given):
            return f"message {match.length}: {match.difference}"
        elif (node := branch.node_at(match.length)) is None or node.reply is None:
            return f"got {match.length} messages, to which the record has no answer"
        return ""

    def restart(self, model: SGLangModel, kept_messages: int = 0) -> list[Node]:
        """Give the model a new main conversation with the first messages of the record and the turns among them.

        Args:
            model: The model.
            kept_messages: Number of messages to keep; the last is an answer. 0 keeps nothing.

        Returns:
            The turns that were kept.
        """
        self.is_over = True
        record, branch = model.record, self.branch
        record.restart_main()
        if not kept_messages:
            return []
        kept = [node for node in branch.nodes if node.position < kept_messages]
        turns = len(branch.trajectory.turns) - (len(branch.nodes) - len(kept))
        messages = branch.history()[:kept_messages]
        model.restore_main(branch.trajectory.snapshot(turns), messages, kept_messages - 1)
        main = record.main
        for node in kept:
            if (own := main.branch.node_at(node.position)) is not None:
                own.reply = node.reply
        record.touch(main.branch)
        main.branch.head = branch.head
        model.bind_tools(main, branch.head.tools if branch.head is not None else ())
        return kept


def reply_of_turn(content: Sequence[dict[str, Any]], turn: Turn, usage: Mapping[str, int] | None) -> Reply:
    """Return a finished turn as its client is sent it."""
    matched = turn.parts[-1].matched
    stop = matched if isinstance(matched, str) else None
    has_calls = any("toolUse" in block for block in content)
    ended = "tool_use" if has_calls else "end_turn" if stop is None else "stop_sequence"
    return reply_of(content, "max_tokens" if turn.finish_reason == "length" else ended, usage, stop)
