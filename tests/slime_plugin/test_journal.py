"""The journal of an episode: its records, and how another process continues the episode after its process died."""

import asyncio
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, TOOL_CALL, args_for, call_text, ids_of
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.multiagent import GraphBuilder

from strands_rollout import Sample, generate, normalize_rewards
from strands_rollout.record.store import take_leftover_records
from strands_rollout.record.weight_versions import KNOWN_VERSIONS
from strands_rollout.settings import settings_from_args
from strands_rollout.slime_plugin.conditions import changed_conditions, episode_conditions
from strands_rollout.slime_plugin.episode import play_sample
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.slime_plugin.slime_adapter import GenerateCall

TWO_CALLS = call_text("a", "work").replace("<|im_end|>", "\n") + call_text("b", "work")
UNPARSED_AND_FAILING = "<tool_call>\n{not json}\n</tool_call>\n" + call_text("fail", "work")
TURNS = (TWO_CALLS, UNPARSED_AND_FAILING, call_text("c", "work"), ANSWER)
TIME_FACTS = ("_s", "requests")
SETTINGS = {"tools": [f"{__name__}.work"], "system_prompt": None}
ran: list[str] = []


@tool
async def work(code: str) -> str:
    """Do a job."""
    await asyncio.sleep(0.001 * (code == "b"))
    ran.append(code)
    if code == "emoji":
        return "cut in an emoji: \ud83d"
    if code == "fail":
        raise RuntimeError("not today")
    if code == "die" and os.environ.get("MAY_DIE"):
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{code} is done"


@pytest.fixture(autouse=True)
def clear_ran() -> None:
    ran.clear()


class ListJournal:
    """Journal that keeps its records in a list."""

    is_latest = True

    def __init__(self, records=(), *, may_have_acted=True) -> None:
        self.records = list(records)
        self.may_have_acted = may_have_acted
        self.written: list[bytes] = []
        self.ran_before: list[list[str]] = []

    def begin(self) -> None:
        self.written.clear()

    def write(self, record: bytes) -> None:
        self.written.append(record)
        self.ran_before.append([*ran])

    async def write_before_tools(self, record: bytes) -> None:
        self.write(record)

    def close(self, *, keep: bool) -> None:
        pass


def new_sample(**fields: Any) -> Sample:
    return Sample(prompt="What is 17 * 2?", label="34", index=3, session_id="one-episode", **fields)


def script_for(tokenizer: Any, turns=TURNS):
    """Return a script that answers with the turn whose number equals the number of earlier turns in the request."""
    turn_ids = [ids_of(tokenizer, text) for text in turns]

    def reply(body: dict[str, Any], _number: int) -> Reply:
        text = tokenizer.decode(body["input_ids"])
        return Reply.tokens(turn_ids[text.count("<|im_start|>assistant") - 1])

    return reply


async def play(tokenizer, sample=None, journal=None, settings=None, turns=TURNS, **args: Any) -> Sample:
    sample = sample or new_sample()
    async with FakeSGLang(script_for(tokenizer, turns), context_length=8192, weight_version="7") as fake:
        given = args_for(fake.base_url, tokenizer, strands_rollout=SETTINGS | (settings or {}), **args)
        params = {"temperature": 1.0, "max_new_tokens": 4096}
        await play_sample(GenerateCall(given, sample, params, False), journal)
    assert fake.violations == []
    return sample


def without_times(sample: Sample) -> dict[str, Any]:
    values = copy.deepcopy(sample.to_dict())
    values.pop("non_generation_time")
    facts = values["metadata"]["strands_rollout"]
    calls = [{name: call[name] for name in ("id", "tool", "status")} for call in facts.pop("calls")]
    process_facts = ("resumes", "version_numberings")
    compared = {
        name: value for name, value in facts.items() if not name.endswith(TIME_FACTS) and name not in process_facts
    }
    values["metadata"]["strands_rollout"] = {**compared, "calls": calls}
    return values


async def test_journal_resumes_after_each_record_without_rerun(shipped_tokenizer) -> None:
    journal = ListJournal()
    expected = await play(shipped_tokenizer, journal=journal)
    assert (expected.status, ran) == (Sample.Status.COMPLETED, ["a", "b", "fail", "c"])
    assert len(journal.written) == 3 + 4  # three turns with calls, and four ended calls
    for count in range(1, len(journal.written) + 1):
        ran[:] = journal.ran_before[count - 1]
        again = await play(shipped_tokenizer, journal=ListJournal(journal.written[:count], may_have_acted=False))
        assert ran == ["a", "b", "fail", "c"], count
        assert without_times(again) == without_times(expected), count
        assert again.metadata["strands_rollout"]["resumes"] == 1


