"""Resuming aborted samples with `generate`: in a turn, and before, between and after tool calls."""

import asyncio
import copy
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, args_for, ids_of
from strands import tool

from strands_rollout import Sample, generate
from strands_rollout.record.weight_versions import KNOWN_VERSIONS
from strands_rollout.slime_plugin.sample_contract import contract_violations

CALLS = (
    '<tool_call>\n{"name": "work", "arguments": {"job": "a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "work", "arguments": {"job": "b"}}\n</tool_call><|im_end|>'
)
# this turn also has a call that can't be parsed and a call that fails
MIXED = "<tool_call>\n{not json}\n</tool_call>\n" + CALLS.replace('"a"', '"fails"', 1)
COMPARED_FACTS = (
    "stop_reason",
    "final_text",
    "turns",
    "tool_iterations",
    "tool_calls",
    "tool_errors",
    "parse_failures",
)


@dataclass
class ToolState:
    """State of the tools and of the abort flag."""

    aborting: bool = False  # the abort flag of the rollout
    ran: list[str] = field(default_factory=list)  # finished jobs
    stuck: set[str] = field(default_factory=set)  # jobs that set the flag and wait

    def is_aborting(self) -> bool:
        return self.aborting


state = ToolState()


@tool
async def work(job: str) -> str:
    """Do a job."""
    if job in state.stuck:
        await asyncio.sleep(0.02)
        state.aborting = True
        await asyncio.sleep(60)
    state.ran.append(job)
    if job == "fails":
        raise RuntimeError("not today")
    return f"{job} is done"


def _reset_state() -> None:
    state.aborting = False
    state.ran.clear()
    state.stuck.clear()


@pytest.fixture(autouse=True)
def _with_reset_state() -> None:
    _reset_state()


Script = Callable[[dict[str, Any], int], Reply]


def aborted(ids: list[int], **meta: Any) -> Reply:
    """Set the abort flag and return an aborted reply."""
    state.aborting = True
    return Reply.abort(ids, **meta)


async def attempt(tokenizer, script, sample, *, settings=None, params=None, version="1", **args):
    """Call `generate` once, with the abort flag cleared."""
    state.aborting = False
    async with FakeSGLang(script, context_length=8192, weight_version=version) as fake:
        settings = {
            "tools": [f"{__name__}.work"],
            "system_prompt": None,
            "should_abort": state.is_aborting,
            **(settings or {}),
        }
        namespace = args_for(fake.base_url, tokenizer, strands_rollout=settings, **args)
        await generate(namespace, sample, {"temperature": 1.0, "max_new_tokens": 2048, **(params or {})})
    assert fake.violations == []
    return fake


def new_sample() -> Sample:
    return Sample(prompt="What is 17 * 2?", label="34", index=3, session_id="one-episode")


def facts_of(sample: Any) -> dict[str, Any]:
    return dict(sample.metadata["strands_rollout"])


def is_valid(sample: Any, tokenizer: Any) -> bool:
    rewarded = copy.copy(sample)
    rewarded.reward = 1.0
    found = contract_violations(rewarded, decode=tokenizer.decode, may_abort=sample.status is Sample.Status.ABORTED)
    assert found == []
    return True


async def test_generate_resumes_after_abort(shipped_tokenizer: Any) -> None:
    sample, turn = new_sample(), ids_of(shipped_tokenizer, ANSWER)
    first = await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[:4]), sample)
    assert (sample.status, sample.tokens[-4:]) == (Sample.Status.ABORTED, turn[:4])
    assert is_valid(sample, shipped_tokenizer)
    prompt = first.requests[0].input_ids
    second = await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(turn[4:]), sample, version="2")
    assert second.requests[0].input_ids == prompt + turn[:4]
    assert sample.status is Sample.Status.COMPLETED
    assert (sample.tokens, sample.loss_mask, sample.weight_versions) == (prompt + turn, [1] * len(turn), ["1", "2"])
    assert is_valid(sample, shipped_tokenizer)
    facts = facts_of(sample)
    start = len(prompt)
    assert facts["spans"] == [[0, start, start + 4, "1"], [0, start + 4, start + len(turn), "2"]]
    assert (facts["weight_versions"], facts["aborts"], facts["resumes"], facts["turns"]) == (["1", "2"], 1, 1, 1)
    assert facts["final_text"] == ANSWER.removesuffix("<|im_end|>")
    assert "resume" not in facts


