"""`DriftMeter`: tokens that training on text would change, by class, and context that the template doesn't render."""

from typing import Any

import pytest
from byte_tokens import byte_ids, encode
from dumped_samples import Parts, dumped_episode, parts_of, sample_of_parts
from family_episodes import random_episode
from family_templates import TEMPLATES, tokenizer_with
from harness import ANSWER, TOOL_CALL, call_text, run

from strands_rollout import Sample
from strands_rollout.samples import finished_samples
from strands_rollout.slime_plugin.drift import (
    CLASSES,
    MAX_SAMPLES,
    DriftMeter,
    EpisodeDrift,
    RenderCheck,
    TurnReader,
    measure_some,
)
from strands_rollout.template.chat_template import ChatTemplate

QUESTION = "What is 17 * 2?"


async def play_two_turns(tokenizer: Any) -> Any:
    """Play an episode of two turns, the first with two calls."""
    calls = call_text().removesuffix("<|im_end|>") + "\n" + call_text("print(1)")
    return (await run(tokenizer, [calls, ANSWER], prompt=QUESTION)).sample


def measure(tokenizer: Any, sample: Any) -> EpisodeDrift:
    return DriftMeter(tokenizer).measure(dumped_episode(sample))


async def test_drift_meter_finds_none_in_canonical_tokens(tokenizer: Any) -> None:
    sample = await play_two_turns(tokenizer)
    found = measure(tokenizer, sample)
    assert (found.turn_drift, found.text_drift, found.off_policy, found.first, found.mismatches) == (0, 0, 0, None, [])
    assert (found.sampled_tokens, found.classes) == (sum(sample.loss_mask), dict.fromkeys(CLASSES, 0))


async def test_drift_meter_reads_the_question_of_an_environment(tokenizer: Any) -> None:
    settings = {"environment": "strands_rollout.examples.guessing_game.GuessingGame", "tools": []}
    sample = Sample(prompt="Play.", label="37")
    played = await run(
        tokenizer,
        [TOOL_CALL.format(name="guess", arguments='{"number": 37}'), ANSWER],
        settings=settings,
        sample=sample,
    )
    assert measure(tokenizer, played.sample).mismatches == []


async def test_drift_meter_counts_drifted_tokens_by_class(tokenizer: Any) -> None:
    prompt, call, context, answer = parts_of(await play_two_turns(tokenizer))
    before, name, after = "I will run ", "execute", call_text().partition("execute")
    text = [
        *byte_ids(tokenizer, before),
        *encode(tokenizer, after[0]),
        *byte_ids(tokenizer, name),
        *encode(tokenizer, after[2]),
    ]
    spelled = [*byte_ids(tokenizer, "<think>"), *encode(tokenizer, "x"), *byte_ids(tokenizer, "\n\n"), *answer]
    (single,) = parts_of((await run(tokenizer, [call_text(), ANSWER], prompt=QUESTION)).sample)[2:3]
    found = measure(tokenizer, sample_of_parts([prompt, text, single, spelled], prompt=QUESTION))
    blank = sum(not tokenizer.decode([token]).strip() for token in byte_ids(tokenizer, before))
    in_text = len(byte_ids(tokenizer, before)) - blank
    assert found.classes == {
        "assistant text": pytest.approx(in_text, abs=2),  # a word of one byte has the same token either way
        "tool call": len(name),
        "whitespace": pytest.approx(2 + blank, abs=3),
        "special tokens": len("<think>"),
        "template": 0,
    }
    assert (found.turn_drift, found.mismatches) == (sum(found.classes.values()), [])


