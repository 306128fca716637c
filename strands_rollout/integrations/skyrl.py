"""SkyRL: convert samples to its GeneratorOutput, and play the prompts of its GeneratorInput with this package.

Input and output are plain dicts; SkyRL is not imported. Sources in NovaSky-AI/SkyRL: skyrl/train/generators/base.py
(the fields), skyrl/train/utils/trainer_utils.py (the validator), skyrl/train/trainer.py.
"""

import asyncio
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from strands_rollout.errors import ConfigError, ExportError
from strands_rollout.files.json_codec import Json
from strands_rollout.integrations.conversion import VLLM, FinishedEpisode, compared_rewards, finished_episodes
from strands_rollout.play.player import Reward, open_player
from strands_rollout.samples import Sample
from strands_rollout.settings import REWARD_KEY, settings_from_args
from strands_rollout.slime_plugin.inputs import ROW_SETTINGS_KEY
from strands_rollout.slime_plugin.reward import reward_func
from strands_rollout.slime_plugin.sample_writer import exclude_from_training

GeneratorOutput: TypeAlias = dict[str, Any]
STOP_REASONS: Final = {"completed": "stop", "truncated": "length", "failed": "error"}
"""SkyRL's stop reason by status; SkyRL's filters only distinguish "stop" from others."""
_METRICS: Final = ("turns", "tool_calls", "parse_failures")


def to_generator_output(samples: Iterable[Any], *, reward_key: str = REWARD_KEY) -> GeneratorOutput:
    """Return finished samples as SkyRL's GeneratorOutput, in order; its lists are empty if there are no samples.

    A sample that is not trained has a loss mask of zeros, and the reward of `compared_rewards`.

    Raises:
        ExportError: See `finished_episodes`.
    """
    episodes = finished_episodes(samples, reward_key=reward_key)
    times = [episode.facts.duration_s for episode in episodes]
    return {
        "prompt_token_ids": [episode.prompt_ids for episode in episodes],
        "response_ids": [episode.response_ids for episode in episodes],
        "rewards": compared_rewards(episodes),
        "loss_masks": [episode.loss_mask for episode in episodes],
        "stop_reasons": [STOP_REASONS[episode.status] for episode in episodes],
        "rollout_metrics": _metrics(episodes),
        "rollout_logprobs": [episode.logprobs for episode in episodes],
        "trajectory_ids": None,
        "trajectory_generation_times": None if None in times else times,
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "is_last_step": None,
        "env_metrics": None,
        "pixel_values": None,
        "image_grid_thw": None,
    }


def _metrics(episodes: Sequence[FinishedEpisode]) -> dict[str, float]:
    """Return metrics. The end of a name tells SkyRL whether to average or sum the values when it joins batches."""
    metrics: dict[str, float] = {}
    for name in _METRICS:
        values = [value for episode in episodes if (value := getattr(episode.facts, name)) is not None]
        if values:
            metrics[f"strands/{name}_mean"] = sum(values) / len(values)
    if episodes:
        metrics["strands/untrained_samples"] = float(sum(not episode.is_trained for episode in episodes))
    return metrics