async def test_generate_resumes_with_the_remaining_budgets(shipped_tokenizer: Any) -> None:
    turn = ids_of(shipped_tokenizer, ANSWER)
    for settings, params, left in (({}, {"max_new_tokens": 20}, 16), ({"max_turn_tokens": 9}, {}, 5)):
        sample = new_sample()
        await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[:4]), sample, settings=settings, params=params)
        fake = await attempt(
            shipped_tokenizer, lambda _b, _n: Reply.tokens(turn[4:]), sample, settings=settings, params=params
        )
        assert fake.requests[0].body["sampling_params"]["max_new_tokens"] == left


async def test_generate_resumes_without_rerunning_finished_tools(shipped_tokenizer: Any) -> None:
    sample, calls = new_sample(), ids_of(shipped_tokenizer, CALLS)
    state.stuck.add("b")
    await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(calls), sample)
    assert (sample.status, state.ran) == (Sample.Status.ABORTED, ["a"])
    assert is_valid(sample, shipped_tokenizer)
    state.stuck.clear()
    fake = await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(ids_of(shipped_tokenizer, ANSWER)), sample)
    assert state.ran == ["a", "b"]
    text = shipped_tokenizer.decode(fake.requests[0].input_ids)
    assert text.count("a is done") == text.count("b is done") == 1
    assert text.index("a is done") < text.index("b is done")
    facts = facts_of(sample)
    assert (facts["tool_iterations"], facts["tool_calls"], facts["turns"]) == (1, 2, 2)
    assert sample.status is Sample.Status.COMPLETED
    assert is_valid(sample, shipped_tokenizer)


async def test_generate_resumes_after_several_aborts(shipped_tokenizer: Any) -> None:
    sample = new_sample()
    calls, answer = ids_of(shipped_tokenizer, CALLS), ids_of(shipped_tokenizer, ANSWER)
    await attempt(shipped_tokenizer, lambda _b, _n: aborted(calls[:5]), sample, version="1")
    await attempt(shipped_tokenizer, lambda _b, _n: aborted([]), sample, version="2")
    await attempt(shipped_tokenizer, lambda _b, _n: aborted(calls[5:7]), sample, version="3")
    await attempt(
        shipped_tokenizer, lambda _b, n: Reply.tokens(calls[7:]) if n == 0 else aborted(answer[:2]), sample, version="4"
    )
    await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(answer[2:]), sample, version="5")
    assert state.ran == ["a", "b"]
    facts = facts_of(sample)
    assert (facts["weight_versions"], facts["aborts"], facts["resumes"]) == (["1", "3", "4", "5"], 4, 4)
    assert sum(sample.loss_mask or []) == len(calls) + len(answer) == facts["sampled_tokens"]
    assert is_valid(sample, shipped_tokenizer)


@pytest.mark.parametrize("copied_by", ["deepcopy", "pickle", "json"])
async def test_generate_resumes_a_copied_sample(shipped_tokenizer, copied_by) -> None:
    turns = [Reply.tokens(ids_of(shipped_tokenizer, text)) for text in (MIXED, ANSWER)]
    sample, undisturbed = new_sample(), new_sample()
    await attempt(shipped_tokenizer, lambda _b, n: turns[n], undisturbed)
    _reset_state()
    state.stuck.add("b")
    await attempt(shipped_tokenizer, lambda _b, _n: turns[0], sample)
    assert sample.status is Sample.Status.ABORTED
    state.stuck.clear()
    copied: Any = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda sample: pickle.loads(pickle.dumps(sample)),  # noqa: S301 - our own bytes
        "json": lambda sample: Sample.from_dict(json.loads(json.dumps(sample.to_dict()))),
    }[copied_by](sample)
    await attempt(shipped_tokenizer, lambda _b, _n: turns[1], copied)
    assert (copied.status, state.ran) == (Sample.Status.COMPLETED, ["fails", "b"])
    assert (copied.tokens, copied.loss_mask) == (undisturbed.tokens, undisturbed.loss_mask)
    assert [facts_of(copied)[name] for name in COMPARED_FACTS] == [
        facts_of(undisturbed)[name] for name in COMPARED_FACTS
    ]
    assert is_valid(copied, shipped_tokenizer)


async def test_generate_resumes_with_slimes_mask(shipped_tokenizer: Any) -> None:
    sample, turn = new_sample(), ids_of(shipped_tokenizer, ANSWER)
    await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[:4]), sample)
    sample.loss_mask = [0] * sample.response_length  # as --mask-offpolicy-in-partial-rollout does
    await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(turn[4:]), sample)
    assert sample.loss_mask == [0] * 4 + [1] * (len(turn) - 4)
    assert is_valid(sample, shipped_tokenizer)


