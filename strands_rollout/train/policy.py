"""The policy under training: a Hugging Face causal model in single precision with AdamW, and GRPO's loss.

This module handles torch and model folders; it knows nothing about episodes, engines or rewards. Each loss function
computes the published formula as slime 0.3 does (slime/utils/ppo_utils.py and slime/backends/megatron_utils/loss.py);
tests compare the results.
"""

import copy
import inspect
import itertools
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from strands_rollout.errors import ConfigError, RolloutError, TrajectoryError
from strands_rollout.files.safe_files import atomic_replacement
from strands_rollout.play.options import UpdateSettings
from strands_rollout.train.rollouts import TrainingSequence

_MAX_KL: Final = 10.0
_BETAS: Final = (0.9, 0.98)
_MAX_MICRO_BATCH_LOGITS: Final = 10_000_000  # bounds the memory, because several copies of the logits exist at once
_WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.index.json", "training.json")


class CausalModel(Protocol):
    """A Hugging Face causal model: a `model` that returns hidden states, and an `lm_head`."""

    config: Any
    model: Any
    lm_head: Any


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss of each token, and 1.0 for each clipped token, else 0.0.

    `log_ratio` is the logprob under the policy minus the logprob under the behavior policy. The ratio is clipped to
    the range from 1 - clip_low to 1 + clip_high.
    """
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(unclipped, clipped), (clipped > unclipped).float()


def truncated_weights(trainer: Tensor, rollout: Tensor, upper: float) -> Tensor:
    """Return the truncated importance weights: trainer's probability / rollout's probability, at most `upper`.

    `trainer` and `rollout` are logprobs of the same tokens; the trainer's logprobs must be from before the update.
    `upper` is slime's `--tis-clip`.
    """
    return (trainer - rollout).exp().clamp(max=upper)


def k3_divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Return a non-negative estimate of KL(policy || reference) for each token, like slime's `low_var_kl`.

    The estimate is unbiased, apart from its upper bound, if the policy sampled the tokens. See
    http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = reference - log_probs
    return (log_ratio.exp() - 1 - log_ratio).clamp(max=_MAX_KL)


def trained_logits(
    model: CausalModel, token_ids: Sequence[list[int]], positions: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return the logits that predict the chosen tokens from all tokens before them, and the chosen tokens' ids.

    The attention keys and values of the common prefix are computed only once for the batch; this changes neither the
    logits nor the gradients. Shorter sequences are padded on the right; earlier tokens can't attend to the padding.

    Args:
        model: A model in evaluation mode.
        token_ids: At least one sequence.
        positions: The indices of each sequence's chosen tokens, in ascending order; at least one index, and none is 0.

    Returns:
        [chosen, vocabulary] logits and [chosen] ids, in the order of sequences and positions.
    """
    shared = min(shared_prefix_length(token_ids), *(chosen[0] - 1 for chosen in positions))
    width = max(map(len, token_ids)) - shared
    ids = torch.zeros(len(token_ids), width, dtype=torch.long)
    is_chosen = torch.zeros(len(token_ids), width, dtype=torch.bool)
    for row, (sequence, chosen) in enumerate(zip(token_ids, positions, strict=True)):
        ids[row, : len(sequence) - shared] = torch.tensor(sequence[shared:])
        is_chosen[row, torch.tensor(chosen) - shared] = True
    cache = DynamicCache(config=model.config)
    # the parameter's name depends on the version of transformers
    name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
    cache_arguments = {name: cache, "use_cache": True}
    if shared:
        model.model(input_ids=torch.tensor([token_ids[0][:shared]]), **cache_arguments)
        cache.batch_repeat_interleave(len(token_ids))
    hidden = model.model(input_ids=ids, **cache_arguments).last_hidden_state
    targets = is_chosen[:, 1:]
    return model.lm_head(hidden[:, :-1][targets]), ids[:, 1:][targets]


def shared_prefix_length(sequences: Sequence[list[int]]) -> int:
    """Return the length of the common prefix of all sequences, at most the shortest length minus one."""
    # a prefix shared by the lexicographic minimum and maximum is shared by all sequences
    first, last = min(sequences), max(sequences)
    pairs = enumerate(zip(first, last, strict=False))
    shared = next((position for position, (a, b) in pairs if a != b), len(first))
    return min(shared, min(len(sequence) for sequence in sequences) - 1)


