"""A client's request, and the branch that it goes on with: clients tell a history as they like, in words of their own.

A history is compared with what its client was sent: ids of calls, text, reasoning. What was sampled is never tokenised
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from strands_rollout.record.agent_request import lines_around
from strands_rollout.record.branch import UNPARSED, Block, Branch, Conversation, Head, Kind, Reply, StrandsMessages
from strands_rollout.record.place import Match, Place

if TYPE_CHECKING:
    from strands_rollout.record.record import Record

Call = Mapping[str, Any]
"""A block of Strands' `toolUse`."""
_SHOWN_CHARS: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMatch(Match):
    """How far a client's history follows one branch.

    Attributes:
        given: The request's messages, the calls of a turn in one message.
        ids: The branch's `client_ids`, with what this request tells of them; the branch's own once it goes on there.
        changed: Calls among those that were compared that differ, each as text.
        has_same_head: Whether the system prompt and the tools are the branch's.
        reaches_end: Whether it goes on where the branch ends, whatever its system prompt and tools.
    """

    given: StrandsMessages = ()
    ids: dict[str, list[str]] = field(default_factory=dict)
    changed: Sequence[str] = ()
    has_same_head: bool = True
    reaches_end: bool = False


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of a client of the gateway, as far as the record has to know it.

    Attributes:
        messages: Its history as Strands messages; the last is a user's.
        head: Its system prompt and tools.
        grammar: Sampling parameters that bound the turn's text; an answer without them is an answer to something else.
        keeps_transient: Whether texts stay where the policy has read them that the next request does not have.
    """

    messages: StrandsMessages
    head: Head
    grammar: Mapping[str, Any] = field(default_factory=dict)
    keeps_transient: bool = False

    def matches(self, record: Record) -> list[ClientMatch]:
        """How far it follows each branch: the longest first, of equals that with the newest answer."""
        branches = [(one, branch) for one in record for branch in one if not branch.is_new or one.is_sampling(branch)]
        branches.sort(key=lambda both: -both[1].touched)
        matches = [self.match(conversation, branch) for conversation, branch in branches]
        matches.sort(key=lambda one: -one.length)
        return matches

    def match(self, conversation: Conversation, branch: Branch) -> ClientMatch:
        """How far it follows a branch."""
        given, ids = self.messages, dict(branch.client_ids)
        length = shared_length(branch.seen, given)  # what is spelled as before is compared in C
        last = next((at for at in reversed(range(length)) if given[at]["role"] == "assistant"), None)
        if last is not None:  # a client may use an id again: that of the last turn counts
            _note_ids(_pairs(sent(branch, last).calls, reply_of(given[last]["content"]).calls), ids)
        changed: list[str] = []
        why = ""
        while length < min(len(given), len(branch.messages)):
            role, content = branch.messages[length]
            if role == "assistant" and given[length]["role"] == "user" and sent(branch, length).is_silent:
                given = [*given[:length], {"role": "assistant", "content": []}, *given[length:]]
            if role == "user" == given[length]["role"]:
                told = _under_ids(given, length, ids, length)["content"]
                why = _user_difference(content, told, keeps_transient=self.keeps_transient)
            elif role != given[length]["role"]:
                why = f"got one of the {given[length]['role']}, in the place of one of the {role}"
            else:
                reply = sent(branch, length)
                given = _with_whole_turn(given, length, reply)
                why = _difference(reply, reply_of(given[length]["content"]), ids, changed)
            if why:
                break
            length += 1
        is_end = not why and length == len(branch.messages)
        has_same_head = branch.head == self.head
        node = branch.node_at(length) if has_same_head and not why and length == len(given) else None
        is_answer = node is not None and node.reply is not None and node.grammar in (None, self.grammar)
        # an open turn is continued by the request that it answers, which tells nothing new; grammars bound whole turns
        has_next = (len(given) == length and not self.grammar) if branch.is_open else len(given) > length
        reaches_end = is_end and has_next and not conversation.is_busy
        answered = branch.answered if reaches_end else None
        return ClientMatch(
            conversation,
            branch,
            node=node if is_answer else None,
            extends=reaches_end and has_same_head,
            why=why or _why_not_extended(conversation, len(given) - length),
            answered=None if answered is None else {"role": answered[0], "content": answered[1]},
            new=own_messages(given, ids, length) if reaches_end else (),
            length=length,
            given=given,
            ids=ids,
            changed=() if why else changed,
            has_same_head=has_same_head,
            reaches_end=reaches_end,
        )

    def place_beside(self, record: Record, matches: Sequence[ClientMatch]) -> Place:
        """Where it goes on if it extends no branch: on a new branch of a conversation, or in a new one."""
        has_answers = any(message["role"] == "assistant" for message in self.messages)
        same = [one for one in matches if one.has_same_head]
        # a head that changed in mid-conversation; else another agent's
        near = next((one for one in same if one.length or not has_answers), same[0] if same else None)
        near = near or next((one for one in matches if one.reaches_end), None)
        is_free = near is not None and not near.conversation.is_busy
        conversation = near.conversation if near is not None and is_free else self._new_conversation(record)
        branch = None if is_free or isinstance(conversation, str) else conversation.branch
        why = self._why_beside(near)
        if near is None:
            return Place(conversation, branch, why, new=self.messages)
        # what was recorded of a shared beginning is read again as it was
        shared = near.branch.messages[: near.length]
        beginning = [{"role": role, "content": [*map(sent_block, content)]} for role, content in shared]
        new = [*beginning, *own_messages(near.given, near.ids, near.length)]
        origin = next((node for node in near.branch.path() if node.position < near.length), None)
        return Place(conversation, branch, why, new=new, match=near, shared=near.length, origin=origin)

    def _new_conversation(self, record: Record) -> Conversation | Kind:
        """The main one for the first request with tools, which may be of a kind that is to be begun."""
        if not self.head.tools:
            return "aside"
        return "agent" if record.is_begun(record.main) else record.main

    def _why_beside(self, near: ClientMatch | None) -> str:
        """Why it extends no branch."""
        if near is None:
            return "its beginning is of no conversation so far"
        if near.has_same_head:
            return f"message {near.length}: {near.why}"
        system = near.branch.head.system if near.branch.head is not None else None
        return "the system prompt changed" if system != self.head.system else "the tools changed"


def own_messages(given: StrandsMessages, ids: Mapping[str, Sequence[str]], matched: int) -> StrandsMessages:
    """Return the messages after those that match, with results under the ids that calls were sent with."""
    return [_under_ids(given, at, ids, matched) for at in range(matched, len(given))]


def _why_not_extended(conversation: Conversation, more: int) -> str:
    """Why a history that follows a branch as far as both go does not go on there; it has so many messages more."""
    if not more:
        return "messages were taken from its end"
    if conversation.is_busy:
        return "another request that goes on there is being answered"
    return f"got {more} more; the turn before it was interrupted"


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two lists begin with that are equal."""
    if one == other[: len(one)]:  # one comparison in C
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def sent(branch: Branch, at: int) -> Reply:
    """Return what a client was sent as the policy's message at this place, or what it had told itself."""
    node = branch.node_at(at)
    return node.reply if node is not None and node.reply is not None else reply_of(branch.messages[at][1])


