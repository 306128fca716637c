"""Commands that the launch scripts print and run, compared with golden files.

After a change, write the files again and read their diff: UPDATE_GOLDEN=1 bash scripts/test.sh tests/launch
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from launch_stage import REPOSITORY, Stage, make_stage, readable, value_of

GOLDEN = Path(__file__).parents[1] / "golden" / "launch"
SCRIPTS = ["strands_qwen3_8b", "strands_qwen3_4b", "strands_qwen3_8b_async", "eval_aime", "prepare_model"]
VARIANTS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "smoke": ("strands_qwen3_8b", ["--smoke"], {}),
    "partial_rollout": ("strands_qwen3_8b", ["--partial-rollout"], {}),
    "several_nodes": ("strands_qwen3_8b", ["--num-nodes", "4"], {"RAY_ADDRESS": "10.0.0.1:6379"}),
    "wandb": ("strands_qwen3_8b", [], {"WANDB_API_KEY": "secret", "RAY_ADDRESS": "http://10.0.0.1:8265"}),
    "several_sets": ("strands_qwen3_8b", ["--eval-config", "/configs/aime_eval.yaml"], {}),
    "everything": (
        "strands_qwen3_8b",
        ["--dynamic-sampling=0", "--kl-loss-coef", "0.001", "--context-parallel", "2", "--", "--seed", "7"],
        {"DUMP_ROLLOUTS": "0", "FAKE_NVLINK": "1", "WANDB_MODE": "offline"},
    ),
    "checkpoint": ("eval_aime", ["--load", "/runs/one", "--ckpt-step", "199"], {}),
    "convert_on_gpus": ("prepare_model", ["--model", "Qwen/Qwen3-4B", "--conversion-gpus=4", "--revision=abc"], {}),
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return make_stage(tmp_path_factory.mktemp("launch"))


def dry_run(stage: Stage, script: str, *arguments: str, **environment: str) -> str:
    # options of the script come before those of slime
    finished = stage.run(f"{script}.sh", "--dry-run", *arguments, **environment)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return readable(stage, finished.stdout)


def words_of(shown: str) -> list[str]:
    return shlex.split(shown.replace("\\\n", ""))


def check_golden(name: str, shown: str) -> None:
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(shown)
    assert shown == golden.read_text(), f"see the docstring of {Path(__file__).name} if this is meant"


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_prints_golden_command(stage: Stage, script: str) -> None:
    check_golden(script, dry_run(stage, script))


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_without_slime_prints_placeholder(stage, script):
    before, calls = stage.files(), len(stage.calls)
    shown = dry_run(stage, script, SLIME_DIR="")
    assert stage.files() == before
    assert {call.name for call in stage.calls[calls:]} <= {"python3", "nvidia-smi"}
    assert "<MODEL_ARGS of scripts/models/qwen3-" in shown
    check_golden(f"{script}.without_slime", shown)
    with_key = dry_run(stage, script, WANDB_API_KEY="hush", RAY_ADDRESS="http://10.0.0.1:8265", USE_WANDB="0")
    assert "--use-wandb" not in with_key
    assert not [secret for secret in ("hush", "/root", str(REPOSITORY)) if secret in with_key]


@pytest.mark.parametrize("name", VARIANTS)
def test_dry_run_options_change_golden_command(stage: Stage, name: str) -> None:
    script, arguments, environment = VARIANTS[name]
    check_golden(f"{script}.{name}", dry_run(stage, script, *arguments, **environment))


def test_golden_files_are_all_used() -> None:
    names = {*SCRIPTS, *(f"{script}.without_slime" for script in SCRIPTS)}
    names |= {f"{script}.{name}" for name, (script, _, _) in VARIANTS.items()}
    assert {path.stem for path in GOLDEN.iterdir()} == names


def test_option_overrides_environment_variable(stage: Stage) -> None:
    by_option = dry_run(stage, "strands_qwen3_8b", "--num-rollout", "7", "--hf-checkpoint=/m/x y", NUM_ROLLOUT="8")
    assert by_option == dry_run(stage, "strands_qwen3_8b", NUM_ROLLOUT="7", HF_CHECKPOINT="/m/x y")
    words = words_of(by_option)
    assert (value_of(words, "--hf-checkpoint"), value_of(words, "--num-rollout")) == ("/m/x y", "7")


def test_dry_run_checks_slimes_arguments(stage: Stage) -> None:
    finished = stage.run("strands_qwen3_8b.sh", "--dry-run", "--", "--lrr", "3", FAKE_CHECK_STATUS="1")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert "the arguments for slime have errors" in finished.stderr
    check = stage.calls_of("python3", "-m", "strands_rollout.cli", "doctor", "--flags", "-")[-1]
    assert "--lrr 3" in str(check.stdin)
    assert "--lrr 3" in dry_run(stage, "strands_qwen3_8b", "--", "--lrr", "3", FAKE_NOT_INSTALLED="1")


def test_slime_arguments_come_last_and_reward_replaces_default(stage: Stage) -> None:
    given = ["--", "--lr", "3e-6", "--rollout-stop", "a b"]
    words = words_of(dry_run(stage, "strands_qwen3_8b", *given, REWARD="mine.reward", REWARD_KEY="none"))
    assert (words[-4:], value_of(words, "--custom-rm-path")) == (given[1:], "mine.reward")
    assert not {"--reward-key", "--eval-reward-key"} & set(words)


def test_tutorial_command_uses_project_rows(stage: Stage) -> None:
    tutorial = (REPOSITORY / "docs/tutorial.md").read_text()
    (example,) = [block for block in re.findall(r"```bash\n(.*?)```", tutorial, re.DOTALL) if "PROMPT_DATA" in block]
    given = dict(re.findall(r"([A-Z_]+)=(\S+)", example))
    finished = stage.run("strands_qwen3_8b.sh", "--dry-run", **given)
    words = words_of(finished.stdout)
    data, rows = words.index("--eval-prompt-data"), Path("my-agent").absolute()
    assert (value_of(words, "--prompt-data"), value_of(words, "--custom-config-path")) == (
        f"{rows}/train.jsonl",
        f"{rows}/rollout.yaml",
    )
    assert words[data + 1 : data + 3] == ["held_out", f"{rows}/held_out.jsonl"]
    assert words[data + 3].startswith("--")


def test_paths_are_normalized_and_smoke_run_has_own_checkpoints(stage: Stage) -> None:
    smoke = words_of(dry_run(stage, "strands_qwen3_8b", "--smoke", "--save-dir=/runs/one/", "--model-dir=~/models//"))
    real = words_of(dry_run(stage, "strands_qwen3_8b", "--save-dir=/runs/one"))
    assert value_of(smoke, "--save") == "/runs/one-smoke"
    assert value_of(smoke, "--ref-load") == f"{stage.root.parent}/models/Qwen3-8B_torch_dist"
    assert value_of(smoke, "--num-rollout") == "2"
    assert not {"--load", "--dynamic-sampling-filter-path"} & set(smoke)
    assert value_of(real, "--load") == "/runs/one"


@pytest.mark.parametrize("address", ["http://10.0.0.1:8265", "10.0.0.1:6379", "10.0.0.1", "ray://10.0.0.1:10001"])
def test_ray_address_names_job_server(stage: Stage, address: str) -> None:
    words = words_of(dry_run(stage, "strands_qwen3_8b", RAY_ADDRESS=address, NUM_NODES="4"))
    assert "--address=http://10.0.0.1:8265" in words
    assert value_of(words, "--actor-num-nodes") == "4"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_setting(stage: Stage, script: str) -> None:
    before = stage.files()
    shown = stage.run(f"{script}.sh", "--help")
    assert (shown.returncode, stage.files()) == (0, before)
    options = ["--slime-dir", "--model-dir", "--dry-run", "--help", *(["--smoke"] if "strands" in script else [])]
    assert [option for option in (*options, "Example: ") if option not in shown.stdout] == []
    assert str(stage.root) not in shown.stdout.replace(f"{stage.root}/scripts", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--actor-gpus", "8"], "expected fewer, so that some GPUs generate"),
        (["--num-gpu", "8"], r"unknown option --num-gpu; did you mean --num-gpus\? Arguments for slime go after --"),
        (["--num-rolout", "3"], r"unknown option --num-rolout; did you mean --num-rollout\? "),
        (["--optimizer", "x"], r"unknown option --optimizer\. Arguments for slime go after --"),
        (["--num-gpus", "eight"], "got NUM_GPUS='eight'; expected a whole number"),
        (["--partial-rollout", "yes"], "got PARTIAL_ROLLOUT='yes'; expected 0 or 1"),
        (["--learning-rate", "fast"], "got LEARNING_RATE='fast'; expected a number"),
        (["--sglang-mem-fraction", "70"], "got SGLANG_MEM_FRACTION='70'; expected a number between 0 and 1"),
        (["--eval-temperature", "-1"], "got EVAL_TEMPERATURE='-1'; expected a number of at least 0"),
        (["--eval-top-p", "3"], "got EVAL_TOP_P='3'; expected a number above 0, at most 1"),
        (["--eval-top-p", "0"], "got EVAL_TOP_P='0'; expected a number above 0, at most 1"),
        (["--temperature", "0.0"], "got TEMPERATURE='0.0'; expected a number above 0"),
        (["--eval-sets", ","], "got EVAL_SETS=','; expected names separated by commas, without spaces"),
        (["--max-response-len", "9", "--max-context-len", "9"], "expected a larger MAX_CONTEXT_LEN, because the"),
        (["--max-tokens-per-gpu", "1000"], "expected a product of at least MAX_CONTEXT_LEN=18432"),
        (["--num-gpus", "7"], "7 GPUs train; expected a multiple of .* = 2"),
        (["--gpus-per-engine", "3"], "8 GPUs generate; expected a multiple of GPUS_PER_ENGINE=3"),
        (["--global-batch-size", "100"], "= 128 episodes; expected a multiple of GLOBAL_BATCH_SIZE=100"),
        (["--n-samples-per-prompt", "1"], "expected 2 or more: GRPO compares"),
        (["--over-sampling-batch-size", "8"], "expected at least ROLLOUT_BATCH_SIZE=16"),
        (["--", "--wandb-key", "hush"], "expected the key in the environment"),
        (["--run-name", "a b"], "got RUN_NAME='a b'; expected a letter or digit"),
        (["--save-dir", "/runs/{x}"], "expected no braces"),
        (
            ["--num-nodes", "64"],
            "GLOBAL_BATCH_SIZE is 128; expected a multiple of the 256 replicas that train .*, such as "
            "ROLLOUT_BATCH_SIZE=32 with GLOBAL_BATCH_SIZE=256",
        ),
        (
            ["--num-nodes", "3"],
            "128; expected a multiple of the 12 replicas .*ROLLOUT_BATCH_SIZE=18 with .*=144",
        ),
        (
            ["--num-gpus", "6"],
            "128; expected a multiple of the 3 replicas .*ROLLOUT_BATCH_SIZE=18 with .*=144",
        ),
        (["--num-gpus", "6", "--smoke"], "16; expected a multiple of the 3 replicas .* such as ROLLOUT_BATCH_SIZE=6 "),
        (["--num-nodes", "3", "--context-parallel", "2"], "128; expected a multiple of the 6 replicas .*=18 with "),
        (["--rollout-batch-size", "5", "--n-samples-per-prompt", "5"], "25; expected a multiple of the 4 replicas"),
        (["--rollout-batch-size=15", "--global-batch-size=30"], "30; expected a multiple of the 4 .*=15 with .*=120"),
        (["--actor-gpus", "6", "--gpus-per-engine", "2"], "128; expected a multiple of the 3 replicas that train"),
    ],
)
def test_dry_run_refuses_bad_options(stage: Stage, arguments: list[str], words: str) -> None:
    script = "strands_qwen3_8b_async.sh" if "--actor-gpus" in arguments else "strands_qwen3_8b.sh"
    finished = stage.run(script, "--dry-run", *arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert re.search(words, finished.stderr.replace("\n", " ")), finished.stderr
    assert "--help" in finished.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-nodes=3", "--rollout-batch-size=18"],
        ["--num-gpus=6", "--rollout-batch-size=18", "--global-batch-size=72"],
        ["--num-gpus=6", "--context-parallel=3"],
    ],
)
def test_dry_run_accepts_divisible_batch_sizes(stage: Stage, arguments: list[str]) -> None:
    assert "--global-batch-size" in dry_run(stage, "strands_qwen3_8b", *arguments)


def test_async_script_refuses_unsupported_environment(stage: Stage) -> None:
    finished = stage.run("strands_qwen3_8b_async.sh", "--dry-run", PARTIAL_ROLLOUT="1")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "got PARTIAL_ROLLOUT='1'; expected 0" in finished.stderr


def test_dry_run_of_unknown_model_lists_known_models(stage: Stage) -> None:
    finished = stage.run("strands_qwen3_8b.sh", "--dry-run", SLIME_MODEL="foo-14B")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.endswith("to one of: qwen3-4B qwen3-8B\n")
