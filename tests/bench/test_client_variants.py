"""Client variants play the scripted episode token by token; the engine refuses everything else."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from bench_stage import SHIPPED_TOKENIZER, Stage, perfect, stage_of

from benchmarks.client import missing_reason, run_job
from benchmarks.client import stage as client_stage
from benchmarks.peer import PEER, PEER_ENVIRONMENT
from benchmarks.script import Script, save_scripts, write_scripts
from benchmarks.variants import VARIANTS, WITH_IMAGES, WORKERS, Job, Step, WrongEpisodeError, check_played
from benchmarks.worker import check_all, play_episodes

NEEDS = {PEER: "strands_sglang", "openai": "openai"}


@pytest.fixture(scope="module")
def scripts(shipped_tokenizer: Any) -> list[Script]:
    return write_scripts(shipped_tokenizer, 2, count=2)


@pytest.fixture(scope="module")
def stage(scripts: list[Script], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage_of(scripts, tmp_path_factory.mktemp("bench")) as found:
        yield found


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "openai" else name
        for name in VARIANTS
        if name not in (WITH_IMAGES, *WORKERS)  # played in a process of their own, below
    ],
)
async def test_client_variant_plays_the_script(variant, stage):
    if variant in NEEDS:
        pytest.importorskip(NEEDS[variant])
    player = stage.player(variant)
    done = await play_episodes(player, stage.scripts, 4, 2)
    await player.close()
    check_all(done)
    assert len(done) == 4
    assert {script.question for script, _ in done} == {script.question for script in stage.scripts}


@pytest.mark.slow
def test_strands_sglang_plays_the_script_in_its_own_environment(scripts, stage, tmp_path):
    if not PEER_ENVIRONMENT.exists():
        pytest.skip(f"no {PEER_ENVIRONMENT.name}; python -m benchmarks client --variants {PEER} creates it")
    path = tmp_path / "scripts.json"
    save_scripts(scripts, path)
    step = Step("cpu", PEER, turns=2, concurrency=2, episodes=4)
    figures = run_job(Job(step, str(path), str(path), str(SHIPPED_TOKENIZER), stage.port))
    assert figures["requests_per_trajectory"] == 3


@pytest.mark.parametrize(
    ("step", "figure"),
    [
        (Step("growth", "ours", turns=1, concurrency=2, episodes=20), "growth_bytes"),
        (Step("lag", WITH_IMAGES, turns=1, concurrency=2, episodes=4), "lag_p99_ms"),
        pytest.param(
            Step("cpu", "ours-2-workers", turns=1, concurrency=2, episodes=4),
            "cpu_ms_per_trajectory",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value.variant if isinstance(value, Step) else value,
)
def test_client_variant_in_its_own_process(step, figure, shipped_tokenizer):
    if reason := missing_reason(step.variant):
        pytest.skip(reason)
    with client_stage(shipped_tokenizer, SHIPPED_TOKENIZER) as measure:
        assert isinstance(measure(step)[figure], float | int)


async def test_scripted_engine_refuses_other_tokens(stage):
    ids, turn = stage.scripts[0].prompt_ids, stage.scripts[0].turns[0]
    player = stage.player("floor")
    with pytest.raises(WrongEpisodeError, match="404"):
        await player.play(replace(stage.scripts[0], prompt_ids=[ids[0] + 1, *ids[1:]]))
    await player.close()
    async with httpx.AsyncClient(base_url=stage.url) as http:
        refused = [
            await http.post("/generate", json={"input_ids": other}) for other in ([1, *ids], [ids[0] + 1, *ids[1:]])
        ]
        assert [answer.status_code for answer in refused] == [404, 404]
        assert f"expected {len(ids)}" in refused[0].text
        plain = (await http.post("/generate", json={"input_ids": ids})).json()
        with_input = (await http.post("/generate", json={"input_ids": ids, "logprob_start_len": 3})).json()
    assert plain["text"] == turn.text
    meta = plain["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == turn.ids
    assert [entry[0] for entry in meta["output_token_logprobs"]] == turn.logprobs
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(ids), len(turn.ids))
    assert meta["input_token_logprobs"] == []
    assert [entry[1] for entry in with_input["meta_info"]["input_token_logprobs"]] == ids[3:]


@pytest.mark.parametrize("part", ["tokens", "loss_mask", "logprobs"])
def test_check_played_refuses_one_wrong_value(part, scripts):
    played = perfect(scripts[0])
    check_played(played, scripts[0])
    values = list(getattr(played, part))
    values[-1] = 1 - values[-1]
    with pytest.raises(WrongEpisodeError, match=f"{part}.*the first difference is at"):
        check_played(replace(played, **{part: values}), scripts[0])
