"""Play GSM8K with SkyRL's generator interface, on the embedded engine or a server.

python data_prep/gsm8k.py        # the data, once
python scripts/skyrl_gsm8k.py    # --help shows the rest
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from strands_rollout.cli.options import run_command
from strands_rollout.integrations.skyrl import StrandsGenerator
from strands_rollout.play.engine import fetch_tokenizer_folder, served_engine
from strands_rollout.play.rows import Row, load_rows
from strands_rollout.settings import read_config_file

REPOSITORY = Path(__file__).parents[1]
SKYRL_PARAMS: Final[Mapping[str, Any]] = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}
"""Sampling parameters that SkyRL derives from its default settings
(skyrl/backends/skyrl_train/inference_servers/engine_utils.py)."""


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """Stand-in for SkyRL's class (skyrl/train/generators/base.py), for use without SkyRL."""

    instance_id: str
    repetition_id: int


def generator_input(rows: Sequence[Row], repetitions: int, sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Return SkyRL's GeneratorInput: each problem `repetitions` times in a row, as SkyRL's trainer passes it."""
    asked = [(number, row, repetition) for number, row in enumerate(rows) for repetition in range(repetitions)]
    return {
        "prompts": [row.prompt for _, row, _ in asked],
        "env_classes": ["strands" for _ in asked],
        "env_extras": [{"label": row.label} for _, row, _ in asked],
        "sampling_params": sampling_params,
        "trajectory_ids": [TrajectoryID(str(number), repetition) for number, _, repetition in asked],
        "batch_metadata": None,
    }


async def play(
    rows: Sequence[Row],
    repetitions: int,
    sampling_params: dict[str, Any],
    settings: dict[str, Any],
    base_url: str | None,
    tokenizer: Path | None,
) -> dict[str, Any]:
    """Return the GeneratorOutput of these problems."""
    async with served_engine(base_url, None) as url:
        generator = StrandsGenerator(url, tokenizer or await fetch_tokenizer_folder(url), settings=settings)
        return await generator.generate(generator_input(rows, repetitions, sampling_params))


def main(
    data: Annotated[Path, typer.Option(help="JSONL of data_prep/gsm8k.py.", exists=True, dir_okay=False)] = REPOSITORY
    / "data"
    / "gsm8k-train.jsonl",
    config: Annotated[Path, typer.Option(help="YAML file with the settings.", exists=True)] = REPOSITORY
    / "configs"
    / "gsm8k.yaml",
    base_url: Annotated[str | None, typer.Option(help="URL of SGLang; default: the embedded engine.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer; default: the folder that the engine names.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Number of problems.", min=1)] = 4,
    repetitions: Annotated[int, typer.Option(help="Number of episodes of each problem.", min=1)] = 4,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum tokens of a whole response, tool results included.", min=1)
    ] = 1024,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0.0)] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the first episode; it grows by 1 per episode. Default: none.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write the GeneratorOutput to, as JSON.")] = None,
) -> None:
    """Play GSM8K problems as SkyRL's generator; the last line on stdout is a summary as JSON."""
    # transformers would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    params = {**SKYRL_PARAMS, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    settings = read_config_file(config).model_dump(exclude_unset=True)
    output = asyncio.run(play(load_rows(data)[:prompts], repetitions, params, settings, base_url, tokenizer))
    if out is not None:
        out.write_text(json.dumps(output) + "\n", encoding="utf-8")
    rewards = output["rewards"]
    summary = {
        "responses": len(rewards),
        "mean_reward": round(sum(rewards) / len(rewards), 4),
        "trained_tokens": sum(map(sum, output["loss_masks"])),
        "stop_reasons": dict(Counter(output["stop_reasons"])),
    }
    typer.echo(json.dumps(summary))


if __name__ == "__main__":
    run_command(main, "python scripts/skyrl_gsm8k.py")
