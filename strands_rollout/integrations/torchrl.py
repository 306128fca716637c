"""TorchRL: finished samples as a TensorDict for its LLM losses, and a policy that samples from an engine.

This module needs the extra `torchrl`. Sources in torchrl 0.14:

- torchrl/objectives/llm/grpo.py: the keys that the losses and MCAdvantage read; the losses leave out tokens without a
  logprob.
- torchrl/modules/llm/policies/common.py: the containers.
- torchrl/modules/llm/policies/vllm_wrapper.py: in `LogProbs.full`, tokens without a logprob are NaN; `LogProbs.prompt`
  is set only if the engine returns the prompt's logprobs.
- torchrl/modules/llm/policies/sglang_wrapper.py: the wrapper that `SGLangPolicy` replaces, with the same keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import torch
from tensordict import MetaData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LLMWrapperBase, LogProbs, Masks, Text, Tokens

from strands_rollout.client.client import SGLangClient
from strands_rollout.client.generate_api import Generation
from strands_rollout.errors import ConfigError, EngineAbortedError, ExportError
from strands_rollout.integrations.conversion import TORCHRL, compared_rewards, finished_episodes
from strands_rollout.settings import REWARD_KEY
from strands_rollout.template.chat_template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_LOGPROB: Final = float("nan")
_TURN_START: Final = "<|im_start|>"
_TURN_END: Final = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one sample; `loss_mask` and `logprobs` have an entry per response token, including context."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]


def containers_of(rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase, *, padded: bool) -> list[TensorDict]:
    """Return a TensorDict for each row, without batch dimensions, with TorchRL's default keys.

    If `padded`, all rows have equal lengths: prompts are padded on the left and responses on the right. So a full
    sequence may have padding on both sides.
    """
    prompt_length = max((len(row.prompt_ids) for row in rows), default=0) if padded else 0
    response_length = max((len(row.response_ids) for row in rows), default=0) if padded else 0
    return [_containers(row, tokenizer, prompt_length, response_length, padded=padded) for row in rows]


def _containers(
    row: TokenRow, tokenizer: PreTrainedTokenizerBase, prompt_length: int, response_length: int, *, padded: bool
) -> TensorDict:
    before = max(0, prompt_length - len(row.prompt_ids))
    after = max(0, response_length - len(row.response_ids))
    pad_ids = [tokenizer.pad_token_id, tokenizer.eos_token_id, 0]
    pad_id = next(int(pad_id) for pad_id in pad_ids if pad_id is not None)
    prompt = torch.tensor([pad_id] * before + list(row.prompt_ids), dtype=torch.int64)
    response = torch.tensor(list(row.response_ids) + [pad_id] * after, dtype=torch.int64)
    full = torch.cat([prompt, response])
    attention = [False] * before + [True] * (len(full) - before - after) + [False] * after
    trained = [bool(mask) for mask in row.loss_mask] + [False] * after
    trained_logprobs = [
        logprob if mask else _NO_LOGPROB for logprob, mask in zip(row.logprobs, row.loss_mask, strict=True)
    ]
    logprobs = torch.tensor(trained_logprobs + [_NO_LOGPROB] * after, dtype=torch.float32)
    texts = [_text(ids, tokenizer) for ids in (row.prompt_ids, row.response_ids)]
    is_padded = MetaData(padded)
    return TensorDict(
        {
            "text": Text(prompt=texts[0], response=texts[1], full="".join(texts)),
            "tokens": Tokens(prompt=prompt, response=response, full=full, padded=is_padded),
            "masks": Masks(
                all_attention_mask=torch.tensor(attention, dtype=torch.bool),
                all_assistant_mask=torch.tensor([False] * len(prompt) + trained, dtype=torch.bool),
                padded=is_padded,
            ),
            "log_probs": LogProbs(
                response=logprobs, full=torch.cat([torch.full((len(prompt),), _NO_LOGPROB), logprobs]), padded=is_padded
            ),
            "history": chat_history(row, tokenizer),
        }
    )


def chat_history(row: TokenRow, tokenizer: PreTrainedTokenizerBase) -> ChatHistory:
    """Return the conversation, split at ChatML's control tokens, so that no text of a message can forge a turn.

    These control tokens are `<|im_start|>` and `<|im_end|>`. The roles come from the rendered template (Qwen renders
    tool results as user messages). Tool calls stay in the assistant's content and have no field, since a template would
    render them twice. If the tokenizer or the prompt lacks `<|im_start|>`, the prompt is one user message and the
    response one assistant message.
    """
    start_id, end_id = (tokenizer.convert_tokens_to_ids(token) for token in (_TURN_START, _TURN_END))
    ids, prompt_length = [*row.prompt_ids, *row.response_ids], len(row.prompt_ids)
    # a control token sampled by the policy does not begin a turn
    is_context = [True] * prompt_length + [not mask for mask in row.loss_mask]
    starts = [
        position
        for position, token in enumerate(ids)
        if token == start_id and token != tokenizer.unk_token_id and is_context[position]
    ]
    prompt_starts = [start for start in starts if start < prompt_length]
    if not prompt_starts:
        parts = [("user", row.prompt_ids), ("assistant", row.response_ids)]
        messages, prompt_count = [(role, _text(part, tokenizer), True) for role, part in parts], 1
    else:
        messages = [_message(ids[start + 1 : stop], end_id, tokenizer) for start, stop in pairwise([*starts, len(ids)])]
        # the policy's first turn begins at the end of the prompt, but belongs to the response
        prompt_count = len(prompt_starts) - (end_id not in row.prompt_ids[prompt_starts[-1] :])
    return ChatHistory(
        prompt=_history(messages[:prompt_count]),
        response=_history(messages[prompt_count:]),
        full=_history(messages),
    )


_Message = tuple[str, str, bool]


def _message(ids: Sequence[int], end_id: int, tokenizer: PreTrainedTokenizerBase) -> _Message:
    """Return the role and the content of a message, and whether it has an end token."""
    end = next((position for position in range(len(ids) - 1, -1, -1) if ids[position] == end_id), None)
    role, _, content = _text(ids if end is None else ids[:end], tokenizer).partition("\n")
    return role, content, end is not None


def _history(messages: Sequence[_Message]) -> History:
    return lazy_stack(
        [History(role=role, content=content, is_complete=is_complete) for role, content, is_complete in messages]
    )


def _text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def to_tensordict(
    samples: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    padded: bool = False,
    reward_key: str = REWARD_KEY,
) -> TensorDictBase:
    """Return a TensorDict of batch size [samples], one row per sample, in order; without samples, it has no keys.

    It has TorchRL's default keys: `text`, `tokens`, `masks`, `log_probs`, `history` (see `containers_of`) and `query`
    (the prompt's text; MCAdvantage groups by it); under `next`: `reward` [samples, 1, 1], `done`, `terminated` and
    `truncated` [samples, 1].

    `masks.all_assistant_mask` is True for the trained tokens of all turns: pass `masking_strategy="rlhf"` to losses.
    `log_probs` are NaN for untrained tokens, which the losses leave out. For a sample that is not trained, the mask is
    False everywhere, and `compared_rewards` sets the reward.

    Args:
        samples: A flat iterable of samples (slime's or this package's) with rewards.
        tokenizer: The policy's tokenizer.
        padded: Return tensors of equal lengths. Ragged tensors are read with `get(key, as_nested_tensor=True)`,
            `as_list=True` or `as_padded_tensor=True`.
        reward_key: Key of the number in a reward that is a dict.

    Raises:
        ExportError: See `finished_episodes`.
    """
    episodes = finished_episodes(samples, reward_key=reward_key)
    rows = [
        TokenRow(episode.prompt_ids, episode.response_ids, episode.loss_mask, episode.logprobs) for episode in episodes
    ]
    dicts = containers_of(rows, tokenizer, padded=padded)
    for row, episode, reward in zip(dicts, episodes, compared_rewards(episodes), strict=True):
        is_truncated = episode.status == "truncated"
        flags = {"done": True, "terminated": not is_truncated, "truncated": is_truncated}
        row["query"] = row["text"].prompt
        row["next"] = TensorDict({name: torch.tensor([flag]) for name, flag in flags.items()})
        row["next", "reward"] = torch.tensor([[reward]], dtype=torch.float32)
    return lazy_stack(dicts) if dicts else TensorDict(batch_size=[0])


_INPUT_MODES: Final = ("history", "text", "tokens")
_Key = str | tuple[str, ...]


class SGLangPolicy(LLMWrapperBase):  # type: ignore[misc] # torchrl is not installed for type checks
    """A TorchRL policy that samples answers to the prompts of a batch from an SGLang engine.

    By default, it reads `("history", "prompt")`, `("text", "prompt")` or `("tokens", "prompt")`, depending on
    `input_mode`, and sets `text`, `tokens`, `masks`, `log_probs` and `history`; see `containers_of`. A history is
    rendered with the chat template, and no message's text becomes a control token. Text is encoded without a template:
    it must be rendered already. Tokens are sent unchanged. SGLang batches the requests.

    `forward` blocks; in a coroutine, call it with `asyncio.to_thread`.

    Args:
        base_url: URL of the engine or router.
        tokenizer: A Hugging Face fast tokenizer.
        input_mode: "history", "text" or "tokens".
        input_key: Key of the prompts; default: `(input_mode, "prompt")`.
        prefer_tokens: With input_mode "history", send the tokens at `(tokens_key, "prompt")` instead, if the batch has
            them.
        chat_template: Chat template for input_mode "history"; default: the tokenizer's.
        generate_kwargs: Sampling parameters with TorchRL's names; `seed` is used for the first answer, and increases by
            one per answer.
        pad_output: Return tensors of equal lengths instead of ragged tensors.
        num_samples: Answers per prompt, in an additional last batch dimension; None for one answer and no such
            dimension.
        concurrency: Maximum requests at the same time.
        generate: Must be True; for logprobs of given tokens, use the trained model.
        text_key: Key of the output text; None leaves it out.
        masks_key: Key of the masks; None leaves them out.
        tokens_key: Key of the tokens; None leaves them out.
        log_probs_key: Key of the logprobs; None leaves them out.
        history_key: Key of the conversation; None leaves it out.

    Raises:
        ConfigError: A sampling parameter is unknown or has no equivalent in SGLang, or `input_mode`, `num_samples` or
            `generate` has a value that is not allowed.
        TemplateError: With `input_mode="history"`, the chat template can't be used.
    """

    def __init__(
        self,
        base_url: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        input_mode: str = "history",
        input_key: _Key | None = None,
        prefer_tokens: bool = False,
        chat_template: str | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
        pad_output: bool = False,
        num_samples: int | None = None,
        concurrency: int = 64,
        generate: bool = True,
        text_key: _Key | None = "text",
        masks_key: _Key | None = "masks",
        tokens_key: _Key | None = "tokens",
        log_probs_key: _Key | None = "log_probs",
        history_key: _Key | None = "history",
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in {"self", "__class__"}}
        super().__init__()
        _check_arguments(input_mode, num_samples, generate=generate)
        self._arguments = arguments
        self.base_url, self.tokenizer, self.input_mode = base_url, tokenizer, input_mode
        self.num_samples, self.prefer_tokens = num_samples, prefer_tokens
        self.sampling_params = TORCHRL.to_sglang(generate_kwargs or {})
        self.generate, self.pad_output, self.concurrency = True, pad_output, concurrency
        self.text_key, self.masks_key, self.tokens_key = text_key, masks_key, tokens_key
        self.log_probs_key, self.history_key = log_probs_key, history_key
        keys = {"text": text_key, "masks": masks_key, "tokens": tokens_key}
        keys |= {"log_probs": log_probs_key, "history": history_key}
        self._keys: dict[str, _Key] = {name: key for name, key in keys.items() if key is not None}
        self.in_keys, self.out_keys = [input_key or (input_mode, "prompt")], list(self._keys.values())
        template_options = {"chat_template": chat_template} if chat_template else {}
        self._template = ChatTemplate(tokenizer, **template_options) if input_mode == "history" else None

    def get_new_version(self, **changes: object) -> Self:
        """Return a new policy with this policy's constructor arguments, updated with `changes`."""
        return type(self)(**{**self._arguments, **changes})

    def get_dist(self, *_: object, **__: object) -> NoReturn:
        """Raise an error, since an engine returns logprobs of sampled tokens and no logits.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("SGLang returns no logits; use torchrl's TransformersWrapper for the distribution")

    def forward(self, tensordict: TensorDictBase, **_: object) -> TensorDictBase:
        """Return a new TensorDict with the entries of `tensordict` and the answers.

        Raises:
            ExportError: The prompts can't be read.
            RolloutError: The engine failed to answer a prompt.
        """
        if tensordict.ndim != 1:
            answered = self.forward(tensordict.reshape(-1))
            return answered.reshape(*tensordict.shape, *answered.shape[1:]) if tensordict.ndim else answered[0]
        if self.num_samples is None:
            return self._generate_answers(tensordict)
        count = self.num_samples
        rows = self._generate_answers(lazy_stack([row for row in tensordict.unbind(0) for _ in range(count)])).unbind(0)
        return lazy_stack([lazy_stack(list(rows[at : at + count])) for at in range(0, len(rows), count)])

    def _generate_answers(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the entries and one answer per prompt, for a batch with one dimension."""
        prompts = self._prompt_ids(tensordict)
        answers = asyncio.run(self._sample(prompts))
        rows = [
            TokenRow(prompt, answer.output_ids, [1] * len(answer.output_ids), answer.logprobs)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        outputs = containers_of(rows, self.tokenizer, padded=self.pad_output)
        if self.input_mode == "history":
            for history, output in zip(tensordict[self.in_keys[0]].unbind(0), outputs, strict=True):
                answer = output["history"].response
                full = lazy_stack([*history.unbind(0), *answer.unbind(0)])
                output["history"] = ChatHistory(prompt=history, response=answer, full=full)
        rows_out = [TensorDict(dict(row.items())) for row in tensordict.unbind(0)]
        for row, output in zip(rows_out, outputs, strict=True):
            for name, key in self._keys.items():
                row[key] = output[name]
        return lazy_stack(rows_out)

    async def _sample(self, prompts: Sequence[Sequence[int]]) -> list[Generation]:
        semaphore, seed = asyncio.Semaphore(self.concurrency), self.sampling_params.get("sampling_seed")

        async def generate(number: int, prompt: Sequence[int]) -> Generation:
            seed_params = {} if seed is None else {"sampling_seed": seed + number}
            async with semaphore:
                answer = await client.generate(prompt, {**self.sampling_params, **seed_params})
            if answer.finish_reason.type == "abort":
                raise EngineAbortedError(f"the engine aborted the answer to prompt {number}: {answer.finish_reason}")
            return answer

        async with SGLangClient(self.base_url) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(generate(number, prompt)) for number, prompt in enumerate(prompts)]
            except ExceptionGroup as e:  # several errors usually have one cause, an outage
                raise e.exceptions[0] from e
            return [task.result() for task in tasks]

    def _prompt_ids(self, tensordict: TensorDictBase) -> list[list[int]]:
        (key,) = self.in_keys
        if key not in tensordict.keys(include_nested=True):
            raise ExportError(
                f"got a TensorDict without {key}; expected the prompts there, as input_mode={self.input_mode!r} or "
                "input_key says"
            )
        if self.input_mode == "tokens":
            return self._strip_padding(tensordict, key)
        if self.input_mode == "history":
            tokens = _nested_key(self.tokens_key or "tokens", "prompt")
            if self.prefer_tokens and tokens in tensordict.keys(include_nested=True):
                return self._strip_padding(tensordict, tokens)
            return [self._render(history) for history in tensordict[key].unbind(0)]
        texts = _require_strings(tensordict[key], "texts")
        return [list(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def _render(self, history: History) -> list[int]:
        if self._template is None:
            raise ConfigError(f"got a history with input_mode={self.input_mode!r}; expected input_mode='history'")
        messages = list(
            zip(_require_strings(history.role, "roles"), _require_strings(history.content, "contents"), strict=True)
        )
        return self._template.prompt_ids([{"role": role, "content": text} for role, text in messages])

    def _strip_padding(self, tensordict: TensorDictBase, key: _Key) -> list[list[int]]:
        prompts, parent = tensordict.get(key, as_list=True), _nested_key(key)[:-1]
        if not parent or not getattr(tensordict[parent], "padded", False):
            return [prompt.tolist() for prompt in prompts]
        masks = tensordict.get(_nested_key(self.masks_key or "masks", "all_attention_mask"), None)
        if masks is None:
            raise ExportError(
                "got padded tokens without masks.all_attention_mask, which is needed to remove the padding"
            )
        return [prompt[mask[: len(prompt)]].tolist() for prompt, mask in zip(prompts, masks, strict=True)]


def _check_arguments(input_mode: str, num_samples: int | None, *, generate: bool) -> None:
    if not generate:
        raise ConfigError(
            "got generate=False; this policy only samples. For the logprobs of given tokens, use the trained model: "
            "torchrl's TransformersWrapper(generate=False)"
        )
    if input_mode not in _INPUT_MODES:
        raise ConfigError(f"got input_mode={input_mode!r}; expected one of {', '.join(map(repr, _INPUT_MODES))}")
    if num_samples is not None and num_samples < 1:
        raise ConfigError(f"got num_samples={num_samples}; expected at least 1, or None")


def _require_strings(values: Iterable[object], name: str) -> list[str]:
    """Return the values; raise ExportError if a value is not a string, as with images or unknown containers."""
    strings = list(values)
    if not all(isinstance(value, str) for value in strings):
        raise ExportError(
            f"got {name} of the types {', '.join({type(value).__name__ for value in strings})}; expected only str"
        )
    return strings  # type: ignore[return-value] # just checked


def _nested_key(*keys: _Key) -> tuple[str, ...]:
    return tuple(part for key in keys for part in ((key,) if isinstance(key, str) else key))
