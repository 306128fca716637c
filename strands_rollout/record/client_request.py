"""A gateway client's request, and the branch that it continues.

Many clients change a history when they send it back: they drop reasoning, reformat arguments, or change ids of calls.
The history is compared with what the client was sent, and recognized messages keep their sampled tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.record.agent_request import surrounding_lines, text_of
from strands_rollout.record.record import (
    UNPARSED,
    BeginBranch,
    Block,
    Branch,
    Conversation,
    ConversationKind,
    Head,
    Match,
    Reply,
    StrandsMessages,
)
from strands_rollout.template.tokens import shared_length

if TYPE_CHECKING:
    from strands_rollout.record.record import Record

Call = Mapping[str, Any]
"""A value of Strands' `toolUse`."""
_MAX_SHOWN_CHARS: Final = 80


@dataclass(slots=True, kw_only=True)
class ClientMatch(Match):
    """Result of comparing a client's history with a branch.

    Attributes:
        given: The request's messages, with all calls of a turn in one message, and with empty messages for silent turns
            that the client left out.
        call_ids: The branch's `ClientView.call_ids`, updated by this request; stored on the branch that is entered.
        changed_calls: Descriptions of calls in the shared messages that the client changed or omitted.
        has_same_head: True if the request has the branch's system prompt and tools.
        reaches_end: True if the request continues where the branch ends, even with another system prompt or other
            tools.
    """

    given: StrandsMessages = ()
    call_ids: dict[str, list[str]] = field(default_factory=dict)
    changed_calls: Sequence[str] = ()
    has_same_head: bool = True
    reaches_end: bool = False


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """The parts of a client's request that determine which turn it repeats or which branch it continues.

    Attributes:
        messages: The client's history as Strands messages, ending with a user message.
        head: The system prompt and the tools.
        grammar: Sampling parameters that constrain the turn's text. A recorded turn with another grammar does not
            answer this request.
        keeps_transient: True if a text stays in the policy's history after a request omits it
            (`transient_context="keep"`).
    """

    messages: StrandsMessages
    head: Head
    grammar: Mapping[str, Any] = field(default_factory=dict)
    keeps_transient: bool = False

    def matches(self, record: Record) -> list[ClientMatch]:
        """Compare the request with each branch that has begun.

        The longest match comes first; of equally long matches, the one whose branch was touched last.
        """
        branches = [
            (conversation, branch)
            for conversation in record
            for branch in conversation
            if not branch.is_new or conversation.is_sampling(branch)
        ]
        branches.sort(key=lambda pair: -pair[1].touched)
        matches = [self.match(conversation, branch) for conversation, branch in branches]
        matches.sort(key=lambda match: -match.length)
        return matches

    def match(self, conversation: Conversation, branch: Branch) -> ClientMatch:
        """Compare the request with a branch, message by message."""
        given, call_ids = self.messages, dict(branch.client.call_ids)
        length = shared_length(branch.client.messages, given)
        last = next((index for index in reversed(range(length)) if given[index]["role"] == "assistant"), None)
        if last is not None:  # if a client reuses an id, it means the last call with that id
            _note_ids(_pair_calls(sent_reply(branch, last).calls, reply_of(given[last]["content"]).calls), call_ids)
        changed_calls: list[str] = []
        difference = ""
        while length < min(len(given), len(branch.messages)):
            role, content = branch.messages[length]
            if role == "assistant" and given[length]["role"] == "user" and sent_reply(branch, length).is_silent:
                given = [*given[:length], {"role": "assistant", "content": []}, *given[length:]]
            if role == "user" == given[length]["role"]:
                message = _with_sent_ids(given, length, call_ids, length)
                difference = _user_difference(content, message["content"], keeps_transient=self.keeps_transient)
            elif role != given[length]["role"]:
                difference = f"got a message of the {given[length]['role']} instead of one of the {role}"
            else:
                reply = sent_reply(branch, length)
                given = _with_joined_calls(given, length, reply)
                difference = _assistant_difference(reply, reply_of(given[length]["content"]), call_ids, changed_calls)
            if difference:
                break
            length += 1
        has_same_head = branch.head == self.head
        node = branch.node_at(length) if has_same_head and not difference and length == len(given) else None
        is_answered = node is not None and node.reply is not None and node.grammar in (None, self.grammar)
        # An open turn is continued only by the request that it answers. A request with a grammar can't continue it:
        # a grammar constrains a whole turn, not the rest of a turn.
        has_next = (len(given) == length and not self.grammar) if branch.is_open else len(given) > length
        is_end = not difference and length == len(branch.messages)
        reaches_end = is_end and has_next and not conversation.is_busy
        answer = branch.last_answer if reaches_end else None
        return ClientMatch(
            conversation,
            branch,
            repeated=node if is_answered else None,
            extends=reaches_end and has_same_head,
            difference=difference or _end_difference(conversation, len(given) - length),
            answer=None if answer is None else {"role": answer[0], "content": answer[1]},
            new_messages=messages_after(given, call_ids, length) if reaches_end else (),
            length=length,
            given=given,
            call_ids=call_ids,
            changed_calls=() if difference else changed_calls,
            has_same_head=has_same_head,
            reaches_end=reaches_end,
        )

    def new_branch_place(self, record: Record, matches: Sequence[ClientMatch]) -> BeginBranch:
        """Return where to begin a branch.

        The branch joins the conversation of the best match: the longest match with the same system prompt and tools or,
        without one, a match that reaches the end of its branch. If there is no best match, or its conversation is busy,
        the branch joins a conversation that has not begun yet.
        """
        same_head = (match for match in matches if match.has_same_head)  # the longest match first
        best = next(same_head, None) or next((match for match in matches if match.reaches_end), None)
        is_free = best is not None and not best.conversation.is_busy
        conversation = best.conversation if best is not None and is_free else self._new_conversation(record)
        reason = self._reason(best)
        if best is None:
            return BeginBranch(conversation, self.messages, reason)
        # the policy reads the shared messages as they were recorded, not as the client words them
        recorded = best.branch.messages[: best.length]
        shared = [{"role": role, "content": [*map(sent_block, content)]} for role, content in recorded]
        new_messages = [*shared, *messages_after(best.given, best.call_ids, best.length)]
        origin = next((node for node in best.branch.path() if node.position < best.length), None)
        return BeginBranch(conversation, new_messages, reason, match=best, shared=best.length, origin=origin)

    def _new_conversation(self, record: Record) -> Conversation | ConversationKind:
        if not self.head.tools:
            return "aside"
        return "agent" if record.has_begun(record.main) else record.main

    def _reason(self, best: ClientMatch | None) -> str:
        if best is None:
            return "no conversation so far begins like this history"
        if best.has_same_head:
            return f"message {best.length}: {best.difference}"
        system = best.branch.head.system if best.branch.head is not None else None
        return "the system prompt changed" if system != self.head.system else "the tools changed"


