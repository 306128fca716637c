"""The rows of `scripts/launch/models.sh` compared with slime's own scripts, model files and checks of arguments.

Reads slime's files without importing slime: set SLIME_PATH to a checkout. Models that this checkout lacks are skipped.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml
from launch_models import REPOSITORY, flags_of, model_rows, number, training_command, words_of

from strands_rollout.diagnostics.flag_check import RECORD, check_flags, load_flag_table
from strands_rollout.diagnostics.flag_probe import MAIN_ARGUMENTS, execute_file
from strands_rollout.diagnostics.training_command import TrainingCommand, engine_cache, model_size, training_memory

SLIME = Path(os.environ.get("SLIME_PATH") or "/nowhere").resolve()
pytestmark = [
    pytest.mark.slime,
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),  # slime's own files
    pytest.mark.skipif(not (SLIME / "scripts/models").is_dir(), reason="needs SLIME_PATH, a checkout of THUDM/slime"),
]
ROWS = model_rows()
# the rows and docs/training-models.md have the numbers of slime 0.3.1 and newer; 0.3.1 is the first with this file
HAS_NUMBERS = pytest.mark.skipif(
    not (SLIME / "scripts/models/qwen3.5-9B.sh").is_file(), reason="this slime is older than 0.3.1"
)
# flags whose number in a row is slime's, by key of the row
NUMBERS = {
    "nodes": "--actor-num-nodes",
    "gpus": "--actor-num-gpus-per-node",
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "last": "--decoder-last-pipeline-num-layers",
    "tokens": "--max-tokens-per-gpu",
    "engine": "--rollout-num-gpus-per-engine",
    "memory": "--sglang-mem-fraction-static",
}
# see docs/training-models.md, "Numbers that are not slime's"
# layout: slime's examples for Qwen3-4B take all GPUs and 2 GPUs, and its script for GLM-Z1 half of a node for each side
# memory: its script for GLM-Z1 sets no fraction
OWN = {("qwen3-4B", "gpus"), ("qwen3-4B-Instruct-2507", "gpus"), ("glm4-9B", "gpus")}
OWN |= {
    ("qwen3.5-9B", "gpus"),
    ("qwen3.5-9B", "tp"),
    ("qwen3-8B", "memory"),
    ("glm4-9B", "memory"),
    ("minimax-m2", "ep"),
}
# slime's own variables of its scripts
SLIMES_DEFAULTS = {"CP_SIZE": "4"}
PRINT_ARGUMENTS = (
    'pkill() { :; }; ssh() { :; }; sleep() { :; }; ray() { [[ "$1 $2" != "job submit" ]] || printf "%q " "$@"; }; '
    'source "$0"'
)
COMPARED = {
    "qwen3-4B": "run-qwen3-4B.sh",
    "qwen3-30B-A3B": "run-qwen3-30B-A3B.sh",
    "qwen3-235B-A22B": "run-qwen3-235B-A22B.sh",
    "qwen3.5-27B": "run-qwen3.5-27B.sh",
    "glm4.7-30B-A3B": "run-glm4.7-30B-A3B.sh",
}


def command_of(model: str, mode: str = "colocated", **given: str) -> list[str]:
    if not (SLIME / f"scripts/models/{model}.sh").is_file():
        pytest.skip(f"this slime has no {model}")
    return words_of(training_command(mode, MODEL=model, SLIME_DIR=str(SLIME), **given))


def numbers_of(text: str, flag: str) -> set[float]:
    """Return the numbers that follow a flag in a script, with shell variables replaced by their defaults."""
    found = set()
    for value in re.findall(rf"{flag}[ =]+[\"']?([\w.${{}}]+)", text):
        name = value.strip("${}")
        default = re.search(rf"^{name}=\$\{{{name}:-([\d.]+)\}}", text, re.MULTILINE)
        shown = default[1] if default else value
        if re.fullmatch(r"[\d.]+", shown):
            found.add(float(shown))
    return found


@HAS_NUMBERS
@pytest.mark.parametrize("model", [name for name, row in ROWS.items() if not row["source"].startswith("like")])
def test_numbers_of_row_are_in_its_source(model: str) -> None:
    row, files = ROWS[model], [SLIME / name for name in ROWS[model]["source"].split(", ")]
    if not all(file.is_file() for file in files):
        pytest.skip(f"this slime lacks {row['source']}")
    text = "\n".join(file.read_text() for file in files)
    for key, flag in NUMBERS.items():
        if row[key] and (model, key) not in OWN:
            assert float(row[key]) in numbers_of(text, flag), (key, row[key])
    assert (row["offload"] == "1") == ("--optimizer-cpu-offload" in text)
    assert f"--advantage-estimator {row['estimator']}" in text
    for key, flag in (("clip", "--eps-clip"), ("clip_high", "--eps-clip-high")):
        slimes = {float(value) for value in re.findall(rf"{flag} ([\d.e-]+)", text)}
        assert float(row[key]) in (slimes or {0.2, 0.28, float(row["clip"])}), key
    for pair in row["environment"].split():
        assert re.search(pair.replace("=", r"\W+") + r"\b", text), pair
    plain = re.sub(r"\$\(seq (\d+) (\d+) (\d+)\)", _counted, re.sub(r"\$\(\( *([\d *]+?) *\)\)", _multiplied, text))
    for flag, value in flags_of(row["further"].split()).items():
        is_ours = flag in ("--apply-chat-template-kwargs", "--moe-token-dispatcher-type")
        assert is_ours or re.search(rf"^\W*{flag}[\s=]+{re.escape(value)}(?![\w.])", plain, re.MULTILINE), (flag, value)


def _counted(found: re.Match[str]) -> str:
    first, step, last = map(int, found.groups())
    return " ".join(map(str, range(first, last + 1, step)))


def _multiplied(found: re.Match[str]) -> str:
    return str(prod(map(int, found[1].split("*"))))


@pytest.mark.parametrize("model", ROWS)
def test_sizes_divide_models_heads_experts_and_layers(model: str) -> None:
    """The rules are Megatron's for its arguments; the model's numbers are slime's."""
    flags = flags_of(command_of(model))
    tensor, pipeline = (number(flags, f"--{name}-model-parallel-size") for name in ("tensor", "pipeline"))
    heads = number(flags, "--num-attention-heads")
    groups = heads if "--multi-latent-attention" in flags else number(flags, "--num-query-groups", heads)
    assert heads % tensor == 0
    assert groups % tensor == 0
    assert number(flags, "--num-experts", 0) % number(flags, "--expert-model-parallel-size") == 0
    ends = [number(flags, f"--decoder-{end}-pipeline-num-layers", 0) for end in ("first", "last")]
    rest = number(flags, "--num-layers") - sum(ends)
    assert rest % max(1, pipeline - sum(1 for end in ends if end)) == 0
    assert "--spec" not in flags or len(flags["--spec"].split()) == 2


