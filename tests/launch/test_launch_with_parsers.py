"""The launch scripts' commands, parsed and checked by slime, Megatron-LM and SGLang themselves.

Needs SLIME_PATH and MEGATRON_PATH, checkouts of slime and of slime's Megatron-LM, and a Python with SGLang, the router
and torch: this one, or the Python that PARSERS_PYTHON names. slime's image has all of these in matching versions.
Models that the checkout of slime lacks are not tested.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch_models import REPOSITORY, model_rows, training_command, words_of

SLIME, MEGATRON = (Path(os.environ.get(name) or "/nowhere").resolve() for name in ("SLIME_PATH", "MEGATRON_PATH"))
pytestmark = [
    pytest.mark.slime,
    pytest.mark.skipif(not (SLIME / "scripts/models").is_dir(), reason="needs SLIME_PATH, a checkout of THUDM/slime"),
    pytest.mark.skipif(not (MEGATRON / "megatron/training").is_dir(), reason="needs MEGATRON_PATH, a checkout"),
    pytest.mark.timeout(600),
]
MISSING_PACKAGE = 3  # the exit status of parse_with_slime.py
MODELS = [name for name in model_rows() if (SLIME / f"scripts/models/{name}.sh").is_file()]


def refusals_of(commands: Sequence[Sequence[str]]) -> list[str | None]:
    """Return each command's error from slime, Megatron-LM or SGLang; None if all three accept the command."""
    folders = [MEGATRON, SLIME, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as in the job
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [os.environ.get("PARSERS_PYTHON", sys.executable), str(REPOSITORY / "tests/support/parse_with_slime.py")],
        input="".join(f"{json.dumps(list(words))}\n" for words in commands),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == MISSING_PACKAGE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def command_of(model: str, job: str = "colocated") -> list[str]:
    """Return a command with a routing policy that the router on PyPI has, too."""
    named = {"script": "eval_aime.sh"} if job == "evaluation" else {}
    arguments = [] if named else [job]
    return words_of(
        training_command(*arguments, **named, MODEL=model, SLIME_DIR=str(SLIME), ROUTER_POLICY="cache_aware")
    )


def test_commands_of_all_models_are_accepted() -> None:
    jobs = ("colocated", "async", "evaluation")
    commands = {(model, job): command_of(model, job) for model in MODELS for job in jobs}
    answers = dict(zip(commands, refusals_of(list(commands.values())), strict=True))
    assert {place: answer for place, answer in answers.items() if answer is not None} == {}


def test_planted_mistakes_are_refused() -> None:
    planted = {
        "--tensor-model-parallel-size 3": "not divisible",
        "--num-query-groups 3": "num_query_groups",
        "--decoder-last-pipeline-num-layers 4": "decoder_last_pipeline_num_layers",
        "--attention-backend flsh": "flsh",
        "--sglang-dp-size 2": "AssertionError",  # without --sglang-enable-dp-attention
        "--sglang-attention-backend none": "invalid choice: 'none'",
        "--over-sampling-batch-size 8": "over_sampling_batch_size 8",
    }
    command = command_of("qwen3-8B")
    answers = refusals_of([[*command, *words.split()] for words in planted])
    unexpected = {
        words: answer
        for (words, error), answer in zip(planted.items(), answers, strict=True)
        if error not in (answer or "")
    }
    assert unexpected == {}
