"""One trajectory's tokens in TorchRL's containers: Text, Tokens, Masks, LogProbs and ChatHistory.

Needs the extra `torchrl`. Knows containers, padding and control tokens; nothing of samples or engines. Read in torchrl
0.14: torchrl/modules/llm/policies/common.py (the containers), torchrl/modules/llm/policies/vllm_wrapper.py (NaN in
`LogProbs.full` where there is no logprob, and no `LogProbs.prompt` where the engine gave none for it),
torchrl/objectives/llm/grpo.py (which leaves such tokens out).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from tensordict import MetaData, TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

_NO_LOGPROB: Final = float("nan")
_TURN_BEGINS: Final = "<|im_start|>"
_TURN_ENDS: Final = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """What a policy read and wrote; the two last have one entry per response token.

    Attributes:
        prompt_ids: At least one.
        response_ids: Sampled tokens and context between them.
        loss_mask: 1 where a token is trained.
        logprobs: Read only where it is.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]


def containers_of(
    rows: Sequence[TokenRow],
    tokenizer: Any,  # noqa: ANN401 - any Hugging Face tokenizer
    *,
    padded: bool,
) -> list[TensorDict]:
    """A TensorDict for each row, without batch dimensions, under TorchRL's default keys.

    Args:
        rows: Of one batch.
        tokenizer: Of the policy.
        padded: Give all rows the same lengths: prompts are padded on the left and responses on the right, so that a
            whole sequence may be padded on both sides.
    """
    prompts = max((len(row.prompt_ids) for row in rows), default=0) if padded else 0
    responses = max((len(row.response_ids) for row in rows), default=0) if padded else 0
    return [_containers(row, tokenizer, _Padding(padded, prompts, responses, _pad_id(tokenizer))) for row in rows]


def _pad_id(tokenizer: Any) -> int:  # noqa: ANN401
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return 0 if pad_id is None else int(pad_id)


@dataclass(frozen=True, slots=True)
class _Padding:
    """How far prompts and responses are padded, and with what id; not at all below their own lengths."""

    is_on: bool
    prompt_length: int
    response_length: int
    pad_id: int

    def of_prompt(self, values: Sequence[Any], filler: Any) -> list[Any]:  # noqa: ANN401
        return [filler] * (self.prompt_length - len(values)) + list(values)

    def of_response(self, values: Sequence[Any], filler: Any) -> list[Any]:  # noqa: ANN401
        return list(values) + [filler] * (self.response_length - len(values))


def _containers(row: TokenRow, tokenizer: Any, padding: _Padding) -> TensorDict:  # noqa: ANN401
    prompt = torch.tensor(padding.of_prompt(row.prompt_ids, padding.pad_id), dtype=torch.int64)
    response = torch.tensor(padding.of_response(row.response_ids, padding.pad_id), dtype=torch.int64)
    ones = (torch.ones(len(row.prompt_ids)), torch.ones(len(row.response_ids)))
    attention = [*padding.of_prompt(ones[0].tolist(), 0.0), *padding.of_response(ones[1].tolist(), 0.0)]
    trained = padding.of_response([bool(mask) for mask in row.loss_mask], filler=False)
    known = [p if mask else _NO_LOGPROB for p, mask in zip(row.logprobs, row.loss_mask, strict=True)]
    logprobs = torch.tensor(padding.of_response(known, _NO_LOGPROB), dtype=torch.float32)
    texts = [str(tokenizer.decode(ids, skip_special_tokens=False)) for ids in (row.prompt_ids, row.response_ids)]
    is_padded = MetaData(padding.is_on)
    return TensorDict(
        {
            "text": Text(prompt=texts[0], response=texts[1], full="".join(texts)),
            "tokens": Tokens(prompt=prompt, response=response, full=torch.cat([prompt, response]), padded=is_padded),
            "masks": Masks(
                all_attention_mask=torch.tensor(attention, dtype=torch.bool),
                all_assistant_mask=torch.tensor([False] * len(prompt) + trained, dtype=torch.bool),
                padded=is_padded,
            ),
            "log_probs": LogProbs(
                response=logprobs,
                full=torch.cat([torch.full((len(prompt),), _NO_LOGPROB), logprobs]),
                padded=is_padded,
            ),
            "history": chat_history(row, tokenizer),
        }
    )


def chat_history(row: TokenRow, tokenizer: Any) -> ChatHistory:  # noqa: ANN401
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
        spoken = [("user", row.prompt_ids), ("assistant", row.response_ids)]
        messages, asked = [(role, _text(part, tokenizer), True) for role, part in spoken], 1
    else:
        messages = [_message(ids[start + 1 : stop], ends, tokenizer) for start, stop in pairwise([*starts, len(ids)])]
        # what opens the policy's first turn ends the prompt, and belongs to its answer
        asked = len(opened) - (ends not in row.prompt_ids[opened[-1] :])
    return ChatHistory(prompt=_history(messages[:asked]), response=_history(messages[asked:]), full=_history(messages))


_Message = tuple[str, str, bool]


def _message(ids: Sequence[int], ends: int, tokenizer: Any) -> _Message:  # noqa: ANN401
    """Role, content, and whether it was ended, of the message that these ids are."""
    end = _last(ids, ends)
    role, _, content = _text(ids if end is None else ids[:end], tokenizer).partition("\n")
    return role, content, end is not None


def _last(ids: Sequence[int], wanted: int) -> int | None:
    return next((position for position in range(len(ids) - 1, -1, -1) if ids[position] == wanted), None)


def _history(messages: Sequence[_Message]) -> History:
    return lazy_stack(
        [History(role=role, content=content, is_complete=is_ended) for role, content, is_ended in messages]
    )


def _text(ids: Sequence[int], tokenizer: Any) -> str:  # noqa: ANN401
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
