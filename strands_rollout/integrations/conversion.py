"""What the integrations share: finished samples, checked before they are handed on, and sampling parameters.

Other engines' sampling parameters are converted to SGLang's names; what SGLang can't do is refused, never dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeAlias

from strands_rollout.errors import ConfigError, ExportError
from strands_rollout.files.json_codec import Json
from strands_rollout.samples import EpisodeFacts, SampleLike, facts_of
from strands_rollout.settings import REWARD_KEY
from strands_rollout.slime_plugin.sample_contract import export_violations

Value: TypeAlias = Json

_CONVERTED: Final[Mapping[str, Callable[[Value], Value]]] = {
    "top_k": lambda value: -1 if value == 0 else value,  # all tokens are 0 in vLLM, and -1 in SGLang
    "logit_bias": lambda value: {str(token): bias for token, bias in value.items()},  # ids are text in JSON
    "do_sample": lambda value: None if value else 0.0,  # of transformers: greedy, or nothing
}


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """What a trainer needs of one sample; the three response lists have one entry per response token, and are copies.

    Attributes:
        prompt_ids: At least one.
        response_ids: At least one; sampled tokens and context between them.
        loss_mask: 1 where the policy wrote the token and is trained on it; all 0 where the sample is not trained.
        logprobs: At the sampling temperature; 0.0 for context.
        status: "completed", "truncated" or "failed".
        facts: Of the episode; none are known of a foreign sample.
    """

    sample: SampleLike
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    reward: float
    status: str
    facts: EpisodeFacts

    @property
    def is_trained(self) -> bool:
        """Whether its reward is compared with others': the infrastructure did not fail it, and it was not removed."""
        return self.status != "failed" and not self.sample.remove_sample


def finished_episodes(
    samples: Iterable[Any], *, reward_key: str = REWARD_KEY, may_lose_images: bool = False
) -> list[FinishedEpisode]:
    """The samples, slime's or ours, finished and rewarded, flat and in order; none is changed.

    `reward_key` is where the number is in a reward that is a dict. No form takes images along.

    Raises:
        ExportError: A sample is unfinished, has no such reward, has images, or its tokens, mask and logprobs disagree;
            the message says all that is wrong with the first such sample.
    """
    episodes = [_episode(sample, number, reward_key) for number, sample in enumerate(samples)]
    for number, episode in enumerate(episodes):
        if not may_lose_images and getattr(episode.sample, "multimodal_train_inputs", None) is not None:
            raise ExportError(
                f"{_where(episode.sample, number)} has images; expected text only: this form would hand on their "
                "tokens without them, and what is trained would not be what was sampled"
            )
    return episodes


def _episode(sample: SampleLike, number: int, reward_key: str) -> FinishedEpisode:
    where = _where(sample, number)
    if not hasattr(sample, "response_length"):
        hint = ": hand over the samples of a fan-out one by one" if isinstance(sample, list | tuple) else ""
        raise ExportError(f"{where} is a {type(sample).__name__}; expected slime's Sample or ours{hint}")
    found = export_violations(sample, reward_key=reward_key if isinstance(sample.reward, dict) else None)
    if found:
        raise ExportError(f"{where} can't be exported: {'; '.join(found)}; export samples after generate and reward")
    start, status = len(sample.tokens) - sample.response_length, str(sample.status.value)
    is_masked = status == "failed" or sample.remove_sample
    return FinishedEpisode(
        sample=sample,
        prompt_ids=list(sample.tokens[:start]),
        response_ids=list(sample.tokens[start:]),
        loss_mask=[0] * sample.response_length if is_masked else list(sample.loss_mask),
        logprobs=[float(logprob) for logprob in sample.rollout_log_probs],
        reward=float(sample.reward[reward_key] if isinstance(sample.reward, dict) else sample.reward),
        status=status,
        facts=facts_of(sample),
    )


def _where(sample: object, number: int) -> str:
    return f"sample {number} (index={getattr(sample, 'index', None)})"


