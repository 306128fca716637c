"""The part of experiments/shipped_model that makes a model which knows recorded conversations by heart."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer

from strands_rollout.engine import SHIPPED_MODEL_DIR
from strands_rollout.template.tokens import TokenEncoder

MANY_TOOLS = Path(__file__).parents[1] / "real/many_tools/checkpoint"
SYSTEM = "<|im_start|>system\nAnswer in colours, and say nothing else at all.<|im_end|>\n"
SPOKEN = (
    (("What is grass?", "Green."), ("And snow?", "White.")),
    (("What is coal?", "Black."),),
    (("What is the sea?", "Blue."), ("And foam?", "White.")),
)


def pieces(turns: tuple[tuple[str, str], ...]) -> list[tuple[str, bool]]:
    """A conversation as it is recorded."""
    found: list[tuple[str, bool]] = []
    for number, (question, answer) in enumerate(turns):
        before = "\n" if number else SYSTEM
        found += [(f"{before}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False)]
        found += [(f"{answer}<|im_end|>", True)]
    return found


@pytest.fixture
def transcripts_file(tmp_path: Path) -> Path:
    path = tmp_path / "transcripts.jsonl"
    path.write_text("".join(json.dumps({"pieces": pieces(turns)}) + "\n" for turns in SPOKEN))
    return path


@pytest.fixture
def episodes(shipped_model: Any, transcripts_file: Path, shipped_tokenizer: Any) -> Any:
    """The transcripts in the shipped model's tokens."""
    module = shipped_model("transcripts")
    encoder = TokenEncoder(shipped_tokenizer)
    return [module.tokenized(transcript, encoder) for transcript in module.read_transcripts(transcripts_file)]


def test_what_was_sampled_is_learned(episodes: Any, shipped_tokenizer: Any) -> None:
    for turns, episode in zip(SPOKEN, episodes, strict=True):
        whole = "".join(text for text, _ in pieces(turns))
        assert list(episode.token_ids) == shipped_tokenizer.encode(whole, add_special_tokens=False)
        learned = [token for token, is_learned in zip(episode.token_ids, episode.is_learned, strict=True) if is_learned]
        assert shipped_tokenizer.decode(learned) == "".join(f"{answer}<|im_end|>" for _, answer in turns)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", "line 1 is '\\[\\]'; expected"),
        ('{"pieces": [["text"]]}', "expected .*was it sampled"),
        ("no JSON", "line 1 is 'no JSON'"),
        ('{"pieces": [["text", false]]}', "nothing in .* line 1 was sampled"),
    ],
)
def test_a_line_that_is_no_transcript_is_refused(shipped_model: Any, tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "transcripts.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=words):
        shipped_model("transcripts").read_transcripts(path)


def test_the_shipped_model_is_not_overwritten_by_one_of_transcripts(transcripts_file: Path) -> None:
    with pytest.raises(typer.BadParameter, match="name another folder"):
        importlib.import_module("experiments.shipped_model.__main__").main(transcripts=transcripts_file)


def test_the_model_of_many_tools_is_small_and_knows_its_episodes() -> None:
    facts = json.loads((MANY_TOOLS / "training.json").read_text())
    assert facts["greedy"] == 1.0
    assert facts["certainty"] > 0.9
    assert {path.name for path in MANY_TOOLS.iterdir()} == {path.name for path in SHIPPED_MODEL_DIR.iterdir()}
    assert sum(path.stat().st_size for path in MANY_TOOLS.iterdir()) < 1_500_000


@pytest.mark.torch
def test_an_abridged_prompt_lacks_context_alone(shipped_model: Any, episodes: Any) -> None:
    pytest.importorskip("torch")
    rng = Random(1)
    for group in (episodes, episodes[1:2]):
        lengths = set()
        for _ in range(20):
            abridged = shipped_model("memorizing").abridged(group, rng)
            lengths.add(len(abridged[0].token_ids))
            for short, whole in zip(abridged, group, strict=True):
                first = whole.is_learned.index(True) - len(whole.token_ids)
                assert short.token_ids[first:] == whole.token_ids[first:]
                assert short.is_learned[first:] == whole.is_learned[first:]
        assert len(lengths) > 3


@pytest.mark.torch
def test_an_episode_alone_is_learned_as_among_others(shipped_model: Any, episodes: Any) -> None:
    torch = pytest.importorskip("torch")
    training, model = shipped_model("training"), shipped_model("checkpoint").load_model(SHIPPED_MODEL_DIR)
    with torch.inference_mode():
        together = training.episode_logits(model, episodes)[0]
        alone = torch.cat([training.episode_logits(model, [episode])[0] for episode in episodes])
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=1e-3)


@pytest.mark.torch
def test_transcripts_are_known_by_heart_after_training(
    shipped_model: Any, transcripts_file: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from transformers import AutoTokenizer

    memorizing, out = shipped_model("memorizing"), tmp_path / "model"
    shape = replace(memorizing.SHAPE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, context_length=256)
    plan = memorizing.Plan(steps=150, learning_rate=0.01, vocabulary_size=300, certainty=0.9, shape=shape)
    facts = memorizing.memorize(plan, transcripts_file, out, lambda *_: None)
    assert facts["greedy"] == 1.0
    assert facts["certainty"] >= 0.9
    assert facts == json.loads((out / "training.json").read_text())
    tokenizer, model = AutoTokenizer.from_pretrained(out), shipped_model("checkpoint").load_model(out)
    prompt = tokenizer("".join(text for text, _ in pieces(SPOKEN[0])[:3]), return_tensors="pt").input_ids
    said = model.generate(input_ids=prompt, do_sample=False, temperature=None, max_new_tokens=8)
    assert tokenizer.decode(said[0, prompt.shape[1] :]) == "White.<|im_end|>"