async def test_journal_keeps_big_integers_and_lone_surrogates(shipped_tokenizer) -> None:
    turn = TOOL_CALL.format(name="work", arguments=f'{{"code": "emoji", "n": [{10**30}, -{10**30}]}}')
    journal, turns = ListJournal(), (turn, ANSWER)
    expected = await play(shipped_tokenizer, journal=journal, turns=turns)
    for count in (1, 2):
        again = await play(
            shipped_tokenizer, journal=ListJournal(journal.written[:count], may_have_acted=False), turns=turns
        )
        assert without_times(again) == without_times(expected)
        assert again.metadata["strands_rollout"]["resumes"] == 1


async def test_journal_counts_repeated_resumes(shipped_tokenizer) -> None:
    expected, journal = await play(shipped_tokenizer, journal=ListJournal()), ListJournal()
    await play(shipped_tokenizer, journal=journal)
    for attempt in range(1, 4):
        journal = ListJournal(journal.written[: 1 + attempt], may_have_acted=False)
        ran.clear()
        again = await play(shipped_tokenizer, journal=journal)
        assert again.metadata["strands_rollout"]["resumes"] == attempt
        assert without_times(again) == without_times(expected)


async def test_journal_obeys_repeat_interrupted_tools(shipped_tokenizer) -> None:
    journal = ListJournal()
    await play(shipped_tokenizer, journal=journal)
    for settings, status, calls in (({}, "failed", []), ({"repeat_interrupted_tools": True}, "completed", ["b"])):
        ran.clear()
        again = await play(shipped_tokenizer, journal=ListJournal(journal.written[:2]), settings=settings)
        assert (again.status.value, ran[:1]) == (status, calls)
        if not calls:
            facts = again.metadata["strands_rollout"]
            assert facts["stop_reason"] == "worker_error"
            assert "died while tools ran (work)" in facts["error"]
            assert "repeat_interrupted_tools" in facts["error"]
            assert (again.remove_sample, sum(again.loss_mask or [])) == (True, 0)
            again.reward = -1.0
            assert contract_violations(again, decode=shipped_tokenizer.decode) == []


async def test_journal_reruns_code_without_session(shipped_tokenizer) -> None:
    turns, journal = (call_text("print(34)"), ANSWER), ListJournal()
    settings = {"tools": ["strands_rollout.tools.execute_python_code"], "executor": "subprocess"}
    await play(shipped_tokenizer, journal=journal, settings=settings, turns=turns)
    again = await play(shipped_tokenizer, journal=ListJournal(journal.written[:1]), settings=settings, turns=turns)
    assert (again.status.value, again.metadata["strands_rollout"]["code"]["calls"]) == ("completed", 1)
    in_session = settings | {"code_session": True, "executor": {"name": "local", "isolation": "rlimits"}}
    lost = await play(shipped_tokenizer, journal=ListJournal(journal.written[:1]), settings=in_session, turns=turns)
    assert lost.metadata["strands_rollout"]["stop_reason"] == "worker_error"


async def program(task: Any, endpoint: Any) -> str:
    """Agent program with the tool of this file."""
    client = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    agent = Agent(OpenAIModel(client_args=client, model_id=endpoint.model), tools=[work], callback_handler=None)
    return str(await agent.invoke_async(task.text))


PROGRAM = {"agent_program": f"{__name__}.program", "resumable": "replay", "tools": []}
TITLE = "A title.<|im_end|>"


async def titled_program(task: Any, endpoint: Any) -> str:
    """Like `program`, after a request without tools."""
    client = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    title_agent = Agent(OpenAIModel(client_args=client, model_id=endpoint.model), callback_handler=None)
    await title_agent.invoke_async("A title?")
    return await program(task, endpoint)


