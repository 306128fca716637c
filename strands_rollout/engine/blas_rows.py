"""How many tokens' queries this machine's BLAS may multiply at once without changing the last bit of any.

Some of its kernels sum a row's products in an order that depends on how many rows there are, some don't; which one runs
is BLAS's own choice. So it is tried, on the shapes that attention has.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_TOGETHER = 4
_HEADS = 2
_LONGEST_TRIED = 2048


def tokens_at_once(group: int, head_dim: int, *, token_step: int, mix_tokens: int, stride_pad: int) -> int:
    """The number of tokens to put into one product with the keys, or of their scores with the values.

    Args:
        group: Queries per key of one token.
        head_dim: Dimensions of a query.
        token_step: Keys come in multiples of this.
        mix_tokens: The most values in one product.
        stride_pad: Unused tokens after the keys and values of each dimension.
    """
    random = np.random.default_rng(0)
    queries = random.standard_normal((_HEADS, _TOGETHER, group, head_dim), np.float32)
    stored = random.standard_normal((_HEADS, 1, head_dim, _LONGEST_TRIED + stride_pad), np.float32)
    scores = random.random((_HEADS, _TOGETHER, group, mix_tokens), np.float32)
    keys = [stored[..., :stop] for stop in range(token_step, _LONGEST_TRIED + 1, token_step)]
    values = [stored[..., :stop].swapaxes(-1, -2) for stop in range(token_step, mix_tokens + 1, token_step)]
    same = all(_same_together(queries, some) for some in keys)
    same = same and all(_same_together(scores[..., : some.shape[-2]], some) for some in values)
    return _TOGETHER if same else 1


def _same_together(left: Floats, right: Floats) -> bool:
    """Whether [heads, tokens, group, n] times [heads, 1, n, m] is the same with a product per token and one for all."""
    heads, tokens, group, inner = left.shape
    together = left.reshape(heads, 1, tokens * group, inner) @ right
    return np.array_equal(together.reshape(heads, tokens, group, -1), left @ right)
