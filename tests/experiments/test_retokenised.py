"""Retokenising keeps what canonical text keeps, trains what lies in trained text, and says what it changed."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from spelled_tokens import bytewise, encode
from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from experiments.methods import Retokenised, retokenise
from strands_rollout import Sample
from strands_rollout.errors import TrajectoryError
from strands_rollout.template.drift import drift_of_turn, token_bytes

PROMPT = "<|im_start|>user\nWhat is 17 * 2?<|im_end|>\n<|im_start|>assistant\n"
TURN = "The answer is the number 34.<|im_end|>"
CONTEXT = "\n<|im_start|>user\n<tool_response>\n34\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def sample_of(prompt: list[int], *parts: tuple[list[int], int]) -> Sample:
    """A sample of a prompt and parts of a response, each trained (1) or not (0); no two logprobs are equal."""
    sample = Sample(tokens=list(prompt))
    for ids, trained in parts:
        log_probs = [-(sample.response_length + at + 1) / 100 for at in range(len(ids))] if trained else None
        sample.append_response_tokens(tokens=ids, log_probs=log_probs, trainable=bool(trained))
    return sample


def trained_text(tokenizer: Any, found: Retokenised) -> list[str]:
    """The runs of trained tokens as texts."""
    runs: list[list[int]] = [[]]
    for token, mask in zip(found.tokens[found.prompt_length :], found.loss_mask, strict=True):
        if mask:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def test_an_episode_of_tokens_that_the_tokenizer_itself_would_choose_comes_back_whole(tokenizer: Any) -> None:
    turn, context = encode(tokenizer, TURN), encode(tokenizer, CONTEXT)
    sample = sample_of(encode(tokenizer, PROMPT), (turn, 1), (context, 0), (turn, 1))
    found = retokenise(sample, tokenizer)
    assert (found.tokens, found.loss_mask) == (sample.tokens, sample.loss_mask)
    assert found.prompt_length == len(encode(tokenizer, PROMPT))
    assert (found.sampled_tokens, found.drifted_tokens, found.first_difference) == (2 * len(turn), 0, None)
    expected = [value if mask else None for value, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)]
    assert found.aligned_log_probs == expected


def test_a_word_sampled_in_other_pieces_is_trained_as_one_token_without_a_logprob(tokenizer: Any) -> None:
    before, word, after = encode(tokenizer, "It is the"), bytewise(tokenizer, " number"), encode(tokenizer, " 34.")
    prompt = encode(tokenizer, PROMPT)
    found = retokenise(sample_of(prompt, ([*before, *word, *after], 1)), tokenizer)
    response = found.tokens[found.prompt_length :]
    assert response == [*before, *encode(tokenizer, " number"), *after]
    assert found.loss_mask == [1] * len(response)
    assert (found.drifted_tokens, found.first_difference) == (len(word), len(prompt) + len(before))
    aligned = found.aligned_log_probs
    assert [at for at, value in enumerate(aligned) if value is None] == [len(before)]
    # what comes after keeps the logprobs that it was sampled at, at its new position
    assert aligned[-1] == -(len(before) + len(word) + len(after)) / 100


def test_control_tokens_that_a_tool_spelled_become_real_and_the_mask_still_fits(tokenizer: Any) -> None:
    turn, forged = encode(tokenizer, TURN), bytewise(tokenizer, "\n<|im_start|>user\nsays <|im_end|>\n")
    found = retokenise(sample_of(encode(tokenizer, PROMPT), (turn, 1), (forged, 0), (turn, 1)), tokenizer)
    assert found.tokens.count(encode(tokenizer, "<|im_end|>")[0]) == 4
    assert trained_text(tokenizer, found) == [TURN, TURN]
    assert found.drifted_tokens == 0
    assert found.first_difference is not None


def test_a_token_that_grows_out_of_the_prompt_belongs_to_the_prompt(shipped_tokenizer: Any) -> None:
    newline, two = encode(shipped_tokenizer, "\n"), encode(shipped_tokenizer, "\n\n")
    assert (len(newline), len(two)) == (1, 1)
    prompt = encode(shipped_tokenizer, PROMPT)
    assert prompt[-1:] == newline
    found = retokenise(sample_of(prompt, ([*newline, *encode(shipped_tokenizer, "34")], 1)), shipped_tokenizer)
    assert found.tokens[: found.prompt_length] == [*prompt[:-1], *two]
    assert trained_text(shipped_tokenizer, found) == ["34"]
    assert found.drifted_tokens == 1
    swallowed = retokenise(sample_of(prompt, (newline, 1)), shipped_tokenizer)
    assert (swallowed.loss_mask, swallowed.aligned_log_probs) == ([0], [None])
    assert swallowed.prompt_length == len(swallowed.tokens) - 1
    with pytest.raises(TrajectoryError, match="1 tokens; expected one of the prompt and one of the response"):
        retokenise(sample_of(newline, (newline, 1)), shipped_tokenizer)


def test_what_merges_across_the_end_of_a_turn_goes_by_its_first_byte(shipped_tokenizer: Any) -> None:
    newline, answer = encode(shipped_tokenizer, "\n"), encode(shipped_tokenizer, "34")
    prompt = encode(shipped_tokenizer, PROMPT)
    # a turn that was cut before its end token, then context that begins with what its last token goes on with
    cut = retokenise(sample_of(prompt, ([*answer, *newline], 1), (newline, 0), (answer, 1)), shipped_tokenizer)
    assert cut.loss_mask == [1] * len(answer) + [1] + [1] * len(answer)
    begun = retokenise(sample_of(prompt, (answer, 1), (newline, 0), ([*newline, *answer], 1)), shipped_tokenizer)
    assert begun.loss_mask == [1] * len(answer) + [0] + [1] * len(answer)


def test_broken_utf8_becomes_trained_replacement_characters_where_it_was(tokenizer: Any) -> None:
    broken = bytewise(tokenizer, "🙂")[:2]
    turn = [*encode(tokenizer, "It is"), *broken, *encode(tokenizer, "<|im_end|>")]
    found = retokenise(sample_of(encode(tokenizer, PROMPT), (turn, 1), (encode(tokenizer, CONTEXT), 0)), tokenizer)
    assert trained_text(tokenizer, found) == ["It is\ufffd<|im_end|>"]
    assert found.drifted_tokens == len(broken)


def test_text_that_encoding_itself_changes_keeps_its_mask() -> None:
    tokenizer = composing_tokenizer()
    accented = encode(tokenizer, "é")
    plain = {text: encode(tokenizer, text) for text in ("ab", "cd", "ef")}
    decomposed = [*encode(tokenizer, "e"), *bytewise(tokenizer, "\u0301")]
    sample = sample_of(plain["ab"], ([*decomposed, *plain["cd"]], 1), (decomposed, 0), (plain["ef"], 1))
    found = retokenise(sample, tokenizer)
    assert found.tokens == [*plain["ab"], *accented, *plain["cd"], *accented, *plain["ef"]]
    assert found.prompt_length == 2
    assert found.loss_mask == [*[1] * len(accented), 1, 1, *[0] * len(accented), 1, 1]
    # the letters around are where they were in the text that was given
    assert [value is not None for value in found.aligned_log_probs][-2:] == [True, True]


def composing_tokenizer() -> Any:
    """Bytes as tokens, of text whose accents are composed first."""
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


pieces = st.lists(st.text("aehnrtu 17.\n", min_size=1, max_size=6), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(prompt=pieces, parts=st.lists(st.tuples(pieces, st.integers(0, 1)), min_size=1, max_size=4))
def test_each_token_is_trained_if_its_first_character_was(shipped_tokenizer: Any, prompt: Any, parts: Any) -> None:
    def pieced(texts: list[str]) -> list[int]:
        return [token for text in texts for token in encode(shipped_tokenizer, text)]

    sample = sample_of(pieced(["<|im_start|>", *prompt]), *((pieced(texts), trained) for texts, trained in parts))
    found = retokenise(sample, shipped_tokenizer)
    of_character = [mask for texts, mask in [(prompt, 0), *parts] for text in texts for _ in text]
    at, expected = 0, []
    for token in found.tokens[1:]:
        expected.append(of_character[at])
        at += len(shipped_tokenizer.decode([token]))
    assert at == len(of_character)
    assert found.loss_mask == expected[found.prompt_length - 1 :]
    assert len(found.aligned_log_probs) == len(found.loss_mask)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(256, 1199), min_size=1, max_size=30))
def test_a_response_between_control_tokens_drifts_as_a_turn_alone_does(shipped_tokenizer: Any, ids: list[int]) -> None:
    assume("\ufffd" not in shipped_tokenizer.decode(ids))  # where drift takes equal bytes at the end for the same
    prompt = encode(shipped_tokenizer, "<|im_start|>")
    # a control token before it and one after keep the response's text to itself
    close = encode(shipped_tokenizer, "<|im_end|>")
    found = retokenise(sample_of(prompt, (ids, 1), (close, 0)), shipped_tokenizer)
    assert found.drifted_tokens == drift_of_turn(ids, shipped_tokenizer, token_bytes(shipped_tokenizer))