class UpdateMetrics:
    """The metrics of an update: means over optimizer steps or trained tokens, and the range of importance ratios."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._least_ratio, self._greatest_ratio = math.inf, -math.inf

    def add(self, count: int, **totals: float) -> None:
        """Add the sums of values over `count` steps or tokens."""
        for name, total in totals.items():
            self.sums[name] += total
            self.counts[name] += count

    def add_ratios(self, ratio: Tensor, clipped: Tensor) -> None:
        """Add the importance ratios of tokens to the behavior policy.

        `clipped` has 1.0 for each clipped token, else 0.0.
        """
        self.add(len(ratio), clip_fraction=float(clipped.sum()), ratio_mean=float(ratio.sum()))
        self._least_ratio = min(self._least_ratio, float(ratio.min()))
        self._greatest_ratio = max(self._greatest_ratio, float(ratio.max()))

    def to_record(self) -> dict[str, float]:
        """Return the metrics for a step's record; metrics without a value are left out."""
        record = {name: total / self.counts[name] for name, total in self.sums.items()}
        if "ratio_mean" in record:
            record |= {"ratio_min": self._least_ratio, "ratio_max": self._greatest_ratio}
        return record


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Statistics of a sequence's trained tokens under the policy before an update, at the rollout's temperature.

    Attributes:
        log_probs: Shape [trained tokens].
        entropy: Shape [trained tokens]; the entropy of the distribution at each token, in nats.
    """

    log_probs: Tensor
    entropy: Tensor


class Policy:
    """The model under training and its optimizer; not thread-safe.

    Args:
        model_dir: The folder of a model that transformers can load.
        settings: The settings of the optimizer steps.

    Raises:
        ConfigError: transformers can't load a model from the folder.
    """

    def __init__(self, model_dir: Path, settings: UpdateSettings) -> None:
        disable_progress_bar()
        self.model_dir = model_dir
        self.settings = settings
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        except (OSError, ValueError) as e:
            raise ConfigError(f"can't load the model of {model_dir}: {e}") from e
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=settings.learning_rate, betas=_BETAS, weight_decay=0.0
        )
        self._reference = copy.deepcopy(self._model).requires_grad_(requires_grad=False) if settings.kl else None

    def measure(self, sequences: Sequence[TrainingSequence]) -> list[TokenStats]:
        """Return logprobs and entropies of each sequence's trained tokens under the current weights."""
        measured: dict[int, TokenStats] = {}
        with torch.no_grad():
            for indices in self._micro_batches(sequences):
                log_probs, entropy = self._log_probs(self._model, [sequences[index] for index in indices])
                counts = [_trained_token_count(sequences[index]) for index in indices]
                stats = map(TokenStats, log_probs.split(counts), entropy.split(counts))
                measured |= zip(indices, stats, strict=True)
        return [measured[index] for index in range(len(sequences))]

    def update(
        self, sequences: Sequence[TrainingSequence], before: Sequence[TokenStats], *, progress: float = 0.0
    ) -> UpdateMetrics:
        """Take the optimizer steps of a batch.

        If KL and entropy are off, skip steps whose advantages are all 0.

        Args:
            sequences: The batch.
            before: The result of `measure` on the batch.
            progress: The finished share of the run, from 0 to 1; used by a linear schedule of the learning rate.

        Raises:
            TrajectoryError: A gradient is not finite. The weights stay as they were before this optimizer step.
        """
        metrics = UpdateMetrics()
        factor = 1 - progress if self.settings.decay == "linear" else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * factor
        for indices in _update_batches(sequences, self.settings.updates):
            batch = [sequences[index] for index in indices]
            # the loss is a mean over trained tokens, or over rollouts, each with all its siblings
            if self.settings.mean == "token":
                count = sum(map(_trained_token_count, batch))
            else:
                count = len({sequence.rollout for sequence in batch})
            # without KL and entropy, a sequence with the advantage 0 has no gradient; once the policy is nearly always
            # right, this holds for most sequences
            uses_all = self.settings.kl or self.settings.entropy
            learned = [(sequences[index], before[index]) for index in indices if sequences[index].advantage or uses_all]
            if learned:
                self._step(learned, 1 / count, metrics)
        return metrics

    def write_weights(self, folder: Path) -> None:
        """Write a model folder for an engine: the weights in single precision, and copies of the model's other files.

        Subfolders are not copied.

        Raises:
            RolloutError: The folder can't be written.
        """
        new = folder.with_name(f"{folder.name}.new")
        tied = {"lm_head.weight"} if self._model.config.tie_word_embeddings else set()
        state = {name: weight.contiguous() for name, weight in self._model.state_dict().items() if name not in tied}
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            for path in self.model_dir.iterdir():
                if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_FILES):
                    shutil.copy(path, new)
            save_file(state, new / "model.safetensors", metadata={"format": "pt"})
            folder.mkdir(parents=True, exist_ok=True)
            for path in new.iterdir():
                path.replace(folder / path.name)
            new.rmdir()
        except (OSError, SafetensorError) as e:
            raise RolloutError(f"can't write {folder}: {e}; free disk space and resume the run") from e

    def save(self, path: Path) -> None:
        """Write the weights and the optimizer's state to a file atomically.

        Raises:
            RolloutError: The file can't be written.
        """
        try:
            with atomic_replacement(path) as new:
                torch.save({"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}, new)
        except (OSError, RuntimeError) as e:  # torch's writer raises RuntimeError on a full disk
            raise RolloutError(f"can't write {path}: {e}; free disk space and resume the run") from e

    def restore(self, path: Path) -> None:
        """Load a file that `save` wrote. The reference model of the KL term keeps the initial weights.

        Raises:
            ConfigError: The file can't be read, or is not a checkpoint of this model.
        """
        try:
            state = torch.load(path, weights_only=True)
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, EOFError, KeyError, ValueError, UnpicklingError) as e:
            reason = f"the file can't be read, or is not a checkpoint of this model ({type(e).__name__})"
            raise ConfigError(f"can't resume from {path}: {reason}; start again in another folder with --out") from e

    def _step(
        self, learned: Sequence[tuple[TrainingSequence, TokenStats]], share: float, metrics: UpdateMetrics
    ) -> None:
        """Take an optimizer step; its loss is `share` times the sum of the sequences' losses."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for indices in self._micro_batches([sequence for sequence, _ in learned]):
            micro_batch_loss = self._loss([learned[index] for index in indices], metrics) * share
            micro_batch_loss.backward()
            loss += float(micro_batch_loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self.settings.max_grad_norm)
        if not torch.isfinite(norm):
            raise TrajectoryError(
                f"got a gradient of norm {float(norm)} at a loss of {loss}; expected finite numbers. The weights are "
                "unchanged by this optimizer step. Check the rewards and logprobs, or lower --learning-rate"
            )
        self._optimizer.step()
        metrics.add(1, loss=loss, grad_norm=float(norm))

    def _loss(self, learned: Sequence[tuple[TrainingSequence, TokenStats]], metrics: UpdateMetrics) -> Tensor:
        """Return the sum of the sequences' losses.

        A sequence's loss is the sum over its trained tokens; if the setting `mean` is "sample", it is divided by
        the sequence's `denominator`.
        """
        sequences, before = zip(*learned, strict=True)
        settings = self.settings
        log_probs, entropy = self._log_probs(self._model, sequences)
        counts = torch.tensor([_trained_token_count(sequence) for sequence in sequences])
        advantages = _repeat_per_token([sequence.advantage for sequence in sequences], counts)
        divisors = [sequence.denominator if settings.mean == "sample" else 1 for sequence in sequences]
        trainer = torch.cat([stats.log_probs for stats in before])
        rollout = torch.cat(
            [
                stats.log_probs if (known := sequence.trained_log_probs) is None else torch.tensor(known)
                for sequence, stats in zip(sequences, before, strict=True)
            ]
        )
        log_ratio = log_probs - (rollout if settings.tis_clip is None else trainer)
        losses, clipped = clipped_policy_loss(log_ratio, advantages, settings.clip_low, settings.clip_high)
        if settings.tis_clip is not None:
            weights = truncated_weights(trainer, rollout, settings.tis_clip)
            losses = losses * weights
            metrics.add(len(weights), tis_clip_fraction=float((weights == settings.tis_clip).float().sum()))
        losses = losses - settings.entropy * entropy
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._log_probs(self._reference, sequences)
            divergence = k3_divergence(log_probs, reference)
            losses = losses + settings.kl * divergence
            metrics.add(len(divergence), kl_reference=float(divergence.detach().sum()))
        metrics.add_ratios(log_ratio.detach().exp(), clipped)
        return (losses / _repeat_per_token(divisors, counts)).sum()

    def _micro_batches(self, sequences: Sequence[TrainingSequence]) -> Iterator[list[int]]:
        """Yield the indices of sequences in batches whose logits fit the bound on memory; shorter sequences come first.

        A single sequence may exceed the bound.
        """
        max_tokens = _MAX_MICRO_BATCH_LOGITS // self._model.config.vocab_size
        batch: list[int] = []
        for index in sorted(range(len(sequences)), key=lambda index: len(sequences[index].tokens)):
            response_length = len(sequences[index].tokens) - sequences[index].prompt_length
            if batch and (len(batch) + 1) * response_length > max_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _log_probs(self, model: CausalModel, sequences: Sequence[TrainingSequence]) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies of all trained tokens, concatenated in the order of sequences."""
        logits, targets = trained_logits(
            model,
            [sequence.tokens for sequence in sequences],
            [sequence.trained_positions for sequence in sequences],
        )
        log_softmax = torch.log_softmax(logits / self.settings.temperature, dim=-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        return log_softmax.gather(-1, targets[:, None])[:, 0], entropy


def _trained_token_count(sequence: TrainingSequence) -> int:
    return len(sequence.trained_positions)


def _repeat_per_token(values: Sequence[float], counts: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.tensor(values, dtype=torch.float32), counts)


def _update_batches(sequences: Sequence[TrainingSequence], parts: int) -> Iterator[list[int]]:
    """Yield the indices of sequences, in at most `parts` non-empty batches with similar numbers of rollouts.

    Rollouts are in order of their first sequence. Siblings stay in one batch, as in slime, because a rollout's loss is
    averaged over the tokens of all its siblings.
    """
    by_rollout: dict[Hashable, list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_rollout.setdefault(sequence.rollout, []).append(index)
    rollouts = list(by_rollout.values())
    bounds = [len(rollouts) * part // parts for part in range(parts + 1)]
    return (list(itertools.chain(*rollouts[start:end])) for start, end in itertools.pairwise(bounds) if start < end)
