"""Answer requests from the record of an aborted attempt, when a restarted program repeats them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from strands_rollout.model.context import first_prompt
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.client_request import ClientRequest, reply_of
from strands_rollout.record.record import Branch, Node, Reply, StrandsMessages
from strands_rollout.record.tokens import Turn

_OTHER_HEAD: Final = "the system prompt or the tools differ"


class Replay:
    """The main conversation of an earlier attempt, which the restarted program repeats.

    Until the replay is over (see `is_over`), requests that repeat the record are answered from the record. If a request
    departs from the record, `Session` restarts the conversation.

    Args:
        model: The model, which was resumed with that conversation.
        messages: The conversation's messages; the policy's answers have their usage in the metadata.

    Attributes:
        conversation: The resumed conversation.
        branch: The only branch of the conversation.
        is_over: True once a request has continued past the record or departed from it, another conversation has become
            the main one, or the program has ended.
        position: The largest `Node.position` of the turns that were returned from the record; None before the first.
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
        """Advance `position` to `node`, whose turn was returned from the record; never move it back."""
        self.position = max(node.position, self.position or 0)

    @property
    def is_complete(self) -> bool:
        """True if the program has repeated the whole record."""
        return self.position is not None and self.position + 1 == len(self.branch.messages) and not self.branch.is_open

    async def compare(self, request: ClientRequest) -> str:
        """Compare a request with the record; a request that continues past the record ends the replay.

        Returns:
            A description of where the request departs from the record. "" if the request repeats or continues the
            record, or is a side request. "" also if a concurrent request ended the replay.
        """
        branch = self.branch
        # a resumed branch has no head: the first request that renders to the recorded prompt sets it
        if branch.head is None:
            has_same_prompt = await self._has_same_prompt(request)
            if self.is_over:  # a concurrent request ended the replay
                return ""
            if not has_same_prompt:
                return "" if self._is_side_request(request) else _OTHER_HEAD
            branch.head = request.head
        match = request.match(self.conversation, branch)
        if not match.has_same_head:
            is_at_end = match.length == len(branch.messages)
            # a request past the last repeated turn is the agent's own next request, unless it lacks the agent's tools
            is_past_repeats = self.position is not None and match.length > self.position
            is_agents_request = is_past_repeats and bool(request.head.tools or not branch.head.tools)
            return _OTHER_HEAD if is_at_end or is_agents_request else ""
        if match.extends:
            self.is_over = True
        elif match.length < len(match.given):
            return f"message {match.length}: {match.difference}"
        elif (node := branch.node_at(match.length)) is None or node.reply is None:
            return f"got {match.length} messages, for which the record has no answer"
        return ""

    async def _has_same_prompt(self, request: ClientRequest) -> bool:
        """Return whether the recorded first messages, with the request's head, render to the recorded first prompt."""
        branch = self.branch
        first = min((node.position for node in branch.nodes if node.reply), default=len(branch.messages))
        prompt_ids = await first_prompt(self._template, Branch(), request.head, branch.history()[:first])
        return prompt_ids == branch.prompt_ids

    def _is_side_request(self, request: ClientRequest) -> bool:
        """Return whether a request that does not repeat the first prompt is a side request, such as for a title."""
        has_calls = any("toolUse" in block for _, content in self.branch.messages for block in content)
        shares_nothing = not request.match(self.conversation, self.branch).length
        return not request.head.tools and (has_calls or shares_nothing)

    def restart(self, model: SGLangModel, kept_messages: int = 0) -> list[Node]:
        """End the replay; begin the main conversation again with the record's first messages and the turns among them.

        Args:
            model: The model.
            kept_messages: Number of messages to keep, up to and including an answer; 0 keeps nothing.

        Returns:
            The turns of the record that were kept.
        """
        self.is_over = True
        record, branch = model.record, self.branch
        record.restart_main()
        if not kept_messages:
            return []
        kept_nodes = [node for node in branch.nodes if node.position < kept_messages]
        turn_count = len(branch.trajectory.turns) - (len(branch.nodes) - len(kept_nodes))
        messages = branch.history()[:kept_messages]
        model.restore_main(branch.trajectory.snapshot(turn_count), messages, kept_messages - 1)
        main = record.main
        for node in kept_nodes:
            if (restored := main.branch.node_at(node.position)) is not None:
                restored.reply = node.reply
        record.touch(main.branch)
        main.branch.head = branch.head
        model.bind_tools(main, branch.head.tools if branch.head is not None else ())
        return kept_nodes


def reply_of_turn(content: Sequence[dict[str, Any]], turn: Turn, usage: Mapping[str, int] | None) -> Reply:
    """Return a finished turn as the reply to its client."""
    matched = turn.parts[-1].matched
    stop = matched if isinstance(matched, str) else None
    if turn.finish_reason == "length":
        stop_reason = "max_tokens"
    elif any("toolUse" in block for block in content):
        stop_reason = "tool_use"
    else:
        stop_reason = "end_turn" if stop is None else "stop_sequence"
    return reply_of(content, stop_reason, usage, stop)