def reply_of(
    content: Sequence[Block], stop_reason: str = "", usage: Mapping[str, int] | None = None, stop: str | None = None
) -> Reply:
    """A message of the policy's, of which this is the content, as a client is sent it.

    A call that can't be parsed is text, as engines' own endpoints send it: a client would not know its tool.
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
    """A block of the policy's as a client is sent it: a call that can't be parsed is text."""
    is_unparsed = "toolUse" in block and block["toolUse"]["toolUseId"].endswith(UNPARSED)
    return {"text": str(block["toolUse"]["input"].get("raw", ""))} if is_unparsed else block


def _pairs(sent: Sequence[Call], got: Sequence[Call]) -> list[tuple[Call, Call]]:
    """The calls that a client tells, each after the one that it was sent: by its id if no other has it, or in order."""
    by_id, counts = {call["toolUseId"]: call for call in sent}, Counter(call["toolUseId"] for call in got)
    own = {use_id for use_id, count in counts.items() if count == 1 and use_id in by_id}
    others = (call for call in sent if call["toolUseId"] not in own)
    return [
        (one, call)
        for call in got
        if (one := by_id[call["toolUseId"]] if call["toolUseId"] in own else next(others, None)) is not None
    ]


def _note_ids(pairs: Sequence[tuple[Call, Call]], ids: dict[str, list[str]]) -> None:
    """Remember under which ids a client knows the calls of a turn, in the place of those of earlier turns."""
    told = dict[str, list[str]]()
    for one, other in pairs:
        told.setdefault(other["toolUseId"], []).append(one["toolUseId"])
    for use_id, sent in told.items():
        ids.pop(use_id, None)
        if sent != [use_id]:
            ids[use_id] = sent


def _with_whole_turn(given: StrandsMessages, at: int, sent: Reply) -> StrandsMessages:
    """The messages with the calls of one turn in one of them, and their results in the next.

    Some clients tell a turn's calls one by one, each with its result, as if the policy had waited for it.
    """
    calls, results, end = [*given[at]["content"]], list[Block](), at + 1
    known = {call["toolUseId"] for call in sent.calls}
    while (count := sum("toolUse" in block for block in calls)) < len(sent.calls) and end + 1 < len(given):
        told, more = given[end]["content"], given[end + 1]["content"]
        follows = zip(sent.calls[count:], (block.get("toolUse") for block in more), strict=False)
        is_of_turn = all(
            call is not None and (call["toolUseId"] in known or _is_same(one, call)) for one, call in follows
        )
        are_results = bool(told) and all("toolResult" in block for block in told)
        if not (more and is_of_turn and len(more) <= len(sent.calls) - count and are_results):
            break
        calls, results, end = [*calls, *more], [*results, *told], end + 2
    if not results or end >= len(given):
        return given
    turn, answers = {**given[at], "content": calls}, {**given[end], "content": [*results, *given[end]["content"]]}
    return [*given[:at], turn, answers, *given[end + 1 :]]


def _is_same(one: Call, other: Call) -> bool:
    return (one["name"], one["input"]) == (other["name"], other["input"])


def _difference(sent: Reply, got: Reply, ids: dict[str, list[str]], changed: list[str]) -> str:
    """In what a client's message is another than the assistant's that it was sent; "" if in nothing.

    Whitespace does not count, nor a text that is left out beside calls, nor reasoning that is left out, or changed
    beside a text or calls. `ids` gets the ids under which the client knows calls, `changed` the calls that are others
    under their own id, or left out beside such: agents tell them as their tools took them, and some don't tell those
    that they have not run.
    """
    known = {call["toolUseId"] for call in sent.calls}
    is_known = bool(got.calls) and len({call["toolUseId"] for call in got.calls} & known) == len(got.calls)
    if not is_known and len(sent.calls) != len(got.calls):
        return f"got {len(got.calls)} calls; {len(sent.calls)} were sent"
    pairs = _pairs(sent.calls, got.calls)
    for one, other in pairs:
        if not _is_same(one, other):
            shown = [_short(call["name"], call["input"]) for call in (other, one)]
            words = "got the call {}; {} was sent".format(*shown)
            if one["toolUseId"] != other["toolUseId"]:
                return words
            changed.append(words)
    told = [one for one, _ in pairs]
    left_out = [call for call in sent.calls if call not in told]
    changed += [f"got no call {_short(call['name'], call['input'])}, which was sent" for call in left_out]
    is_left_out = not got.text and bool(got.calls)
    if sent.text.split() != got.text.split() and not is_left_out:
        return f"got the text {_short(got.text)}; {_short(sent.text)} was sent"
    if sent.is_silent and got.reasoning.strip() and sent.reasoning.split() != got.reasoning.split():
        return "got other reasoning than was sent"
    _note_ids(pairs, ids)
    return ""


def _user_difference(kept: Sequence[Block], given: Sequence[Block], *, keeps_transient: bool) -> str:
    """In what a user's message is another than the one that the policy has read; "" if in nothing that it reads."""
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
    """Split a user's message: its results, by the ids of their calls, and images; and the words of its texts."""
    results = [block["toolResult"] for block in content if "toolResult" in block]
    images = [block["image"]["source"]["bytes"] for block in content if "image" in block]
    by_id = sorted(((one["toolUseId"], _plain(one["content"])) for one in results), key=itemgetter(0))
    return [*by_id, *images], _texts(content).split()


