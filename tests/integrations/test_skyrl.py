"""SkyRL: finished samples as its GeneratorOutput, the generator, and the example on GSM8K."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import skyrl_rules
from fake_sglang import FakeSGLang, Reply
from finished import WRONG, two_samples
from grouped_samples import sample_of
from harness import ANSWER, call_text, ids_of

from strands_rollout.errors import ConfigError, ExportError
from strands_rollout.integrations.skyrl import StrandsGenerator, to_generator_output

PROMPT = [{"role": "user", "content": "What is 17 * 2?"}]
PARAMS = {"temperature": 1.0, "top_k": -1, "max_tokens": 512, "min_tokens": 1, "logprobs": 1, "stop": None}


def batch(**changes: Any) -> dict[str, Any]:
    """Two repetitions of one prompt and one of another, as SkyRL's trainer asks."""
    return {
        "prompts": [PROMPT] * 3,
        "env_classes": ["strands"] * 3,
        "env_extras": [{"reward_spec": {"ground_truth": "34"}}] * 2 + [{"label": "35"}],
        "sampling_params": PARAMS,
        "trajectory_ids": [SimpleNamespace(instance_id=name, repetition_id=0) for name in "aab"],
        "batch_metadata": SimpleNamespace(global_step=1, training_phase="train"),
        **changes,
    }


def solver(tokenizer: Any) -> Any:
    """A policy that calls the tool once, then answers 34."""

    def reply(request: dict[str, Any], number: int) -> Reply:
        seen = tokenizer.decode(request["input_ids"], skip_special_tokens=False)
        return Reply.tokens(ids_of(tokenizer, ANSWER if "<tool_response>" in seen else call_text()))

    return reply


async def generated(tokenizer: Any, script: Any, input_batch: Any, **options: Any) -> tuple[dict[str, Any], FakeSGLang]:
    async with FakeSGLang(script, context_length=8192) as fake:
        generator = StrandsGenerator(fake.base_url, tokenizer.name_or_path, **options)
        return await generator.generate(input_batch), fake


async def test_an_output_holds_the_sample_token_for_token(shipped_tokenizer: Any) -> None:
    samples = await two_samples(shipped_tokenizer)
    output = to_generator_output(samples)
    assert list(output) == list(skyrl_rules.FIELDS)
    assert list(skyrl_rules.violations(output, 2)) == []
    for number, sample in enumerate(samples):
        assert output["prompt_token_ids"][number] + output["response_ids"][number] == sample.tokens
        assert output["loss_masks"][number] == sample.loss_mask
        assert output["rollout_logprobs"][number] == sample.rollout_log_probs
    assert 0 in output["loss_masks"][0]
    assert output["rewards"] == [1.0, -1.0]
    assert output["stop_reasons"] == ["stop", "stop"]
    assert output["rollout_metrics"]["strands/turns_mean"] == 1.5
    assert all(seconds > 0 for seconds in output["trajectory_generation_times"])
    before = list(samples[0].loss_mask)
    output["loss_masks"][0][0] = 7
    assert samples[0].loss_mask == before, "an output shares nothing with the sample"
    empty = to_generator_output([])
    assert list(empty) == list(skyrl_rules.FIELDS)
    assert not any(empty.values())


def test_what_is_not_trained_leaves_the_mean_of_its_group_alone() -> None:
    samples = [sample_of(1.0), sample_of(0.0), sample_of(-1.0, status="FAILED"), sample_of(-1.0, removed=True)]
    output = to_generator_output([*samples, sample_of(-1.0, group=1, status="FAILED")])
    assert output["rewards"] == [1.0, 0.0, 0.5, 0.5, 0.0]
    assert output["loss_masks"][2:] == [[0, 0]] * 3
    assert output["stop_reasons"] == ["stop", "stop", "error", "stop", "error"]
    assert output["rollout_metrics"] == {"strands/untrained_samples": 3.0}
    samples[0].loss_mask = [0, 1]
    assert to_generator_output(samples)["rollout_logprobs"][0] == [-1.0, -1.0], "masked later, it keeps its logprob"
    with pytest.raises(ExportError, match="sample 0 .* is a list; .* fan-out one by one"):
        to_generator_output([samples])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "PENDING"}, "status is pending"),
        ({"status": "ABORTED"}, "status is aborted"),
        ({"reward": None}, "reward is None"),
        ({"reward": {"acc": 1.0}}, "expected a dict with a finite number under 'score'"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"loss_mask": [1]}, "loss_mask has 1 values; expected response_length=2"),
        ({"rollout_log_probs": [1]}, "rollout_log_probs has 1 values; expected response_length=2"),
    ],
)
def test_an_unfinished_sample_or_one_without_reward_is_refused_by_its_index(
    changes: dict[str, Any], words: str
) -> None:
    lists = {name: changes.pop(name) for name in ("loss_mask", "rollout_log_probs") if name in changes}
    bad = sample_of(**{"reward": 1.0, "index": 17, **changes})
    vars(bad).update(lists)
    with pytest.raises(ExportError, match=r"sample 1 \(index=17\)") as caught:
        to_generator_output([sample_of(1.0), bad])
    assert words in str(caught.value)


async def test_a_generator_answers_in_the_order_of_its_prompts(shipped_tokenizer: Any) -> None:
    output, fake = await generated(shipped_tokenizer, solver(shipped_tokenizer), batch())
    assert list(skyrl_rules.violations(output, 3)) == []
    assert output["rewards"] == [1.0, 1.0, -1.0]
    assert len(fake.requests) == 6
    asked = fake.requests[0].body["sampling_params"]
    assert asked["max_new_tokens"] <= 512
    assert asked["min_new_tokens"] == 1
    assert "max_tokens" not in asked
    assert "logprobs" not in asked


