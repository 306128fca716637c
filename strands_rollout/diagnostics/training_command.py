"""The values of a training command, and the sizes that follow from them by arithmetic.

The memory model is a lower estimate for planning, not a measurement. It counts weights, gradients, optimizer state,
logits, kept activations, the KV cache, and a constant for CUDA and NCCL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path
from typing import Final

from strands_rollout.diagnostics.flag_check import is_flag

GB: Final = 1e9
WEIGHT_BYTES: Final = 2  # bf16
TRAINED_BYTES: Final = 6  # weights in bf16, gradients in fp32 (--accumulate-allreduce-grads-in-fp32)
OPTIMIZER_BYTES: Final = 12  # fp32 weights and Adam's two moments; slime shards them over the replicas
SAVED_BYTES: Final = 14  # bf16 weights and the optimizer's state
# bytes per token and entry of the vocabulary: the logit in bf16 and in fp32, its softmax and its gradient
LOGIT_BYTES: Final = 14
# bytes per token and hidden unit that a layer without recomputation keeps for its backward pass: Korthikanti et al.
# 2022 (arXiv:2205.05198), section 4.1, without the quadratic term, because flash attention does not keep the scores
LAYER_BYTES: Final = 34
RUNTIME_GB: Final = 3.0  # CUDA's context, NCCL's buffers
_LAYER_PATTERN: Final = re.compile(r"\[([\d,]*)\](?:\*(\d+))?")  # a term of --moe-layer-freq, as in [0]*3+[1]*45
_ROWS: Final = re.compile(r"(?P<file>.*)@\[(?P<start>-?\d{0,15}):(?P<end>-?\d{0,15})\]", re.DOTALL)
_MAX_DIGITS: Final = 15  # a longer number is a mistake, and too large for the computations
DEFAULT_CONCURRENCY: Final = 512  # slime's --sglang-server-concurrency (slime/backends/sglang_utils/arguments.py)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model: its parameters, layers and vocabulary, and the bytes of a token in the KV cache.

    Attributes:
        shared: Parameters outside of the experts.
        experts: Parameters of all experts; 0 for a dense model.
        query_groups: Number of parts that GPUs can split the KV cache into. With latent attention, it is 1: each GPU
            holds the whole cache.
        cache_bytes: Bytes of a token in the KV cache of a whole engine; None if the model has layers of its own
            (`--spec`).
    """

    shared: int
    experts: int
    layers: int
    hidden: int
    vocabulary: int
    query_groups: int
    cache_bytes: int | None

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.shared + self.experts


