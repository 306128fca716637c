"""What is left of an episode whose process died, after any of its steps, and what another process makes of it."""

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
from strands_rollout.record.store import take_left_records
from strands_rollout.record.weight_versions import KNOWN_VERSIONS
from strands_rollout.settings import settings_from_args
from strands_rollout.slime_plugin.conditions import changed_conditions, episode_conditions
from strands_rollout.slime_plugin.episode import play_sample
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.slime_plugin.slime_adapter import GenerateCall

TWO = call_text("a", "work").replace("<|im_end|>", "\n") + call_text("b", "work")
FAULTY = "<tool_call>\n{not json}\n</tool_call>\n" + call_text("fails", "work")
TURNS = (TWO, FAULTY, call_text("c", "work"), ANSWER)
TIMES = ("_s", "requests")
SETTINGS = {"tools": [f"{__name__}.work"], "system_prompt": None}
ran: list[str] = []


@tool
async def work(code: str) -> str:
    """Do a job."""
    await asyncio.sleep(0.001 * (code == "b"))
    ran.append(code)
    if code == "half":
        return "cut in an emoji: \ud83d"
    if code == "fails":
        raise RuntimeError("not today")
    if code == "dies" and os.environ.get("MAY_DIE"):
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{code} is done"


@pytest.fixture(autouse=True)
def nothing_has_run() -> None:
    ran.clear()


class Kept:
    """Keeps records in a list."""

    is_latest = True

    def __init__(self, records=(), *, may_have_acted=True) -> None:
        self.records = list(records)
        self.may_have_acted = may_have_acted
        self.written: list[bytes] = []
        self.ran_by_then: list[list[str]] = []

    def begin(self) -> None:
        self.written.clear()

    def write(self, record: bytes) -> None:
        self.written.append(record)
        self.ran_by_then.append([*ran])

    async def write_before_tools(self, record: bytes) -> None:
        self.write(record)

    def close(self, *, keep: bool) -> None:
        pass


def new_sample(**fields: Any) -> Sample:
    return Sample(prompt="What is 17 * 2?", label="34", index=3, session_id="one-episode", **fields)


def script_for(tokenizer: Any, turns=TURNS):
    """Answers with the turn whose number the request has tool results or prompts for."""
    ids = [ids_of(tokenizer, text) for text in turns]

    def reply(body: dict[str, Any], _number: int) -> Reply:
        text = tokenizer.decode(body["input_ids"])
        return Reply.tokens(ids[text.count("<|im_start|>assistant") - 1])

    return reply


async def play(tokenizer, sample=None, kept=None, settings=None, turns=TURNS, **args: Any) -> Sample:
    sample = sample or new_sample()
    async with FakeSGLang(script_for(tokenizer, turns), context_length=8192, weight_version="7") as fake:
        given = args_for(fake.base_url, tokenizer, strands_rollout=SETTINGS | (settings or {}), **args)
        params = {"temperature": 1.0, "max_new_tokens": 4096}
        await play_sample(GenerateCall(given, sample, params, False), kept)
    assert fake.violations == []
    return sample


def without_times(sample: Sample) -> dict[str, Any]:
    values = copy.deepcopy(sample.to_dict())
    values.pop("non_generation_time")
    facts = values["metadata"]["strands_rollout"]
    calls = [{name: call[name] for name in ("id", "tool", "status")} for call in facts.pop("calls")]
    of_a_process = ("resumes", "version_numberings")
    kept = {name: value for name, value in facts.items() if not name.endswith(TIMES) and name not in of_a_process}
    values["metadata"]["strands_rollout"] = {**kept, "calls": calls}
    return values


async def test_journal_resumes_after_each_record_without_rerun(shipped_tokenizer) -> None:
    kept = Kept()
    whole = await play(shipped_tokenizer, kept=kept)
    assert (whole.status, ran) == (Sample.Status.COMPLETED, ["a", "b", "fails", "c"])
    assert len(kept.written) == 3 + 4  # turns with tools, and calls that ended
    for count in range(1, len(kept.written) + 1):
        ran[:] = kept.ran_by_then[count - 1]
        again = await play(shipped_tokenizer, kept=Kept(kept.written[:count], may_have_acted=False))
        assert ran == ["a", "b", "fails", "c"], count
        assert without_times(again) == without_times(whole), count
        assert again.metadata["strands_rollout"]["resumes"] == 1


