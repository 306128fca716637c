"""Episode workers on a real Ray cluster of two nodes: samples, aborts, deaths, lost nodes, placement."""

import asyncio
import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recorded_tools
from fake_sglang import FakeSGLang, Reply
from harness import args_for
from interruptible_policy import (
    ANSWER,
    InterruptiblePolicy,
    PolicyRequest,
    abort_after,
    call,
    hold_after,
    paced,
    prompt_of,
    turn,
)
from processes import exits_within, wait_until
from ray_cluster import QUIET, ray_cluster
from test_journal import CHILD

from strands_rollout import Sample, generate, normalize_rewards, reward_func
from strands_rollout.errors import ConfigError, WorkersLostError
from strands_rollout.record.store import take_leftover_records
from strands_rollout.record.weight_versions import KNOWN_VERSIONS
from strands_rollout.settings import EpisodeWorkers, validate_settings
from strands_rollout.slime_plugin import metrics, worker, workers
from strands_rollout.slime_plugin.slime_adapter import GenerateCall
from strands_rollout.slime_plugin.workers import close_pools, pool_metrics

pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # raised by Ray
    pytest.mark.timeout(1200),  # a busy machine takes minutes to start a worker
]
SUPPORT = Path(recorded_tools.__file__).parent
PLANS = {
    "job": [turn(call("work")), turn("Both.", call("work", "a"), call("fail", "b")), turn(call("work")), ANSWER],
    "slow": [*[turn(call("work", seconds=0.02))] * 12, ANSWER],
    "deadly": [turn(call("work")), turn(call("die")), ANSWER],
}
SETTINGS = {"tools": [*recorded_tools.PATHS], "system_prompt": None, "max_tool_iterations": None}
PROGRAM = {"agent_program": "recorded_tools.program", "resumable": "replay"}
PARAMS = {"temperature": 1.0, "max_new_tokens": 20_000}
HANG_S = 900  # longer than any step takes, even on a busy machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimpleNamespace]:
    with ray_cluster({"one": 2, "two": 2}, SUPPORT, Path(__file__).parent) as started:
        yield started
        close_pools()


@pytest.fixture(autouse=True)
def _clean_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    recorded_tools.clear_calls()
    monkeypatch.setattr(workers, "_START_TIMEOUT_S", HANG_S)
    if "own_workers" in request.keywords:
        close_pools()
    yield
    if "own_workers" in request.keywords:
        close_pools()