async def test_repetitions_of_a_prompt_are_one_group(shipped_tokenizer: Any) -> None:
    turns = iter([ANSWER, None, WRONG])  # the second prompt's engine answers nonsense

    def reply(request: dict[str, Any], number: int) -> Reply:
        text = next(turns)
        return Reply.status(400) if text is None else Reply.tokens(ids_of(shipped_tokenizer, text))

    output, _ = await generated(shipped_tokenizer, reply, batch(), concurrency=1)
    assert output["stop_reasons"] == ["stop", "error", "stop"]
    assert output["rewards"] == [1.0, 1.0, 1.0]


async def test_a_prompt_that_the_engine_aborts_is_masked_like_one_that_failed(shipped_tokenizer: Any) -> None:
    ids = ids_of(shipped_tokenizer, ANSWER)
    turns = iter([Reply.tokens(ids), Reply.abort(ids[:2]), Reply.tokens(ids)])
    output, _ = await generated(
        shipped_tokenizer, lambda *_: next(turns), batch(), concurrency=1, settings={"on_engine_abort": "return"}
    )
    assert output["stop_reasons"] == ["stop", "error", "stop"]
    assert set(output["loss_masks"][1]) == {0}


async def test_each_prompt_has_a_seed_of_its_own_and_a_rows_own_settings_count(shipped_tokenizer: Any) -> None:
    extras = [{"label": "34", "strands_rollout_settings": {"max_turn_tokens": 7}}] * 3
    given = batch(env_extras=extras, sampling_params={**PARAMS, "seed": 5})
    answer = Reply.tokens(ids_of(shipped_tokenizer, ANSWER))
    _, fake = await generated(shipped_tokenizer, lambda *_: answer, given)
    asked = [request.body["sampling_params"] for request in fake.requests]
    assert sorted(params["sampling_seed"] for params in asked) == [5, 6, 7]
    assert {params["max_new_tokens"] for params in asked} == {7}


async def test_a_generator_takes_a_reward_of_the_callers(shipped_tokenizer: Any) -> None:
    async def length_reward(args: Any, sample: Any) -> dict[str, float]:
        return {"tokens": float(sample.response_length)}

    script = [Reply.tokens(ids_of(shipped_tokenizer, ANSWER))] * 3
    output, _ = await generated(shipped_tokenizer, script, batch(), reward=length_reward, reward_key="tokens")
    assert output["rewards"] == [float(len(ids)) for ids in output["response_ids"]]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"env_extras": [{}] * 3}, ExportError, "prompt 0 has env_extras with nothing; expected the right answer"),
        ({"env_extras": [{"label": 1}]}, ExportError, "got 3 prompts, 1 env_extras and 3 trajectory_ids"),
        ({"sampling_params": {"bad_words": ["no"]}}, ConfigError, "bad_words"),
    ],
)
async def test_an_input_that_cannot_be_played_is_refused_before_anything_is_asked(
    shipped_tokenizer: Any, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await generated(shipped_tokenizer, [], batch(**changes))


def test_a_generator_refuses_a_fan_out() -> None:
    with pytest.raises(ConfigError, match="fan_out"):
        StrandsGenerator("http://127.0.0.1:1", Path(), settings={"fan_out": True})


@pytest.mark.skipif("SKYRL_PATH" not in os.environ, reason="needs SKYRL_PATH, a checkout of NovaSky-AI/SkyRL")
async def test_skyrls_own_validator_takes_the_output(shipped_tokenizer: Any) -> None:
    validate = skyrl_rules.validator_of(Path(os.environ["SKYRL_PATH"]))
    output, _ = await generated(shipped_tokenizer, solver(shipped_tokenizer), batch())
    validate(3, output)
    with pytest.raises(AssertionError):
        validate(3, {**output, "loss_masks": [[1]] * 3})


REPOSITORY = Path(__file__).parents[2]
PROBLEMS = Path(__file__).with_name("gsm8k.jsonl")


def run_script(script: str, *arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(REPOSITORY / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd="/").stdout


@pytest.mark.slow
def test_gsm8k_becomes_a_generator_output_on_the_embedded_engine(tmp_path: Path) -> None:
    data, out = tmp_path / "gsm8k.jsonl", tmp_path / "output.json"
    run_script("data_prep/gsm8k.py", "--from", PROBLEMS, "--out", data)
    summary = json.loads(
        run_script("scripts/skyrl_gsm8k.py", "--data", data, "--out", out, "--seed", 0).splitlines()[-1]
    )
    output: dict[str, Any] = json.loads(out.read_text())
    assert list(skyrl_rules.violations(output, 16)) == []
    assert set(output["rewards"]) == {0.0, 1.0}, "the shipped model solves some of these, and not all"
    assert summary["responses"] == 16
    assert summary["trained_tokens"] == sum(map(sum, output["loss_masks"]))
    if "SKYRL_PATH" in os.environ:
        skyrl_rules.validator_of(Path(os.environ["SKYRL_PATH"]))(16, output)


def test_a_configuration_without_the_key_is_refused_in_words(tmp_path: Path) -> None:
    config = tmp_path / "other.yaml"
    config.write_text("strands: {}\n")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        run_script("scripts/skyrl_gsm8k.py", "--data", PROBLEMS, "--config", config)
    assert refused.value.returncode == 2
    assert refused.value.stderr.startswith("error: ")
    assert "strands_rollout" in refused.value.stderr