@pytest.mark.parametrize(("staleness", "trained"), [(None, 4), (2, 4), (1, 0), (0, 0)])
async def test_max_staleness_masks_tokens_of_old_weights(shipped_tokenizer, staleness, trained) -> None:
    sample, turn = new_sample(), ids_of(shipped_tokenizer, ANSWER)
    settings = {"max_staleness": staleness}
    await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[:4]), sample, version="7", settings=settings)
    await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(turn[4:]), sample, version="9", settings=settings)
    assert (sum((sample.loss_mask or [])[:4]), facts_of(sample)["stale_tokens"]) == (trained, 4 - trained)
    assert is_valid(sample, shipped_tokenizer)


@pytest.mark.parametrize(("staleness", "trained"), [(None, 4), (99, 0)])
async def test_max_staleness_masks_tokens_of_an_earlier_run(shipped_tokenizer, monkeypatch, staleness, trained) -> None:
    sample, turn = new_sample(), ids_of(shipped_tokenizer, ANSWER)
    settings = {"max_staleness": staleness}
    await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[:4]), sample, version="1", settings=settings)
    monkeypatch.setattr(KNOWN_VERSIONS, "_numbering", "the next process")
    await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[4:6]), sample, version="1", settings=settings)
    await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(turn[6:]), sample, version="2", settings=settings)
    assert (sum((sample.loss_mask or [])[:4]), facts_of(sample)["stale_tokens"]) == (trained, 4 - trained)
    assert sum((sample.loss_mask or [])[4:]) == len(turn) - 4
    assert facts_of(sample)["version_numberings"][1:] == ["the next process"]
    assert is_valid(sample, shipped_tokenizer)


def _damage_state(*path: Any, value: Any) -> Callable[[Sample], None]:
    def damage(sample: Sample) -> None:
        place: Any = sample.metadata["strands_rollout"]["resume"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return damage


def _damage_sample(name: str, change: Callable[[Any], Any]) -> Callable[[Sample], None]:
    return lambda sample: setattr(sample, name, change(getattr(sample, name)))


DAMAGES: dict[str, Callable[[Sample], None]] = {
    "newer version": _damage_state("version", value=99),
    "no facts": lambda sample: sample.metadata.clear(),
    "facts that are not a mapping": lambda sample: sample.metadata.update(strands_rollout="?"),
    "unreadable": _damage_state("turns", value="?"),
    "overlapping turns": _damage_state("turns", 0, "start", value=1),
    "too many messages covered": _damage_state("covered", value=7),
    "negative count": _damage_state("tool_iterations", value=-1),
    "unknown count": _damage_state("code", "novel", value="?"),
    "odd message": _damage_state("messages", 0, "content", value=[5]),
    "unfinished result": _damage_state("finished", value={"call_1_0": {}}),
    "other tokens": _damage_sample("tokens", lambda tokens: [*tokens[:-1], tokens[-1] + 1]),
    "shorter mask": _damage_sample("loss_mask", lambda mask: mask[1:]),
    "no logprobs": _damage_sample("rollout_log_probs", lambda _logprobs: None),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_generate_restarts_from_an_unusable_state_with_a_warning(shipped_tokenizer, caplog, damage) -> None:
    sample, turn = new_sample(), ids_of(shipped_tokenizer, ANSWER)
    first = await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[:4]), sample)
    DAMAGES[damage](sample)
    again = await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(turn), sample, version="2")
    assert again.requests[0].input_ids == first.requests[0].input_ids
    assert sample.tokens == first.requests[0].input_ids + turn
    assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["2"])
    assert (facts_of(sample)["aborts"], facts_of(sample)["resumes"]) == (1, 0)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("aborted sample starts from scratch index=3 reason=got")
    assert is_valid(sample, shipped_tokenizer)


async def test_resume_aborted_false_starts_from_scratch(shipped_tokenizer: Any) -> None:
    sample, turn = new_sample(), ids_of(shipped_tokenizer, ANSWER)
    settings = {"resume_aborted": False}
    await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[:4]), sample, settings=settings)
    assert "resume" not in facts_of(sample)
    assert sample.tokens[-4:] == turn[:4]
    fake = await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(turn), sample, settings=settings)
    assert sample.tokens == fake.requests[0].input_ids + turn