class Stage(SimpleNamespace):
    """A fake engine with a scripted policy, and slime's args for it."""

    async def play(self, count: int = 1, name: str = "job", **settings: Any) -> list[Any]:
        rows = [{"prompt": prompt_of(name, n), "index": n, "session_id": f"{name}-{n}"} for n in range(count)]
        samples = [Sample(label="34", group_index=row["index"] // 4, **row) for row in rows]
        return [*await asyncio.gather(*(self.play_one(sample, **settings) for sample in samples))]

    async def play_one(self, sample: Sample, **settings: Any) -> Any:
        await generate(self.args_with(**settings), sample, {**PARAMS, "sampling_seed": sample.index})
        if sample.status is not Sample.Status.ABORTED:
            sample.reward = await reward_func(self.args, sample)
        return sample

    def args_with(self, **settings: Any) -> SimpleNamespace:
        self.args.strands_rollout = self.args.strands_rollout | settings
        return self.args

    def sampled(self, sample: Sample) -> list[int]:
        return [t for _, start, end, _ in sample.metadata["strands_rollout"]["spans"] for t in sample.tokens[start:end]]

    def planned(self, sample: Sample) -> list[int]:
        name = str(sample.session_id).partition("-")[0]
        return [token for ids in self.policy.planned_ids(str(sample.session_id), name) for token in ids]


@pytest.fixture
async def stage(cluster: SimpleNamespace, shipped_tokenizer: Any) -> AsyncIterator[Stage]:
    policy = InterruptiblePolicy(shipped_tokenizer, PLANS)
    fake = FakeSGLang(policy, context_length=32_768, vocab_size=len(shipped_tokenizer))
    async with fake:
        rewards = {"custom_rm_path": "strands_rollout.reward_func", "reward_key": "score"}
        args = args_for(fake.base_url, shipped_tokenizer, **rewards)
        args.strands_rollout = {**SETTINGS, "episode_workers": 2}
        yield Stage(policy=policy, fake=fake, args=args, ray=cluster.ray)
    assert (policy.violations, fake.violations) == ([], [])


def without_times(sample: Sample) -> dict[str, Any]:
    values = copy.deepcopy(sample.to_dict())
    del values["non_generation_time"]
    facts = values["metadata"]["strands_rollout"]
    calls = sorted((entry["id"], entry["tool"], entry["status"]) for entry in facts.pop("calls", ()))
    compared = {
        name: value for name, value in facts.items() if not name.endswith("_s") and name not in ("requests", "code")
    }
    values["metadata"]["strands_rollout"] = {**compared, "calls": calls}
    return values


def disturb_some(request: PolicyRequest) -> Any:
    """Return the same fault in each run: a 503, an abort in the middle of a turn, a slow answer, or none."""
    kind = (request.number * 7 + request.turn * 3) % 5
    if kind == 0 and request.attempt == 1:
        return Reply.status(503)
    if kind == 1 and request.done == 0:
        return abort_after(4)
    return paced(0.001) if kind == 2 else None


@pytest.mark.parametrize(("player", "count"), [({}, 32), (PROGRAM, 12)])
async def test_workers_match_one_process_despite_faults(stage, player, count) -> None:
    stage.policy.disturb = disturb_some
    in_process = await stage.play(count, episode_workers=0, **player)
    by_workers = await stage.play(count, episode_workers=2, **player)
    assert [without_times(sample) for sample in by_workers] == [without_times(sample) for sample in in_process]
    assert {sample.status.value for sample in by_workers} == {"completed"}
    assert [stage.sampled(sample) for sample in by_workers] == [stage.planned(sample) for sample in by_workers]
    assert len(recorded_tools.ended_calls()) == 2 * count * 4
    found = metrics.worker_metrics(metrics.finished_samples(by_workers))
    assert found["workers/0/episodes"] + found["workers/1/episodes"] >= count
    assert min(found["workers/0/episodes"], found["workers/1/episodes"]) > count / 8
    assert found["queue_s/max"] >= 0.0


async def test_workers_compute_reward_ahead_once(stage: Stage, monkeypatch) -> None:
    [sample] = await stage.play(1)
    assert (sample.reward["score"], sample.reward["method"]) == (1.0, "exact")
    assert "reward_ahead" not in sample.metadata["strands_rollout"]
    assert sample.metadata["strands_rollout"]["score_s"] > 0
    again = Sample(prompt=prompt_of("job", 1), label="34", index=1, session_id="job-1")
    await generate(stage.args, again, PARAMS)
    monkeypatch.setattr("strands_rollout.slime_plugin.reward.grade", None)
    assert (await reward_func(stage.args, again))["score"] == 1.0
    assert (await reward_func(stage.args, again))["error"] != ""  # the reward computed ahead is used once


@pytest.mark.parametrize("player", [{}, PROGRAM])
async def test_workers_abort_and_resume_each_others_episodes(stage: Stage, player) -> None:
    flag = threading.Event()
    stage.policy.disturb = lambda request: hold_after(3) if request.turn == 2 and request.done == 0 else None
    running = asyncio.ensure_future(stage.play(8, should_abort=flag.is_set, **player))
    await wait_until(lambda: len(recorded_tools.ended_calls()) >= 8 * 3)
    flag.set()
    async with asyncio.timeout(HANG_S):
        samples = await running
    assert {sample.status.value for sample in samples} == {"aborted"}
    assert all(sample.metadata["strands_rollout"]["resume"] for sample in samples)
    flag.clear()
    stage.policy.disturb = lambda _request: None
    for sample in samples:
        sample.group_index = None  # without a group, no worker is preferred
    samples = await asyncio.gather(*(stage.play_one(sample) for sample in samples))
    assert {sample.status.value for sample in samples} == {"completed"}
    assert [stage.sampled(sample) for sample in samples] == [stage.planned(sample) for sample in samples]
    assert len(recorded_tools.calls_ended_twice()) == (8 * 3 if player else 0)  # a program's tools run again


async def test_workers_report_newest_weight_version(stage: Stage, monkeypatch) -> None:
    monkeypatch.setattr(KNOWN_VERSIONS, "newest", None)
    stage.policy.disturb = lambda request: hold_after(2) if request.turn == 1 else None
    stage.fake.engine.update_weights("12")
    # no journal, because its records contain the version too
    running = asyncio.ensure_future(stage.play(1, resume_aborted=False))
    await wait_until(lambda: KNOWN_VERSIONS.newest == 12)
    assert not running.done()
    samples = [
        Sample(index=n, reward=float(n), weight_versions=[str(version)]) for n, version in enumerate([9, 10, 11])
    ]
    for sample in samples:
        sample.tokens, sample.response_length, sample.status = [1, 2], 1, Sample.Status.COMPLETED
    normalize_rewards(stage.args_with(max_sample_staleness=2), samples)
    assert [sample.remove_sample for sample in samples] == [True, False, False]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_workers_use_the_drivers_version_numbering(stage: Stage) -> None:
    [sample] = await stage.play(1)
    assert sample.metadata["strands_rollout"]["version_numberings"] == [KNOWN_VERSIONS.numbering]


async def test_workers_abort_queued_episodes_untouched(stage: Stage) -> None:
    flag = threading.Event()
    stage.policy.disturb = lambda _request: hold_after(2)
    one_each = {"episode_workers": {"count": 2, "max_episodes": 1}, "should_abort": flag.is_set}
    running = asyncio.ensure_future(stage.play(6, **one_each))
    await wait_until(lambda: len(stage.fake.requests) >= 2)
    flag.set()
    samples = await running
    assert {sample.status.value for sample in samples} == {"aborted"}
    assert sorted(bool(sample.tokens) for sample in samples) == [False] * 4 + [True] * 2


@pytest.mark.own_workers
async def test_announce_abort_returns_when_every_worker_knows(stage: Stage, monkeypatch) -> None:
    monkeypatch.setattr(workers, "_ABORT_POLL_S", HANG_S)  # so only announce_abort can tell the workers
    monkeypatch.setattr(workers, "_SEND_ABORT_TIMEOUT_S", HANG_S)
    flag, may_reply = threading.Event(), asyncio.Event()
    reply = stage.policy.reply

    async def wait_and_reply(*args: Any) -> Reply:
        await may_reply.wait()
        return reply(*args)

    monkeypatch.setattr(stage.policy, "reply", wait_and_reply)
    running = asyncio.ensure_future(stage.play(4, should_abort=flag.is_set, abort_grace_s=HANG_S))
    await stage.fake.arrived(4)
    flag.set()
    [pool] = workers._POOLS.values()
    await asyncio.to_thread(pool.announce_abort)
    may_reply.set()
    assert {sample.status.value for sample in await running} == {"aborted"}
    assert len(stage.fake.requests) == 4


@pytest.mark.parametrize("player", [{}, PROGRAM])
async def test_workers_end_requests_sent_after_an_abort(stage: Stage, player) -> None:
    stage.fake._router = True  # a router, which drops the worker's abort requests
    flag = threading.Event()

    def disturb(_request: PolicyRequest) -> Any:
        flag.set()  # the rollout is aborted, but the worker does not know yet
        return hold_after(2)

    stage.policy.disturb = disturb
    [sample] = await stage.play(1, should_abort=flag.is_set, abort_grace_s=HANG_S * 2, **player)
    assert (sample.status.value, len(stage.fake.disconnects)) == ("aborted", 1)


async def test_workers_wait_for_requests_sent_before_an_abort(stage: Stage, monkeypatch) -> None:
    stage.fake._router = True
    flag, batches = threading.Event(), list[object]()
    process = workers.WorkerPool._process_batch
    monkeypatch.setattr(workers.WorkerPool, "_process_batch", lambda *args: (batches.append(args[1]), process(*args)))
    stage.policy.disturb = lambda request: hold_after(3) if request.done == 0 else None
    running = asyncio.ensure_future(stage.play(1, should_abort=flag.is_set, abort_grace_s=HANG_S * 2))
    await wait_until(lambda: stage.fake.requests)
    sent = len(batches)
    for ready in ready_workers():  # each batch tells the worker that there is no abort
        await wait_until(lambda ready=ready: batches[sent:].count(ready) >= 3)
    flag.set()
    await wait_until(lambda: stage.fake.aborts)  # the worker knows of the abort
    stage.fake.engine.abort("")  # as slime aborts at the engine
    [sample] = await running
    assert (sample.status.value, sum(sample.loss_mask), stage.fake.disconnects) == ("aborted", 3, [])


async def test_workers_end_episode_of_a_cancelled_caller(stage: Stage) -> None:
    stage.policy.disturb = lambda _request: hold_after(2)
    task = asyncio.ensure_future(stage.play(1))
    await wait_until(lambda: stage.fake.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: stage.fake.disconnects)


def ready_workers() -> list[Any]:
    return [entry for pool in workers._POOLS.values() for entry in pool._workers if entry.is_ready]


async def test_killed_workers_episodes_resume_without_rerun(stage: Stage) -> None:
    stage.policy.disturb = lambda _request: paced(0.02)  # much slower than the tools
    running = asyncio.ensure_future(stage.play(24, "slow", repeat_interrupted_tools=False))
    for after in (24 * 2, 24 * 6):
        await wait_until(lambda after=after: len(recorded_tools.ended_calls()) >= after)
        busiest = max(ready_workers(), key=lambda entry: len(entry.jobs))
        os.kill(busiest.info.pid, signal.SIGKILL)
        await wait_until(lambda busiest=busiest: not busiest.is_ready)
    async with asyncio.timeout(HANG_S):
        samples = await running
    finished = [sample for sample in samples if sample.status.value == "completed"]
    assert [stage.sampled(sample) for sample in finished] == [stage.planned(sample) for sample in finished]
    lost = [sample for sample in samples if sample not in finished]  # a tool ran when the worker died
    assert any(sample.metadata["strands_rollout"]["resumes"] for sample in finished)
    assert {sample.metadata["strands_rollout"]["stop_reason"] for sample in lost} <= {"worker_error"}
    assert recorded_tools.calls_ended_twice() == []
    assert all(len(sample.weight_versions) == 13 for sample in finished)


async def test_workers_read_journal_of_killed_run(stage: Stage, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRANDS_ROLLOUT_EPISODE_WORKERS", "0")
    settings = SETTINGS | {"tools": [*recorded_tools.PATHS, "recorded_tools.die"], "journal_dir": str(tmp_path)}
    sample = Sample(prompt=prompt_of("deadly", 0), label="34", index=0, session_id="deadly-0")
    stage.args.strands_rollout = settings
    command = [sys.executable, "-c", CHILD, json.dumps([vars(stage.args), sample.to_dict(), PARAMS])]
    child = await asyncio.to_thread(subprocess.run, command, check=False, timeout=HANG_S, env={**os.environ})
    assert (child.returncode, len(stage.fake.requests)) == (-signal.SIGKILL, 2)
    await stage.play_one(sample, episode_workers=2)
    assert sample.metadata["strands_rollout"]["stop_reason"] == "worker_error"
    assert (len(stage.fake.requests), Counter(recorded_tools.ended_calls())) == (2, {"deadly-0:0": 1, "deadly-0:1": 1})
    await stage.play_one(sample)  # the episode has ended, so this call starts a new one
    assert len(stage.fake.requests) > 2


async def test_workers_clear_journal_of_finished_episodes(stage: Stage, tmp_path: Path) -> None:
    samples = await stage.play(3, journal_dir=str(tmp_path / "journal"))
    assert {sample.status.value for sample in samples} == {"completed"}
    shutil.copytree(tmp_path / "journal", tmp_path / "copy")  # the copy has no lock of this process
    assert any((tmp_path / "copy").iterdir())
    assert take_leftover_records(tmp_path / "copy") == {}


@pytest.mark.parametrize(
    ("player", "message"),
    [
        ({"tools": [*recorded_tools.PATHS, "recorded_tools.die"]}, "died while tools ran (die)"),
        pytest.param(
            {"agent_program": "recorded_tools.program"},
            "the episode can't be continued: its program may not be started again",
            marks=pytest.mark.own_workers,
        ),
    ],
)
async def test_tool_that_kills_its_worker_is_a_worker_error(stage: Stage, player, message) -> None:
    sample = Sample(prompt=prompt_of("deadly", 0), label="34", index=0, session_id="deadly-0")
    await stage.play_one(sample, **player)
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, facts["stop_reason"], sample.remove_sample) == ("failed", "worker_error", True)
    assert message in facts["error"]
    assert Counter(recorded_tools.ended_calls()) == {"deadly-0:0": 1, "deadly-0:1": 1}


@pytest.mark.own_workers
async def test_killed_workers_agent_program_is_replayed(stage: Stage) -> None:
    stage.policy.disturb = lambda _request: paced(0.02)
    running = asyncio.ensure_future(stage.play(8, "slow", **PROGRAM))
    await wait_until(lambda: len(recorded_tools.ended_calls()) >= 8 * 4)
    busiest = max(ready_workers(), key=lambda entry: len(entry.jobs))
    os.kill(busiest.info.pid, signal.SIGKILL)
    async with asyncio.timeout(120):
        samples = await running
    assert {sample.status.value for sample in samples} == {"completed"}
    assert [stage.sampled(sample) for sample in samples] == [stage.planned(sample) for sample in samples]
    facts = [sample.metadata["strands_rollout"] for sample in samples]
    assert any(fact["resumes"] for fact in facts)
    assert {fact["gateway"]["diverged"] for fact in facts} == {""}
    assert recorded_tools.calls_ended_twice()  # the program's tools ran again


@pytest.mark.own_workers
async def test_agent_program_that_kills_each_worker_fails(stage: Stage) -> None:
    sample = Sample(prompt=prompt_of("deadly", 0), label="34", index=0, session_id="deadly-0")
    await stage.play_one(sample, **PROGRAM)
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, facts["stop_reason"], sample.remove_sample) == ("failed", "worker_error", True)
    assert "episode workers in a row died" in facts["error"]
    assert Counter(recorded_tools.ended_calls()) == {"deadly-0:0": 4, "deadly-0:1": 4}


@pytest.mark.own_workers
async def test_workers_lost_error_shows_log_of_dying_worker(stage: Stage) -> None:
    tools = [*recorded_tools.PATHS, "recorded_tools.die"]
    stage.args_with(tools=tools, repeat_interrupted_tools=True, episode_workers=1)
    sample = Sample(prompt=prompt_of("deadly", 0), label="34", index=0, session_id="deadly-0")
    with pytest.raises(WorkersLostError, match=r"(?s)died 5 times within 60 s.*The end of its log:\n.+"):
        await stage.play_one(sample)


@pytest.mark.own_workers
async def test_workers_resume_episodes_of_lost_node(stage: Stage, cluster: SimpleNamespace) -> None:
    third = cluster.nodes.add_node(num_cpus=2, resources={"here": 1}, include_dashboard=False)
    stage.policy.disturb = lambda _request: paced(0.002)
    setting = {"count": 5, "per_node": 2, "cpus": 1}
    running = asyncio.ensure_future(stage.play(20, "slow", episode_workers=setting))
    await wait_until(lambda: len(recorded_tools.ended_calls()) >= 20 * 3)
    cluster.nodes.remove_node(third)
    async with asyncio.timeout(HANG_S):
        samples = await running
    finished = [sample for sample in samples if sample.status.value == "completed"]
    assert [stage.sampled(sample) for sample in finished] == [stage.planned(sample) for sample in finished]
    # an episode whose tool ran on the lost node ends with worker_error
    assert any(sample not in finished or sample.metadata["strands_rollout"]["resumes"] for sample in samples)
    assert {sample.metadata["strands_rollout"]["stop_reason"] for sample in samples} <= {"completed", "worker_error"}
    assert recorded_tools.calls_ended_twice() == []


@pytest.mark.own_workers
async def test_workers_are_placed_per_node(stage: Stage, cluster: SimpleNamespace) -> None:
    await stage.play(4, episode_workers={"count": None, "per_node": 1, "env": {"WHO": "me"}})
    nodes = [entry.info.node for entry in ready_workers()]
    assert set(cluster.ids.values()) <= set(nodes)


async def error_of(stage: Stage, sample: Sample | None = None, **settings: Any) -> str:
    sample = sample or Sample(prompt=prompt_of("job", 0), label="34", index=0, session_id="job-0")
    await stage.play_one(sample, **settings)
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, facts["stop_reason"]) == ("failed", "setup_error"), facts
    return str(facts["error"])


