"""Protocols: their sampling and prompts, what overrides them, and that two protocols' numbers never mix."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import options_for
from fake_sglang import Reply, dead_url
from harness import ids_of
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.errors import ConfigError
from strands_rollout.evaluation import run as run_module
from strands_rollout.evaluation.benchmarks import BENCHMARK_KEY, BENCHMARKS
from strands_rollout.evaluation.protocols import PROTOCOLS, find_protocol, refuse_several_protocols
from strands_rollout.evaluation.run import run_evaluation
from strands_rollout.play.options import EvalOptions
from strands_rollout.play.rows import Row
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.reward import GRADING_KEY

QWEN3_BOX = "Please reason step by step, and put your final answer within \\boxed{}."
SMALL = {"samples": 2, "max_new_tokens": 64}


def write_benchmark(folder: Path, name: str, problems: int, **metadata: Any) -> Path:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {number} + 0?"}],
            "label": str(number),
            "metadata": {BENCHMARK_KEY: name, **metadata},
        }
        for number in range(problems)
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def measure(run, tmp_path, shipped_tokenizer):
    """Return a function that evaluates 30 made-up problems as AIME 2024, without a settings file."""

    async def measure(protocol: str | None, **changes: Any) -> Any:
        data = [write_benchmark(tmp_path, "aime-2024", 30)]
        return await run(**{"data": data, "config": None, "protocol": protocol, "ks": [1, 2], **changes})

    return measure


async def test_protocol_sets_sampling_prompt_and_agent(measure, shipped_tokenizer, monkeypatch, capsys):
    few = {**PROTOCOLS["qwen3"].own_sampling["aime-2024"], "samples": 2}
    monkeypatch.setitem(PROTOCOLS["qwen3"].own_sampling, "aime-2024", few)  # type: ignore[arg-type]
    ended = await measure("qwen3", context_length=40_960)
    params = [request.body["sampling_params"] for request in ended.fake.requests]
    names = ("temperature", "top_p", "top_k")
    assert Counter(tuple(one[name] for name in names) for one in params) == {(0.6, 0.95, 20): 60}
    assert {one["max_new_tokens"] for one in params} == {38_912}
    prompt = shipped_tokenizer.decode(ended.fake.requests[0].input_ids)
    assert f"What is 0 + 0?\n{QWEN3_BOX}" in prompt
    assert "execute_python_code" not in prompt
    assert "system" not in prompt
    (name,) = ended.report["data_sets"]
    sums = ended.report["data_sets"][name]
    assert (name, ended.report["protocol"], sums["scored"]) == ("aime-2024@qwen3", "qwen3", 60)
    assert sums["protocol"]["modified"] == []
    out = " ".join(capsys.readouterr().out.split())
    for said in (
        "aime-2024@qwen3: avg@2 ",
        "95% interval",
        "pass@1 ",
        "pass@2 ",
        "protocol qwen3 (Qwen3 Technical Report (arXiv:2505.09388), section 4.6, thinking mode)",
        "comparable with numbers reported in Qwen3 Technical Report (arXiv:2505.09388), table 17: Qwen3-8B 76.0%, ",
    ):
        assert said in out


async def test_protocol_overrides_are_reported_as_modifications(measure, tmp_path, capsys):
    ended = await measure("qwen3", sampling_overrides={**SMALL, "temperature": 0.9}, limit=5)
    (name,) = ended.report["data_sets"]
    protocol = ended.report["data_sets"][name]["protocol"]
    assert name == "aime-2024@qwen3+modified"
    assert protocol["modified"] == [
        "samples 2 instead of 64",
        "max_new_tokens 64 instead of 38912",
        "temperature 0.9 instead of 0.6",
        "5 of 30 problems",
    ]
    assert protocol["comparability"] == "not comparable with published numbers: the protocol qwen3 is modified"
    assert "modified: samples 2 instead of 64, " in capsys.readouterr().out
    config = tmp_path / "other.yaml"
    config.write_text("strands_rollout: {system_prompt: 'Be brief.', executor: {name: local, memory_mb: 512}}\n")
    ended = await measure("qwen3", sampling_overrides=SMALL, config=config, out=tmp_path / "second")
    (sums,) = ended.report["data_sets"].values()
    assert "the setting system_prompt" in sums["protocol"]["modified"]
    assert not any("executor" in change for change in sums["protocol"]["modified"])


async def test_protocol_tool_is_the_default_agent(measure, shipped_tokenizer):
    ended = await measure("tool", sampling_overrides=SMALL, limit=1)
    prompt = shipped_tokenizer.decode(ended.fake.requests[0].input_ids)
    assert "execute_python_code" in prompt
    assert QWEN3_BOX not in prompt
    (name,) = ended.report["data_sets"]
    assert name == "aime-2024@tool+modified"


async def test_protocols_do_not_mix_in_a_folder_or_a_comparison(measure, tmp_path):
    first = await measure("qwen3", sampling_overrides=SMALL, limit=2)
    with pytest.raises(ConfigError, match=r"holds another run: protocol was 'qwen3' and is 'tool'\. Use the values"):
        await measure("tool", sampling_overrides=SMALL, limit=2)
    with pytest.raises(ConfigError, match="holds another run: protocol was 'qwen3' and is None"):
        await measure(None, limit=2)
    assert len((await measure("qwen3", sampling_overrides=SMALL, limit=2)).lines) == len(first.lines) == 4
    second = await measure("tool", sampling_overrides=SMALL, limit=2, out=tmp_path / "second")
    third = await measure(None, limit=2, out=tmp_path / "third")
    refuse_several_protocols([first.folder, first.folder / "results.jsonl", tmp_path])
    for other, name in ((second, "tool"), (third, "no protocol")):
        with pytest.raises(ConfigError, match=f"can't be compared: got {first.folder} under qwen3, .* under {name};"):
            refuse_several_protocols([first.folder, other.folder])
        command = ["view", str(first.folder), str(other.folder / "results.jsonl"), "--text"]
        refused = CliRunner().invoke(app, command)
        assert isinstance(refused.exception, ConfigError)


async def test_protocol_refuses_short_context_before_episodes(measure):
    words = r"aime-2024@qwen3: got responses of up to 38912 tokens and a context of 8192 tokens; .*--max-new-tokens"
    with pytest.raises(ConfigError, match=words):
        await measure("qwen3")
    with pytest.raises(ConfigError, match="up to 38912 tokens and a context of 38912 tokens"):
        await measure("qwen3", context_length=40_960, max_context_tokens=38_912)


def test_protocol_refuses_unknown_names_and_other_sampling(tmp_path, shipped_tokenizer):
    with pytest.raises(ConfigError, match="got --protocol 'qwen'; expected one of qwen3, tool"):
        run_evaluation(options_for(tmp_path, dead_url(), shipped_tokenizer, protocol="qwen"))
    config = tmp_path / "eval.yaml"
    config.write_text("eval: {datasets: [{name: a, path: a.jsonl}]}\n")
    with pytest.raises(ConfigError, match="got --protocol and --eval-config, which has its own sampling"):
        run_evaluation(
            options_for(tmp_path, dead_url(), shipped_tokenizer, protocol="tool", data=[], eval_config=config)
        )
    data = [write_benchmark(tmp_path, "ifeval", 2, **{GRADING_KEY: "ifeval"})]
    with pytest.raises(ConfigError, match="the protocol tool can't measure ifeval: the agent's system prompt"):
        run_evaluation(options_for(tmp_path, dead_url(), shipped_tokenizer, protocol="tool", data=data, config=None))


def test_protocols_name_known_benchmarks_and_valid_settings():
    for protocol in PROTOCOLS.values():
        assert {*protocol.own_sampling, *protocol.published} <= BENCHMARKS.keys()
        settings = protocol.apply_to(RolloutSettings())
        assert protocol.setting_changes(settings) == []
        assert bool(protocol.published) == bool(protocol.published_in)
    assert find_protocol("qwen3").sampling_of(BENCHMARKS["gpqa-diamond"]).samples == 10
    assert find_protocol("qwen3").sampling_of(None).max_new_tokens == 32_768


def test_with_instruction_extends_texts_and_parts():
    protocol = find_protocol("qwen3")
    assert protocol.with_instruction(Row("2 + 2?", "4")).prompt == f"2 + 2?\n{QWEN3_BOX}"
    image = {"type": "image", "image": "a.png"}
    (message,) = protocol.with_instruction(Row([{"role": "user", "content": [image]}], "4")).prompt
    assert message == {"role": "user", "content": [image, {"type": "text", "text": QWEN3_BOX}]}


def test_eval_command_tells_given_options_from_defaults(tmp_path, monkeypatch):
    given: list[EvalOptions] = []
    monkeypatch.setattr(run_module, "run_evaluation", lambda options: given.append(options) or 0)
    command = ["eval", "--data", str(write_benchmark(tmp_path, "aime-2024", 1)), "--protocol", "qwen3"]
    for more, overrides in (
        ((), {}),
        (("--temperature", "1.0", "--samples-per-problem", "4"), {"temperature": 1.0, "samples": 4}),
    ):
        result = CliRunner().invoke(app, [*command, *more])
        assert result.exit_code == 0, result.output
        assert (given[-1].protocol, given[-1].sampling_overrides) == ("qwen3", overrides)


async def test_choices_are_graded_by_letter(run, tmp_path, shipped_tokenizer):
    rows = [{"prompt": "Which?\n(A) 1\n(B) 2", "label": "B", "metadata": {GRADING_KEY: "choice"}}]
    path = tmp_path / "choices.jsonl"
    path.write_text(json.dumps(rows[0]) + "\n")
    texts = ['{"answer": "B"}', "Answer: (B) 2", "\\boxed{B + 0}", "\\boxed{2}"]
    replies = iter(texts)
    script = [Reply.tokens(ids_of(shipped_tokenizer, f"{next(replies)}<|im_end|>")) for _ in texts]
    ended = await run(script, data=[path], concurrency=1)
    (sums,) = ended.report["data_sets"].values()
    assert (sums["right"], sums["without_answer"], sums["methods"]) == (2, 2, {"choice": 2, "empty": 2})


@pytest.mark.parametrize(
    ("label", "metadata", "words"),
    [
        ("12", {GRADING_KEY: "choice"}, "got the label '12'; expected the letter of the right choice"),
        (
            "B",
            {GRADING_KEY: "letters"},
            "got strands_rollout_grading='letters' in a row's metadata; expected one of",
        ),
        ("x", {GRADING_KEY: "ifeval"}, "the row's metadata has ifeval: None; expected a mapping with"),
    ],
)
def test_eval_refuses_rows_that_can_not_be_graded(tmp_path, shipped_tokenizer, label, metadata, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "?", "label": label, "metadata": metadata}) + "\n")
    with pytest.raises(Exception, match=rf"rows\.jsonl:1: {words}"):
        run_evaluation(options_for(tmp_path, dead_url(), shipped_tokenizer, data=[path]))