@dataclass(frozen=True)
class TrainingCommand:
    """The arguments of slime's train.py or train_async.py; if a flag is given twice, its last use counts."""

    words: tuple[str, ...]

    @cached_property
    def values(self) -> Mapping[str, tuple[str, ...]]:
        """The values of each flag, by the flag's name."""
        starts = [position for position, word in enumerate(self.words) if is_flag(word)]
        parts = [self.words[begin:end] for begin, end in pairwise([*starts, len(self.words)])]
        split = [(word.partition("="), following) for word, *following in parts]
        return {flag: (joined, *rest) if equals else tuple(rest) for (flag, equals, joined), rest in split}

    def has(self, flag: str) -> bool:
        """Return whether the command has the flag."""
        return flag in self.values

    def text(self, flag: str) -> str | None:
        """Return the first value of a flag; None if the flag is absent or has no value."""
        return next(iter(self.values.get(flag, ())), None)

    def int_value(self, flag: str, default: int = 0) -> int:
        """Return the value of a flag; `default` if the value is absent, or is not 1 to 15 decimal digits."""
        text = self.text(flag) or ""
        return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else default

    def float_value(self, flag: str, default: float) -> float:
        """Return the value of a flag; `default` if it is not a finite number, or is absent."""
        try:
            number = float(self.text(flag) or default)
        except ValueError:
            return default
        return number if isfinite(number) else default

    @property
    def is_colocated(self) -> bool:
        """True if the same GPUs generate and train in turns."""
        return self.has("--colocate")

    @property
    def only_evaluates(self) -> bool:
        """True if the job evaluates a checkpoint and ends."""
        return self.text("--num-rollout") == "0"

    @property
    def is_fully_async(self) -> bool:
        """True if the rollout function is fully asynchronous: episodes continue while the trainer trains."""
        return "fully_async" in (self.text("--rollout-function-path") or "")

    @property
    def fails_to_evaluate(self) -> bool:
        """True if a fully asynchronous run ends at its first evaluation.

        slime's fully asynchronous rollout function can't evaluate. slime's other functions would share a semaphore with
        the event loop of the rollout's worker (`GenerateState` in slime/rollout/sglang_rollout.py). Python raises an
        error as soon as an episode has to wait for a semaphore of another event loop.
        """
        path = self.text("--eval-function-path") or ""
        has_own = path != "" and not path.startswith("slime.") and "fully_async" not in path
        return bool(self.evaluations) and self.is_fully_async and not has_own

    @property
    def samples(self) -> int:
        """Samples of a step, if each episode becomes one sample."""
        return self.int_value("--rollout-batch-size") * self.int_value("--n-samples-per-prompt", 1)

    @property
    def optimizer_batch(self) -> int:
        """Samples of an optimizer step; 0 if unknown."""
        if steps := self.int_value("--num-steps-per-rollout"):
            return self.samples // steps
        return self.int_value("--global-batch-size")

    @property
    def training_gpus(self) -> int:
        """GPUs that train, on all nodes."""
        return self.int_value("--actor-num-nodes", 1) * self.int_value("--actor-num-gpus-per-node", 8)

    @property
    def rollout_gpus(self) -> int:
        """GPUs that generate, on all nodes."""
        return self.training_gpus if self.is_colocated else self.int_value("--rollout-num-gpus")

    @property
    def engines(self) -> int:
        """Number of SGLang's engines."""
        return self.rollout_gpus // self.engine_gpus

    @property
    def engine_gpus(self) -> int:
        """GPUs of an engine."""
        return max(self.int_value("--rollout-num-gpus-per-engine", 1), 1)

    def parallel(self, kind: str) -> int:
        """Return the parallel size of a kind such as "tensor-model"; 1 if the command does not set it."""
        return max(self.int_value(f"--{kind}-parallel-size", 1), 1)

    @property
    def replica_gpus(self) -> int:
        """GPUs that hold one copy of the trained model."""
        return self.parallel("tensor-model") * self.parallel("pipeline-model") * self.parallel("context")

    @property
    def replicas(self) -> int:
        """Copies of the trained model, which share the samples of a step."""
        return self.training_gpus // self.replica_gpus

    @property
    def context(self) -> int:
        """Maximum tokens of a training episode: its limit, else the tokens of a micro batch; 0 if neither is given."""
        return self.int_value("--rollout-max-context-len") or self.trainable_context

    @property
    def trainable_context(self) -> int:
        """Maximum tokens of a sample that fits into a micro batch; 0 without dynamic batch sizes."""
        if not self.has("--use-dynamic-batch-size"):
            return 0
        return self.int_value("--max-tokens-per-gpu") * self.parallel("context")

    @property
    def evaluated_context(self) -> int:
        """Maximum tokens of an evaluated episode: the command's own limit for evaluations, else `context`."""
        return self.int_value("--eval-max-context-len") or self.context

    @property
    def concurrent_episodes(self) -> int:
        """Maximum number of episodes that hold tokens in the engines at once."""
        limit = self.int_value("--sglang-server-concurrency", DEFAULT_CONCURRENCY) * max(self.engines, 1)
        if self.is_fully_async:
            return limit
        prompts = self.int_value("--over-sampling-batch-size") or self.int_value("--rollout-batch-size")
        return min(limit, prompts * self.int_value("--n-samples-per-prompt", 1))

    @property
    def saves(self) -> int:
        """Number of saves in the run: at each interval, and after the last step.

        0 if the command has no --save or no --save-interval.
        """
        steps, interval = self.int_value("--num-rollout"), self.int_value("--save-interval")
        return ceil(steps / interval) if interval and self.has("--save") else 0

    @property
    def kept_saves(self) -> int:
        """Number of saves that exist at once: the newest, the replaced one, and the retained ones.

        Without --save-retain-interval, Megatron retains all saves.
        """
        retained = self.int_value("--save-retain-interval")
        if self.saves and retained:
            return min(self.saves, 2 + self.int_value("--num-rollout") // retained)
        return self.saves

    @property
    def evaluations(self) -> int:
        """Number of evaluations in the whole run: at each interval, and before the first step of a colocated run.

        If the command has `--skip-eval-before-train`, there is no evaluation before the first step. A run of 0 steps
        evaluates once. If there is no interval, there are no evaluations.
        """
        interval, steps = self.int_value("--eval-interval"), self.int_value("--num-rollout")
        if not interval:
            return 0
        if not steps:
            return 1
        before = self.is_colocated and not self.has("--skip-eval-before-train")
        return steps // interval + before


def model_size(command: TrainingCommand) -> ModelSize | None:
    """Return the size of the model from Megatron's arguments; None if these arguments are missing."""
    layers, hidden = command.int_value("--num-layers"), command.int_value("--hidden-size")
    heads, vocabulary = command.int_value("--num-attention-heads"), command.int_value("--vocab-size")
    if not (layers and hidden and heads and vocabulary):
        return None
    attention, groups, cached = _attention(command, hidden, heads)
    matrices = 3 if command.has("--swiglu") else 2
    shared = vocabulary * hidden * (2 if command.has("--untie-embeddings-and-output-weights") else 1)
    shared += layers * attention
    sparse = _sparse_layers(command, layers)
    shared += (layers - sparse) * matrices * hidden * command.int_value("--ffn-hidden-size", 4 * hidden)
    shared += sparse * (
        matrices * hidden * command.int_value("--moe-shared-expert-intermediate-size")
        + hidden * command.int_value("--num-experts")
    )
    expert = matrices * hidden * command.int_value("--moe-ffn-hidden-size")
    experts = sparse * command.int_value("--num-experts") * expert
    cache = None if command.has("--spec") else WEIGHT_BYTES * layers * cached
    return ModelSize(shared, experts, layers, hidden, vocabulary, groups, cache)


def _attention(command: TrainingCommand, hidden: int, heads: int) -> tuple[int, int, int]:
    """Return the parameters of a layer's attention, its query groups, and how many numbers it caches for a token.

    Latent attention caches a compressed vector and the rotated part of the keys, for all heads (arXiv:2405.04434,
    section 2.1). The defaults are Megatron's.
    """
    if not command.has("--multi-latent-attention"):
        channels = command.int_value("--kv-channels") or hidden // heads
        groups = command.int_value("--num-query-groups", 1) if command.has("--group-query-attention") else heads
        return 2 * hidden * channels * (heads + groups), max(groups, 1), 2 * groups * channels
    rotated, latent = command.int_value("--qk-pos-emb-head-dim", 64), command.int_value("--kv-lora-rank", 32)
    key, value = command.int_value("--qk-head-dim", 128), command.int_value("--v-head-dim", 128)
    queries = heads * (key + rotated)
    compressed = command.int_value("--q-lora-rank")
    parameters = compressed * (hidden + queries) if compressed else hidden * queries
    parameters += hidden * (latent + rotated) + latent * heads * (key + value) + heads * value * hidden
    return parameters, 1, latent + rotated


def _sparse_layers(command: TrainingCommand, layers: int) -> int:
    """Return the number of layers with experts: --moe-layer-freq is an interval, or a pattern such as [0]*3+[1]*45.

    Without --moe-layer-freq, all layers have experts; without --num-experts, none has.
    """
    if not command.int_value("--num-experts"):
        return 0
    terms = _LAYER_PATTERN.findall((command.text("--moe-layer-freq") or "").replace(" ", ""))
    if not terms:
        return ceil(layers / max(command.int_value("--moe-layer-freq", 1), 1))
    counts: list[int] = [flags.split(",").count("1") * int(times[:_MAX_DIGITS] or 1) for flags, times in terms]
    return min(layers, sum(counts))


def training_memory(command: TrainingCommand, size: ModelSize) -> dict[str, float]:
    """Return the GB that each part of a training step takes on a GPU, for a micro batch of the maximum length."""
    tensor, pipeline = command.parallel("tensor-model"), command.parallel("pipeline-model")
    # by default, Megatron splits an expert over as many GPUs as a layer
    expert_tensor = max(command.int_value("--expert-tensor-parallel-size", tensor), 1)
    expert_gpus = command.parallel("expert-model") * expert_tensor * pipeline
    shared, experts = size.shared / (tensor * pipeline), size.experts / expert_gpus
    gpus = max(command.training_gpus, 1)
    optimizer = size.shared / gpus + size.experts / max(gpus, expert_gpus)
    tokens = command.int_value("--max-tokens-per-gpu") or command.context // command.parallel("context")
    layers, activations = size.layers / pipeline, size.hidden * tokens / tensor
    recomputes = command.text("--recompute-granularity") == "full"
    return {
        "weights and gradients": TRAINED_BYTES * (shared + experts) / GB,
        "optimizer": 0.0 if command.has("--optimizer-cpu-offload") else OPTIMIZER_BYTES * optimizer / GB,
        "logits": LOGIT_BYTES * size.vocabulary * tokens / tensor / GB,
        "activations": activations * (2 * layers + LAYER_BYTES if recomputes else LAYER_BYTES * layers) / GB,
        "CUDA and NCCL": RUNTIME_GB,
    }


@dataclass(frozen=True, slots=True)
class EngineCache:
    """The KV cache of an engine.

    Attributes:
        weights_gb: GB of weights on each GPU of the engine.
        tokens: Capacity of the cache in tokens; negative if the weights leave no memory for the cache.
        parts: Number of parts of the cache. With SGLang's data-parallel attention, each episode uses a single part;
            otherwise, there is one part.
    """

    weights_gb: float
    tokens: int
    parts: int = 1


def engine_cache(
    command: TrainingCommand, size: ModelSize, gpu_gb: float, model_gb: float | None = None
) -> EngineCache | None:
    """Return the KV cache of an engine; None if its size is unknown.

    SGLang's --mem-fraction-static covers weights and cache; if the command does not set it, the size is unknown. Each
    GPU caches its share of the query groups, but at least one group.

    Args:
        command: The command.
        size: The model's size.
        gpu_gb: GB of a GPU.
        model_gb: GB of the engine's weights; None to compute it from `size`, for weights in bf16.
    """
    fraction = command.float_value("--sglang-mem-fraction-static", 0)
    if not size.cache_bytes or not fraction:
        return None
    gpus = command.engine_gpus
    weights_gb = (model_gb or WEIGHT_BYTES * size.parameters / GB) / gpus
    parts = min(command.int_value("--sglang-dp-size", 1), gpus) if command.has("--sglang-enable-dp-attention") else 1
    parts = max(parts, 1)
    gpu_bytes = size.cache_bytes / min(gpus // parts, size.query_groups)
    return EngineCache(weights_gb, parts * int((gpu_gb * fraction - weights_gb) * GB / gpu_bytes), parts)


def saved_gb(command: TrainingCommand, size: ModelSize) -> float:
    """Return the GB of a checkpoint."""
    return size.parameters * (WEIGHT_BYTES if command.has("--no-save-optim") else SAVED_BYTES) / GB


def data_file(path: str) -> tuple[Path, slice]:
    """Return the file of a path such as `rows.jsonl@[0:100]`, and the slice of its rows that slime takes.

    The notation is slime's (slime/utils/data.py, `_parse_generalized_path`).
    """
    found = _ROWS.fullmatch(path)
    if found is None:
        return Path(path), slice(None)
    start, end = (int(number) if number else None for number in (found["start"], found["end"]))
    return Path(found["file"]), slice(start, end)


def evaluation_sets(words: Sequence[str]) -> dict[str, str]:
    """Return the data files of slime's --eval-prompt-data by name; a single value is the file of the set `aime`."""
    if len(words) == 1:  # an old form (slime/utils/arguments.py, _resolve_eval_datasets)
        return {"aime": words[0]}
    return dict(zip(words[::2], words[1::2], strict=False))
