"""Episodes of verifiers environments over the gateway: the harnesses, tools, scoring and errors of verifiers."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from harness import Run, args_for, run
from interruptible_policy import call, turn

from strands_rollout import Sample, reward_func
from strands_rollout.errors import ConfigError
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.inputs import find_load_errors
from strands_rollout.slime_plugin.sample_contract import contract_violations

pytest.importorskip("verifiers", reason="needs verifiers: pip install 'strands-rollout[verifiers]'")
import uvicorn
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.environments.verifiers import TASK_KEY, task_rows

HERE = Path(__file__).parent
PLAY = "strands_rollout.environments.verifiers.play"
TURNS = [turn("I count.", call("words_count", text="a b c")), "It is 34.<|im_end|>"]
BASH_TURNS = [turn(call("bash", command="echo $((30 + 4))")), "It is 34.<|im_end|>"]
SUBPROCESS = {"type": "subprocess"}


@pytest.fixture(autouse=True)
def _importable_by_tool_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]))
    if shutil.which("uv") is None:
        pytest.skip("needs uv on the PATH")


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    lines = [
        f"{key} = {json.dumps(value).replace(': ', ' = ')}\n"
        for key, value in table.items()
        if not isinstance(value, dict)
    ]
    rest = [to_toml(value, f"{name}.{key}".strip(".")) for key, value in table.items() if isinstance(value, dict)]
    return "".join([f"[{name}]\n" if name and lines else "", *lines, *rest])


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    def write(*, taskset: Mapping[str, Any] | None = None, agent: Mapping[str, Any] | None = None, **top: Any) -> Path:
        path = tmp_path / "env.toml"
        seat = {"harness": {"id": "null"}, "runtime": SUBPROCESS, **(agent or {})}
        table = {**top, "taskset": {"id": "word-count", **(taskset or {})}, "agent": seat}
        path.write_text(to_toml(table), encoding="utf-8")
        return path

    return write


async def play(
    tokenizer: Any, path: Path, turns: Sequence[Any] = TURNS, row: Mapping[str, Any] | None = None, **settings: Any
) -> Run:
    row = row or task_rows(path, limit=1)[0]
    sample = Sample(prompt=row["prompt"], label=row["label"], index=0, metadata=dict(row["metadata"]))
    given = {"agent_program": PLAY, "environment_config": str(path), **settings}
    return await run(tokenizer, turns, sample=sample, settings=given)


def assert_all_sampled_tokens_are_trained(played: Run) -> None:
    sampled = sum(len(reply.ids) for reply in played.replied)
    assert sum(played.sample.loss_mask) == played.facts["sampled_tokens"] == sampled > 0
    assert played.fake.violations == []


@pytest.mark.parametrize(("harness", "turns"), [("null", TURNS), ("bash", TURNS), ("bash", BASH_TURNS)])
async def test_play_trains_every_sampled_token(shipped_tokenizer, config, harness, turns):
    played = await play(shipped_tokenizer, config(agent={"harness": {"id": harness}}), turns)
    assert (played.facts["stop_reason"], played.facts["error"]) == ("completed", None)
    assert_all_sampled_tokens_are_trained(played)
    assert played.facts["gateway"]["requests"] == 2
    assert ("\n34\n" if turns is BASH_TURNS else "\n3\n") in played.context_after(0)
    reward = await reward_func(args_for(played.fake.base_url, shipped_tokenizer), played.sample)
    parts = {name: value for name, value in reward.items() if name.startswith("parts/")}
    assert (reward["score"], reward["method"]) == (2.0, "environment")
    assert parts == {"parts/correct": 1.0, "parts/replies": 2.0}
    played.sample.reward = reward["score"]
    assert contract_violations(played.sample) == []


async def test_play_scores_a_wrong_answer(shipped_tokenizer, config):
    played = await play(shipped_tokenizer, config(), ["It is 33.<|im_end|>"])
    assert played.facts["environment_score"] == {"score": 0.0, "correct": 0.0, "replies": 1.0}
    assert_all_sampled_tokens_are_trained(played)


@pytest.mark.parametrize(
    ("fault", "reason", "message"),
    [
        ("scorer", "environment_error", "TaskError: task WordCountTask scoring: ZeroDivisionError: no words"),
        ("setup", "environment_error", "TaskError: task setup: OSError: no disk"),
        ("exit", "environment_error", "raised SystemExit(3)"),
    ],
)
async def test_play_does_not_train_on_a_fault_of_the_task(shipped_tokenizer, config, fault, reason, message):
    played = await play(shipped_tokenizer, config(taskset={"task": {"fault": fault}}))
    assert (played.facts["stop_reason"], played.sample.status.value) == (reason, "failed")
    assert message in played.facts["error"]
    assert sum(played.sample.loss_mask) == 0


async def test_play_ends_a_stage_at_its_timeout(shipped_tokenizer, config):
    path = config(taskset={"task": {"fault": "hang"}}, agent={"timeout": {"finalize": 0.5}})
    played = await play(shipped_tokenizer, path)
    assert (played.facts["stop_reason"], sum(played.sample.loss_mask)) == ("environment_error", 0)
    assert "finalize_timeout" in played.facts["error"]


async def test_play_ends_a_hanging_environment_at_the_episode_timeout(shipped_tokenizer, config):
    played = await play(shipped_tokenizer, config(taskset={"task": {"fault": "hang"}}), episode_timeout_s=15)
    assert (played.facts["stop_reason"], played.sample.status.value) == ("episode_timeout", "truncated")


async def test_play_ends_at_max_turns_of_the_seat_with_a_score(shipped_tokenizer, config):
    played = await play(shipped_tokenizer, config(agent={"max_turns": 1}), TURNS[:1])
    assert (played.facts["stop_reason"], played.facts["environment_score"]["correct"]) == ("completed", 0.0)
    assert_all_sampled_tokens_are_trained(played)


async def test_play_ends_at_max_tool_iterations(shipped_tokenizer, config):
    played = await play(shipped_tokenizer, config(), [TURNS[0], TURNS[0]], max_tool_iterations=1)
    assert (played.facts["stop_reason"], played.sample.status.value) == ("max_tool_iterations", "truncated")
    assert_all_sampled_tokens_are_trained(played)


async def test_play_uses_the_split_of_the_row(shipped_tokenizer, config):
    row = task_rows(config(), split="test")[0]
    played = await play(shipped_tokenizer, config(), row=row)
    assert played.facts["stop_reason"] == "completed"
    assert "What is 2 times 17?" in played.decode(played.fake.requests[0].input_ids)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "expected a mapping with `key` and `idx`"),
        (
            {TASK_KEY: {"key": "gone", "idx": 7}},
            "the task 'gone' (index 7), which the taskset does not have; write the rows again",
        ),
    ],
)
async def test_play_names_a_missing_task(shipped_tokenizer, config, metadata, message):
    played = await play(shipped_tokenizer, config(), row={"prompt": "?", "label": "", "metadata": metadata})
    assert (played.facts["stop_reason"], sum(played.sample.loss_mask)) == ("setup_error", 0)
    assert message in played.facts["error"]
    assert played.fake.requests == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"taskset": {"nmaes": []}}, "taskset.nmaes"),
        ({"taskset": {"id": "no-such-taskset"}}, "taskset 'no-such-taskset' not found"),
        ({"agent": {"harness": {"id": "claude"}}}, "harness 'claude' not found"),
        ({"agent": {"runtime": {"type": "docker"}}}, "agent.runtime is 'docker', and "),
        ({"agent": {"runtime": {"type": "prime"}}}, "agent.runtime is 'prime', verifiers' default, which is hosted"),
        ({"agent": {"harness": {"id": "codex"}}}, "needs a container runtime"),
        ({"taskset": {"task": {"judges": [{"id": "reference"}]}}}, "has no key; set the environment variable"),
    ],
)
async def test_find_load_errors_names_what_can_not_be_played(config, monkeypatch, tmp_path, given, message):
    monkeypatch.setenv("HOME", str(tmp_path))  # without a login at a provider
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("PATH", f"{Path(shutil.which('uv') or '').parent}:/nowhere")
    path = config(**given)
    settings = RolloutSettings(agent_program=PLAY, environment_config=str(path), tools=())
    [(name, error)] = await find_load_errors(settings)
    assert name == "environment_config"
    assert message in str(error)
    assert str(path) in str(error)


def test_tasks_command_writes_rows(config, tmp_path):
    path, out = config(taskset={"names": ["a", "b", "c", "d"]}), tmp_path / "rows.jsonl"
    done = CliRunner().invoke(app, ["tasks", str(path), "--out", str(out), "--limit", "3", "--seed", "1"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == task_rows(path, limit=3, seed=1) != task_rows(path, limit=3)
    keys = {row["metadata"][TASK_KEY]["key"] for row in task_rows(path)}
    assert len(keys) == 4
    assert {row["metadata"][TASK_KEY]["key"] for row in rows} < keys


async def test_tasks_of_harbor_become_rows_and_need_containers(monkeypatch, tmp_path):
    pytest.importorskip("harbor", reason="needs Harbor, on Python 3.12 or newer: pip install 'verifiers[harbor]'")
    from verifiers.v1.tasksets.harbor import taskset

    monkeypatch.setattr(taskset, "CACHE", tmp_path / "cache")
    task = tmp_path / "cache" / "own_tasks" / "greeting"  # a data set that has been downloaded
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text('version = "1.0"\n[environment]\ndocker_image = "python:3.12-slim"\n')
    (task / "instruction.md").write_text("Write hello into /app/hello.txt.")
    (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    path = tmp_path / "env.toml"
    seat = {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}
    path.write_text(to_toml({"taskset": {"id": "harbor", "dataset": "own/tasks"}, "agent": seat}), encoding="utf-8")
    [row] = task_rows(path)
    assert row["prompt"] == "Write hello into /app/hello.txt."
    monkeypatch.setenv("PATH", "/nowhere")
    [(_, error)] = await find_load_errors(RolloutSettings(agent_program=PLAY, environment_config=str(path), tools=()))
    assert "agent.runtime is 'docker', and " in str(error)


def test_task_rows_refuses_a_split_that_the_taskset_lacks(config):
    with pytest.raises(ConfigError, match=r"taskset\.split|test2"):
        task_rows(config(), split="test2")


def two_seats(tmp_path: Path, **checker: Any) -> Path:
    seat = {"harness": {"id": "null"}, "runtime": SUBPROCESS}
    table = {"id": "two-seats", "taskset": {"id": "word-count"}, "solver": seat, "checker": {**seat, **checker}}
    path = tmp_path / "two.toml"
    path.write_text(to_toml(table), encoding="utf-8")
    return path


@pytest.mark.parametrize("fan_out", [False, True])
async def test_play_records_each_seat_as_a_conversation(shipped_tokenizer, tmp_path, fan_out):
    played = await play(shipped_tokenizer, two_seats(tmp_path), [*TURNS, "34 is right.<|im_end|>"], fan_out=fan_out)
    samples = played.sample if fan_out else [played.sample]
    facts = samples[0].metadata["strands_rollout"]
    assert (facts["stop_reason"], facts["error"]) == ("completed", None)
    assert facts["environment_score"]["score"] == 2.0
    assert facts["environment_score"]["solver/replies"] == 2.0
    assert facts["environment_score"]["checker/replies"] == 1.0
    solver, checker = sum(len(reply.ids) for reply in played.replied[:2]), len(played.replied[2].ids)
    assert [sum(sample.loss_mask) for sample in samples] == ([checker, solver] if fan_out else [checker])
    assert (facts["dropped_sampled_tokens"] or 0) == (0 if fan_out else solver)
    on_wire = [played.fake.requests[n].input_ids + list(played.replied[n].ids) for n in (2, 1)]
    assert [sample.tokens for sample in samples] == on_wire[: len(samples)]
    first = played.fake.requests[0].input_ids + list(played.replied[0].ids)
    assert played.fake.requests[1].input_ids[: len(first)] == first


async def test_play_fails_if_the_seats_get_different_rewards(shipped_tokenizer, tmp_path):
    played = await play(shipped_tokenizer, two_seats(tmp_path), [*TURNS, "That is wrong.<|im_end|>"])
    assert (played.sample.status.value, sum(played.sample.loss_mask)) == ("failed", 0)
    assert "the seats got different rewards {'solver': 2.0, 'checker': 0.0}" in played.facts["error"]


async def test_play_refuses_several_attempts_in_one_episode(shipped_tokenizer, config):
    played = await play(shipped_tokenizer, config(id="best-of-n", n=2), [TURNS[1]] * 2)
    assert (played.sample.status.value, sum(played.sample.loss_mask)) == ("failed", 0)
    assert "use slime's --n-samples-per-prompt for several attempts" in played.facts["error"]


@asynccontextmanager
async def resource_server() -> AsyncIterator[tuple[str, list[tuple[str, Any]]]]:
    """Serve the resource server's protocol of NeMo Gym with a tool `count`; yield the URL and the requests."""
    asked: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        name, body = request.path.strip("/"), await request.json()
        asked.append((name, body))
        if name == "seed_session":
            return web.json_response({})
        if name == "count":
            return web.json_response({"words": len(body["text"].split())})
        outputs = [item for item in body["response"]["output"] if item["type"] == "message"]
        reward = float("34" in json.dumps(outputs[-1]["content"]))
        return web.json_response({**body, "reward": reward, "outputs": len(body["response"]["output"])})

    app = web.Application()
    app.router.add_post("/{name}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


async def test_play_plays_rows_of_nemo_gym(shipped_tokenizer, tmp_path):
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tool = {"type": "function", "name": "count", "description": "Count words.", "parameters": parameters}
    request = {"input": [{"role": "user", "content": "What is 17 times 2?"}], "tools": [tool]}
    rows, path = tmp_path / "rows.jsonl", tmp_path / "env.toml"
    rows.write_text(json.dumps({"responses_create_params": request, "expected": 34}) + "\n", encoding="utf-8")
    seat = {"harness": {"id": "null"}, "runtime": SUBPROCESS}
    async with resource_server() as (url, asked):
        taskset = {"id": "nemo-gym", "dataset": str(rows), "task": {"resources_url": url}}
        path.write_text(to_toml({"taskset": taskset, "agent": seat}), encoding="utf-8")
        counts = turn('<tool_call>\n{"name": "count", "arguments": {"text": "a b"}}\n</tool_call>')
        played = await play(shipped_tokenizer, path, [counts, TURNS[1]])
    assert (played.facts["stop_reason"], played.facts["error"]) == ("completed", None)
    assert [name for name, _ in asked] == ["seed_session", "count", "verify"]
    assert '{"words": 2}' in played.context_after(0)
    assert played.facts["environment_score"]["score"] == 1.0
    assert_all_sampled_tokens_are_trained(played)


@asynccontextmanager
async def openenv_server() -> AsyncIterator[str]:
    """Serve an environment of OpenEnv in which the policy doubles a number until it is 8; yield the URL."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Guess(Action):
        number: int

    class Asked(Observation):
        text: str

    class Doubling(Environment):
        number = 2

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_more: Any) -> Asked:
            return Asked(text="double 2")

        def step(self, action: Guess, timeout_s: float | None = None, **_more: Any) -> Asked:
            is_right = action.number == 2 * self.number
            self.number = action.number
            return Asked(text=f"double {self.number}", reward=0.5 * is_right, done=self.number >= 8)

        @property
        def state(self) -> State:
            return State()

    config = uvicorn.Config(create_app(Doubling, Guess, Asked), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def test_play_plays_an_environment_of_openenv(shipped_tokenizer, tmp_path):
    """The environment is the user: its observations follow the policy's actions."""
    pytest.importorskip("openenv", reason="needs OpenEnv: pip install 'verifiers[openenv]'")
    seat = {"harness": {"id": "null"}, "runtime": SUBPROCESS}
    path = tmp_path / "env.toml"
    async with openenv_server() as url:
        path.write_text(to_toml({"taskset": {"id": "openenv", "base_url": url}, "player": seat}), encoding="utf-8")
        played = await play(shipped_tokenizer, path, ["4<|im_end|>", '{"number": 8}<|im_end|>'])
    assert (played.facts["stop_reason"], played.facts["error"]) == ("completed", None)
    assert "double 4" in played.context_after(0)
    assert played.facts["environment_score"]["score"] == 1.0
    assert_all_sampled_tokens_are_trained(played)


async def test_play_plays_a_game_of_textarena(shipped_tokenizer, monkeypatch, tmp_path):
    """The game is the user: its engine answers each move."""
    pytest.importorskip("textarena", reason="needs TextArena: pip install 'verifiers[ta]'")
    import nltk

    words = tmp_path / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("apple\nbread\nchair\n")
    monkeypatch.setattr(nltk.data, "path", [str(words.parents[1])])
    monkeypatch.setattr(nltk, "download", lambda *_args, **_more: True)
    guesses = [f"I guess [{letter}].<|im_end|>" for letter in "zyxwvu"]  # in none of the words
    played = await play(shipped_tokenizer, HERE.parents[1] / "configs" / "verifiers.toml", guesses)
    assert (played.facts["stop_reason"], played.facts["error"]) == ("completed", None)
    assert played.facts["turns"] == 6
    assert "game_reward" in played.facts["environment_score"]
    assert_all_sampled_tokens_are_trained(played)