async def test_journal_keeps_big_integers_and_lone_surrogates(shipped_tokenizer) -> None:
    long = TOOL_CALL.format(name="work", arguments=f'{{"code": "half", "n": [{10**30}, -{10**30}]}}')
    kept, turns = Kept(), (long, ANSWER)
    whole = await play(shipped_tokenizer, kept=kept, turns=turns)
    for count in (1, 2):
        again = await play(shipped_tokenizer, kept=Kept(kept.written[:count], may_have_acted=False), turns=turns)
        assert without_times(again) == without_times(whole)
        assert again.metadata["strands_rollout"]["resumes"] == 1


async def test_journal_counts_repeated_resumes(shipped_tokenizer) -> None:
    whole, kept = await play(shipped_tokenizer, kept=Kept()), Kept()
    await play(shipped_tokenizer, kept=kept)
    for attempt in range(1, 4):
        kept = Kept(kept.written[: 1 + attempt], may_have_acted=False)
        ran.clear()
        again = await play(shipped_tokenizer, kept=kept)
        assert again.metadata["strands_rollout"]["resumes"] == attempt
        assert without_times(again) == without_times(whole)


async def test_journal_obeys_repeat_interrupted_tools(shipped_tokenizer) -> None:
    kept = Kept()
    await play(shipped_tokenizer, kept=kept)
    for settings, status, calls in (({}, "failed", []), ({"repeat_interrupted_tools": True}, "completed", ["b"])):
        ran.clear()
        again = await play(shipped_tokenizer, kept=Kept(kept.written[:2]), settings=settings)
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
    turns, kept = (call_text("print(34)"), ANSWER), Kept()
    settings = {"tools": ["strands_rollout.tools.execute_python_code"], "executor": "subprocess"}
    await play(shipped_tokenizer, kept=kept, settings=settings, turns=turns)
    again = await play(shipped_tokenizer, kept=Kept(kept.written[:1]), settings=settings, turns=turns)
    assert (again.status.value, again.metadata["strands_rollout"]["code"]["calls"]) == ("completed", 1)
    in_session = settings | {"code_session": True, "executor": {"name": "local", "isolation": "rlimits"}}
    lost = await play(shipped_tokenizer, kept=Kept(kept.written[:1]), settings=in_session, turns=turns)
    assert lost.metadata["strands_rollout"]["stop_reason"] == "worker_error"


async def program(task: Any, endpoint: Any) -> str:
    """An agent in a program, with this file's tool."""
    client = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    agent = Agent(OpenAIModel(client_args=client, model_id=endpoint.model), tools=[work], callback_handler=None)
    return str(await agent.invoke_async(task.text))


PROGRAM = {"agent_program": f"{__name__}.program", "resumable": "replay", "tools": []}
TITLE = "A title.<|im_end|>"


async def titled_program(task: Any, endpoint: Any) -> str:
    """The same, after a request without tools."""
    client = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    aside = Agent(OpenAIModel(client_args=client, model_id=endpoint.model), callback_handler=None)
    await aside.invoke_async("A title?")
    return await program(task, endpoint)


def without_replays(sample: Sample) -> dict[str, Any]:
    """What an attempt that was answered from a record has as the one that left it."""
    values = without_times(sample)
    facts = values["metadata"]["strands_rollout"]
    for name in ("requests", "repeats"):
        facts["gateway"].pop(name)
    facts.pop("dropped_sampled_tokens")  # of titles, each of which was asked for
    facts["budgets"].pop("context")  # unknown where the engine was not asked
    return values


@pytest.mark.parametrize("name", ["program", "titled_program"])
async def test_journal_replays_agent_program_after_each_turn(shipped_tokenizer, name) -> None:
    settings = PROGRAM | {"agent_program": f"{__name__}.{name}"}
    turns, kept = (TWO, call_text("c", "work"), ANSWER), Kept()

    def script(body: dict[str, Any], _number: int) -> Reply:
        text = shipped_tokenizer.decode(body["input_ids"])
        turn = TITLE if "A title?" in text else turns[text.count("<|im_start|>assistant") - 1]
        return Reply.tokens(ids_of(shipped_tokenizer, turn))

    async def attempt(kept: Kept) -> tuple[Sample, int]:
        sample = new_sample()
        async with FakeSGLang(script, context_length=8192, weight_version="7") as fake:
            args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=SETTINGS | settings)
            params = {"temperature": 1.0, "max_new_tokens": 4096}
            await play_sample(GenerateCall(args, sample, params, False), kept)
        return sample, len(fake.requests)

    whole, asked = await attempt(kept)
    assert (whole.status, len(kept.written)) == (Sample.Status.COMPLETED, 3)
    titles = asked - 3
    for count in range(1, 4):
        ran.clear()
        again, asked = await attempt(Kept(kept.written[:count]))  # a call may have begun
        facts = again.metadata["strands_rollout"]
        assert (facts["resumes"], facts["gateway"]["diverged"]) == (1, "")
        assert asked == titles + 3 - count  # the others are answered from the record
        assert ran == ["a", "b", "c"]  # its calls are made again
        assert without_replays(again) == without_replays(whole)