def messages_after(given: StrandsMessages, call_ids: Mapping[str, Sequence[str]], shared: int) -> StrandsMessages:
    """Return the messages after the first `shared`; tool results get the ids that the gateway gave their calls."""
    return [_with_sent_ids(given, index, call_ids, shared) for index in range(shared, len(given))]


def _end_difference(conversation: Conversation, more: int) -> str:
    """Describe why a request doesn't extend a branch, although all compared messages match.

    `more` is the number of the request's messages after the matching messages.
    """
    if not more:
        return "messages were removed from the end of the history"
    if conversation.is_busy:
        return "another request that continues this branch is being answered"
    return f"got {more} more message{'s' * (more > 1)} after a turn that was interrupted"


def sent_reply(branch: Branch, index: int) -> Reply:
    """Return the assistant message at an index as the gateway sent it, or else as the client sent it."""
    node = branch.node_at(index)
    return node.reply if node is not None and node.reply is not None else reply_of(branch.messages[index][1])


def reply_of(
    content: Sequence[Block], stop_reason: str = "", usage: Mapping[str, int] | None = None, stop: str | None = None
) -> Reply:
    """Return the reply that a client gets for an assistant message with this content.

    A call that can't be parsed becomes text, as in the engines' own endpoints: its tool is uncertain.
    """
    reasoning, texts, calls = [], [], []
    for block in map(sent_block, content):
        if "reasoningContent" in block:
            reasoning.append(block["reasoningContent"]["reasoningText"]["text"])
        elif "text" in block:
            texts.append(block["text"])
        else:
            calls.append(block["toolUse"])
    text = "".join(texts).strip("\n")
    reason = "end_turn" if stop_reason == "tool_use" and not calls else stop_reason
    return Reply("".join(reasoning).strip("\n"), text.removesuffix(stop or ""), calls, reason, usage or {}, stop)