@pytest.mark.own_workers
async def test_workers_setup_errors_name_the_cause(stage: Stage, monkeypatch) -> None:
    assert "enough for" in await error_of(stage, episode_workers=64)
    assert "Set a count of" in await error_of(stage, episode_workers={"count": 3, "per_node": 1})
    assert "not_there" in await error_of(stage, tools=["not_there.tool"], episode_workers={"count": 1, "cpus": 0})
    unpicklable = {"name": "local", "options": threading.Lock()}
    assert "strands_rollout.executor" in await error_of(stage, executor=unpicklable, tools=[recorded_tools.PATHS[0]])
    del stage.args.strands_rollout["executor"]
    unpicklable_sample = Sample(prompt=prompt_of("job", 0), index=0, metadata={"lock": threading.Lock()})
    message = await error_of(stage, unpicklable_sample, episode_workers=1)
    assert "the sample can't be sent" in message
    assert "metadata" in message
    monkeypatch.setattr(workers, "_START_TIMEOUT_S", 0.01)
    assert "did not start within" in await error_of(stage, episode_workers={"count": 1, "cpus": 0.5})
    assert [entry for pool in workers._POOLS.values() for entry in pool._workers if entry.jobs] == []


async def test_workers_without_ray_error_names_remedy(stage: Stage, monkeypatch) -> None:
    monkeypatch.setattr(stage.ray, "is_initialized", lambda: False)
    assert "ray.init()" in await error_of(stage, episode_workers={"count": 1, "env": {"A": "1"}})
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda _name: None)
    assert "pip install" in await error_of(stage, episode_workers={"count": 1, "env": {"A": "2"}})