async def other_program(task: Any, endpoint: Any) -> str:
    """The same, which asks something else."""
    return await program(replace(task, messages=[{"role": "user", "content": [{"text": "And 2 * 17?"}]}]), endpoint)


async def test_journal_resumes_diverged_agent_program(shipped_tokenizer) -> None:
    turns, first, second = (TWO, call_text("c", "work"), ANSWER), Kept(), Kept()
    await play(shipped_tokenizer, kept=first, settings=PROGRAM, turns=turns)
    settings = PROGRAM | {"agent_program": f"{__name__}.other_program"}
    second.records = first.written[:2]
    whole = await play(shipped_tokenizer, kept=second, settings=settings, turns=turns)
    facts = whole.metadata["strands_rollout"]
    assert (whole.status, "message 0" in facts["gateway"]["diverged"]) == (Sample.Status.COMPLETED, True)
    for count in range(1, 4):
        again = await play(shipped_tokenizer, kept=Kept(second.written[:count]), settings=settings, turns=turns)
        facts = again.metadata["strands_rollout"]
        assert (again.status, facts["gateway"]["diverged"]) == (Sample.Status.COMPLETED, "")
        assert (again.tokens, again.loss_mask) == (whole.tokens, whole.loss_mask)
        assert again.rollout_log_probs == whole.rollout_log_probs
        assert contract_violations(replace(again, reward=1.0)) == []


async def test_journal_ends_if_main_conversation_changes(shipped_tokenizer) -> None:
    """The first attempt had asked for a title alone, whose last tokens the second one samples and writes down."""
    title, kept, is_up = ids_of(shipped_tokenizer, TITLE), Kept(), False

    def script(body: dict[str, Any], _number: int) -> Reply:
        nonlocal is_up
        text = shipped_tokenizer.decode(body["input_ids"])
        if "A title?" not in text:
            return Reply.tokens(ids_of(shipped_tokenizer, ANSWER))
        is_up = text.endswith("assistant\n")
        return Reply.abort(title[:2]) if is_up else Reply.tokens(title[2:])

    def should_abort() -> bool:
        return is_up

    sample = new_sample()
    for _ in range(2):
        is_up = False
        async with FakeSGLang(script, context_length=8192) as fake:
            player = {"agent_program": f"{__name__}.titled_program", "should_abort": should_abort}
            args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=PROGRAM | player, partial_rollout=True)
            params = {"temperature": 1.0, "max_new_tokens": 4096}
            await play_sample(GenerateCall(args, sample, params, False), kept)
    assert sample.status is Sample.Status.COMPLETED
    assert sum(sample.loss_mask) == len(ids_of(shipped_tokenizer, ANSWER))
    assert [b'"turns"' in record for record in kept.written] == [True, False]
    assert b"has become another" in kept.written[1]


async def test_journal_fails_program_that_is_not_resumable(shipped_tokenizer) -> None:
    kept = Kept()
    settings = PROGRAM | {"resumable": None}
    await play(shipped_tokenizer, kept=kept, settings=settings)
    again = await play(shipped_tokenizer, kept=Kept(kept.written), settings=settings)
    facts = again.metadata["strands_rollout"]
    assert (again.status.value, facts["stop_reason"]) == ("failed", "worker_error")
    assert "resumable: replay" in facts["error"]


class Nothing:
    """An environment that does nothing."""


def build_graph(model: Any, _task: Any) -> Any:
    builder = GraphBuilder().set_max_node_executions(3).set_execution_timeout(60)
    builder.add_node(Agent(name="one", model=model, tools=[work]), "one")
    return builder.build()


@pytest.mark.parametrize(
    ("settings", "args", "reason"),
    [
        ({"environment": f"{__name__}.Nothing"}, {}, "environment and resources are closed"),
        ({}, {"use_rollout_routing_replay": True}, "replay data is lost"),
        ({"agent_factory": f"{__name__}.build_graph"}, {}, "it is a swarm's or graph's"),
    ],
    ids=["environment", "replay", "graph"],
)
async def test_journal_records_why_episode_cannot_resume(shipped_tokenizer, settings, args, reason) -> None:
    kept = Kept()
    await play(shipped_tokenizer, kept=kept, settings=settings, **args)
    assert [json.loads(record) for record in kept.written[1:]] == []
    again = await play(shipped_tokenizer, kept=Kept(kept.written), settings=settings, **args)
    facts = again.metadata["strands_rollout"]
    assert (again.status.value, facts["stop_reason"]) == ("failed", "worker_error")
    assert reason in facts["error"]


