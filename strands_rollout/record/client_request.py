"""A gateway client's request, and the branch that it continues.

Clients spell a history as they like. It is compared with what the client was sent (ids of calls, text, reasoning), and
sampled text is never tokenised again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.record.agent_request import lines_around
from strands_rollout.record.branch import (
    UNPARSED,
    Block,
    Branch,
    Conversation,
    ConversationKind,
    Head,
    Reply,
    StrandsMessages,
)
from strands_rollout.record.place import BeginBranch, Match
from strands_rollout.template.tokens import shared_length

if TYPE_CHECKING:
    from strands_rollout.record.record import Record

Call = Mapping[str, Any]
"""A value of Strands' `toolUse`."""
_MAX_SHOWN_CHARS: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMatch(Match):
    """Extent to which a client's history follows a branch.

    Attributes:
        given: The request's messages, with all calls of a turn in one message.
        call_ids: The branch's `ClientView.call_ids`, updated by this request; stored on the branch that is entered.
        changed_calls: Shared calls that the client spells otherwise than it was sent them, each described as text.
        has_same_head: True if the system prompt and the tools are the branch's.
        reaches_end: True if it continues where the branch ends, apart from its system prompt and tools.
    """

    given: StrandsMessages = ()
    call_ids: dict[str, list[str]] = field(default_factory=dict)
    changed_calls: Sequence[str] = ()
    has_same_head: bool = True
    reaches_end: bool = False


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """The parts of a client's request that decide about its place in the record.

    Attributes:
        messages: The client's history as Strands messages, ending with a user message.
        head: The system prompt and the tools.
        grammar: Sampling parameters that constrain the turn's text. A turn is repeated only for the same grammar.
        keeps_transient: True if a text that the next request lacks stays where the policy has read it.
    """

    messages: StrandsMessages
    head: Head
    grammar: Mapping[str, Any] = field(default_factory=dict)
    keeps_transient: bool = False

    def matches(self, record: Record) -> list[ClientMatch]:
        """Compare it with each branch; longest match first, then the branch that was touched last."""
        branches = [(one, branch) for one in record for branch in one if not branch.is_new or one.is_sampling(branch)]
        branches.sort(key=lambda pair: -pair[1].touched)
        matches = [self.match(conversation, branch) for conversation, branch in branches]
        matches.sort(key=lambda match: -match.length)
        return matches

    def match(self, conversation: Conversation, branch: Branch) -> ClientMatch:
        """Compare it with a branch, message by message."""
        given, call_ids = self.messages, dict(branch.client.call_ids)
        length = shared_length(branch.client.messages, given)
        last = next((at for at in range(length - 1, -1, -1) if given[at]["role"] == "assistant"), None)
        if last is not None:  # a client may use an id again, which then means the last call
            _note_ids(_pairs(sent(branch, last).calls, reply_of(given[last]["content"]).calls), call_ids)
        changed_calls: list[str] = []
        difference = ""
        while length < min(len(given), len(branch.messages)):
            role, content = branch.messages[length]
            if role == "assistant" and given[length]["role"] == "user" and sent(branch, length).is_silent:
                given = [*given[:length], {"role": "assistant", "content": []}, *given[length:]]
            if role == "user" == given[length]["role"]:
                message = _under_sent_ids(given, length, call_ids, length)
                difference = _user_difference(content, message["content"], keeps_transient=self.keeps_transient)
            elif role != given[length]["role"]:
                difference = f"got one of the {given[length]['role']}, in the place of one of the {role}"
            else:
                reply = sent(branch, length)
                given = _with_whole_turn(given, length, reply)
                difference = _assistant_difference(reply, reply_of(given[length]["content"]), call_ids, changed_calls)
            if difference:
                break
            length += 1
        has_same_head = branch.head == self.head
        node = branch.node_at(length) if has_same_head and not difference and length == len(given) else None
        is_answered = node is not None and node.reply is not None and node.grammar in (None, self.grammar)
        # An open turn is continued by the very request that it answers. A grammar constrains whole turns, not the rest
        # of one.
        has_next = (len(given) == length and not self.grammar) if branch.is_open else len(given) > length
        is_end = not difference and length == len(branch.messages)
        reaches_end = is_end and has_next and not conversation.is_busy
        answer = branch.answered if reaches_end else None
        return ClientMatch(
            conversation,
            branch,
            repeated=node if is_answered else None,
            extends=reaches_end and has_same_head,
            difference=difference or _end_difference(conversation, len(given) - length),
            answer=None if answer is None else {"role": answer[0], "content": answer[1]},
            new_messages=own_messages(given, call_ids, length) if reaches_end else (),
            length=length,
            given=given,
            call_ids=call_ids,
            changed_calls=() if difference else changed_calls,
            has_same_head=has_same_head,
            reaches_end=reaches_end,
        )

    def begin_branch(self, record: Record, matches: Sequence[ClientMatch]) -> BeginBranch:
        """Begin a branch in the conversation that it shares most with, or in a conversation of its own."""
        has_answers = any(message["role"] == "assistant" for message in self.messages)
        same_head = [match for match in matches if match.has_same_head]
        near = next((match for match in same_head if match.length or not has_answers), None)
        near = near or next(iter(same_head), None) or next((match for match in matches if match.reaches_end), None)
        is_free = near is not None and not near.conversation.is_busy
        conversation = near.conversation if near is not None and is_free else self._new_conversation(record)
        reason = self._reason(near)
        if near is None:
            return BeginBranch(conversation, self.messages, reason)
        # the shared beginning is read as it was recorded, not as the client spells it
        shared = near.branch.messages[: near.length]
        beginning = [{"role": role, "content": [*map(sent_block, content)]} for role, content in shared]
        new_messages = [*beginning, *own_messages(near.given, near.call_ids, near.length)]
        origin = next((node for node in near.branch.path() if node.position < near.length), None)
        return BeginBranch(conversation, new_messages, reason, match=near, shared=near.length, origin=origin)

    def _new_conversation(self, record: Record) -> Conversation | ConversationKind:
        """Return the main conversation for the first request with tools, else the kind of conversation to begin."""
        if not self.head.tools:
            return "aside"
        return "agent" if record.is_begun(record.main) else record.main

    def _reason(self, near: ClientMatch | None) -> str:
        """Describe why it extends no branch."""
        if near is None:
            return "its beginning is of no conversation so far"
        if near.has_same_head:
            return f"message {near.length}: {near.difference}"
        system = near.branch.head.system if near.branch.head is not None else None
        return "the system prompt changed" if system != self.head.system else "the tools changed"


