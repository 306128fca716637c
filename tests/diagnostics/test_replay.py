"""`strands-rollout replay`: send a recorded episode's tokens to an engine again, without running its tools."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from dumped_samples import Parts, dumped_episode, sample_of_parts, write_sample_dump
from fake_sglang import FakeSGLang, Reply
from typer.testing import CliRunner

from strands_rollout import Sample
from strands_rollout.cli.commands import app
from strands_rollout.client.client import SGLangClient
from strands_rollout.client.transport import create_client
from strands_rollout.diagnostics.replay import ReplayedTurn, recorded_gaps, replay, run_replay, to_episode
from strands_rollout.dump import DumpRecord, TokenTexts, write_dump
from strands_rollout.engine import SHIPPED_MODEL_DIR, running_engine
from strands_rollout.errors import ConfigError, DumpError, EngineResponseError, TrajectoryError
from strands_rollout.model.sampling import turn_params
from strands_rollout.play.audit import local_server
from strands_rollout.play.options import slime_sampling_params
from strands_rollout.template.chat_template import ChatTemplate

QUESTION = {"role": "user", "content": "What is 17 * 2?"}
RESULT = {"role": "tool", "name": "execute_python_code", "tool_call_id": "x", "content": "34"}


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    async with running_engine(SHIPPED_MODEL_DIR) as url:
        yield url


async def play_two_turns(base_url: str, tokenizer: Any, *, temperature: float = 0.0, seed: int | None = None) -> Sample:
    """Play two turns of the shipped model, with an invented tool result between them."""
    template = ChatTemplate(tokenizer)
    parts: Parts = [template.prompt_ids([QUESTION])]
    logprobs: list[float] = []
    async with create_client(base_url) as http:
        for turn in range(2):
            params = slime_sampling_params(temperature, 24)
            params = params if seed is None else turn_params({**params, "sampling_seed": seed}, turn)
            answer = await SGLangClient(http).generate([token for part in parts for token in part], params)
            parts.append(answer.output_ids)
            logprobs += answer.logprobs
            if turn == 0:
                parts.append(template.turn_ids([RESULT], last_id=answer.output_ids[-1]))
                logprobs += [0.0] * len(parts[-1])
    return sample_of_parts(parts, prompt=[QUESTION], rollout_log_probs=logprobs)


@pytest.mark.parametrize(
    ("mask", "turns"), [(None, [(2, 6)]), ([1, 1, 0, 1], [(2, 4), (5, 6)]), ([0, 0, 1, 1], [(4, 6)]), ([0] * 4, None)]
)
def test_to_episode_takes_turns_from_the_loss_mask(mask: list[int] | None, turns: Any) -> None:
    """Without a mask, slime trains the whole response."""
    sample = Sample(tokens=[1, 2, 3, 4, 5, 6], response_length=4, loss_mask=mask)
    found = to_episode(DumpRecord.from_sample(sample), 0)
    assert (None if found is None else found.turns) == turns


async def replay_sample(base_url: str, sample: Sample) -> list[ReplayedTurn]:
    async with create_client(base_url) as http:
        asked = replay(SGLangClient(http, vocab_size=1200), dumped_episode(sample), slime_sampling_params(0.0, 1))
        return [turn async for turn in asked]


@pytest.mark.real
async def test_recorded_gaps_on_sglang_are_near_zero(sglang, shipped_tokenizer) -> None:
    sample = await play_two_turns(sglang, shipped_tokenizer, temperature=1.0)
    async with create_client(sglang) as http:
        found = await recorded_gaps(http, dumped_episode(sample), vocab_size=1200)
    assert found is not None
    assert len(found) == sum(sample.loss_mask or [])
    assert max(map(abs, found)) < 1e-4


async def test_run_replay_uses_recorded_sampling_params(
    base_url: str, shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = await play_two_turns(base_url, shipped_tokenizer, temperature=1.0, seed=11)
    for params, used in (({"sampling_seed": 11, "temperature": 1.0}, (1.0, 11)), ({"temperature": 1.0}, (0.0, None))):
        sample.metadata = {"strands_rollout": {**(sample.metadata or {}).get("strands_rollout", {})}}
        sample.metadata["strands_rollout"]["sampling_params"] = {**params, "max_new_tokens": 999}
        folder = tmp_path / str(used[1])
        folder.mkdir()
        dump = write_sample_dump(folder, sample)
        same = await run_replay(dump, base_url=base_url, as_json=True)
        report = json.loads(capsys.readouterr().out)
        await run_replay(dump, base_url=base_url)
        assert ("turns may differ by chance" in " ".join(capsys.readouterr().err.split())) is (used[1] is None)
        assert (report["temperature"], report["seed"]) == used
        assert same is (report["seed"] == 11)


async def test_run_replay_finds_a_changed_token(
    base_url: str, shipped_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = await play_two_turns(base_url, shipped_tokenizer)
    at = len(sample.tokens) - sample.response_length + 3
    engines_own, sample.tokens[at] = sample.tokens[at], sample.tokens[at] + 1
    dump = write_sample_dump(tmp_path, sample)
    assert not await run_replay(dump, base_url=base_url, temperature=0.0, as_json=True)
    report = json.loads(capsys.readouterr().out)
    departure = report["turns"][0]["departure"]
    assert (departure["token"], departure["position"]) == (3, at)
    assert (departure["recorded"]["ids"][0], departure["again"]["ids"][0]) == (engines_own + 1, engines_own)
    assert departure["before"] == shipped_tokenizer.decode(sample.tokens[at - 8 : at])
    assert departure["again"]["text"] == shipped_tokenizer.decode(departure["again"]["ids"])
    assert (report["same"], report["turns"][0]["logprobs"]["tokens"]) == (False, 3)
    assert report["recorded_tokens"] is None  # the embedded engine gives no logprobs of its input


async def test_run_replay_tokenizer_must_be_the_recorded_one(
    base_url: str, shipped_tokenizer: Any, qwen3_tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    write_dump(path, [await play_two_turns(base_url, shipped_tokenizer)], TokenTexts(shipped_tokenizer))
    assert await run_replay(path, base_url=base_url)

    async def no_engine(_: web.Request) -> web.Response:
        return web.json_response({})

    async with local_server(web.get("/{any:.*}", no_engine)) as other:
        with pytest.raises(ConfigError, match="names no model; expected an SGLang server or router"):
            await run_replay(path, base_url=other)
    with pytest.raises(ConfigError, match=f"run.jsonl:1 was written with the tokenizer {SHIPPED_MODEL_DIR}"):
        await run_replay(path, base_url=base_url, tokenizer_dir=Path(qwen3_tokenizer.name_or_path))


async def gaps_for_entries(sample: Sample, entries: list[Any]) -> tuple[list[float] | None, FakeSGLang]:
    reply = Reply.tokens([1], "length", input_token_logprobs=entries)
    async with FakeSGLang([reply]) as fake, create_client(fake.base_url) as http:
        return await recorded_gaps(http, dumped_episode(sample), vocab_size=1200), fake


@pytest.mark.parametrize(("last", "named"), [(10, 10), (1199, 0)])  # SGLang reports the vocabulary's last id as 0
async def test_recorded_gaps_compares_input_logprobs(last, named) -> None:
    entries = [[None, 6, None], [-0.25, 7, None], [-0.5, 8, None], [-3.0, 9, None], [-1.0, named, None]]
    found, fake = await gaps_for_entries(sample_of_parts([[5, 6], [7, 8], [9], [last]]), entries)
    assert found == [0.25, 0.0, -0.5], "each recorded logprob is -0.5"
    (request,) = fake.requests
    assert (request.input_ids, request.body["logprob_start_len"]) == ([5, 6, 7, 8, 9, last], 1)


async def test_recorded_gaps_refuses_logprobs_of_other_tokens() -> None:
    with pytest.raises(EngineResponseError, match="do not belong to the"):
        await gaps_for_entries(sample_of_parts([[5, 6], [7, 8]]), [[None, 6, None], [-0.25, 7, None], [-0.5, 9, None]])


async def test_replay_never_sends_ids_outside_the_vocabulary() -> None:
    async with FakeSGLang([]) as fake, create_client(fake.base_url) as http:
        with pytest.raises(TrajectoryError, match="input id 1300"):
            await replay_sample(fake.base_url, sample_of_parts([[5, 1300], [7, 8]]))
        with pytest.raises(TrajectoryError, match="input id 1300"):
            await recorded_gaps(http, dumped_episode(sample_of_parts([[5, 6], [7, 1300]])), vocab_size=1200)
    assert fake.requests == []


def test_replay_command_refuses_a_missing_or_tokenless_sample(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"data_set": "a", "problem": 0, "number": 0, "status": "completed"}) + "\n")
    for number, kind, words in (
        (0, DumpError, "no tokens of the policy"),
        (1, ConfigError, f"got --sample 1; {path} has 1 samples, counted from 0"),
    ):
        result = CliRunner().invoke(app, ["replay", str(path), "--sample", str(number)])
        assert isinstance(result.exception, kind)
        assert words in str(result.exception)


def test_replay_command_refuses_images(tmp_path: Path) -> None:
    path = write_sample_dump(tmp_path, sample_of_parts([[1, 2], [3]], multimodal_train_inputs={"pixel_values": [0.5]}))
    result = CliRunner().invoke(app, ["replay", str(path), "--base-url", "http://127.0.0.1:9"])
    assert isinstance(result.exception, DumpError)
    assert str(result.exception) == f"{path}:1 has images, which replay does not send; choose a sample without images"
