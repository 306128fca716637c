"""The retokenised rollout: it keeps canonical tokens, trains the text that was trained, and reports what changed."""

from typing import Any

from byte_tokens import byte_ids, encode
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.methods import retokenise
from strands_rollout import Sample

PROMPT = "<|im_start|>user\nWhat is 17 * 2?<|im_end|>\n<|im_start|>assistant\n"
TURN = "The answer is the number 34.<|im_end|>"
CONTEXT = "\n<|im_start|>user\n<tool_response>\n34\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def sample_of(prompt: list[int], *parts: tuple[list[int], int]) -> Sample:
    """Return a sample of a prompt and response parts, each trained (1) or not (0), with distinct logprobs."""
    sample = Sample(tokens=list(prompt))
    for ids, trained in parts:
        log_probs = [-(sample.response_length + at + 1) / 100 for at in range(len(ids))] if trained else None
        sample.append_response_tokens(tokens=ids, log_probs=log_probs, trainable=bool(trained))
    return sample


def test_retokenised_keeps_episode_without_drift(tokenizer: Any) -> None:
    turn, context = encode(tokenizer, TURN), encode(tokenizer, CONTEXT)
    sample = sample_of(encode(tokenizer, PROMPT), (turn, 1), (context, 0), (turn, 1))
    found = retokenise(sample, tokenizer)
    assert (found.tokens, found.loss_mask) == (sample.tokens, sample.loss_mask)
    assert found.prompt_length == len(encode(tokenizer, PROMPT))
    assert (found.sampled_tokens, found.drifted_tokens, found.first_difference) == (2 * len(turn), 0, None)
    expected = [value if mask else None for value, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)]
    assert found.aligned_log_probs == expected


def test_retokenised_drifted_word_has_no_logprob(tokenizer: Any) -> None:
    before, word, after = encode(tokenizer, "It is the"), byte_ids(tokenizer, " number"), encode(tokenizer, " 34.")
    prompt = encode(tokenizer, PROMPT)
    found = retokenise(sample_of(prompt, ([*before, *word, *after], 1)), tokenizer)
    response = found.tokens[found.prompt_length :]
    assert response == [*before, *encode(tokenizer, " number"), *after]
    assert found.loss_mask == [1] * len(response)
    assert (found.drifted_tokens, found.first_difference) == (len(word), len(prompt) + len(before))
    aligned = found.aligned_log_probs
    assert [at for at, value in enumerate(aligned) if value is None] == [len(before)]
    # later tokens keep the logprobs that they were sampled with, at their new positions
    assert aligned[-1] == -(len(before) + len(word) + len(after)) / 100


pieces = st.lists(st.text("aehnrtu 17.\n", min_size=1, max_size=6), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(prompt=pieces, parts=st.lists(st.tuples(pieces, st.integers(0, 1)), min_size=1, max_size=4))
def test_retokenised_trains_token_by_its_first_character(shipped_tokenizer: Any, prompt: Any, parts: Any) -> None:
    def pieced(texts: list[str]) -> list[int]:
        return [token for text in texts for token in encode(shipped_tokenizer, text)]

    sample = sample_of(pieced(["<|im_start|>", *prompt]), *((pieced(texts), trained) for texts, trained in parts))
    found = retokenise(sample, shipped_tokenizer)
    of_character = [mask for texts, mask in [(prompt, 0), *parts] for text in texts for _ in text]
    at, expected = 0, []
    for token in found.tokens[1:]:
        expected.append(of_character[at])
        at += len(shipped_tokenizer.decode([token]))
    assert (at, found.loss_mask) == (len(of_character), expected[found.prompt_length - 1 :])
    assert len(found.aligned_log_probs) == len(found.loss_mask)