async def test_drift_meter_without_checks_context_counts_classes(
    tokenizer,
) -> None:
    prompt, call, context, answer = parts_of(await play_two_turns(tokenizer))
    name = "execute"
    before, _, after = tokenizer.decode(call).partition(name)
    spelled = [*encode(tokenizer, before), *byte_ids(tokenizer, name), *encode(tokenizer, after)]
    episode = dumped_episode(sample_of_parts([prompt, spelled, context[:-1], answer], prompt=QUESTION))
    checked, unchecked = (
        DriftMeter(tokenizer, checks_context=is_checked).measure(episode) for is_checked in (True, False)
    )
    assert (len(checked.mismatches or []), unchecked.mismatches, unchecked.counts["mismatched_tokens"]) == (
        1,
        None,
        None,
    )
    assert unchecked.classes == checked.classes
    assert unchecked.classes["tool call"] == len(name)


async def test_drift_meter_counts_off_policy_after_first_change(tokenizer: Any) -> None:
    prompt, call, context, answer = parts_of(await play_two_turns(tokenizer))
    word = byte_ids(tokenizer, " number")
    turn = [*encode(tokenizer, "The"), *word, *answer]
    found = measure(tokenizer, sample_of_parts([prompt, call, context, turn], prompt=QUESTION))
    position = len(prompt) + len(call) + len(context) + 1
    assert (found.turn_drift, found.text_drift) == (len(word), len(word))
    assert found.off_policy == len(word) + len(answer)
    assert found.first is not None
    assert (found.first.position, found.first.turn) == (position, 1)
    assert found.first.before.endswith("The")
    assert (found.first.got[0], found.first.again_texts[0]) == (word[0], " number")


def remove_end_of_turn(parts: Parts, tokenizer: Any) -> tuple[Parts, int]:
    """Remove the end-of-turn token of the first turn; also return its position."""
    prompt, call, context, answer = parts
    assert call[-1] == ChatTemplate(tokenizer).end_of_turn_id
    return [prompt, call[:-1], context, answer], len(prompt) + len(call) - 1


def respell_context(parts: Parts, tokenizer: Any) -> tuple[Parts, int]:
    """Spell a word of the context in single bytes; also return its position."""
    prompt, call, context, answer = parts
    user = encode(tokenizer, "user")
    at = next(at for at in range(len(context)) if context[at : at + len(user)] == user)
    spelled = [*context[:at], *byte_ids(tokenizer, "user"), *context[at + len(user) :]]
    return [prompt, call, spelled, answer], len(prompt) + len(call) + at


@pytest.mark.parametrize("defect", [remove_end_of_turn, respell_context], ids=lambda defect: defect.__name__)
async def test_drift_meter_locates_context_mismatch(tokenizer: Any, defect: Any) -> None:
    parts, position = defect(parts_of(await play_two_turns(tokenizer)), tokenizer)
    (found,) = measure(tokenizer, sample_of_parts(parts, prompt=QUESTION)).mismatches or []
    assert found.position == position
    assert found.tokens >= 1


async def test_dumped_episode_finds_turns_by_loss_mask(shipped_tokenizer: Any) -> None:
    parts = parts_of(await play_two_turns(shipped_tokenizer))
    foreign = sample_of_parts(parts, with_facts=False)
    assert dumped_episode(foreign).turns == dumped_episode(sample_of_parts(parts)).turns
    foreign.loss_mask = None  # slime's form of "train all"
    assert list(dumped_episode(foreign).turns) == [(len(parts[0]), len(foreign.tokens))]


@pytest.mark.parametrize(("results", "users"), [(2, 1), (0, 2)])
async def test_drift_meter_accepts_user_turns_after_results(tokenizer: Any, results: int, users: int) -> None:
    template = ChatTemplate(tokenizer)
    prompt, call, _, answer = parts_of(await play_two_turns(tokenizer))
    turn = call if results else answer
    messages: Any = [{"role": "tool", "name": "f", "tool_call_id": str(n), "content": "34"} for n in range(results)]
    messages += [{"role": "user", "content": f"And {n}?"} for n in range(users)]
    context = template.turn_ids(messages, last_id=turn[-1])
    assert measure(tokenizer, sample_of_parts([prompt, turn, context, answer], prompt=QUESTION)).mismatches == []
    cut = sample_of_parts([prompt, turn, context[:-1], answer], prompt=QUESTION)
    assert len(measure(tokenizer, cut).mismatches or []) == 1
    unopened = sample_of_parts([prompt[:-1], turn, context, answer], prompt=QUESTION)
    assert len(measure(tokenizer, unopened).mismatches or []) == 1