def without_replays(sample: Sample) -> dict[str, Any]:
    """Return the values of a sample that a replay reproduces."""
    values = without_times(sample)
    facts = values["metadata"]["strands_rollout"]
    for name in ("requests", "repeats"):
        facts["gateway"].pop(name)
    facts.pop("dropped_sampled_tokens")  # titles, which each attempt requests
    facts["budgets"].pop("context")  # unknown without a request to the engine
    return values


@pytest.mark.parametrize("name", ["program", "titled_program"])
async def test_journal_replays_agent_program_after_each_turn(shipped_tokenizer, name) -> None:
    settings = PROGRAM | {"agent_program": f"{__name__}.{name}"}
    turns, journal = (TWO_CALLS, call_text("c", "work"), ANSWER), ListJournal()

    def script(body: dict[str, Any], _number: int) -> Reply:
        text = shipped_tokenizer.decode(body["input_ids"])
        turn = TITLE if "A title?" in text else turns[text.count("<|im_start|>assistant") - 1]
        return Reply.tokens(ids_of(shipped_tokenizer, turn))

    async def attempt(journal: ListJournal) -> tuple[Sample, int]:
        sample = new_sample()
        async with FakeSGLang(script, context_length=8192, weight_version="7") as fake:
            args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=SETTINGS | settings)
            params = {"temperature": 1.0, "max_new_tokens": 4096}
            await play_sample(GenerateCall(args, sample, params, False), journal)
        return sample, len(fake.requests)

    expected, request_count = await attempt(journal)
    assert (expected.status, len(journal.written)) == (Sample.Status.COMPLETED, 3)
    titles = request_count - 3
    for count in range(1, 4):
        ran.clear()
        # by default, `may_have_acted` is True: a call may have begun in the ended attempt
        again, request_count = await attempt(ListJournal(journal.written[:count]))
        facts = again.metadata["strands_rollout"]
        assert (facts["resumes"], facts["gateway"]["diverged"]) == (1, "")
        assert request_count == titles + 3 - count  # the other requests are answered from the journal
        assert ran == ["a", "b", "c"]  # the program calls its tools again
        assert without_replays(again) == without_replays(expected)


async def other_program(task: Any, endpoint: Any) -> str:
    """Like `program`, with another question."""
    return await program(replace(task, messages=[{"role": "user", "content": [{"text": "And 2 * 17?"}]}]), endpoint)


async def test_journal_resumes_diverged_agent_program(shipped_tokenizer) -> None:
    turns, first, second = (TWO_CALLS, call_text("c", "work"), ANSWER), ListJournal(), ListJournal()
    await play(shipped_tokenizer, journal=first, settings=PROGRAM, turns=turns)
    settings = PROGRAM | {"agent_program": f"{__name__}.other_program"}
    second.records = first.written[:2]
    expected = await play(shipped_tokenizer, journal=second, settings=settings, turns=turns)
    facts = expected.metadata["strands_rollout"]
    assert (expected.status, "message 0" in facts["gateway"]["diverged"]) == (Sample.Status.COMPLETED, True)
    for count in range(1, 4):
        again = await play(
            shipped_tokenizer, journal=ListJournal(second.written[:count]), settings=settings, turns=turns
        )
        facts = again.metadata["strands_rollout"]
        assert (again.status, facts["gateway"]["diverged"]) == (Sample.Status.COMPLETED, "")
        assert (again.tokens, again.loss_mask) == (expected.tokens, expected.loss_mask)
        assert again.rollout_log_probs == expected.rollout_log_probs
        assert contract_violations(replace(again, reward=1.0)) == []


async def test_journal_ends_if_main_conversation_changes(shipped_tokenizer) -> None:
    """The first attempt requests only a title; the second attempt samples and records the title's last tokens."""
    title, journal, aborting = ids_of(shipped_tokenizer, TITLE), ListJournal(), False

    def script(body: dict[str, Any], _number: int) -> Reply:
        nonlocal aborting
        text = shipped_tokenizer.decode(body["input_ids"])
        if "A title?" not in text:
            return Reply.tokens(ids_of(shipped_tokenizer, ANSWER))
        aborting = text.endswith("assistant\n")
        return Reply.abort(title[:2]) if aborting else Reply.tokens(title[2:])

    def should_abort() -> bool:
        return aborting

    sample = new_sample()
    for _ in range(2):
        aborting = False
        async with FakeSGLang(script, context_length=8192) as fake:
            player = {"agent_program": f"{__name__}.titled_program", "should_abort": should_abort}
            args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=PROGRAM | player, partial_rollout=True)
            params = {"temperature": 1.0, "max_new_tokens": 4096}
            await play_sample(GenerateCall(args, sample, params, False), journal)
    assert sample.status is Sample.Status.COMPLETED
    assert sum(sample.loss_mask) == len(ids_of(shipped_tokenizer, ANSWER))
    assert [b'"turns"' in record for record in journal.written] == [True, False]
    assert b"another conversation became the main one" in journal.written[1]


