"""Find problems of a sample: violations of slime's contract, contradictions, and deviations from its chat template.

The template's rules are inferred from the dump; see `TurnHabits`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from strands_rollout.dump import DumpRecord
from strands_rollout.errors import DumpError
from strands_rollout.settings import REWARD_KEY
from strands_rollout.slime_plugin.sample_contract import contract_violations, export_violations
from strands_rollout.view.tokens import TokenLists, TurnHabits, equal_runs

_MAX_CONTRACT_PROBLEMS: Final = 20
_POSITION: Final = re.compile(r"\[(\d+)\] is")
_MIN_TURN_TOKENS: Final = 4  # logprobs of a shorter turn may all be 0.0
# part of a violation's message -> kind of the problem
_CONTRACT_KINDS: Final = {
    ", as many as response_length": "lengths disagree",
    " tokens with response_length": "lengths disagree",
    "where loss_mask is 0": "context logprob",
    "a FAILED sample would be trained": "trained failure",
    "ends with context": "trailing context",
    "the episode was aborted": "unfinished",
    "no token of a COMPLETED sample": "nothing trained",
    "reward is": "reward",
    "status is": "status",
}


class Problem(NamedTuple):
    """A problem of a sample: its kind in a word or two, a description, and the tokens start..end-1, if any."""

    kind: str
    text: str
    start: int | None = None
    end: int | None = None


def find_problems(record: DumpRecord, lists: TokenLists, habits: TurnHabits) -> list[Problem]:
    """Return all problems: violations of slime's contract first, violations that the dump reports last.

    For a sample without tokens, return only the violations that the dump reports.
    """
    violations = [Problem("violation", text) for text in record.violations]
    if not record.has_tokens:
        return violations
    return [
        *_contract_problems(record, lists),
        *_mask_problems(record, lists),
        *_logprob_problems(lists),
        *_response_problems(record, lists),
        *_turn_problems(lists, habits),
        *_forgery_problems(lists, habits),
        *_version_problems(lists),
        *violations,
    ]


def _contract_problems(record: DumpRecord, lists: TokenLists) -> Iterator[Problem]:
    try:
        sample = record.to_sample()
    except DumpError as e:
        yield Problem("no sample", str(e))
        return
    key = reward_key(record)
    if record.has_facts:
        aborted = sample.status.value == "aborted"
        unrewarded = sample.reward is None and not sample.metadata.get("eval")
        found = contract_violations(sample, reward_key=key, may_abort=aborted)
        found = [text for text in found if not (unrewarded and text.startswith("reward is"))]
    else:
        found = export_violations(sample, reward_key=key)
    for text in found[:_MAX_CONTRACT_PROBLEMS]:
        place = _POSITION.search(text)
        start = None if place is None or "tokens" in text else lists.prompt_length + int(place[1])
        kind = next((kind for part, kind in _CONTRACT_KINDS.items() if part in text), "contract")
        yield Problem(kind, text, start, None if start is None else start + 1)
    if len(found) > _MAX_CONTRACT_PROBLEMS:
        yield Problem("contract", f"and {len(found) - _MAX_CONTRACT_PROBLEMS} more violations of slime's contract")


def reward_key(record: DumpRecord) -> str | None:
    """Return the key of the number in a sample's reward; None if the reward is not a mapping.

    The key is `score` if the reward has this key, else the first key with a number. If no key has a number, the result
    is `score` too.
    """
    reward = record.values.get("reward")
    if not isinstance(reward, dict):
        return None
    if REWARD_KEY in reward:
        return REWARD_KEY
    numbers = (key for key, value in reward.items() if isinstance(value, int | float))
    return next(numbers, REWARD_KEY)


def _mask_problems(record: DumpRecord, lists: TokenLists) -> Iterator[Problem]:
    """Find contradictions between loss mask and spans, and between spans and the number of sampled tokens."""
    if not lists.spans_recorded:
        return
    sampled = bytearray(len(lists.ids))
    for span in lists.spans:
        sampled[span.start : span.end] = b"\x01" * (span.end - span.start)
    offset, mask = lists.prompt_length, lists.loss_mask
    may_drop = bool(
        record.values.get("status") == "failed" or record.values.get("remove_sample") or record.facts.stale_tokens
    )
    disagree = [
        ("context is trained" if mask[place] else "a sampled token is not trained")
        if bool(mask[place]) != bool(sampled[offset + place]) and (mask[place] or not may_drop)
        else None
        for place in range(min(len(mask), len(sampled) - offset))
    ]
    for fault, start, end in equal_runs(disagree):
        if fault:
            yield Problem("mask", f"{fault}: the mask disagrees with the turns' spans", offset + start, offset + end)
    count = record.facts.sampled_tokens
    if count is not None and count != sum(sampled):
        yield Problem("spans", f"spans cover {sum(sampled)} tokens; the episode's facts count {count} sampled tokens")


def _logprob_problems(lists: TokenLists) -> Iterator[Problem]:
    offset = lists.prompt_length
    values = lists.logprobs
    for positive, start, end in equal_runs([value > 0 for value in values]):
        if positive:
            yield Problem("logprob", "a logprob above 0", offset + start, offset + end)
    for start, end in lists.turns:
        turn = values[start - offset : end - offset]
        trained = any(lists.loss_mask[start - offset : end - offset])
        if len(turn) >= _MIN_TURN_TOKENS and trained and not any(turn):
            yield Problem("logprob", "a turn whose logprobs are all 0.0", start, end)


def _response_problems(record: DumpRecord, lists: TokenLists) -> Iterator[Problem]:
    response, texts = record.values.get("response"), record.token_texts
    ids = lists.ids[lists.prompt_length :]
    if not isinstance(response, str) or not texts or not all(token in texts for token in ids):
        return
    text = b"".join(texts[token] for token in ids).decode("utf-8", "replace")
    if response != text and any(lists.loss_mask):
        place = next((p for p, (left, right) in enumerate(zip(response, text, strict=False)) if left != right), None)
        difference = "one text is longer" if place is None else f"at character {place}"
        yield Problem("text", f"the response differs from the text of its tokens: {difference}")


def _turn_problems(lists: TokenLists, habits: TurnHabits) -> Iterator[Problem]:
    """Find turns that are closed neither by their last token nor by the first token of the context after them."""
    text = "a turn is not closed: context follows without an end of turn"
    for start, _ in lists.contexts if habits.ends_of_turn else ():
        if not habits.ends_of_turn.intersection(lists.ids[start - 1 : start + 1]):
            yield Problem("not closed", text, start - 1, start + 1)


def _forgery_problems(lists: TokenLists, habits: TurnHabits) -> Iterator[Problem]:
    for start, end in lists.contexts:
        for place in habits.forged_positions(lists.ids[start:end]):
            text = "a control token in context where no template writes it: a tool's text may have forged it"
            yield Problem("forged control", text, start + place, start + place + 1)


def _version_problems(lists: TokenLists) -> Iterator[Problem]:
    last = lists.spans[-1].version if lists.spans else None
    for span in lists.spans:
        if last is not None and span.version not in (None, last):
            text = f"sampled by the weights {span.version}; the last weights of the sample are {last}"
            yield Problem("stale version", text, span.start, span.end)
