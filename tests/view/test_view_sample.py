"""`read_conversation` in every parser's format, `find_problems` on planted defects, and `view_sample`."""

from typing import Any

import orjson
import pytest
from family_templates import TEMPLATES, tokenizer_with
from parser_families import family
from planted_defects import ANSWER, CALL, DEFECTS, END, PROMPT, RESULT, Episode, respelled_sample, whole_episode

from strands_rollout.dump import DumpRecord, TokenTexts
from strands_rollout.samples import EpisodeFacts, Sample
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.view.conversation import read_conversation
from strands_rollout.view.problems import Problem, find_problems
from strands_rollout.view.sample import Retokenizer, to_plain, view_sample
from strands_rollout.view.tokens import TokenLists, TurnHabits, learn_habits, token_kinds

CALLS = [("run", {"code": "print('é€💡')", "note": "a\nb"}), ("tell", {"what": "five"})]
SAYS = "I add 💡."


def shown(tokenizer: Any, episode: Episode, **facts: Any) -> list[list[list[Any]]]:
    """Return the parts of each turn and context after the prompt, with texts instead of offsets."""
    record = DumpRecord.from_sample(episode.sample, TokenTexts(tokenizer))
    lists = TokenLists.from_record(record)
    ends = dict([*lists.turns, *lists.contexts])
    found = []
    for start, parts in read_conversation(lists, record.token_texts, EpisodeFacts(**facts)):
        whole_text = b"".join(record.token_texts[token] for token in lists.ids[start : ends[start]])
        units = whole_text.decode().encode("utf-16-le")
        found.append([_with_text(part, units) for part in parts])
    return found


def _with_text(part: list[Any], units: bytes) -> list[Any]:
    kind, *rest = part
    if kind == "call":
        return part
    return [kind, units[2 * rest[0] : 2 * rest[1]].decode("utf-16-le"), *rest[2:]]


def context_of(tokenizer: Any, results: list[str]) -> str:
    """Return the template's text after a turn with calls, without the end of that turn."""
    template = ChatTemplate(tokenizer)
    ids = "Call{n}0000" if "ids of 9" in tokenizer.chat_template else "functions.{name}:{n}"
    results_read = [
        {"role": "tool", "content": text, "name": name, "tool_call_id": ids.format(name=name, n=n)}
        for n, (text, (name, _)) in enumerate(zip(results, CALLS, strict=True))
    ]
    return template.render_turn(results_read).removeprefix(tokenizer.decode([template.end_of_calls_id]))


def test_to_plain_writes_large_integers_as_text(shipped_tokenizer: Any) -> None:
    given = {"a": 2**63 - 1, "b": [2**64, {"c": -(10**100)}]}
    turn = family("hermes").turn(calls=[("run", given)])
    [[call]] = shown(shipped_tokenizer, Episode(shipped_tokenizer, (False, PROMPT), (True, turn + END)))
    assert orjson.loads(orjson.dumps(to_plain(call)))[3] == {"a": 2**63 - 1, "b": [str(2**64), {"c": str(-(10**100))}]}


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("known", [one for one in TEMPLATES if one != "apertus"])  # its template joins all results
def test_read_conversation_reads_calls_and_results(known: str, is_recorded: bool, shipped_tokenizer: Any) -> None:
    parser, template = TEMPLATES[known]
    tokenizer = tokenizer_with(template, shipped_tokenizer)
    of_family = family(known)
    turn = of_family.turn(reasoning="Hm 💡", text=SAYS if of_family.mixes else "", calls=CALLS)
    context = context_of(tokenizer, ["four 💡", "two</result>\nlines"])
    episode = Episode(tokenizer, (False, PROMPT), (True, turn + END), (False, context), (True, "Done." + END))
    facts = {"tool_parser": parser, "final_in_reasoning": False} if is_recorded else {}
    first, between, last = shown(tokenizer, episode, **facts)
    calls = [part for part in first if part[0] == "call"]
    if of_family.mixes:
        assert [[name, given] for _, _, name, given in calls] == [list(call) for call in CALLS]
        texts = [part[1].strip() for part in first if part[0] in ("think", "text")]
        assert texts == ["Hm 💡", SAYS]
        assert [(part[0], part[2]) for part in between] == [("result", call[1]) for call in calls]
    as_shown = {
        "llama3_json": ['{"output": "four 💡"}', '{"output": "two</result>\\nlines"}'],
        "mistral-nemo": [
            '{"content": four 💡, "call_id": "Call00000"}',
            '{"content": two</result>\nlines, "call_id": "Call10000"}',
        ],
        **{one: ['"four 💡"', '"two</result>\\nlines"'] for one in ("gpt_oss", "pythonic")},
    }
    expected = as_shown.get(known, ["four 💡", "two</result>\nlines"])
    assert [part[1].replace("\\ud83d\\udca1", "💡") for part in between] == expected
    assert [part[1] for part in last] == ["Done."]