async def test_journal_fails_episode_of_damaged_records(shipped_tokenizer) -> None:
    kept = Kept()
    await play(shipped_tokenizer, kept=kept)
    head, _, tail = kept.written[0].partition(b"\n")
    for damaged in (b"{", head, head + b"\n" + tail[:-8], head.replace(b"stop", b"stoq") + b"\n" + tail):
        again = await play(shipped_tokenizer, kept=Kept([damaged]))
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


@pytest.mark.parametrize("repeats", [True, False], ids=["repeated", "not repeated"])
async def test_journal_dir_resumes_episodes_of_killed_run(shipped_tokenizer, tmp_path, repeats) -> None:
    turns = (TWO, call_text("dies", "work"), call_text("c", "work"), ANSWER)
    settings = SETTINGS | {"journal_dir": str(tmp_path / "journal"), "repeat_interrupted_tools": repeats}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    async with FakeSGLang(script_for(shipped_tokenizer, turns), context_length=8192, weight_version="7") as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        given = json.dumps([vars(args), new_sample().to_dict(), {"temperature": 1.0, "max_new_tokens": 4096}])
        command = [sys.executable, "-c", CHILD, given]
        environment = {**os.environ, "PYTHONPATH": path, "MAY_DIE": "yes"}
        child = await asyncio.to_thread(subprocess.run, command, env=environment, check=False, timeout=120)
        assert (child.returncode, len(fake.requests)) == (-signal.SIGKILL, 2)
        sample = await generate(args, new_sample(), {"temperature": 1.0, "max_new_tokens": 4096})
        if repeats:
            assert (ran, len(fake.requests)) == (["dies", "c"], 4)
            whole = await play(shipped_tokenizer, turns=turns, settings={"repeat_interrupted_tools": True})
            assert without_times(sample) == without_times(whole)
        else:
            assert (sample.metadata["strands_rollout"]["stop_reason"], len(fake.requests)) == ("worker_error", 2)
        again = await generate(args, new_sample(), {"temperature": 1.0, "max_new_tokens": 4096})
        assert again.metadata["strands_rollout"]["resumes"] == 0  # an episode that is over is not continued


ROW = {"strands_rollout_settings": {"max_tool_calls": 9}, "task": 1}


@pytest.mark.parametrize(
    ("metadata", "params", "resumes"),
    [
        (ROW, {}, 1),
        (ROW | {"strands_rollout_settings": {"max_tool_calls": 8}}, {}, 0),
        pytest.param(ROW | {"task": 2}, {}, 0, marks=pytest.mark.slow),
        pytest.param(ROW, {"temperature": 0.5}, 0, marks=pytest.mark.slow),
    ],
    ids=["the same", "other settings of the row", "another row", "another temperature"],
)
async def test_journal_dir_restarts_under_changed_conditions(
    shipped_tokenizer, tmp_path, metadata, params, resumes
) -> None:
    turns = (call_text("a", "work"), call_text("dies", "work"), ANSWER)
    settings = SETTINGS | {"journal_dir": str(tmp_path / "journal"), "repeat_interrupted_tools": True}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    sampling = {"temperature": 1.0, "max_new_tokens": 4096}
    async with FakeSGLang(script_for(shipped_tokenizer, turns), context_length=8192, weight_version="7") as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        given = json.dumps([vars(args), new_sample(metadata=ROW).to_dict(), sampling])
        environment = {**os.environ, "PYTHONPATH": path, "MAY_DIE": "yes"}
        command = [sys.executable, "-c", CHILD, given]
        child = await asyncio.to_thread(subprocess.run, command, env=environment, check=False, timeout=120)
        assert child.returncode == -signal.SIGKILL
        sample = await generate(args, new_sample(metadata=metadata), sampling | params)
    assert (sample.status.value, sample.metadata["strands_rollout"]["resumes"]) == ("completed", resumes)
    assert len(fake.requests) == (3 if resumes else 5)