@pytest.mark.parametrize(("free", "remedy"), [(0.5, "Set episode_workers: 0, set fewer"), (2.0, "Set a count of 2 or")])
def test_choose_nodes_names_a_possible_count(free: float, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_RAY_DELAY_S", 0.0)
    nodes = [{"NodeID": "node", "Alive": True, "Resources": {"CPU": 4.0}}]
    ray = SimpleNamespace(
        nodes=lambda: nodes, available_resources=lambda: {"CPU": free}, cluster_resources=lambda: {"CPU": 4.0}
    )
    with pytest.raises(ConfigError, match=remedy):
        worker.choose_nodes(ray, EpisodeWorkers(count=3))


def test_choose_nodes_without_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_RAY_DELAY_S", 0.0)
    nodes = [{"NodeID": "head", "Alive": True, "Resources": {}}, {"NodeID": "gone", "Alive": False, "Resources": {}}]
    ray = SimpleNamespace(nodes=lambda: nodes, available_resources=dict, cluster_resources=dict)
    with pytest.raises(ConfigError, match="2 workers .* 0 nodes, and 0 of 0 CPU are free.* Set episode_workers: 0"):
        worker.choose_nodes(ray, EpisodeWorkers(count=None, per_node=2, cpus=0))


def test_pool_metrics_add_up_the_workers_of_two_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = {}
    for count in (1, 2):
        pools[1, str(count)] = pool = object.__new__(workers.WorkerPool)
        pool._workers = [workers._Worker(number, None, episodes=count, busy=0.5) for number in range(count)]
    monkeypatch.setattr(workers, "_POOLS", pools)
    found = pool_metrics()
    assert (found["workers/0/episodes"], found["workers/0/busy"], found["workers/1/episodes"]) == (3.0, 1.0, 2.0)


def call_of(sample: Sample) -> GenerateCall:
    return GenerateCall(None, sample, {}, False)


async def test_worker_pool_restart_takes_leftover_records(monkeypatch) -> None:
    monkeypatch.setattr(workers, "_NODE_POLL_S", 0.001)
    dead = worker.WorkerInfo(1, "here", "node", "", "folder", {})
    entry, job, polls = (
        workers._Worker(0, None, info=dead),
        workers._EpisodeJob(call_of(Sample()), None, key=7),
        list[int](),
    )
    entry.jobs, job.new_records, job.worker = {7: job}, [b"turn"], entry
    pool = object.__new__(workers.WorkerPool)
    pool.loop, pool._workers, pool._queue = asyncio.get_running_loop(), [entry], deque()

    def nodes() -> list[dict[str, Any]]:
        polls.append(len(polls))
        return [{"NodeID": "node", "Alive": True}]

    async def start_worker(started: Any) -> None:
        await wait_until(lambda: len(polls) > 3)  # the new worker starts slowly
        started.info, started.is_ready = dead, True

    async def take_leftover_records(_near: Any, _died: Any) -> dict[int, list[bytes]]:
        return {7: [b"turn", b"result"]}

    pool._ray = SimpleNamespace(nodes=nodes, kill=lambda *_a, **_k: None)
    pool._start_worker, pool._take_leftover_records = start_worker, take_leftover_records
    monkeypatch.setattr(pool, "_assign", lambda: None)
    await pool._restart(entry, "killed")
    assert (job.records, list(pool._queue)) == ([b"turn", b"result"], [job])


def test_on_worker_death_sets_may_have_acted() -> None:
    cases = [([b"a"], [], [b"a"], False), ([b"a"], None, [b"a"], True), ([b"a"], [b"a", b"b"], [b"a", b"b"], True)]
    for sent, left, records, may_have_acted in [*cases, ([b"a", b"b", b"c"], [b"a"], [b"a", b"b", b"c"], True)]:
        job = workers._EpisodeJob(call_of(Sample()), None, new_records=sent)
        job.on_worker_death(left)
        assert (job.records, job.may_have_acted, job.is_latest) == (records, may_have_acted, True)


async def test_restarted_worker_is_assigned_jobs_after_abort() -> None:
    """The abort is sent while the records of the dead worker are searched."""
    assigned, loop = list[Any](), asyncio.get_running_loop()
    actor = SimpleNamespace(assign=SimpleNamespace(remote=lambda *args: assigned.append(args)))
    entry = workers._Worker(0, None, actor=actor)
    pool = object.__new__(workers.WorkerPool)
    pool.loop, pool._setting, pool._workers = loop, SimpleNamespace(max_episodes=None), [entry]
    pool._groups, pool._queue = OrderedDict(), deque()
    lost = workers._EpisodeJob(call_of(Sample(index=1)), None, key=1, done=loop.create_future(), worker=entry)
    assert pool._send_abort([lost], worker.AbortSignals(True, None)) == []
    lost.on_worker_death([b"a turn"])
    later = workers._EpisodeJob(call_of(Sample(index=2)), None, key=2, done=loop.create_future())
    entry.is_ready = True
    pool._queue.extend([lost, later])
    pool._assign()
    await wait_until(lambda: bool(assigned))
    ((assignments, notices, cancelled),) = assigned
    assert [(assignment.key, assignment.aborts.slime) for assignment in assignments] == [(1, True), (2, False)]
    assert (notices, cancelled) == ([], [])


async def test_worker_pool_resends_dropped_args() -> None:
    sent = list[int]()
    actor = SimpleNamespace(set_args=SimpleNamespace(remote=lambda number, _data: sent.append(number)))
    remote_worker = worker.EpisodeWorker(0, "pool", 0, KNOWN_VERSIONS.numbering)
    driver = workers._Worker(0, None, actor=actor)
    pool = object.__new__(workers.WorkerPool)
    numbers = [*range(worker.MAX_ARGS + 1), worker.MAX_ARGS, 0]
    for number in numbers:
        pool._send_args(driver, SimpleNamespace(number=number, data=b""))
    assert sent == [*range(worker.MAX_ARGS + 1), 0]
    for number in sent:
        await remote_worker.set_args(number, pickle.dumps(number))
    assert list(remote_worker._args) == list(driver.args_numbers)
    assert remote_worker._args[0] == 0
    await remote_worker.close()


def test_pack_and_unpack_share_large_arrays() -> None:
    experts = np.arange(100_000, dtype=np.int32)
    data, buffers = worker.pack({"experts": experts, "few": np.arange(3)})
    assert len(data) < 1000
    assert [len(buffer) for buffer in buffers] == [experts.nbytes]
    found = worker.unpack(data, buffers)
    assert np.shares_memory(found["experts"], buffers[0])
    assert np.shares_memory(experts, buffers[0])
    assert (found["few"].tolist(), found["experts"][-1]) == ([0, 1, 2], 99_999)


@pytest.mark.own_workers
async def test_close_pools_ends_workers_and_removes_folders(stage: Stage) -> None:
    await stage.play(4, episode_workers=2)
    pids, folders = zip(*((entry.info.pid, entry.info.folder) for entry in ready_workers()), strict=True)
    assert pids
    close_pools()
    assert not any(map(os.path.exists, folders))
    assert all([await asyncio.to_thread(exits_within, pid) for pid in pids])
    assert pool_metrics() == {}


def test_eval_command_report_is_the_same_with_workers(tmp_path: Path) -> None:
    reports = []
    for count in (0, 1):
        command = f"eval --limit 2 --samples-per-problem 2 --seed 1 --workers {count} --out {tmp_path}/{count}"
        strands_rollout = [sys.executable, "-m", "strands_rollout.cli", *command.split()]
        done = subprocess.run(
            strands_rollout, capture_output=True, timeout=HANG_S, check=False, env={**os.environ, **QUIET}
        )
        assert done.returncode == 0, done.stderr
        reports.append(json.loads((tmp_path / str(count) / "report.json").read_text()))
        del reports[-1]["session"]
    assert reports[0] == reports[1]


def test_episode_workers_setting_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRANDS_ROLLOUT_EPISODE_WORKERS", "eight")
    with pytest.raises(ConfigError, match="STRANDS_ROLLOUT_EPISODE_WORKERS='eight'"):
        validate_settings({}, "strands_rollout")
    monkeypatch.undo()
    per_node = validate_settings({"episode_workers": {"per_node": 2}}, "strands_rollout").episode_workers
    assert (per_node.is_enabled, per_node.count) == (True, None)
    for invalid in (-1, {"count": None}, {"cpus": 2}, {"cout": 2}, {"count": 2, "max_episodes": 0}):
        with pytest.raises(ConfigError, match="episode_workers"):
            validate_settings({"episode_workers": invalid}, "strands_rollout")
