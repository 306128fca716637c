"""IFEval's instructions, checked by lm-evaluation-harness: strict accuracy by prompt and by instruction."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evaluation_stage import evaluate_on_fake
from fake_sglang import Reply
from harness import ids_of

from strands_rollout import Sample, reward_func
from strands_rollout.diagnostics.rewards import load_reward, run_validate
from strands_rollout.errors import ConfigError, PromptError
from strands_rollout.evaluation.benchmarks import BENCHMARK_KEY
from strands_rollout.grading import ifeval
from strands_rollout.grading.ifeval import Instructions
from strands_rollout.slime_plugin.reward import GRADING_KEY, check_row_grading

PUNKT_TEXT = "Dr. Ada met Mr. Byron at noon. They spoke. It rained; the roof leaked. Nobody minded. " * 20


def metadata_of(*instructions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    names, kwargs = [name for name, _ in instructions], [given for _, given in instructions]
    given = {"key": 1, "instruction_id_list": names, "kwargs": kwargs}
    return {BENCHMARK_KEY: "ifeval", GRADING_KEY: "ifeval", "ifeval": given}


NO_COMMA = ("punctuation:no_comma", {"num_words": None})
WORDS = ("length_constraints:number_words", {"num_words": 4, "relation": "at least"})
SENTENCES = ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"})
JSON = ("detectable_format:json_format", {})


async def reward_of(response: str, *instructions: tuple[str, dict[str, Any]]) -> Any:
    sample = Sample(prompt="Write.", label="x", metadata=metadata_of(*instructions))
    sample.response, sample.status = response, Sample.Status.COMPLETED
    return await reward_func(SimpleNamespace(strands_rollout={}), sample)


def test_ifeval_missing_extra_names_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ifeval", None)
    ifeval._library.cache_clear()
    words = r"grading IFEval needs '.*', which is not installed; run: pip install 'strands-rollout\[ifeval\]'"
    with pytest.raises(ConfigError, match=words):
        check_row_grading("x", metadata_of(NO_COMMA))
    ifeval._library.cache_clear()


@pytest.mark.parametrize(
    "given",
    [None, "x", {"instruction_id_list": ["punctuation:no_comma"]}, {"instruction_id_list": ["a"], "kwargs": []}],
)
def test_instructions_of_refuses_malformed_metadata(given):
    with pytest.raises(PromptError, match="expected a mapping with instruction_id_list and kwargs, two lists"):
        Instructions.of({"ifeval": given})


@pytest.fixture
def library() -> None:
    pytest.importorskip("lm_eval", reason="needs the extra ifeval")
    pytest.importorskip("langdetect", reason="needs the extra ifeval")


@pytest.fixture
def punkt(library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a small Punkt model in the place where NLTK looks for its own."""
    import nltk
    from nltk.tokenize.punkt import PunktTrainer, save_punkt_params

    folder = tmp_path / "nltk_data/tokenizers/punkt_tab/english"
    folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])
    save_punkt_params(PunktTrainer(PUNKT_TEXT).get_params(), dir=str(folder))
    ifeval._has_punkt.cache_clear()
    yield
    ifeval._has_punkt.cache_clear()


async def test_reward_func_counts_followed_instructions(library):
    both = await reward_of("one two three four", NO_COMMA, WORDS)
    assert (both["acc"], both["score"], both["method"]) == (1.0, 1.0, "instructions")
    half = await reward_of("one, two three four", NO_COMMA, WORDS)
    assert (half["acc"], half["score"]) == (0.0, -1.0)
    assert (half["parts/instructions"], half["parts/instructions_followed"]) == (2.0, 1.0)
    thought = await reward_of("<think>one, two</think>one two three four", NO_COMMA, WORDS)
    assert thought["acc"] == 1.0, "reasoning is not part of the response"
    empty = await reward_of("", NO_COMMA, WORDS)
    assert (empty["acc"], empty["parts/instructions_followed"]) == (0.0, 0.0)


async def test_reward_func_grades_responses_that_break_checkers(library):
    assert (await reward_of('{"a": 1}', JSON))["acc"] == 1.0
    deep = await reward_of("[" * 40_000, JSON)
    assert (deep["acc"], deep["error"]) == (0.0, "")
    endless = await reward_of("x" * (ifeval.MAX_RESPONSE_CHARS + 1), NO_COMMA)
    assert (endless["acc"], endless["error"]) == (0.0, "")


async def test_reward_func_reports_a_row_that_can_not_be_checked(library):
    unknown = await reward_of("one", ("punctuation:no_colon", {}))
    assert "got the instruction 'punctuation:no_colon'; expected one of " in unknown["error"]
    broken = await reward_of("one", ("length_constraints:number_words", {"num_words": 3, "relation": "about"}))
    assert broken["method"] == "error"
    assert "length_constraints:number_words can't be checked with" in broken["error"]


async def test_reward_func_counts_sentences_with_punkt(punkt):
    assert (await reward_of("They spoke. It rained.", SENTENCES))["acc"] == 1.0
    assert (await reward_of("They spoke", SENTENCES))["acc"] == 0.0


def test_check_row_grading_names_the_missing_model(library, tmp_path, monkeypatch):
    import nltk

    check_row_grading("x", metadata_of(NO_COMMA))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    ifeval._has_punkt.cache_clear()
    with pytest.raises(ConfigError, match="punkt_tab, which could not be downloaded; run python -m nltk.downloader"):
        check_row_grading("x", metadata_of(SENTENCES))
    ifeval._has_punkt.cache_clear()


async def test_eval_reports_both_accuracies(library, tmp_path, shipped_tokenizer, capsys):
    rows = [{"prompt": "Write.", "label": "a", "metadata": metadata_of(NO_COMMA, WORDS)} for _ in range(2)]
    data = tmp_path / "ifeval.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = ["one two three four", "one, two three four", "one, two", "one two three four five"]
    script = [Reply.tokens(ids_of(shipped_tokenizer, f"{text}<|im_end|>")) for text in texts]
    ended = await evaluate_on_fake(
        tmp_path,
        shipped_tokenizer,
        script,
        data=[data],
        config=None,
        protocol="qwen3",
        sampling_overrides={"samples": 2, "max_new_tokens": 64},
        concurrency=1,
    )
    (sums,) = ended.report["data_sets"].values()
    assert (sums["avg_at_n"], sums["instruction_accuracy"], sums["maj_at_n"]) == (0.5, 0.625, None)
    assert "IFEval, strict: by prompt 50.0%, by instruction 62.5%" in capsys.readouterr().out
    prompt = shipped_tokenizer.decode(ended.fake.requests[0].input_ids)
    assert "Write.<|im_end|>" in prompt, "no answer instruction is appended"


def test_validate_checks_the_instructions_of_ifeval(library, tmp_path, capsys):
    unknown = ("punctuation:no_colon", {})
    rows = [{"prompt": "Write.", "label": "a", "metadata": metadata_of(one)} for one in (NO_COMMA, WORDS, unknown)]
    data = tmp_path / "ifeval.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = load_reward(None, None, ["score"])
    assert asyncio.run(run_validate(data, reward, prompt_key="prompt", label_key="label")) is False
    out = capsys.readouterr().out
    assert f"{data}:3: label \"a\": got the instruction 'punctuation:no_colon'" in out
    assert out.endswith("2 of 3 ground truths are right\n")