def test_episode_conditions_cover_what_changes_an_episode(shipped_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, words in (("first", "Double."), ("second", "Triple.")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "double_tool.py").write_text(TOOL_FILE.format(words))

    def conditions(*, evaluation: bool = False, **settings: Any) -> dict[str, str]:
        whole = settings_from_args(SimpleNamespace(strands_rollout=settings))
        args = args_for("http://127.0.0.1:1", shipped_tokenizer, eval_max_context_len=99)
        given = {"temperature": 1.0, "sampling_seed": 3}
        return episode_conditions(GenerateCall(args, new_sample(), given, evaluation), whole)

    def changed(**settings: Any) -> list[str]:
        return changed_conditions(conditions(), conditions(**settings))

    assert changed(evaluation=True) == ["the context limit"]
    assert changed(max_turn_tokens=9) == ["max_turn_tokens"]
    assert changed(executor={"name": "local", "isolation": "rlimits"}) == ["executor"]
    quiet = {"reward": {"wrong": 0.0}, "fan_out": True, "dump_dir": "x", "row_tools": ["./first/double_tool.py"]}
    assert changed(**quiet, engine_patience_s=1.0, max_failed_groups=1, max_staleness=1) == []
    first, second = conditions(tools=["./first/double_tool.py"]), conditions(tools=["./second/double_tool.py"])
    digests = first["the code of ./first/double_tool.py"], second["the code of ./second/double_tool.py"]
    assert digests[0] != digests[1]


async def test_journal_resume_masks_tokens_before_restart(shipped_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(KNOWN_VERSIONS, "newest", None)
    turns = (call_text("dies", "work"), ANSWER)
    settings = {"journal_dir": str(tmp_path / "journal"), "repeat_interrupted_tools": True, "max_staleness": 50}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    fake = FakeSGLang(script_for(shipped_tokenizer, turns), context_length=8192, weight_version="41")
    async with fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=SETTINGS | settings)
        given = json.dumps([vars(args), new_sample().to_dict(), {"temperature": 1.0, "max_new_tokens": 4096}])
        environment = {**os.environ, "PYTHONPATH": path, "MAY_DIE": "yes"}
        command = [sys.executable, "-c", CHILD, given]
        child = await asyncio.to_thread(subprocess.run, command, env=environment, check=False, timeout=120)
        assert child.returncode == -signal.SIGKILL
        fake.engine.update_weights("1")  # slime has begun to count again
        sample = await generate(args, new_sample(), {"temperature": 1.0, "max_new_tokens": 4096})
    fresh = [await play(shipped_tokenizer, new_sample(), turns=(ANSWER,)) for _ in range(2)]
    first = len(ids_of(shipped_tokenizer, turns[0]))
    assert (sample.weight_versions, sample.loss_mask[:first]) == (["41", "1"], [0] * first)
    assert sum(sample.loss_mask) == len(ids_of(shipped_tokenizer, ANSWER))
    for number, one in enumerate([sample, *fresh]):
        one.reward, one.index = float(number), number
    args.strands_rollout["max_sample_staleness"] = 10
    args.n_samples_per_prompt = 3
    normalize_rewards(args, [sample, *fresh])
    assert [one.remove_sample for one in (sample, *fresh)] == [False, False, False]


@pytest.mark.parametrize(
    "row",
    [{"label": 2**70}, {"prompt": "Cut in an emoji: \ud83d"}, {"metadata": {"by": {(1, 2): 3}}}],
    ids=["a large label", "half of a pair", "keys of no JSON"],
)
async def test_journal_accepts_rows_of_any_values(shipped_tokenizer, tmp_path, row) -> None:
    sample = new_sample()
    vars(sample).update(row)
    settings = {"journal_dir": str(tmp_path / "journal")}
    await play(shipped_tokenizer, sample, settings=settings, turns=(call_text("a", "work"), ANSWER))
    assert (sample.metadata["strands_rollout"]["error"], sample.status) == (None, Sample.Status.COMPLETED)


@pytest.mark.parametrize("changed", [{}, {"temperature": 0.5}], ids=["the same conditions", "other conditions"])
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
        assert (sample.status, next(iter(_left(tmp_path / "journal")))[:2]) == (Sample.Status.ABORTED, "3-")
        sample.metadata["start_rollout_id"] = 7  # slime's, of a collected sample
        aborting = False
        await generate(args, sample, params | changed)
    assert sample.status is Sample.Status.COMPLETED
    assert _left(tmp_path / "journal") == {}


def _left(folder: Path) -> dict[str, list[bytes]]:
    """What another process would find."""
    copied = Path(tempfile.mkdtemp(), "copy")  # without its writer's lock
    shutil.copytree(folder, copied)
    return take_left_records(copied)


async def test_unusable_journal_dir_does_not_fail_episode(shipped_tokenizer, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    sample = await play(shipped_tokenizer, settings={"journal_dir": str(tmp_path / "file" / "folder")})
    assert sample.status is Sample.Status.COMPLETED
    assert "have no journal in journal_dir" in caplog.text