def own_messages(given: StrandsMessages, call_ids: Mapping[str, Sequence[str]], shared: int) -> StrandsMessages:
    """Return the messages after the shared ones, with results under the ids that the calls were sent with."""
    return [_under_sent_ids(given, at, call_ids, shared) for at in range(shared, len(given))]


def _end_difference(conversation: Conversation, more: int) -> str:
    """Describe why a history does not extend a branch that it follows to the end, with `more` messages after it."""
    if not more:
        return "messages were taken from its end"
    if conversation.is_busy:
        return "another request that goes on there is being answered"
    return f"got {more} more; the turn before it was interrupted"


def sent(branch: Branch, at: int) -> Reply:
    """Return the assistant message at an index as its client was sent it, or as the client spelled it."""
    node = branch.node_at(at)
    return node.reply if node is not None and node.reply is not None else reply_of(branch.messages[at][1])


def reply_of(
    content: Sequence[Block], stop_reason: str = "", usage: Mapping[str, int] | None = None, stop: str | None = None
) -> Reply:
    """Return an assistant message with this content as a client is sent it.

    A call that can't be parsed becomes text, as in the engines' own endpoints, since it names no tool for sure.
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
    """Return an assistant's block as a client is sent it: a call that can't be parsed becomes text."""
    is_unparsed = "toolUse" in block and block["toolUse"]["toolUseId"].endswith(UNPARSED)
    return {"text": str(block["toolUse"]["input"].get("raw", ""))} if is_unparsed else block


def _pairs(sent: Sequence[Call], got: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Pair the calls that were sent with those that a client gives back: by unique ids, else in order."""
    by_id, counts = {call["toolUseId"]: call for call in sent}, Counter(call["toolUseId"] for call in got)
    own = {use_id for use_id, count in counts.items() if count == 1 and use_id in by_id}
    others = (call for call in sent if call["toolUseId"] not in own)
    return [
        (one, call)
        for call in got
        if (one := by_id[call["toolUseId"]] if call["toolUseId"] in own else next(others, None)) is not None
    ]


def _note_ids(pairs: Sequence[tuple[Call, Call]], call_ids: dict[str, list[str]]) -> None:
    """Add the ids that a client uses for the calls of a turn to `call_ids`; they replace those of earlier turns."""
    used = dict[str, list[str]]()
    for was_sent, given in pairs:
        used.setdefault(given["toolUseId"], []).append(was_sent["toolUseId"])
    for use_id, sent_ids in used.items():
        call_ids.pop(use_id, None)
        if sent_ids != [use_id]:
            call_ids[use_id] = sent_ids


def _with_whole_turn(given: StrandsMessages, at: int, sent: Reply) -> StrandsMessages:
    """Return the messages with all calls of the turn at an index in one message, and their results in the next.

    Some clients give back a turn's calls one by one, each with its result, as if the policy had waited for it.
    """
    calls, results, end = [*given[at]["content"]], list[Block](), at + 1
    sent_ids = {call["toolUseId"] for call in sent.calls}
    while (count := sum("toolUse" in block for block in calls)) < len(sent.calls) and end + 1 < len(given):
        answered, more = given[end]["content"], given[end + 1]["content"]
        candidates = zip(sent.calls[count:], (block.get("toolUse") for block in more), strict=False)
        is_of_turn = all(
            call is not None and (call["toolUseId"] in sent_ids or _is_same(one, call)) for one, call in candidates
        )
        are_results = bool(answered) and all("toolResult" in block for block in answered)
        if not (more and is_of_turn and len(more) <= len(sent.calls) - count and are_results):
            break
        calls, results, end = [*calls, *more], [*results, *answered], end + 2
    if not results or end >= len(given):
        return given
    turn, answers = {**given[at], "content": calls}, {**given[end], "content": [*results, *given[end]["content"]]}
    return [*given[:at], turn, answers, *given[end + 1 :]]


