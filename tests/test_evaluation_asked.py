"""What an evaluation is asked: data sets, seeds, settings and engines, and what of them must not change."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from evaluation_stage import evaluated, guesser, options_for, sample_seed, write_problems
from fake_sglang import FakeSGLang, Reply, dead_url
from harness import ANSWER, ids_of

from strands_rollout.errors import ConfigError, EngineUnavailableError
from strands_rollout.evaluation.plan import Sampling
from strands_rollout.evaluation.run import run_evaluation


async def test_generate_is_told_that_it_is_an_evaluation(shipped_tokenizer: Any, tmp_path: Path) -> None:
    """It alone heeds eval_max_context_len; a prompt of that length leaves nothing to answer."""
    ended = await evaluated(tmp_path, shipped_tokenizer, max_context_tokens=8)
    assert set(ended.report["data_sets"]["sums"]["stop_reasons"]) == {"prompt_too_long"}
    assert ended.fake.requests == []


async def test_without_a_seed_none_is_sent(shipped_tokenizer: Any, tmp_path: Path) -> None:
    answer = Reply.tokens(ids_of(shipped_tokenizer, ANSWER))
    ended = await evaluated(tmp_path, shipped_tokenizer, lambda *_: answer, seed=None)
    assert all("sampling_seed" not in request.body["sampling_params"] for request in ended.fake.requests)


async def test_a_samples_seed_depends_on_nothing_but_its_key(shipped_tokenizer: Any, tmp_path: Path) -> None:
    few = await evaluated(tmp_path, shipped_tokenizer, limit=2, sampling=Sampling(2, max_new_tokens=64))
    many = await evaluated(tmp_path, shipped_tokenizer, out=tmp_path / "many")

    def seeds(lines: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
        return {(line["problem"], line["number"]): line["seed"] for line in lines}

    assert seeds(few.lines).items() <= seeds(many.lines).items()
    assert len(set(seeds(many.lines).values())) == 12
    assert sample_seed(0, 0) != sample_seed(0, 0, "others")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 8}, "seed was 7 and is 8"),
        ({"max_context_tokens": 99}, "max_context_length was None and is 99"),
        ({"sampling": Sampling(5, 256)}, "data_sets.sums.samples_per_problem was 4 and is 5"),
        ({"sampling": Sampling(4, 256, temperature=0.5)}, "sampling_params.temperature was 1.0 and is 0.5"),
        ({"limit": 2}, "data_sets.sums.problems was 3 and is 2"),
        ({"config": None}, "settings.tools was"),
    ],
)
async def test_other_settings_are_refused(
    shipped_tokenizer: Any, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    await evaluated(tmp_path, shipped_tokenizer)
    with pytest.raises(ConfigError, match=words):
        await evaluated(tmp_path, shipped_tokenizer, **change)


async def test_changed_data_and_another_model_are_refused(shipped_tokenizer: Any, tmp_path: Path) -> None:
    first = await evaluated(tmp_path, shipped_tokenizer)
    data = tmp_path / "other" / "sums.jsonl"
    data.parent.mkdir()
    data.write_text((tmp_path / "sums.jsonl").read_text().replace("+ 0", "+ 1"))
    with pytest.raises(ConfigError, match=r"data_sets\.sums\.sha256 was"):
        await evaluated(tmp_path, shipped_tokenizer, data=[data])
    record = json.loads((first.folder / "run.json").read_text())
    assert record["model"] == "/models/fake"
    (first.folder / "run.json").write_text(json.dumps({**record, "model": "/models/another"}))
    with pytest.raises(ConfigError, match="model was '/models/another' and is '/models/fake'"):
        await evaluated(tmp_path, shipped_tokenizer)


async def test_where_the_engine_is_and_how_many_run_at_once_may_change(shipped_tokenizer: Any, tmp_path: Path) -> None:
    await evaluated(tmp_path, shipped_tokenizer)
    assert (await evaluated(tmp_path, shipped_tokenizer, concurrency=5, ks=[2])).code == 0


async def test_several_data_sets_are_reported_apart(shipped_tokenizer: Any, tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    entries = [
        {"name": "few", "path": str(write_problems(tmp_path)), "n_samples_per_eval_prompt": 1},
        {"name": "cold", "path": str(write_problems(tmp_path)), "temperature": 0.25, "top_k": 5},
    ]
    config.write_text(yaml.safe_dump({"eval": {"datasets": entries}}))
    ended = await evaluated(tmp_path, shipped_tokenizer, data=[], eval_config=config)
    assert {name: one["scored"] for name, one in ended.report["data_sets"].items()} == {"few": 3, "cold": 12}
    assert (ended.report["planned"], ended.report["scored"]) == (15, 15)
    assert ended.report["data_sets"]["few"]["pass_at_k"].keys() == {"1"}
    sent = Counter(
        (request.body["sampling_params"]["temperature"], request.body["sampling_params"]["top_k"])
        for request in ended.fake.requests
    )
    assert sent == {(1.0, -1): 3, (0.25, 5): 12}


async def test_the_models_name_in_the_settings_does_not_matter(shipped_tokenizer: Any, tmp_path: Path) -> None:
    config = tmp_path / "named.yaml"
    config.write_text("strands_rollout: {tools: [], model_name: actor}\n")
    assert (await evaluated(tmp_path, shipped_tokenizer, config=config)).code == 0


async def test_an_engine_behind_a_path_is_reached(shipped_tokenizer: Any, tmp_path: Path) -> None:
    """slime's args name no more than a host and a port; here a gateway with a prefix stands before the engine."""
    import aiohttp

    async with FakeSGLang(guesser(shipped_tokenizer), context_length=8192) as fake, aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            url = fake.base_url + "/" + request.match_info["path"]
            async with session.request(request.method, url, data=await request.read() or None) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/policy/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/policy"
        try:
            assert await asyncio.to_thread(run_evaluation, options_for(tmp_path, url, shipped_tokenizer)) == 0
        finally:
            await runner.cleanup()
        assert len(fake.requests) == 12