async def test_journal_fails_program_that_is_not_resumable(shipped_tokenizer) -> None:
    journal = ListJournal()
    settings = PROGRAM | {"resumable": None}
    await play(shipped_tokenizer, journal=journal, settings=settings)
    again = await play(shipped_tokenizer, journal=ListJournal(journal.written), settings=settings)
    facts = again.metadata["strands_rollout"]
    assert (again.status.value, facts["stop_reason"]) == ("failed", "worker_error")
    assert "resumable: replay" in facts["error"]


class EmptyEnvironment:
    """Environment without tools and score."""


def build_graph(model: Any, _task: Any) -> Any:
    builder = GraphBuilder().set_max_node_executions(3).set_execution_timeout(60)
    builder.add_node(Agent(name="one", model=model, tools=[work]), "one")
    return builder.build()


@pytest.mark.parametrize(
    ("settings", "args", "reason"),
    [
        ({"environment": f"{__name__}.EmptyEnvironment"}, {}, "environment and resources were closed"),
        ({}, {"use_rollout_routing_replay": True}, "it asks for replay data"),
        ({"agent_factory": f"{__name__}.build_graph"}, {}, "it was played by a swarm or graph"),
    ],
    ids=["environment", "replay", "graph"],
)
async def test_journal_records_why_episode_cannot_resume(shipped_tokenizer, settings, args, reason) -> None:
    journal = ListJournal()
    await play(shipped_tokenizer, journal=journal, settings=settings, **args)
    assert [json.loads(record) for record in journal.written[1:]] == []
    again = await play(shipped_tokenizer, journal=ListJournal(journal.written), settings=settings, **args)
    facts = again.metadata["strands_rollout"]
    assert (again.status.value, facts["stop_reason"]) == ("failed", "worker_error")
    assert reason in facts["error"]


async def test_journal_fails_episode_of_damaged_records(shipped_tokenizer) -> None:
    journal = ListJournal()
    await play(shipped_tokenizer, journal=journal)
    head, _, tail = journal.written[0].partition(b"\n")
    for damaged in (b"{", head, head + b"\n" + tail[:-8], head.replace(b"stop", b"stoq") + b"\n" + tail):
        again = await play(shipped_tokenizer, journal=ListJournal([damaged]))
        assert "the episode can't be continued" in again.metadata["strands_rollout"]["error"], damaged[:80]


TOOL_FILE = '''
from strands import tool

@tool
def double(number: int) -> int:
    """{}"""
    return 2 * number
'''
CHILD = """
import asyncio, json, sys
from types import SimpleNamespace
from strands_rollout import Sample, generate
args, sample, params = json.loads(sys.argv[1])
asyncio.run(generate(SimpleNamespace(**args), Sample.from_dict(sample), params))
"""


@pytest.mark.end_to_end
@pytest.mark.parametrize("repeats", [True, False], ids=["repeated", "not repeated"])
async def test_journal_dir_resumes_episodes_of_killed_run(shipped_tokenizer, tmp_path, repeats) -> None:
    turns = (TWO_CALLS, call_text("die", "work"), call_text("c", "work"), ANSWER)
    settings = SETTINGS | {"journal_dir": str(tmp_path / "journal"), "repeat_interrupted_tools": repeats}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    async with FakeSGLang(script_for(shipped_tokenizer, turns), context_length=8192, weight_version="7") as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        arguments = json.dumps([vars(args), new_sample().to_dict(), {"temperature": 1.0, "max_new_tokens": 4096}])
        command = [sys.executable, "-c", CHILD, arguments]
        environment = {**os.environ, "PYTHONPATH": path, "MAY_DIE": "yes"}
        child = await asyncio.to_thread(subprocess.run, command, env=environment, check=False, timeout=120)
        assert (child.returncode, len(fake.requests)) == (-signal.SIGKILL, 2)
        sample = await generate(args, new_sample(), {"temperature": 1.0, "max_new_tokens": 4096})
        if repeats:
            assert (ran, len(fake.requests)) == (["die", "c"], 4)
            expected = await play(shipped_tokenizer, turns=turns, settings={"repeat_interrupted_tools": True})
            assert without_times(sample) == without_times(expected)
        else:
            assert (sample.metadata["strands_rollout"]["stop_reason"], len(fake.requests)) == ("worker_error", 2)
        again = await generate(args, new_sample(), {"temperature": 1.0, "max_new_tokens": 4096})
        assert again.metadata["strands_rollout"]["resumes"] == 0  # an ended episode is not continued