@pytest.mark.parametrize("mode", ["colocated", "async"])
@pytest.mark.parametrize("model", ROWS)
def test_training_step_fits_gpu_of_80_gb(model: str, mode: str) -> None:
    command = TrainingCommand(tuple(command_of(model, mode)))
    size = model_size(command)
    if size is None:
        pytest.skip("the size of a model with latent attention is not computed")
    assert sum(training_memory(command, size).values()) < 70


def cache_tokens(model: str, command: TrainingCommand) -> int | None:
    """Return the number of tokens that fit into an engine's cache; None if the model has linear attention."""
    row, size = ROWS[model], model_size(command)
    if size is None:
        return None
    weight = 1 if row["fp8"] == "1" or row["weights"] == "fp8" else 2
    cache = engine_cache(command, size, int(row["gpu_gb"] or 80), weight * size.parameters / 1e9)
    return cache and cache.tokens


def expert_parameters(command: TrainingCommand) -> int:
    frequency = command.text("--moe-layer-freq") or "1"
    layers = frequency.count("1") if frequency.startswith("[") else command.int_value("--num-layers")
    each = 3 * command.int_value("--hidden-size") * command.int_value("--moe-ffn-hidden-size")
    return layers * each * command.int_value("--num-experts")


@pytest.mark.parametrize("model", ROWS)
def test_concurrent_episodes_fit_cache_of_engine(model: str) -> None:
    """As many episodes as asynchronous training plays concurrently fit, each with half of its context."""
    words = command_of(model, "async", ROLLOUT_BATCH_SIZE="512")
    command = TrainingCommand(tuple(words))
    tokens = cache_tokens(model, command)
    if tokens is None:
        pytest.skip("the cache of a model with linear attention is not computed")
    assert command.int_value("--sglang-server-concurrency") * command.context // 2 <= tokens


