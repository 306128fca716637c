"""SkyRL: `to_generator_output`, `StrandsGenerator`, and the GSM8K example."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from finished import two_samples
from grouped_samples import sample_of
from harness import ANSWER, ids_of

from strands_rollout.errors import ConfigError, ExportError
from strands_rollout.integrations.skyrl import StrandsGenerator, to_generator_output
from strands_rollout.samples import Sample

PROMPT = [{"role": "user", "content": "What is 17 * 2?"}]
PARAMS = {"temperature": 1.0, "top_k": -1, "max_tokens": 512, "min_tokens": 1, "logprobs": 1, "stop": None}
# from SkyRL's GeneratorOutput and validate_generator_output (NovaSky-AI/SkyRL a9564572)
FIELDS = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "stop_reasons",
    "rollout_metrics",
    "rollout_logprobs",
    "trajectory_ids",
    "trajectory_generation_times",
    "trajectory_time_splits",
    "rollout_expert_indices",
    "is_last_step",
    "env_metrics",
    "pixel_values",
    "image_grid_thw",
)
PER_RESPONSE = ("prompt_token_ids", "loss_masks", "rewards", "rollout_logprobs", "stop_reasons", "trajectory_ids")


def violations(output: dict[str, Any], prompts: int) -> Iterator[str]:
    count = len(output["response_ids"])
    if not count or count != prompts:
        yield f"{count} responses to {prompts} prompts"
    for name in PER_RESPONSE:
        if isinstance(output[name], list) and len(output[name]) != count:
            yield f"{name} has {len(output[name])} entries for {count} responses"
    for name in ("loss_masks", "rollout_logprobs"):
        if [len(values) for values in output[name]] != [len(ids) for ids in output["response_ids"]]:
            yield f"{name} differs in length from response_ids"
    if not all(type(reward) is float for reward in output["rewards"]):
        yield "rewards are no floats"


def batch(**changes: Any) -> dict[str, Any]:
    """Return two repetitions of one prompt and one of another, in the form of SkyRL's trainer."""
    return {
        "prompts": [PROMPT] * 3,
        "env_classes": ["strands"] * 3,
        "env_extras": [{"reward_spec": {"ground_truth": "34"}}] * 2 + [{"label": "35"}],
        "sampling_params": PARAMS,
        "trajectory_ids": [SimpleNamespace(instance_id=name, repetition_id=0) for name in "aab"],
        "batch_metadata": SimpleNamespace(global_step=1, training_phase="train"),
        **changes,
    }


async def generate_batch(
    tokenizer: Any, script: Any, input_batch: Any, **options: Any
) -> tuple[dict[str, Any], FakeSGLang]:
    async with FakeSGLang(script, context_length=8192) as fake:
        generator = StrandsGenerator(fake.base_url, tokenizer.name_or_path, **options)
        return await generator.generate(input_batch), fake


async def test_to_generator_output_keeps_every_token(shipped_tokenizer: Any) -> None:
    samples = await two_samples(shipped_tokenizer)
    output = to_generator_output(samples)
    assert (list(output), list(violations(output, 2))) == (list(FIELDS), [])
    for number, sample in enumerate(samples):
        assert output["prompt_token_ids"][number] + output["response_ids"][number] == sample.tokens
        assert output["loss_masks"][number] == sample.loss_mask
        assert output["rollout_logprobs"][number] == sample.rollout_log_probs
    assert 0 in output["loss_masks"][0]
    assert (output["rewards"], output["stop_reasons"]) == ([1.0, -1.0], ["stop", "stop"])
    assert output["rollout_metrics"]["strands/turns_mean"] == 1.5
    assert all(seconds > 0 for seconds in output["trajectory_generation_times"])
    before = list(samples[0].loss_mask)
    output["loss_masks"][0][0] = 7
    assert samples[0].loss_mask == before, "the output's lists are copies"
    empty = to_generator_output([])
    assert list(empty) == list(FIELDS)
    assert not any(empty.values())


def test_to_generator_output_masks_untrained_samples() -> None:
    samples = [sample_of(1.0), sample_of(0.0), sample_of(-1.0, status="FAILED"), sample_of(-1.0, removed=True)]
    output = to_generator_output([*samples, sample_of(-1.0, group=1, status="FAILED")])
    assert (output["rewards"], output["loss_masks"][2:]) == ([1.0, 0.0, 0.5, 0.5, 0.0], [[0, 0]] * 3)
    assert output["stop_reasons"] == ["stop", "stop", "error", "stop", "error"]
    assert output["rollout_metrics"] == {"strands/untrained_samples": 3.0}
    samples[0].loss_mask = [0, 1]
    assert to_generator_output(samples)["rollout_logprobs"][0] == [-1.0, -1.0], "a token masked later keeps its logprob"
    with pytest.raises(ExportError, match="sample 0 .* is a list; .* flatten the lists of a fan-out"):
        to_generator_output([samples])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": Sample.Status.ABORTED}, "status is aborted"),
        ({"reward": None}, "reward is None"),
        ({"reward": {"acc": 1.0}}, "expected a dict with a finite number under 'score'"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"loss_mask": [1]}, "loss_mask has 1 values; expected a list of 2 values, as many as response_length"),
    ],
)
def test_to_generator_output_refuses_an_unfinished_sample(changes, words) -> None:
    bad = sample_of(1.0, index=17)
    vars(bad).update(changes)
    with pytest.raises(ExportError, match=r"sample 1 \(index=17\)") as caught:
        to_generator_output([sample_of(1.0), bad])
    assert words in str(caught.value)