def test_read_conversation_explains_malformed_calls(shipped_tokenizer: Any) -> None:
    broken = CALL.replace('"name"', '"nam"')
    stretches = (False, PROMPT), (True, broken + END), (False, RESULT.format("Error: no name")), (True, ANSWER + END)
    first, between, _ = shown(shipped_tokenizer, Episode(shipped_tokenizer, *stretches))
    kind, raw, call, name, reason = first[-1]
    assert (kind, call, name) == ("malformed", "call_1_1_unparsed", None)
    assert raw.startswith("<tool_call>")
    assert "name" in reason
    assert between == [["result", "Error: no name", call]]


def test_read_conversation_detects_unknown_parser(shipped_tokenizer: Any) -> None:
    first, *_ = shown(shipped_tokenizer, whole_episode(shipped_tokenizer), tool_parser="of_somebody")
    assert first[-1] == ["call", "call_1_1", "run", {"code": "print(17*2)"}]


def record(tokenizer: Any, sample: Sample) -> DumpRecord:
    return DumpRecord.from_sample(sample, TokenTexts(tokenizer))


@pytest.fixture(scope="module")
def habits(shipped_tokenizer: Any) -> TurnHabits:
    return learn_habits([record(shipped_tokenizer, whole_episode(shipped_tokenizer).sample) for _ in range(3)])


def problems(tokenizer: Any, sample: Sample, habits: TurnHabits) -> list[Problem]:
    made = record(tokenizer, sample)
    return find_problems(made, TokenLists.from_record(made), habits)


@pytest.mark.parametrize("name", DEFECTS)
def test_find_problems_finds_each_planted_defect(name: str, shipped_tokenizer: Any, habits: TurnHabits) -> None:
    make, kind = DEFECTS[name]
    found = problems(shipped_tokenizer, make(shipped_tokenizer), habits)
    assert kind in {problem.kind for problem in found}, found


def test_find_problems_accepts_valid_episodes(shipped_tokenizer: Any, habits: TurnHabits) -> None:
    stretches = (False, PROMPT), (True, CALL), (False, END + RESULT.format("34")), (True, ANSWER + END)
    aborted = whole_episode(shipped_tokenizer)
    aborted.sample.status, aborted.sample.reward = Sample.Status.ABORTED, None
    aborted.facts["stop_reason"] = "aborted"
    for made in (whole_episode(shipped_tokenizer), Episode(shipped_tokenizer, *stretches), aborted):
        assert problems(shipped_tokenizer, made.sample, habits) == []


def test_learn_habits_drops_rules_broken_at_position_zero(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [record(shipped_tokenizer, whole_episode(shipped_tokenizer).sample) for _ in range(3)]
    assert learn_habits(records).opening is not None
    monkeypatch.setattr(TurnHabits, "forged_positions", lambda *_: iter([0]))
    assert learn_habits(records).opening is None


def test_view_sample_marks_drift_with_replacement(shipped_tokenizer: Any, habits: TurnHabits) -> None:
    made = record(shipped_tokenizer, respelled_sample(shipped_tokenizer))
    row, detail = view_sample(made, habits, Retokenizer(shipped_tokenizer))
    ((start, end, replacement),) = detail["drift"]
    assert row["drift"] == end - start > 1
    assert len(replacement) == 1
    there = b"".join(made.token_texts[token] for token in made.values["tokens"][start:end])
    assert there == Retokenizer(shipped_tokenizer).texts[replacement[0]]


@pytest.mark.parametrize(
    ("changes", "facts", "kind"),
    [
        ({}, {}, "trained"),
        ({"status": "failed", "loss_mask": [0, 0, 0]}, {}, "failed"),
        ({"remove_sample": True, "loss_mask": [0, 0, 0]}, {}, "removed"),
        ({"remove_sample": True}, {}, "removed"),
        ({"loss_mask": [0, 0, 1]}, {}, "masked"),
        ({"loss_mask": [0, 0, 1]}, {"stale_tokens": 1}, "stale"),
        ({"loss_mask": []}, {}, "unknown"),
    ],
)
def test_token_kinds(changes: dict[str, Any], facts: dict[str, Any], kind: str) -> None:
    metadata = {"strands_rollout": {"spans": [[0, 1, 2, None], [1, 3, 4, None]], **facts}}
    made = DumpRecord(
        Sample(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 0, 1], metadata=metadata).to_dict() | changes
    )
    kinds = token_kinds(made, TokenLists.from_record(made))
    assert kinds[:3] == ["prompt", kind, "unknown" if kind == "unknown" else "context"]
