"""Code that the integrations share: it checks and converts finished samples and sampling parameters.

Other engines' sampling parameters are converted to SGLang's names. An unknown parameter is refused. A known parameter
without an equivalent is refused, too, unless its value is None or changes nothing (see `SamplingNames.neutral`).
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

_VALUE_CONVERSIONS: Final[Mapping[str, Callable[[Value], Value]]] = {
    "top_k": lambda value: -1 if value == 0 else value,  # "all tokens" is 0 in vLLM, and -1 in SGLang
    "logit_bias": lambda value: {str(token): bias for token, bias in value.items()},  # JSON keys are strings
    "do_sample": lambda value: None if value else 0.0,  # transformers: False means greedy
}


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """A finished sample, converted to the fields that other trainers need.

    The lists are copies; `response_ids`, `loss_mask` and `logprobs` have one entry per response token.

    Attributes:
        sample: The sample itself.
        prompt_ids: Prompt tokens, at least one.
        response_ids: Sampled tokens and the context between them, at least one.
        loss_mask: 1 for tokens to train on; all 0 if the sample is not trained.
        logprobs: The sample's logprobs; in samples of this package, 0.0 for context.
        reward: The reward as a number; if the reward is a dict, the number under `reward_key`.
        status: "completed", "truncated" or "failed".
        facts: The episode's facts; empty for a sample of another program.
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
        """True if the sample did not fail and was not removed, so that its reward counts in its group."""
        return self.status != "failed" and not self.sample.remove_sample


def finished_episodes(
    samples: Iterable[Any], *, reward_key: str = REWARD_KEY, allow_images: bool = False
) -> list[FinishedEpisode]:
    """Check finished samples (slime's or this package's), and return them converted, in the same order.

    The samples are not changed.

    Args:
        samples: A flat iterable of samples with rewards.
        reward_key: Key of the number in a reward that is a dict.
        allow_images: Accept samples with images; no export includes the images themselves.

    Raises:
        ExportError: An element is not a sample; or a sample is unfinished, has no finite number as reward, or has
            forbidden images; or its tokens, mask or logprobs are invalid or disagree. The message names such a sample
            and its faults.
    """
    episodes = [_convert_sample(sample, number, reward_key) for number, sample in enumerate(samples)]
    for number, episode in enumerate(episodes):
        if not allow_images and getattr(episode.sample, "multimodal_train_inputs", None) is not None:
            raise ExportError(
                f"{_describe_sample(episode.sample, number)} has images; expected text only, since the export would "
                "have the image tokens without the images, and a trainer would train on inputs that the policy did not "
                "read"
            )
    return episodes


def _convert_sample(sample: SampleLike, number: int, reward_key: str) -> FinishedEpisode:
    where = _describe_sample(sample, number)
    if not hasattr(sample, "response_length"):
        hint = "; flatten the lists of a fan-out" if isinstance(sample, list | tuple) else ""
        raise ExportError(f"{where} is a {type(sample).__name__}; expected a Sample of slime or strands_rollout{hint}")
    violations = export_violations(sample, reward_key=reward_key if isinstance(sample.reward, dict) else None)
    if violations:
        faults = "; ".join(violations)
        raise ExportError(f"{where} can't be exported: {faults}; export samples after generate and reward")
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


def _describe_sample(sample: object, number: int) -> str:
    return f"sample {number} (index={getattr(sample, 'index', None)})"


def compared_rewards(episodes: Sequence[FinishedEpisode]) -> list[float]:
    """Return rewards for a trainer that compares all samples of a prompt, untrained samples included.

    A sample that is not trained gets the mean reward of its group's trained samples, so it does not shift the baseline.
    Without a trained sample in its group, or without a group, it gets 0.0. Samples with the same `group_index` are a
    group.
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
    """A mapping of another engine's sampling parameters to SGLang's.

    Attributes:
        source: The other engine's name.
        names: SGLang's name for each parameter that has an equivalent.
        neutral: For parameters without an equivalent, the values that change nothing and are dropped; other values are
            refused.
        missing: Parameters without an equivalent; every value except None is refused.
    """

    source: str
    names: Mapping[str, str]
    neutral: Mapping[str, tuple[Value, ...]]
    missing: frozenset[str]

    def to_sglang(self, params: Mapping[str, Value]) -> dict[str, Value]:
        """Return the parameters with SGLang's names and values; leave out parameters that are None or neutral.

        Raises:
            ConfigError: A name is unknown, a value has no equivalent in SGLang, or two names of the same parameter have
                different values.
        """
        sglang_params: dict[str, Value] = {}
        for name, value in params.items():
            if name not in self.names:
                self._check_neutral(name, value)
                continue
            convert = _VALUE_CONVERSIONS.get(name)
            converted = value if value is None or convert is None else convert(value)
            sglang_name = self.names[name]
            if converted is not None and sglang_params.setdefault(sglang_name, converted) != converted:
                raise ConfigError(
                    f"got {self.source}'s {name}={value!r}, but another name sets SGLang's {sglang_name} to "
                    f"{sglang_params[sglang_name]!r}; remove one of them"
                )
        return sglang_params

    def _check_neutral(self, name: str, value: Value) -> None:
        known = [*self.names, *self.neutral, *self.missing]
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{self.source} has no sampling parameter {name!r}{hint}")
        neutral = self.neutral.get(name, ())
        # compare types too, since True == 1
        if value is not None and not any(value == allowed and type(value) is type(allowed) for allowed in neutral):
            remedy = f"; expected {' or '.join(map(repr, neutral))}" if neutral else "; remove it"
            raise ConfigError(f"got {self.source}'s {name}={value!r:.80}, which has no equivalent in SGLang{remedy}")


_SHARED_NAMES: Final = (
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
_SHARED_MAPPING: Final = {
    **{name: name for name in _SHARED_NAMES},
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}

VLLM: Final = SamplingNames(
    source="vLLM",
    names={
        **_SHARED_MAPPING,
        "logit_bias": "logit_bias",
        "max_generate_length": "max_new_tokens",  # SkyRL's name in its configuration
    },
    neutral={
        "n": (1,),
        "logprobs": (0, 1),  # the sampled token's logprob is always returned
        "detokenize": (True, False),  # this package decodes the ids itself
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
"""vLLM's SamplingParams (vllm-project/vllm, vllm/sampling_params.py), including names of older versions."""

TORCHRL: Final = SamplingNames(
    source="TorchRL",
    names={
        **_SHARED_MAPPING,
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
        "logprobs": (True, False, 0, 1),  # the sampled token's logprob is always returned
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
"""TorchRL's generate_kwargs, including its vLLM wrapper's (torchrl 0.14, torchrl/modules/llm/policies/common.py)."""