@pytest.mark.parametrize("model", ROWS)
def test_conversion_fits_gpus_of_80_gb(model: str) -> None:
    """The pipeline stages follow the rule of slime's converter, which splits no experts by itself."""
    row, command = ROWS[model], TrainingCommand(tuple(command_of(model)))
    layers, gpus = command.int_value("--num-layers"), int(row["conversion_nodes"]) * int(row["conversion_gpus"])
    assert gpus <= layers
    given = flags_of(row["conversion"].split())
    experts, stages = number(given, "--expert-model-parallel-size"), number(given, "--pipeline-model-parallel-size")
    if not given:
        stages = gpus
        while layers - ceil(layers / stages) * (stages - 1) <= 0:
            assert stages % 2 == 0
            stages //= 2
    size = model_size(command)
    assert gpus % (stages * experts) == 0
    shared = size.shared if size else 0
    assert 2 * (expert_parameters(command) / experts + shared) / layers * ceil(layers / stages) < 75e9


def _value(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def parse(words: list[str]) -> argparse.Namespace:
    """Parse with slime's own flags, and with Megatron's and SGLang's from the record, which lacks their types."""
    sets = [SimpleNamespace(name="aime-2024", path="aime-2024.jsonl")]
    made = {"build_eval_dataset_configs": lambda *_, **__: sets, "ensure_dataset_list": list}
    names = execute_file(SLIME / MAIN_ARGUMENTS, yaml=yaml, RouterArgs=mock.MagicMock(), **made)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    table: Any = json.loads(RECORD.read_text())
    for flag in table["flags"]:
        if flag["system"] != "slime" or flag.get("parser") == "sglang":
            takes_values = flag.get("nargs") != 0
            options: dict[str, Any] = {"type": _value} if takes_values else {"action": "store_true"}
            if takes_values and "nargs" in flag:
                options["nargs"] = flag["nargs"]
            parser.add_argument(*flag["names"], **options)
    names["get_slime_extra_args_provider"](None)(parser)
    with mock.patch("sys.argv", ["train.py", *words]):
        before = names["_pre_parse_mode"]()  # flags that slime parses before all others
    args, unknown = parser.parse_known_args(words, argparse.Namespace(**vars(before)))
    assert unknown == []
    names["slime_validate_args"](args)
    return args


@pytest.mark.parametrize("mode", ["colocated", "async"])
@pytest.mark.parametrize("model", ROWS)
def test_command_passes_slimes_own_checks(model: str, mode: str) -> None:
    words = command_of(model, mode)
    assert not check_flags(words, load_flag_table(None)).findings
    args = parse(words)
    assert args.global_batch_size == args.rollout_batch_size * args.n_samples_per_prompt
    assert args.eps_clip_high >= args.eps_clip


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--over-sampling-batch-size", "8"], "over_sampling_batch_size 8"),
        (["--rollout-max-prompt-len", "99999"], "rollout_max_prompt_len"),
        (["--num-steps-per-rollout", "4"], "global_batch_size 128 is not equal"),
    ],
)
def test_slimes_own_checks_find_planted_mistakes(arguments: list[str], error: str) -> None:
    words = command_of("qwen3-8B")
    with pytest.raises((AssertionError, ValueError), match=error):
        parse([*words, *arguments])


def printed_by(script: Path) -> Mapping[str, str]:
    """Return the flags that slime's own script submits to Ray, without running anything else of it."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "BASE_FOLDER": "/B",
        "BASE_DIR": "/B",
        "MASTER_ADDR": "10.0.0.1",
        "NUM_GPUS": "8",
    }
    done = subprocess.run(
        ["bash", "-c", PRINT_ARGUMENTS, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    words = shlex.split(done.stdout)
    (program,) = [place for place, word in enumerate(words) if word.endswith("train.py")]
    return flags_of(words[program + 1 :])


@HAS_NUMBERS
@pytest.mark.parametrize("model", COMPARED)
def test_models_page_names_every_difference_from_slimes_script(model: str) -> None:
    page = (REPOSITORY / "docs/training-models.md").read_text()
    section = page.partition("## Compared with slime's scripts")[2].partition("\n## ")[0]
    assert COMPARED[model] in section
    ours = flags_of(command_of(model))
    theirs = printed_by(SLIME / "scripts" / COMPARED[model])
    differing = {flag for flag in ours.keys() | theirs.keys() if not _is_same(ours.get(flag), theirs.get(flag))}
    differing -= {"--hf-checkpoint", "--ref-load", "--prompt-data"}  # paths
    assert sorted(differing - set(re.findall(r"`(--[\w-]+)`", section))) == []


def _is_same(ours: str | None, theirs: str | None) -> bool:
    try:
        return ours == theirs or float(str(ours)) == float(str(theirs))
    except ValueError:
        return False
