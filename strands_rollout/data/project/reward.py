"""The reward of an answer. Replace it with your own."""

import re
from typing import Any


def score(response: str, label: str) -> dict[str, Any]:
    """Return a score of 1 for the right amount, less than 0.3 for a wrong amount (more if it is nearer), else 0.

    Args:
        response: The policy's final answer, without its reasoning.
        label: The row's label, which is the right amount.
    """
    amounts = re.findall(r"(?:\\boxed\{|Answer: )(-?\d{1,9})", response)
    if not amounts:
        return {"score": 0.0, "acc": 0.0, "near": 0.0}
    error = abs(int(amounts[-1]) - int(label))
    near = max(0.0, 1.0 - error / max(1, int(label)))
    return {"score": 0.3 * near + 0.7 * (error == 0), "acc": float(error == 0), "near": near, "pred": amounts[-1]}