async def test_strands_generator_keeps_the_order_of_prompts(shipped_tokenizer: Any) -> None:
    answer = Reply.tokens(ids_of(shipped_tokenizer, ANSWER))
    output, fake = await generate_batch(shipped_tokenizer, lambda *_: answer, batch())
    assert (list(violations(output, 3)), output["rewards"], len(fake.requests)) == ([], [1.0, 1.0, -1.0], 3)
    asked = fake.requests[0].body["sampling_params"]
    assert asked["max_new_tokens"] <= 512
    assert asked["min_new_tokens"] == 1
    assert "max_tokens" not in asked
    assert "logprobs" not in asked


async def test_strands_generator_masks_an_aborted_prompt(shipped_tokenizer: Any) -> None:
    ids = ids_of(shipped_tokenizer, ANSWER)
    turns = iter([Reply.tokens(ids), Reply.abort(ids[:2]), Reply.tokens(ids)])
    output, _ = await generate_batch(
        shipped_tokenizer, lambda *_: next(turns), batch(), concurrency=1, settings={"on_engine_abort": "return"}
    )
    assert (output["stop_reasons"], set(output["loss_masks"][1])) == (["stop", "error", "stop"], {0})


async def test_strands_generator_takes_a_callers_reward(shipped_tokenizer: Any) -> None:
    async def length_reward(args: Any, sample: Any) -> dict[str, float]:
        return {"tokens": float(sample.response_length)}

    script = [Reply.tokens(ids_of(shipped_tokenizer, ANSWER))] * 3
    output, _ = await generate_batch(shipped_tokenizer, script, batch(), reward=length_reward, reward_key="tokens")
    assert output["rewards"] == [float(len(ids)) for ids in output["response_ids"]]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"env_extras": [{}] * 3}, ExportError, "prompt 0 has env_extras with no keys; expected the ground truth"),
        ({"env_extras": [{"label": 1}]}, ExportError, "got 3 prompts, 1 env_extras and 3 trajectory_ids"),
        ({"sampling_params": {"bad_words": ["no"]}}, ConfigError, "bad_words"),
    ],
)
async def test_strands_generator_refuses_an_unplayable_input(
    shipped_tokenizer: Any, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await generate_batch(shipped_tokenizer, [], batch(**changes))


def test_skyrl_gsm8k_script_passes_only_the_files_settings(tmp_path, monkeypatch) -> None:
    main = runpy.run_path(str(Path(__file__).parents[2] / "scripts/skyrl_gsm8k.py"))["main"]
    given: list[Any] = []

    async def play(_rows: Any, _repetitions: int, _params: Any, settings: Any, *_more: Any) -> dict[str, Any]:
        given.append(settings)
        return {"rewards": [1.0], "loss_masks": [], "stop_reasons": []}

    monkeypatch.setitem(main.__globals__, "play", play)
    monkeypatch.setitem(main.__globals__, "load_rows", lambda _data: [])
    (tmp_path / "a.yaml").write_text("strands_rollout: {tools: []}")
    main(config=tmp_path / "a.yaml")
    assert given == [{"tools": ()}]


@pytest.mark.slow
def test_skyrl_gsm8k_script_on_the_embedded_engine(tmp_path: Path) -> None:
    data, out = tmp_path / "gsm8k.jsonl", tmp_path / "output.json"
    repository, problems = Path(__file__).parents[2], Path(__file__).with_name("gsm8k.jsonl")
    environment = {**os.environ, "PYTHONPATH": str(repository), "HF_HUB_OFFLINE": "1"}
    prepare = ["data_prep/gsm8k.py", "--from", problems, "--out", data]
    subprocess.run([sys.executable, *prepare], env=environment, check=True, cwd=repository)
    play = ["scripts/skyrl_gsm8k.py", "--data", data, "--out", out, "--seed", "0"]
    done = subprocess.run([sys.executable, *play], env=environment, check=True, stdout=subprocess.PIPE, cwd=repository)
    summary = json.loads(done.stdout.splitlines()[-1])
    output: dict[str, Any] = json.loads(out.read_text())
    assert list(violations(output, 16)) == []
    assert set(output["rewards"]) == {0.0, 1.0}, "the shipped model solves some of these problems, but not all"
    assert (summary["responses"], summary["trained_tokens"]) == (16, sum(map(sum, output["loss_masks"])))
