"""Every variant plays the script's episode token by token, and the engine answers nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from bench_stage import perfect, stage_of

from strands_rollout.bench.answer_script import AnswerScript
from strands_rollout.bench.episode_run import check_all, play_episodes
from strands_rollout.bench.player import Stage, WrongEpisodeError, check_played
from strands_rollout.bench.script_writer import write_scripts
from strands_rollout.bench.worker import make_player

NEEDS = {"ours": "strands", "floor": "httpx_aiohttp", "strands-sglang": "strands_sglang", "openai": "openai"}


@pytest.fixture(scope="module")
def scripts(shipped_tokenizer: Any) -> list[AnswerScript]:
    return write_scripts(shipped_tokenizer, 2, count=2)


@pytest.fixture(scope="module")
def stage(scripts: list[AnswerScript], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage_of(scripts, tmp_path_factory.mktemp("bench")) as found:
        yield found


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.slow) if name == "openai" else name for name in NEEDS]
)
async def test_a_variant_plays_exactly_the_script(variant: str, stage: Stage) -> None:
    pytest.importorskip(NEEDS[variant])
    player = make_player(variant, stage)
    done = await play_episodes(player, stage.scripts, 4, 2)
    await player.close()
    check_all(done)
    assert len(done) == 4
    assert {script.question for script, _ in done} == {script.question for script in stage.scripts}


async def test_a_variant_that_sends_other_tokens_fails(stage: Stage) -> None:
    first = stage.scripts[0]
    player = make_player("floor", stage)
    altered = replace(first, prompt_ids=[first.prompt_ids[0] + 1, *first.prompt_ids[1:]])
    with pytest.raises(WrongEpisodeError, match="404"):
        await player.play(altered)
    await player.close()


async def test_a_turn_that_was_answered_before_is_refused_with_other_tokens(stage: Stage) -> None:
    ids = stage.scripts[0].prompt_ids
    async with httpx.AsyncClient(base_url=stage.url) as http:
        known = await http.post("/generate", json={"input_ids": ids})
        longer = await http.post("/generate", json={"input_ids": [1, *ids]})
        other = await http.post("/generate", json={"input_ids": [ids[0] + 1, *ids[1:]]})
    assert known.json()["output_ids"] == stage.scripts[0].turns[0].ids
    assert longer.status_code == 404
    assert f"expected {len(ids)}" in longer.text
    assert other.status_code == 404
    assert "differ from 0 on" in other.text


async def test_an_answer_has_the_shape_of_an_engines(stage: Stage) -> None:
    ids, turn = stage.scripts[0].prompt_ids, stage.scripts[0].turns[0]
    async with httpx.AsyncClient(base_url=stage.url) as http:
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
def test_an_episode_with_one_other_value_is_refused(part: str, scripts: list[AnswerScript]) -> None:
    played = perfect(scripts[0])
    check_played(played, scripts[0])
    values = list(getattr(played, part))
    values[-1] = 1 - values[-1]
    with pytest.raises(WrongEpisodeError, match=f"{part}.*the first difference is at"):
        check_played(replace(played, **{part: values}), scripts[0])


def test_the_template_writes_the_whole_episode_as_the_script_has_it(
    scripts: list[AnswerScript], shipped_tokenizer: Any
) -> None:
    for script in scripts:
        assert shipped_tokenizer.encode(shipped_tokenizer.decode(script.tokens())) == script.tokens()
        assert script.tool_turns == 2
        assert sum(script.loss_mask()) == len(script.logprobs())


def test_the_same_seed_writes_the_same_script(scripts: list[AnswerScript], shipped_tokenizer: Any) -> None:
    assert write_scripts(shipped_tokenizer, 2, count=2) == scripts
    assert write_scripts(shipped_tokenizer, 2, count=1, seed=1)[0] != scripts[0]
    assert scripts[0].tokens() != scripts[1].tokens()