def sent_block(block: Block) -> Block:
    """Return an assistant's block as it is sent to a client: a call that can't be parsed becomes text."""
    is_unparsed = "toolUse" in block and block["toolUse"]["toolUseId"].endswith(UNPARSED)
    return {"text": str(block["toolUse"]["input"].get("raw", ""))} if is_unparsed else block


def _pair_calls(sent: Sequence[Call], got: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Pair the sent calls with the calls that a client gives back: by unique ids, otherwise in order."""
    by_id, counts = {call["toolUseId"]: call for call in sent}, Counter(call["toolUseId"] for call in got)
    unique_ids = {use_id for use_id, count in counts.items() if count == 1 and use_id in by_id}
    others = (call for call in sent if call["toolUseId"] not in unique_ids)
    return [
        (was_sent, call)
        for call in got
        if (was_sent := by_id[call["toolUseId"]] if call["toolUseId"] in unique_ids else next(others, None)) is not None
    ]


def _note_ids(pairs: Sequence[tuple[Call, Call]], call_ids: dict[str, list[str]]) -> None:
    """Add the ids that a client uses for a turn's calls to `call_ids`, replacing equal ids of earlier turns."""
    sent_ids_of = dict[str, list[str]]()
    for was_sent, got in pairs:
        sent_ids_of.setdefault(got["toolUseId"], []).append(was_sent["toolUseId"])
    for use_id, sent_ids in sent_ids_of.items():
        call_ids.pop(use_id, None)
        if sent_ids != [use_id]:
            call_ids[use_id] = sent_ids


def _with_joined_calls(given: StrandsMessages, index: int, sent: Reply) -> StrandsMessages:
    """Return the messages with all calls of the turn at an index in one message, and their results in the next.

    Some clients give back a turn's calls one by one, each followed by its result, as if they were turns of their own.
    """
    calls, results, end = [*given[index]["content"]], list[Block](), index + 1
    sent_ids = {call["toolUseId"] for call in sent.calls}
    while (count := sum("toolUse" in block for block in calls)) < len(sent.calls) and end + 1 < len(given):
        answered, more = given[end]["content"], given[end + 1]["content"]
        candidates = zip(sent.calls[count:], (block.get("toolUse") for block in more), strict=False)
        is_of_turn = all(
            call is not None and (call["toolUseId"] in sent_ids or _is_same_call(was_sent, call))
            for was_sent, call in candidates
        )
        are_results = bool(answered) and all("toolResult" in block for block in answered)
        if not (more and is_of_turn and len(more) <= len(sent.calls) - count and are_results):
            break
        calls, results, end = [*calls, *more], [*results, *answered], end + 2
    if not results or end >= len(given):
        return given
    turn, answers = {**given[index], "content": calls}, {**given[end], "content": [*results, *given[end]["content"]]}
    return [*given[:index], turn, answers, *given[end + 1 :]]


def _is_same_call(one: Call, other: Call) -> bool:
    return (one["name"], one["input"]) == (other["name"], other["input"])


def _assistant_difference(sent: Reply, got: Reply, call_ids: dict[str, list[str]], changed_calls: list[str]) -> str:
    """Describe how a client's assistant message differs from the message that was sent to it; "" if they are the same.

    These differences do not count:

    - white space;
    - omitted text of a message with calls;
    - omitted reasoning, and changed reasoning of a message with text or calls;
    - a changed name or changed arguments of a call with an unchanged id (agents return calls as their tools accepted
      them);
    - omitted calls, if at least one call is left and all remaining calls have unchanged ids (some agents omit calls
      that they have not run).

    Adds the client's ids of the calls to `call_ids`, and descriptions of changed or omitted calls to `changed_calls`.
    """
    sent_ids = {call["toolUseId"] for call in sent.calls}
    has_sent_ids = bool(got.calls) and len({call["toolUseId"] for call in got.calls} & sent_ids) == len(got.calls)
    if not has_sent_ids and len(sent.calls) != len(got.calls):
        return f"got {len(got.calls)} calls; {len(sent.calls)} were sent"
    pairs = _pair_calls(sent.calls, got.calls)
    for was_sent, returned in pairs:
        if not _is_same_call(was_sent, returned):
            shown = [_quote(call["name"], call["input"]) for call in (returned, was_sent)]
            description = "got the call {}; {} was sent".format(*shown)
            if was_sent["toolUseId"] != returned["toolUseId"]:
                return description
            changed_calls.append(description)
    matched = [was_sent for was_sent, _ in pairs]
    omitted = [call for call in sent.calls if call not in matched]
    changed_calls += [f"got no call {_quote(call['name'], call['input'])}, which was sent" for call in omitted]
    has_no_text = not got.text and bool(got.calls)
    if sent.text.split() != got.text.split() and not has_no_text:
        return f"got the text {_quote(got.text)}; {_quote(sent.text)} was sent"
    if sent.is_silent and got.reasoning.strip() and sent.reasoning.split() != got.reasoning.split():
        return "got reasoning that differs from what was sent"
    _note_ids(pairs, call_ids)
    return ""


def _user_difference(read: Sequence[Block], got: Sequence[Block], *, keeps_transient: bool) -> str:
    """Describe how a user message differs from the message that the policy has read; "" if it does not.

    If `keeps_transient` is true, additional lines before or after the client's text in the policy's message don't
    count.
    """
    if read == got:
        return ""
    (read_parts, read_words), (got_parts, got_words) = _comparable_parts(read), _comparable_parts(got)
    if read_parts != got_parts:
        return "the tool results or images differ"
    if read_words == got_words:
        return ""
    if keeps_transient and (got_parts or got_words) and surrounding_lines(text_of(read), text_of(got)):
        return ""
    start = next((n for n, (a, b) in enumerate(zip(read_words, got_words, strict=False)) if a != b), 0)
    return f"got the text {_quote(*got_words[start:])}; the policy has read {_quote(*read_words[start:])}"


def _comparable_parts(content: Sequence[Block]) -> tuple[list[Any], list[str]]:
    """Return two lists: a user message's tool results (sorted by call id) and images, and the words of its texts."""
    results = [block["toolResult"] for block in content if "toolResult" in block]
    images = [block["image"]["source"]["bytes"] for block in content if "image" in block]
    by_id = sorted(
        ((result["toolUseId"], _comparable_parts(result["content"])) for result in results), key=itemgetter(0)
    )
    return [*by_id, *images], text_of(content).split()


def _quote(*values: object) -> str:
    text = " ".join(map(str, values))
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}...")


def _with_sent_ids(
    given: StrandsMessages, index: int, call_ids: Mapping[str, Sequence[str]], shared: int
) -> Mapping[str, Any]:
    """Return the message at an index; its tool results get the ids that the gateway gave their calls.

    The n-th result with an id belongs to the n-th call with that id. Results of a turn after the first `shared`
    messages keep the client's ids, as the turn's calls do.
    """
    message = given[index]
    if not call_ids or message["role"] == "assistant" or not any("toolResult" in block for block in message["content"]):
        return message
    counts = Counter[str]()
    begin = index
    while begin and given[begin - 1]["role"] == "user":  # a turn's results may be in several messages
        begin -= 1
        counts.update(block["toolResult"]["toolUseId"] for block in given[begin]["content"] if "toolResult" in block)
    if begin > shared:
        return message
    blocks = []
    for block in message["content"]:
        if (result := block.get("toolResult")) is not None:
            sent_ids, number = call_ids.get(result["toolUseId"], ()), counts[result["toolUseId"]]
            counts[result["toolUseId"]] += 1
            use_id = sent_ids[number] if number < len(sent_ids) else result["toolUseId"]
            block = {"toolResult": {**result, "toolUseId": use_id}}
        blocks.append(block)
    return {**message, "content": blocks}
