"""A single-turn TorchRL policy over this package's client: prompts in, checked tokens and logprobs out.

Needs the extra `torchrl`. It stands where torchrl's own SGLangWrapper does, with the same keys
(torchrl/modules/llm/policies/sglang_wrapper.py). For an agent's episodes see `torchrl.to_tensordict`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, Self

from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LLMWrapperBase

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.errors import ConfigError, EngineAbortedError, ExportError
from strands_rollout.export.sampling_names import TORCHRL
from strands_rollout.export.torchrl_containers import TokenRow, containers_of
from strands_rollout.sglang_client import Generation, SGLangClient

_INPUT_MODES: Final = ("history", "text", "tokens")
_Key = str | tuple[str, ...]


class SGLangPolicy(LLMWrapperBase):  # type: ignore[misc] # torchrl is not there when types are checked
    """Samples one answer to each prompt of a batch.

    Reads `("history", "prompt")`, `("text", "prompt")` or `("tokens", "prompt")`, and sets `text`, `tokens`, `masks`,
    `log_probs` and `history`; see `torchrl_containers`. The chat template renders a history, in which no message's text
    makes a control token; a text is taken as rendered; tokens are sent as they are. There is no batching to set: SGLang
    batches what arrives, at any time.

    It waits for the engine without an event loop: from a coroutine call it with `asyncio.to_thread`.

    Args:
        base_url: The engine's, or a router's.
        tokenizer: A Hugging Face fast tokenizer.
        input_mode: "history", "text" or "tokens".
        input_key: Of the prompts; default: as above.
        prefer_tokens: In the mode "history", send a row's own `prompt` under `tokens_key` where it has one.
        chat_template: Instead of the tokenizer's.
        generate_kwargs: By TorchRL's names; a `seed` is the first prompt's, the next one's is one more.
        pad_output: Tensors of equal lengths in place of ragged ones.
        num_samples: Answers to each prompt, in a last batch dimension of their own; None for one, without it.
        concurrency: Requests at once.
        generate: Always True: logprobs of given tokens are a matter of the model that is trained.
        text_key: Where the answers are set; None leaves them out.
        masks_key: The same for masks.
        tokens_key: The same for tokens.
        log_probs_key: The same for logprobs.
        history_key: The same for the conversation.

    Raises:
        ConfigError: A keyword has no equal in SGLang, or the mode is unknown.
    """

    def __init__(
        self,
        base_url: str,
        tokenizer: Any,  # noqa: ANN401
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
        given = {name: value for name, value in locals().items() if name not in {"self", "__class__"}}
        super().__init__()
        if not generate:
            raise ConfigError(
                "got generate=False; this policy samples. The logprobs of given tokens are those of the model that is "
                "trained: torchrl's TransformersWrapper(generate=False) tells them"
            )
        if input_mode not in _INPUT_MODES:
            raise ConfigError(f"got input_mode={input_mode!r}; expected one of {', '.join(_INPUT_MODES)}")
        if num_samples is not None and num_samples < 1:
            raise ConfigError(f"got num_samples={num_samples}; expected at least 1, or None")
        self._given = given
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
        own = {"chat_template": chat_template} if chat_template else {}
        self._template = ChatTemplate(tokenizer, **own) if input_mode == "history" else None

    def get_new_version(self, **changes: Any) -> Self:  # noqa: ANN401
        """The same policy with other arguments, by the constructor's names."""
        return type(self)(**{**self._given, **changes})

    def get_dist(self, *_: object, **__: object) -> NoReturn:
        """Refused, since an engine tells logprobs of sampled tokens and no logits.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("SGLang tells no logits; torchrl's TransformersWrapper has the distribution")

    def forward(self, tensordict: TensorDictBase, **_: object) -> TensorDictBase:
        """A new TensorDict: the given one, and the answers.

        Raises:
            ExportError: The prompts can't be read.
            RolloutError: The engine did not deliver all of them.
        """
        if tensordict.ndim != 1:
            flat = tensordict.reshape(-1)
            done = self.forward(flat)
            return done.reshape(*tensordict.shape, *done.shape[1:]) if tensordict.ndim else done[0]
        if self.num_samples is None:
            return self._answered(tensordict)
        count = self.num_samples
        rows = self._answered(lazy_stack([row for row in tensordict.unbind(0) for _ in range(count)])).unbind(0)
        return lazy_stack([lazy_stack(list(rows[at : at + count])) for at in range(0, len(rows), count)])

    def _answered(self, tensordict: TensorDictBase) -> TensorDictBase:
        """One answer to each prompt of a batch with one dimension."""
        prompts = self._prompt_ids(tensordict)
        answers = asyncio.run(self._sample(prompts))
        rows = [
            TokenRow(prompt, answer.output_ids, [1] * len(answer.output_ids), answer.logprobs)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        outputs = containers_of(rows, self.tokenizer, padded=self.pad_output)
        if self.input_mode == "history":
            for given, output in zip(tensordict[self.in_keys[0]].unbind(0), outputs, strict=True):
                output["history"] = _continued(given, output["history"])
        return lazy_stack([self._with(*pair) for pair in zip(tensordict.unbind(0), outputs, strict=True)])

    def _with(self, given: TensorDictBase, output: TensorDictBase) -> TensorDictBase:
        row = TensorDict(dict(given.items()))
        for name, key in self._keys.items():
            row[key] = output[name]
        return row

    async def _sample(self, prompts: Sequence[Sequence[int]]) -> list[Generation]:
        gate, seed = asyncio.Semaphore(self.concurrency), self.sampling_params.get("sampling_seed")

        async def one(number: int, prompt: Sequence[int]) -> Generation:
            own = {} if seed is None else {"sampling_seed": seed + number}
            async with gate:
                answer = await client.generate(prompt, {**self.sampling_params, **own})
            if answer.finish_reason.type == "abort":
                raise EngineAbortedError(f"the engine aborted the answer to prompt {number}: {answer.finish_reason}")
            return answer

        async with SGLangClient(self.base_url) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(number, prompt)) for number, prompt in enumerate(prompts)]
            except ExceptionGroup as e:  # of one outage, which any of them tells
                raise e.exceptions[0] from e
            return [task.result() for task in tasks]

    def _prompt_ids(self, tensordict: TensorDictBase) -> list[list[int]]:
        (key,) = self.in_keys
        if key not in tensordict.keys(include_nested=True):
            raise ExportError(f"got a TensorDict without {key}, which input_mode={self.input_mode!r} reads")
        if self.input_mode == "tokens":
            return self._unpadded(tensordict, key)
        if self.input_mode == "history":
            tokens = _path(self.tokens_key or "tokens", "prompt")
            if self.prefer_tokens and tokens in tensordict.keys(include_nested=True):
                return self._unpadded(tensordict, tokens)
            return [self._rendered(history) for history in tensordict[key].unbind(0)]
        texts = _strings(tensordict[key], "texts")
        return [list(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def _rendered(self, history: History) -> list[int]:
        if self._template is None:
            raise ConfigError("a history is read in input_mode='history' only")
        messages = list(zip(_strings(history.role, "roles"), _strings(history.content, "contents"), strict=True))
        return self._template.prompt_ids([{"role": role, "content": text} for role, text in messages])

    def _unpadded(self, tensordict: TensorDictBase, key: _Key) -> list[list[int]]:
        prompts, parent = tensordict.get(key, as_list=True), _path(key)[:-1]
        if not parent or not getattr(tensordict[parent], "padded", False):
            return [prompt.tolist() for prompt in prompts]
        masks = tensordict.get(_path(self.masks_key or "masks", "all_attention_mask"), None)
        if masks is None:
            raise ExportError("got padded tokens without masks.all_attention_mask, which tells padding from tokens")
        return [prompt[mask[: len(prompt)]].tolist() for prompt, mask in zip(prompts, masks, strict=True)]


def _strings(values: Iterable[object], what: str) -> list[str]:
    """The values, which other modalities and unknown containers would make something else of."""
    found = list(values)
    if not all(isinstance(value, str) for value in found):
        raise ExportError(f"got {what} of {', '.join({type(value).__name__ for value in found})}; expected str")
    return found  # type: ignore[return-value] # just checked


def _path(*keys: _Key) -> tuple[str, ...]:
    """One key of several that lie in each other."""
    return tuple(part for key in keys for part in ((key,) if isinstance(key, str) else key))


def _continued(given: History, answered: ChatHistory) -> ChatHistory:
    """The history as it was given, and what was answered."""
    full = lazy_stack([*given.unbind(0), *answered.response.unbind(0)])
    return ChatHistory(prompt=given, response=answered.response, full=full)