class StrandsGenerator:
    """A SkyRL generator over `strands_rollout.generate`: each prompt is one agent episode on an SGLang engine.

    SkyRL calls only `generate`. If it requires a subclass of its own class, inherit from both:
    `class Generator(StrandsGenerator, GeneratorInterface)`.

    Args:
        base_url: The URL of the engine or router. The caller updates the engine's weights.
        tokenizer_dir: The folder of the served model's tokenizer.
        settings: The mapping under `strands_rollout:` of a configuration; None for the defaults.
        concurrency: Maximum number of episodes at once.
        reward: Grades a finished sample; called like slime's `--custom-rm-path`.
        reward_key: The key of the number in a reward that is a dict.

    Raises:
        ConfigError: A setting is unknown or invalid, or `fan_out` is on, since SkyRL takes one response per prompt.
    """

    def __init__(
        self,
        base_url: str,
        tokenizer_dir: Path | str,
        *,
        settings: Mapping[str, Any] | None = None,
        concurrency: int = 64,
        reward: Reward = reward_func,
        reward_key: str = REWARD_KEY,
    ) -> None:
        if settings_from_args(SimpleNamespace(strands_rollout=settings)).fan_out:
            raise ConfigError("got fan_out: true; set it to false, since SkyRL takes one response per prompt")
        self._base_url, self._tokenizer_dir, self._settings = base_url, Path(tokenizer_dir), settings
        self._concurrency = concurrency
        self._reward, self._reward_key = reward, reward_key

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> GeneratorOutput:  # noqa: ARG002, FBT001, FBT002 - SkyRL's signature
        """Play all prompts, and return the responses in the same order.

        A prompt's ground truth is `reward_spec.ground_truth` in its `env_extras`, as in SkyRL's data, or `label`, as in
        slime's. Prompts with the same `instance_id` in `trajectory_ids` are a group; without ids, each prompt is a
        group of its own.

        Args:
            input_batch: SkyRL's GeneratorInput. `sampling_params` are vLLM's: `max_tokens` is the budget of a whole
                response, tool results included; `seed` is used for the first prompt, and increases by 1 per prompt.
            disable_tqdm: Ignored; no progress bar is shown.

        Raises:
            ExportError: Lists of the input differ in length, a prompt has no ground truth, or a finished sample can't
                be exported; see `finished_episodes`.
            ConfigError: A sampling parameter is unknown or has no equivalent in SGLang, or the engine's URL or the
                tokenizer can't be used.
        """
        samples = _new_samples(input_batch)
        params = VLLM.to_sglang(input_batch.get("sampling_params") or {})
        phase = getattr(input_batch.get("batch_metadata"), "training_phase", "train")
        semaphore = asyncio.Semaphore(self._concurrency)
        async with open_player(
            self._base_url,
            self._tokenizer_dir,
            self._settings,
            audited=False,
            evaluation=phase == "eval",
            reward=self._reward,
        ) as player:

            async def play(sample: Sample, number: int) -> None:
                seed = params.get("sampling_seed")
                sample_params = params if seed is None else {**params, "sampling_seed": seed + number}
                async with semaphore:
                    await player.play(sample, sample_params)
                if sample.status is Sample.Status.ABORTED:  # SkyRL doesn't resume episodes
                    exclude_from_training(sample)
                    sample.status = Sample.Status.FAILED
                    await player.grade(sample)

            async with asyncio.TaskGroup() as group:
                for number, sample in enumerate(samples):
                    group.create_task(play(sample, number))
        return to_generator_output(samples, reward_key=self._reward_key)


def _new_samples(input_batch: Mapping[str, Any]) -> list[Sample]:
    prompts = input_batch["prompts"]
    extras = input_batch.get("env_extras") or [{} for _ in prompts]
    ids = input_batch.get("trajectory_ids") or [None for _ in prompts]
    if not len(prompts) == len(extras) == len(ids):
        raise ExportError(
            f"got {len(prompts)} prompts, {len(extras)} env_extras and {len(ids)} trajectory_ids; expected equal "
            "numbers"
        )
    groups: dict[Hashable, int] = {}
    samples = []
    for number, (prompt, extra, trajectory) in enumerate(zip(prompts, extras, ids, strict=True)):
        group = number if trajectory is None else groups.setdefault(trajectory.instance_id, len(groups))
        # an environment reads the row from env_extras in the metadata; the row's settings need a key of their own
        metadata = {
            "env_extras": extra,
            **({ROW_SETTINGS_KEY: extra[ROW_SETTINGS_KEY]} if ROW_SETTINGS_KEY in extra else {}),
        }
        label = _label(extra, number)
        samples.append(Sample(prompt=prompt, label=label, index=number, group_index=group, metadata=metadata))
    return samples


def _label(extra: Mapping[str, Any], number: int) -> Json:
    spec = extra.get("reward_spec")
    if isinstance(spec, Mapping) and "ground_truth" in spec:
        return spec["ground_truth"]
    if "label" not in extra:
        raise ExportError(
            f"prompt {number} has env_extras with {', '.join(map(str, extra)) or 'no keys'}; expected the ground truth "
            "as reward_spec.ground_truth or as label"
        )
    return extra["label"]