CHANGES = {
    "another limit": ({"settings": {"max_tool_calls": 7}}, "max_tool_calls"),
    "another system prompt": ({"settings": {"system_prompt": "Be brief."}}, "system_prompt"),
    "another temperature": ({"params": {"temperature": 0.5}}, "temperature"),
    "another budget": ({"params": {"max_new_tokens": 1024, "min_new_tokens": 1}}, None),
    "another context limit": ({"rollout_max_context_len": 4096}, "the context limit"),
    "other template arguments": ({"apply_chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    "another executor": ({"settings": {"executor": {"name": "local", "isolation": "rlimits"}}}, None),
    "another reward": ({"settings": {"reward": {"wrong": 0.0}}}, None),
    "other weights, another seed": ({"version": "2", "params": {"sampling_seed": 9}}, None),
}


@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
async def test_generate_restarts_under_changed_conditions(shipped_tokenizer, caplog, change, name) -> None:
    sample, turn = new_sample(), ids_of(shipped_tokenizer, ANSWER)
    await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[:4]), sample)
    rest = turn if name else turn[4:]
    fake = await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(rest), sample, **change)
    assert (sample.status, facts_of(sample)["resumes"]) == (Sample.Status.COMPLETED, int(name is None))
    assert (fake.requests[0].input_ids[-4:] == turn[:4]) is (name is None)
    message = f"aborted sample starts from scratch index=3 reason=it was begun with other values of {name}"
    assert (message in caplog.text) is (name is not None)


async def test_generate_restarts_under_changed_row_settings(shipped_tokenizer, caplog) -> None:
    sample, turn = new_sample(), ids_of(shipped_tokenizer, ANSWER)
    await attempt(shipped_tokenizer, lambda _b, _n: aborted(turn[:4]), sample)
    sample.metadata["strands_rollout_settings"] = {"max_tool_iterations": 1}
    await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(turn), sample)
    assert facts_of(sample)["resumes"] == 0
    assert "it was begun with other values of max_tool_iterations" in caplog.text


async def test_generate_restarts_silently_without_tokens(shipped_tokenizer, caplog) -> None:
    sample, turn = new_sample(), ids_of(shipped_tokenizer, ANSWER)
    await attempt(shipped_tokenizer, lambda _b, _n: aborted([]), sample)
    assert sample.status is Sample.Status.ABORTED
    assert is_valid(sample, shipped_tokenizer)
    await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(turn), sample)
    assert sample.status is Sample.Status.COMPLETED
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_generate_resumes_with_the_limits_of_all_attempts(shipped_tokenizer: Any) -> None:
    sample, calls = new_sample(), ids_of(shipped_tokenizer, CALLS)
    settings = {"max_tool_iterations": 2}
    await attempt(
        shipped_tokenizer,
        lambda _b, n: Reply.tokens(calls) if n == 0 else aborted(calls[:3]),
        sample,
        settings=settings,
    )
    await attempt(
        shipped_tokenizer,
        lambda _b, n: Reply.tokens(calls[3:]) if n == 0 else Reply.tokens(calls),
        sample,
        settings=settings,
    )
    facts = facts_of(sample)
    assert (facts["stop_reason"], facts["tool_iterations"], facts["tool_calls"]) == ("max_tool_iterations", 2, 4)
    assert (facts["budgets"]["tool_iterations"], state.ran) == (1.0, ["a", "b"] * 2)


@tool
def block_until_the_abort(job: str) -> str:
    """Set the abort flag, and end about when the call is cut."""
    state.aborting = True
    time.sleep(0.06)
    state.ran.append(job)
    return f"{job} is done"


async def test_generate_resumes_with_a_call_that_ended_in_the_abort(shipped_tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("strands_rollout.agent.tool_call.CLEANUP_TIMEOUT_S", 2.0)
    monkeypatch.setattr("strands_rollout.own_thread._GRACE_PERIOD_S", 20.0)
    call = json.dumps({"name": block_until_the_abort.tool_name, "arguments": {"job": "a"}})
    calls = ids_of(shipped_tokenizer, f"<tool_call>\n{call}\n</tool_call><|im_end|>")
    settings = {"tools": [f"{__name__}.block_until_the_abort"]}
    sample = new_sample()
    await attempt(shipped_tokenizer, lambda _b, _n: Reply.tokens(calls), sample, settings=settings)
    assert (sample.status, state.ran) == (Sample.Status.ABORTED, ["a"])
    fake = await attempt(
        shipped_tokenizer, lambda _b, _n: Reply.tokens(ids_of(shipped_tokenizer, ANSWER)), sample, settings=settings
    )
    assert state.ran == ["a"]
    assert "a is done" in shipped_tokenizer.decode(fake.requests[0].input_ids)