def _is_same(one: Call, other: Call) -> bool:
    return (one["name"], one["input"]) == (other["name"], other["input"])


def _assistant_difference(sent: Reply, got: Reply, call_ids: dict[str, list[str]], changed_calls: list[str]) -> str:
    """Describe how a client's assistant message differs from the one that it was sent; "" if it does not.

    These do not count:

    - whitespace, a text that is left out beside calls, and reasoning that is left out, or changed beside text or calls;
    - other arguments of a call under its own id, since agents give calls back as their tools took them;
    - calls that are left out beside such calls, since some agents leave out calls that they have not run.

    Args:
        sent: The message that was sent.
        got: The client's message.
        call_ids: Gets the ids that the client uses for the calls.
        changed_calls: Gets a description of each call that was changed or left out.
    """
    sent_ids = {call["toolUseId"] for call in sent.calls}
    has_sent_ids = bool(got.calls) and len({call["toolUseId"] for call in got.calls} & sent_ids) == len(got.calls)
    if not has_sent_ids and len(sent.calls) != len(got.calls):
        return f"got {len(got.calls)} calls; {len(sent.calls)} were sent"
    pairs = _pairs(sent.calls, got.calls)
    for one, other in pairs:
        if not _is_same(one, other):
            shown = [_short(call["name"], call["input"]) for call in (other, one)]
            description = "got the call {}; {} was sent".format(*shown)
            if one["toolUseId"] != other["toolUseId"]:
                return description
            changed_calls.append(description)
    given_back = [one for one, _ in pairs]
    left_out = [call for call in sent.calls if call not in given_back]
    changed_calls += [f"got no call {_short(call['name'], call['input'])}, which was sent" for call in left_out]
    has_no_text = not got.text and bool(got.calls)
    if sent.text.split() != got.text.split() and not has_no_text:
        return f"got the text {_short(got.text)}; {_short(sent.text)} was sent"
    if sent.is_silent and got.reasoning.strip() and sent.reasoning.split() != got.reasoning.split():
        return "got other reasoning than was sent"
    _note_ids(pairs, call_ids)
    return ""


def _user_difference(kept: Sequence[Block], given: Sequence[Block], *, keeps_transient: bool) -> str:
    """Describe how a user message differs from the one that the policy has read; "" if it reads the same."""
    if kept == given:
        return ""
    before, now = _plain(kept), _plain(given)
    if before == now:
        return ""
    if before[0] != now[0]:
        return "the results or images are others"
    if keeps_transient and (now[0] or now[1]) and lines_around(_texts(kept), _texts(given)):
        return ""
    at = next((n for n, (a, b) in enumerate(zip(before[1], now[1], strict=False)) if a != b), 0)
    return f"got the text {_short(*now[1][at:])}; the policy has read {_short(*before[1][at:])}"


def _plain(content: Sequence[Block]) -> tuple[list[Any], list[str]]:
    """Return a user message's results, sorted by call id, and images; and the words of its texts."""
    results = [block["toolResult"] for block in content if "toolResult" in block]
    images = [block["image"]["source"]["bytes"] for block in content if "image" in block]
    by_id = sorted(((one["toolUseId"], _plain(one["content"])) for one in results), key=itemgetter(0))
    return [*by_id, *images], _texts(content).split()


def _texts(content: Sequence[Block]) -> str:
    return "\n".join(block["text"] for block in content if "text" in block)


def _short(*given: object) -> str:
    text = " ".join(map(str, given))
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}...")


def _under_sent_ids(
    given: StrandsMessages, at: int, call_ids: Mapping[str, Sequence[str]], shared: int
) -> Mapping[str, Any]:
    """Return a message with its results under the ids that their calls were sent with.

    Results that share an id belong to the calls in order. Results of a turn after the `shared` messages keep the ids of
    the client, as its calls do.
    """
    message = given[at]
    if not call_ids or message["role"] == "assistant" or not any("toolResult" in block for block in message["content"]):
        return message
    counts = Counter[str]()
    begin = at
    while begin and given[begin - 1]["role"] == "user":  # the first results of the turn
        begin -= 1
        counts.update(block["toolResult"]["toolUseId"] for block in given[begin]["content"] if "toolResult" in block)
    if begin > shared:
        return message
    blocks = []
    for block in message["content"]:
        if (result := block.get("toolResult")) is not None:
            sent_ids, number = call_ids.get(result["toolUseId"], ()), counts[result["toolUseId"]]
            counts[result["toolUseId"]] += 1
            block = {
                "toolResult": {
                    **result,
                    "toolUseId": sent_ids[number] if number < len(sent_ids) else result["toolUseId"],
                }
            }
        blocks.append(block)
    return {**message, "content": blocks}
