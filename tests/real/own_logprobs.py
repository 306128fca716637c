"""Logprobs of a sample's tokens under the weights in a folder, computed with the embedded engine's model."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from strands_rollout import Sample
from strands_rollout.engine.qwen3 import KvRows, Qwen3, load_weights, read_model_config

_CONTEXT_LENGTH = 2048


def logprobs_under(folder: Path, sample: Sample, *, temperature: float = 1.0) -> dict[int, float]:
    """Return the logprob of each response token by its position in `sample.tokens`."""
    config = read_model_config(folder)
    model = Qwen3(config, load_weights(folder, config), _CONTEXT_LENGTH)
    kv = KvRows(config, 1, _CONTEXT_LENGTH)
    kv.reserve(len(sample.tokens))
    start = len(sample.tokens) - sample.response_length
    logits = model.prefill(kv, 0, 0, np.array(sample.tokens[:start]))
    kv.move(0, 0, start)
    found: dict[int, float] = {}
    for position in range(start, len(sample.tokens)):
        found[position] = _logprob(logits / np.float32(temperature), sample.tokens[position])
        logits = model.decode(kv, np.array(sample.tokens[position : position + 1]), np.array([position]))[0]
    return found


def _logprob(logits: Any, token: int) -> float:
    shifted = logits.astype(np.float64) - logits.max()
    return float(shifted[token] - np.log(np.exp(shifted).sum()))


def perturbed_copy(folder: Path, target: Path, share: float) -> Path:
    """Copy a model with every weight changed by about this share of itself; return the copy's folder."""
    shutil.copytree(folder, target)
    rng = np.random.default_rng(0)
    tensors = {
        name: (tensor * (1 + share * rng.standard_normal(tensor.shape))).astype(tensor.dtype)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