def compared_rewards(episodes: Sequence[FinishedEpisode]) -> list[float]:
    """The rewards, for a trainer that compares all samples of a prompt, whether they are trained or not.

    One that is not trained gets the mean of the trained ones of its `group_index`, so that their mean stays their own;
    0.0 where there is none.
    """
    trained: dict[Hashable, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.is_trained and episode.sample.group_index is not None:
            trained[episode.sample.group_index].append(episode.reward)
    means = {group: sum(rewards) / len(rewards) for group, rewards in trained.items()}
    return [
        episode.reward if episode.is_trained else means.get(episode.sample.group_index, 0.0) for episode in episodes
    ]


@dataclass(frozen=True, slots=True)
class SamplingNames:
    """SGLang's names for one engine's parameters.

    Of `neutral` names, the values that ask for nothing are dropped, and any other is refused; `missing` have no equal
    whatever their value.
    """

    source: str
    names: Mapping[str, str]
    neutral: Mapping[str, tuple[Value, ...]]
    missing: frozenset[str]

    def to_sglang(self, params: Mapping[str, Value]) -> dict[str, Value]:
        """The same by SGLang's names. None asks for nothing, whatever the name.

        Raises:
            ConfigError: A name is unknown, has no equal in SGLang, or two ask for the same and differ.
        """
        found: dict[str, Value] = {}
        for name, value in params.items():
            if name not in self.names:
                self._check_neutral(name, value)
                continue
            converted = value if value is None else _CONVERTED.get(name, lambda same: same)(value)
            theirs = self.names[name]
            if converted is not None and found.setdefault(theirs, converted) != converted:
                raise ConfigError(
                    f"got {self.source}'s {name}={value!r}, and SGLang's {theirs}={found[theirs]!r} by another name; "
                    "expected one of them"
                )
        return found

    def _check_neutral(self, name: str, value: Value) -> None:
        known = [*self.names, *self.neutral, *self.missing]
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"got the sampling parameter {name!r}, which {self.source} does not have{hint}")
        neutral = self.neutral.get(name, ())
        # True is not 1 here: a flag is no number
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            allowed = f"; expected one of {', '.join(map(repr, neutral))}" if neutral else "; leave it out"
            raise ConfigError(f"got {self.source}'s {name}={value!r:.80}, which SGLang has no equal for{allowed}")


_SAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_COMMON: Final = {
    **{name: name for name in _SAME},
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}

VLLM: Final = SamplingNames(
    source="vLLM",
    names={
        **_COMMON,
        "logit_bias": "logit_bias",
        "max_generate_length": "max_new_tokens",  # SkyRL's own name, in its configuration
    },
    neutral={
        "n": (1,),
        "logprobs": (0, 1),  # the sampled token's own are always there
        "detokenize": (True, False),  # text is made of the ids here
        "flat_logprobs": (False,),
        "skip_clone": (True, False),
        "routed_experts_prompt_start": (0,),
        "bad_words": ([],),
        "extra_args": ({},),
    },
    missing=frozenset(
        {
            "prompt_logprobs",
            "prompt_logprob_token_ids",
            "prompt_logprob_start",
            "logprob_token_ids",
            "output_kind",
            "stream_interval",
            "structured_outputs",
            "allowed_token_ids",
            "skip_reading_prefix_cache",
            "thinking_token_budget",
            "repetition_detection",
            "trace_decode_token_ids",
            "best_of",
            "use_beam_search",
            "length_penalty",
            "early_stopping",
            "guided_decoding",
            "truncate_prompt_tokens",
            "logits_processors",
        }
    ),
)
"""vLLM's SamplingParams (vllm-project/vllm, vllm/sampling_params.py; the last two lines: of older versions)."""

TORCHRL: Final = SamplingNames(
    source="TorchRL",
    names={
        **_COMMON,
        "max_new_tokens": "max_new_tokens",
        "stop_sequences": "stop",
        "do_sample": "temperature",
    },
    neutral={
        "num_return_sequences": (1,),
        "n": (1,),
        "num_beams": (1,),
        "length_penalty": (1.0, 1),
        "early_stopping": (False,),
        "logprobs": (True, False, 0, 1),  # the sampled token's own are always there
        "detokenize": (True, False),
        "return_dict_in_generate": (True, False),
    },
    missing=frozenset(
        {
            "prompt_logprobs",
            "bad_words_ids",
            "force_words_ids",
            "no_repeat_ngram_size",
            "output_scores",
            "encoder_repetition_penalty",
            "num_beam_groups",
            "diversity_penalty",
            "pad_token_id",
            "eos_token_id",
            "sampling_type",
            "temperature_last",
            "top_p_last",
            "top_k_last",
        }
    ),
)
"""TorchRL's generate_kwargs (torchrl 0.14, torchrl/modules/llm/policies/common.py), with those of its vLLM wrapper."""