ROW = {"strands_rollout_settings": {"max_tool_calls": 9}, "task": 1}


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("metadata", "params", "resumes"),
    [
        (ROW, {}, 1),
        (ROW | {"strands_rollout_settings": {"max_tool_calls": 8}}, {}, 0),
        pytest.param(ROW | {"task": 2}, {}, 0, marks=pytest.mark.slow),
        pytest.param(ROW, {"temperature": 0.5}, 0, marks=pytest.mark.slow),
    ],
    ids=["unchanged", "other settings of the row", "another row", "another temperature"],
)
async def test_journal_dir_restarts_under_changed_conditions(
    shipped_tokenizer, tmp_path, metadata, params, resumes
) -> None:
    turns = (call_text("a", "work"), call_text("die", "work"), ANSWER)
    settings = SETTINGS | {"journal_dir": str(tmp_path / "journal"), "repeat_interrupted_tools": True}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    sampling = {"temperature": 1.0, "max_new_tokens": 4096}
    async with FakeSGLang(script_for(shipped_tokenizer, turns), context_length=8192, weight_version="7") as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        arguments = json.dumps([vars(args), new_sample(metadata=ROW).to_dict(), sampling])
        environment = {**os.environ, "PYTHONPATH": path, "MAY_DIE": "yes"}
        command = [sys.executable, "-c", CHILD, arguments]
        child = await asyncio.to_thread(subprocess.run, command, env=environment, check=False, timeout=120)
        assert child.returncode == -signal.SIGKILL
        sample = await generate(args, new_sample(metadata=metadata), sampling | params)
    assert (sample.status.value, sample.metadata["strands_rollout"]["resumes"]) == ("completed", resumes)
    assert len(fake.requests) == (3 if resumes else 5)


def test_episode_conditions_cover_settings_and_code(shipped_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("first", "Double."), ("second", "Triple.")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "double_tool.py").write_text(TOOL_FILE.format(text))

    def conditions(*, evaluation: bool = False, **settings: Any) -> dict[str, str]:
        all_settings = settings_from_args(SimpleNamespace(strands_rollout=settings))
        args = args_for("http://127.0.0.1:1", shipped_tokenizer, eval_max_context_len=99)
        params = {"temperature": 1.0, "sampling_seed": 3}
        return episode_conditions(GenerateCall(args, new_sample(), params, evaluation), all_settings)

    def changed(**settings: Any) -> list[str]:
        return changed_conditions(conditions(), conditions(**settings))

    assert changed(evaluation=True) == ["the context limit"]
    assert changed(max_turn_tokens=9) == ["max_turn_tokens"]
    assert changed(executor={"name": "local", "isolation": "rlimits"}) == ["executor"]
    unrelated = {"reward": {"wrong": 0.0}, "fan_out": True, "dump_dir": "x", "row_tools": ["./first/double_tool.py"]}
    assert changed(**unrelated, engine_patience_s=1.0, max_failed_groups=1, max_staleness=1) == []
    first, second = conditions(tools=["./first/double_tool.py"]), conditions(tools=["./second/double_tool.py"])
    digests = first["the code of ./first/double_tool.py"], second["the code of ./second/double_tool.py"]
    assert digests[0] != digests[1]