@pytest.mark.parametrize("known", TEMPLATES)
async def test_render_check_finds_changed_context_by_template(known, shipped_tokenizer) -> None:
    tokenizer = tokenizer_with(TEMPLATES[known][1], shipped_tokenizer)
    check = RenderCheck(TurnReader(tokenizer, {}))
    for seed in range(10):
        episode = random_episode(known, tokenizer, seed)
        await episode.play()
        parts = [ids for pair in zip(episode.contexts, episode.turns, strict=True) for ids in pair]
        question = next(message["content"] for message in episode.chat if message["role"] == "user")
        assert not question or list(check.mismatches(dumped_episode(sample_of_parts(parts, prompt=question)))) == []
        if question and len(parts) > 2:
            parts[2] = [*parts[2][:-1], episode.model.template.end_of_turn_id, *parts[2][-1:]]
            assert len(list(check.mismatches(dumped_episode(sample_of_parts(parts, prompt=question))))) == 1


def test_drift_meter_accepts_empty_result_and_unended_call(shipped_tokenizer: Any) -> None:
    tokenizer = tokenizer_with(TEMPLATES["deepseek_v3-1"][1], shipped_tokenizer)
    template = ChatTemplate(tokenizer)
    turn = template.encoder.encode_trusted(template.write_turn("", [("f", {})] * 2)[0])
    results: Any = [{"role": "tool", "name": "f", "tool_call_id": "c", "content": text} for text in ("", "1")]
    parts = [template.prompt_ids([{"role": "user", "content": QUESTION}]), turn]
    parts += [template.turn_ids(results, last_id=turn[-1]), encode(tokenizer, "Done.")]
    assert measure(tokenizer, sample_of_parts(parts, prompt=QUESTION)).mismatches == []


def measure_turns(tokenizer: Any, *turns: list[list[int]]) -> list[EpisodeDrift]:
    """Measure one sample for each list of turns; each turn follows one token of context."""
    context = encode(tokenizer, "\n")
    samples = [sample_of_parts([part for ids in sample_turns for part in (context, ids)]) for sample_turns in turns]
    return measure_some(finished_samples(samples), DriftMeter(tokenizer))


def test_measure_some_spreads_max_samples_evenly(shipped_tokenizer, monkeypatch) -> None:
    token = encode(shipped_tokenizer, " a")
    # every sample has a different length, which identifies the measured samples
    samples = [[token * length] for length in range(1, 2 * MAX_SAMPLES + 1)]
    lengths = [found.sampled_tokens for found in measure_turns(shipped_tokenizer, *samples)]
    assert lengths == list(range(1, 2 * MAX_SAMPLES, 2))
    monkeypatch.setattr("strands_rollout.slime_plugin.drift.MAX_TOKENS", 100)  # fewer long samples
    assert [drift.sampled_tokens for drift in measure_turns(shipped_tokenizer, *[[token * 24]] * 10)] == [24] * 4
    assert len(measure_turns(shipped_tokenizer, *[[token * 500]] * 10)) == 1


@pytest.mark.parametrize("invalid_id", [-1, 2**40, "7", None])
def test_measure_some_skips_unmeasurable_samples(shipped_tokenizer: Any, invalid_id: Any) -> None:
    plain = encode(shipped_tokenizer, " the answer")
    assert measure_turns(shipped_tokenizer) == []
    found = measure_turns(shipped_tokenizer, [plain], [plain, [*plain, invalid_id]], [plain, plain], [[]])
    assert [drift.sampled_tokens for drift in found] == [len(plain), 2 * len(plain)]
