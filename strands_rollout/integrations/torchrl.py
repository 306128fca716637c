"""TorchRL: finished samples as one TensorDict that its LLM losses take.

Needs the extra `torchrl`. Read in torchrl 0.14: torchrl/objectives/llm/grpo.py (what the losses and MCAdvantage read;
tokens without a logprob are left out), torchrl/modules/llm/policies/common.py (the containers), vllm_wrapper.py (NaN in
`LogProbs.full` where there is no logprob, and no `LogProbs.prompt` where the engine gave none for it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from tensordict import MetaData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from strands_rollout.integrations.finished_episode import FinishedEpisode, compared_rewards, finished_episodes
from strands_rollout.settings import REWARD_KEY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_LOGPROB: Final = float("nan")
_TURN_BEGINS: Final = "<|im_start|>"
_TURN_ENDS: Final = "<|im_end|>"


def _containers(
    row: FinishedEpisode, tokenizer: PreTrainedTokenizerBase, prompt_length: int, response_length: int, *, padded: bool
) -> TensorDict:
    """Prompt and response padded to these lengths, or not at all where they are as long."""
    before = max(0, prompt_length - len(row.prompt_ids))
    after = max(0, response_length - len(row.response_ids))
    pad_ids = [tokenizer.pad_token_id, tokenizer.eos_token_id, 0]
    pad_id = next(int(pad_id) for pad_id in pad_ids if pad_id is not None)
    prompt = torch.tensor([pad_id] * before + list(row.prompt_ids), dtype=torch.int64)
    response = torch.tensor(list(row.response_ids) + [pad_id] * after, dtype=torch.int64)
    full = torch.cat([prompt, response])
    attention = [False] * before + [True] * (len(full) - before - after) + [False] * after
    trained = [bool(mask) for mask in row.loss_mask] + [False] * after
    known = [p if mask else _NO_LOGPROB for p, mask in zip(row.logprobs, row.loss_mask, strict=True)]
    logprobs = torch.tensor(known + [_NO_LOGPROB] * after, dtype=torch.float32)
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


def chat_history(row: FinishedEpisode, tokenizer: PreTrainedTokenizerBase) -> ChatHistory:
    """The conversation by the template's control tokens: no text of a message can end it or speak as another role.

    Roles are those of the rendered template (Qwen shows tool results as a user's). Contents are whole: calls are in the
    assistant's text, and in no field of their own, since a template would render them twice. Where the tokenizer has no
    such control tokens, or the prompt none, the prompt is one user's message and the response one assistant's.
    """
    begins, ends = (tokenizer.convert_tokens_to_ids(token) for token in (_TURN_BEGINS, _TURN_ENDS))
    ids, prompt_length = [*row.prompt_ids, *row.response_ids], len(row.prompt_ids)
    # one that the policy sampled is part of its turn
    untrained = [True] * prompt_length + [not mask for mask in row.loss_mask]
    starts = [n for n, token in enumerate(ids) if token == begins and token != tokenizer.unk_token_id and untrained[n]]
    opened = [start for start in starts if start < prompt_length]
    if not opened:
        parts = [("user", row.prompt_ids), ("assistant", row.response_ids)]
        messages, asked = [(role, _text(part, tokenizer), True) for role, part in parts], 1
    else:
        messages = [_message(ids[start + 1 : stop], ends, tokenizer) for start, stop in pairwise([*starts, len(ids)])]
        # what opens the policy's first turn ends the prompt, and belongs to its answer
        asked = len(opened) - (ends not in row.prompt_ids[opened[-1] :])
    return ChatHistory(prompt=_history(messages[:asked]), response=_history(messages[asked:]), full=_history(messages))


_Message = tuple[str, str, bool]


def _message(ids: Sequence[int], ends: int, tokenizer: PreTrainedTokenizerBase) -> _Message:
    """Role, content, and whether it was ended, of the message that these ids are."""
    end = next((position for position in range(len(ids) - 1, -1, -1) if ids[position] == ends), None)
    role, _, content = _text(ids if end is None else ids[:end], tokenizer).partition("\n")
    return role, content, end is not None


def _history(messages: Sequence[_Message]) -> History:
    return lazy_stack(
        [History(role=role, content=content, is_complete=is_ended) for role, content, is_ended in messages]
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
    """One row per sample, in order, of batch size [samples].

    Under TorchRL's default keys: `text`, `tokens`, `masks`, `log_probs`, `history`, `query`
    (the prompt's text, by which MCAdvantage groups); under `next`: `reward` [samples, 1, 1], `done`, `terminated` and
    `truncated` [samples, 1].

    `masks.all_assistant_mask` is true where a token is trained, in every turn: give losses `masking_strategy="rlhf"`.
    `log_probs` are NaN elsewhere, which the losses leave out. Of a sample that is not trained it is true nowhere; its
    reward: see `compared_rewards`.

    Args:
        samples: slime's or ours, flat, with a reward.
        tokenizer: Of the policy.
        padded: Tensors of equal lengths, prompts padded on the left and responses on the right, so that a whole
            sequence may be padded on both sides. Ask ragged ones for `get(key, as_nested_tensor=True)`, `as_list=True`
            or `as_padded_tensor=True`.
        reward_key: Where the number is in a reward that is a dict.

    Raises:
        ExportError: A sample is unfinished, has no reward, or its lengths disagree.
    """
    episodes = finished_episodes(samples, reward_key=reward_key)
    prompts = max((len(one.prompt_ids) for one in episodes), default=0) if padded else 0
    responses = max((len(one.response_ids) for one in episodes), default=0) if padded else 0
    dicts = [_containers(one, tokenizer, prompts, responses, padded=padded) for one in episodes]
    for one, episode, reward in zip(dicts, episodes, compared_rewards(episodes), strict=True):
        is_cut = episode.status == "truncated"
        flags = {"done": True, "terminated": not is_cut, "truncated": is_cut}
        one["query"] = one["text"].prompt
        one["next"] = TensorDict({name: torch.tensor([flag]) for name, flag in flags.items()})
        one["next", "reward"] = torch.tensor([[reward]], dtype=torch.float32)
    return lazy_stack(dicts) if dicts else TensorDict(batch_size=[0])