def _texts(content: Sequence[Block]) -> str:
    return "\n".join(block["text"] for block in content if "text" in block)


def _short(*given: object) -> str:
    text = " ".join(map(str, given))
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def _under_ids(given: StrandsMessages, at: int, ids: Mapping[str, Sequence[str]], matched: int) -> Mapping[str, Any]:
    """A message with its results under the ids that their calls were sent with; those under one id stand in order.

    Results of a turn that is not among the `matched` messages stay under the client's ids, as do its calls.
    """
    message = given[at]
    if not ids or message["role"] == "assistant" or not any("toolResult" in block for block in message["content"]):
        return message
    counts = Counter[str]()
    begin = at
    while begin and given[begin - 1]["role"] == "user":  # the first results of the turn
        begin -= 1
        counts.update(block["toolResult"]["toolUseId"] for block in given[begin]["content"] if "toolResult" in block)
    if begin > matched:
        return message
    blocks = []
    for block in message["content"]:
        if (result := block.get("toolResult")) is not None:
            sent, number = ids.get(result["toolUseId"], ()), counts[result["toolUseId"]]
            counts[result["toolUseId"]] += 1
            block = {"toolResult": {**result, "toolUseId": sent[number] if number < len(sent) else result["toolUseId"]}}
        blocks.append(block)
    return {**message, "content": blocks}