@pytest.mark.end_to_end
async def test_journal_resume_masks_tokens_before_restart(shipped_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(KNOWN_VERSIONS, "newest", None)
    turns = (call_text("die", "work"), ANSWER)
    settings = {"journal_dir": str(tmp_path / "journal"), "repeat_interrupted_tools": True, "max_staleness": 50}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    fake = FakeSGLang(script_for(shipped_tokenizer, turns), context_length=8192, weight_version="41")
    async with fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=SETTINGS | settings)
        arguments = json.dumps([vars(args), new_sample().to_dict(), {"temperature": 1.0, "max_new_tokens": 4096}])
        environment = {**os.environ, "PYTHONPATH": path, "MAY_DIE": "yes"}
        command = [sys.executable, "-c", CHILD, arguments]
        child = await asyncio.to_thread(subprocess.run, command, env=environment, check=False, timeout=120)
        assert child.returncode == -signal.SIGKILL
        fake.engine.update_weights("1")  # after a restart, slime numbers the versions from 1
        sample = await generate(args, new_sample(), {"temperature": 1.0, "max_new_tokens": 4096})
    fresh = [await play(shipped_tokenizer, new_sample(), turns=(ANSWER,)) for _ in range(2)]
    first = len(ids_of(shipped_tokenizer, turns[0]))
    assert (sample.weight_versions, sample.loss_mask[:first]) == (["41", "1"], [0] * first)
    assert sum(sample.loss_mask) == len(ids_of(shipped_tokenizer, ANSWER))
    for number, each in enumerate([sample, *fresh]):
        each.reward, each.index = float(number), number
    args.strands_rollout["max_sample_staleness"] = 10
    args.n_samples_per_prompt = 3
    normalize_rewards(args, [sample, *fresh])
    assert [each.remove_sample for each in (sample, *fresh)] == [False, False, False]


@pytest.mark.parametrize(
    "row",
    [{"label": 2**70}, {"prompt": "Cut in an emoji: \ud83d"}, {"metadata": {"by": {(1, 2): 3}}}],
    ids=["a large label", "a lone surrogate", "keys that JSON lacks"],
)
async def test_journal_accepts_rows_of_any_values(shipped_tokenizer, tmp_path, row) -> None:
    sample = new_sample()
    vars(sample).update(row)
    settings = {"journal_dir": str(tmp_path / "journal")}
    await play(shipped_tokenizer, sample, settings=settings, turns=(call_text("a", "work"), ANSWER))
    assert (sample.metadata["strands_rollout"]["error"], sample.status) == (None, Sample.Status.COMPLETED)


@pytest.mark.parametrize("changed", [{}, {"temperature": 0.5}], ids=["unchanged conditions", "other conditions"])
async def test_journal_drops_records_after_resumed_attempt_ends(shipped_tokenizer, tmp_path, changed) -> None:
    aborting = False
    turns = [ids_of(shipped_tokenizer, text) for text in (call_text("a", "work"), call_text("c", "work"), ANSWER)]

    def reply(body: dict[str, Any], number: int) -> Reply:
        nonlocal aborting
        aborting = number == 1
        done = shipped_tokenizer.decode(body["input_ids"]).count("is done")
        if aborting:
            return Reply.abort(turns[done][:4])
        cut = 4 if body["input_ids"][-4:] == turns[done][:4] else 0
        return Reply.tokens(turns[done][cut:])

    sample, params = new_sample(), {"temperature": 1.0, "max_new_tokens": 4096}
    settings = SETTINGS | {"journal_dir": str(tmp_path / "journal"), "should_abort": lambda: aborting}
    async with FakeSGLang(reply, context_length=8192, weight_version="7") as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings, log_multi_turn=True)
        await generate(args, sample, params)
        assert (sample.status, next(iter(_leftover_records(tmp_path / "journal")))[:2]) == (Sample.Status.ABORTED, "3-")
        sample.metadata["start_rollout_id"] = 7  # as slime sets it on a collected sample
        aborting = False
        await generate(args, sample, params | changed)
    assert sample.status is Sample.Status.COMPLETED
    assert _leftover_records(tmp_path / "journal") == {}


def _leftover_records(folder: Path) -> dict[str, list[bytes]]:
    """Return the records that another process would find."""
    copied = Path(tempfile.mkdtemp(), "copy")  # the copy has no lock of its writer
    shutil.copytree(folder, copied)
    return take_leftover_records(copied)


async def test_unusable_journal_dir_does_not_fail_episode(shipped_tokenizer, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    sample = await play(shipped_tokenizer, settings={"journal_dir": str(tmp_path / "file" / "folder")})
    assert sample.status is Sample.Status.COMPLETED
    assert "have no journal, since journal_dir" in caplog.text