def test_a_dead_engine_is_named_at_once_and_leaves_no_folder(shipped_tokenizer: Any, tmp_path: Path) -> None:
    options = options_for(tmp_path, dead_url(), shipped_tokenizer)
    with pytest.raises(EngineUnavailableError, match=r"no answer from http://127\.0\.0\.1"):
        run_evaluation(options)
    assert not options.out.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: {"data": []}, "neither --data nor --eval-config"),
        (lambda folder: {"eval_config": folder / "rollout.yaml"}, "got --data and --eval-config"),
        (lambda folder: {"data": [folder / "sums.jsonl"] * 2}, "got the data sets sums, sums"),
    ],
)
def test_unclear_data_is_a_usage_error(
    shipped_tokenizer: Any, tmp_path: Path, change: Callable[[Path], dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_evaluation(options_for(tmp_path, dead_url(), shipped_tokenizer, **change(tmp_path)))


def test_a_rows_wrong_setting_is_refused_by_its_line_before_anything_runs(
    shipped_tokenizer: Any, tmp_path: Path
) -> None:
    data = tmp_path / "told.jsonl"
    row = {"prompt": "?", "label": "1", "metadata": {"strands_rollout_settings": {"tools": ["os.system"]}}}
    data.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"told\.jsonl:1: got the tools \['os.system'\]"):
        run_evaluation(options_for(tmp_path, dead_url(), shipped_tokenizer, data=[data]))


async def test_a_row_sets_limits_of_its_own_samples(shipped_tokenizer: Any, tmp_path: Path) -> None:
    data = tmp_path / "told.jsonl"
    rows = [{"prompt": "?", "label": "1"} for _ in range(2)]
    rows[1]["metadata"] = {"strands_rollout_settings": {"max_turn_tokens": 1}}  # type: ignore[assignment]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = await evaluated(tmp_path, shipped_tokenizer, data=[data])
    asked = Counter(request.body["sampling_params"]["max_new_tokens"] for request in ended.fake.requests)
    assert asked[1] == 4
    assert asked.total() == 8


async def test_what_the_configuration_leaves_out_is_left_out(shipped_tokenizer: Any, tmp_path: Path) -> None:
    """A factory's agent is not given the default words about a code tool."""
    config = tmp_path / "factory.yaml"
    config.write_text("strands_rollout: {agent_factory: user_agents.plain, tools: []}\n")
    ended = await evaluated(tmp_path, shipped_tokenizer, config=config)
    prompts = {shipped_tokenizer.decode(request.input_ids) for request in ended.fake.requests}
    assert not any("careful math solver" in prompt for prompt in prompts)


def test_a_wrong_setting_is_refused_before_anything_runs(shipped_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "rollout.yaml").write_text("strands_rollout: {max_tool_iteration: 3}\n")
    with pytest.raises(ConfigError, match="did you mean 'max_tool_iterations'"):
        run_evaluation(options_for(tmp_path, dead_url(), shipped_tokenizer))
