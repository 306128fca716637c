"""What an answer is worth: put your own idea of a good answer in its place."""

import re
from typing import Any


def score(response: str, label: str) -> dict[str, Any]:
    """1 for the right amount in a box, up to 0.3 for a near one, 0 for none.

    Args:
        response: The policy's final answer, without its reasoning.
        label: Of the row.
    """
    boxed = re.findall(r"\\boxed\{(-?\d{1,9})\}", response)
    if not boxed:
        return {"score": 0.0, "acc": 0.0, "near": 0.0}
    off = abs(int(boxed[-1]) - int(label))
    near = max(0.0, 1.0 - off / max(1, int(label)))
    return {"score": 0.3 * near + 0.7 * (off == 0), "acc": float(off == 0), "near": near, "pred": boxed[-1]}
