"""slime's models by name: the rows of `scripts/launch/models.sh` in training, conversion and evaluation."""

import re
import subprocess
from pathlib import Path

import pytest
from launch_models import flags_of, model_rows, number, training_command, words_of
from launch_stage import REPOSITORY, Stage, make_stage

from strands_rollout import tool_parsers
from strands_rollout.diagnostics.flag_check import check_flags, load_flag_table

ROWS = model_rows()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return make_stage(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("mode", ["colocated", "async"])
@pytest.mark.parametrize("model", ROWS)
def test_train_gives_known_flags_and_sizes_that_fit(model: str, mode: str) -> None:
    words = words_of(training_command(mode, MODEL=model))
    assert not check_flags(words, load_flag_table(None)).findings
    flags = flags_of(words)
    trainers = number(flags, "--actor-num-nodes") * number(flags, "--actor-num-gpus-per-node")
    tensor, pipeline, context, expert = (
        number(flags, f"--{name}-parallel-size")
        for name in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    assert trainers % (tensor * pipeline * context) == 0
    assert trainers % (expert * pipeline) == 0  # Megatron's parallel_state
    assert number(flags, "--global-batch-size") % (trainers // (tensor * pipeline * context)) == 0
    assert number(flags, "--max-tokens-per-gpu") * context >= number(flags, "--rollout-max-context-len")
    generators = number(flags, "--rollout-num-gpus", trainers)
    assert generators % number(flags, "--rollout-num-gpus-per-engine") == 0
    row = ROWS[model]
    assert trainers == int(row["nodes"]) * int(row["gpus"]) // (2 if mode == "async" and row["offload"] == "0" else 1)
    assert ("--eval-interval" in flags) == ("--colocate" in flags) == (mode == "colocated")


@pytest.mark.parametrize("model", ROWS)
def test_rows_name_source_and_known_parser(model: str) -> None:
    row = ROWS[model]
    assert re.fullmatch(r"like [\w.-]+|(scripts|examples|tests)/\S+(, tests/\S+)?", row["source"])
    assert row["source"].removeprefix("like ") in ROWS or "/" in row["source"]
    assert row["parser"] in {"auto", "unknown", *tool_parsers.parser_names()}
    assert row["hub"].count("/") == 1


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-4B", "Qwen3.5-4B", "qwen3.5-4b", "qwen/qwen3.5-4b"])
def test_train_finds_row_by_hub_id_and_any_case(model: str) -> None:
    assert training_command(MODEL=model) == training_command(MODEL="qwen3.5-4B")


def test_train_takes_no_row_of_another_owners_model(stage: Stage) -> None:
    refused = stage.run("train.sh", "--dry-run", MODEL="mine/Qwen3.5-4B")
    assert "no sizes for mine/Qwen3.5-4B" in refused.stderr


def test_train_refuses_unknown_mode(stage: Stage) -> None:
    refused = stage.run("train.sh", "asynch", "--dry-run")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "got 'asynch'; expected colocated, async or an option" in refused.stderr


@pytest.mark.parametrize(
    ("script", "mode", "model"),
    [
        ("strands_qwen3_8b", "colocated", "qwen3-8B"),
        ("strands_qwen3_4b", "colocated", "qwen3-4B"),
        ("strands_qwen3_8b_async", "async", "qwen3-8B"),
    ],
)
def test_script_for_one_model_prints_command_of_train(script: str, mode: str, model: str) -> None:
    own = training_command(script=f"{script}.sh", MODEL="another")
    assert own == training_command(mode, MODEL=model)
    assert (
        len([line for line in (REPOSITORY / f"scripts/{script}.sh").read_text().splitlines() if line[:1] not in "#"])
        == 3
    )


def test_train_without_row_asks_for_sizes_by_name(stage: Stage) -> None:
    asked = "NUM_GPUS TENSOR_PARALLEL GPUS_PER_ENGINE SGLANG_MEM_FRACTION MAX_RESPONSE_LEN TOOL_PARSER"
    refused = stage.run("train.sh", "--dry-run", MODEL="foo/Foo-14B", SLIME_MODEL="qwen3-8B")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"no sizes for foo/Foo-14B; set {asked.replace(' ', ', ')} (docs" in refused.stderr
    given = {"TENSOR_PARALLEL": "2", "SGLANG_MEM_FRACTION": "0.7", "TOOL_PARSER": "auto"}
    options = ["--num-gpus", "4", "--gpus-per-engine=2"]
    refused = stage.run("train.sh", *options, "--dry-run", MODEL="foo/Foo-14B", SLIME_MODEL="qwen3-8B", **given)
    assert "; set MAX_RESPONSE_LEN (docs" in refused.stderr
    options += ["--max-response-len", "4096", "--dry-run"]
    shown = stage.run("train.sh", *options, MODEL="foo/Foo-14B", SLIME_MODEL="qwen3-8B", **given)
    assert shown.returncode == 0, shown.stderr
    assert "foo-14b-strands" in shown.stdout
    assert "--sglang-attention-backend" not in shown.stdout  # only rows name a backend
    assert '"STRANDS_ROLLOUT_TOOL_PARSER": "auto"' in shown.stdout
    assert "Rows: qwen2.5-0.5B" in refused.stderr
    assert stage.run("train.sh", "--help", MODEL="foo/Foo-14B").returncode == 0


def test_train_asks_for_tool_parser_that_no_row_knows(stage: Stage) -> None:
    refused = stage.run("train.sh", "--dry-run", MODEL="moonlight", SLIME_MODEL="qwen3-8B")
    assert "no tool parser for moonlight; set TOOL_PARSER" in refused.stderr
    for given in ({"TOOL_PARSER": "hermes"}, {"ROLLOUT_CONFIG": "mine.yaml"}):  # the configuration may set it
        assert stage.run("train.sh", "--dry-run", MODEL="moonlight", SLIME_MODEL="qwen3-8B", **given).returncode == 0


def test_fp8_rollout_uses_copy_and_bf16_training_weights() -> None:
    flags = flags_of(words_of(training_command(MODEL="qwen3-8B", FP8_ROLLOUT="1", MODEL_DIR="/models")))
    assert flags["--hf-checkpoint"] == "/models/Qwen3-8B-FP8"
    assert flags["--ref-load"] == "/models/Qwen3-8B_torch_dist"


def test_thinking_is_switched_by_template_variable(stage: Stage) -> None:
    flags = flags_of(words_of(training_command("--thinking=0", MODEL="qwen3.5-4B")))
    assert flags["--apply-chat-template-kwargs"] == '{"enable_thinking": false}'
    refused = stage.run("train.sh", "--dry-run", MODEL="minimax-m2", THINKING="0", SLIME_MODEL="qwen3-8B")
    assert "always reasons" in refused.stderr
    refused = stage.run("train.sh", "--dry-run", MODEL="kimi-k2", THINKING="1", SLIME_MODEL="qwen3-8B")
    assert "does not reason" in refused.stderr


def test_thinking_keeps_template_of_row() -> None:
    chosen = flags_of(words_of(training_command(MODEL="deepseek-v3")))["--apply-chat-template-kwargs"]
    assert "deepseek_r1_tools" in chosen
    with_thinking = flags_of(words_of(training_command("--thinking=1", MODEL="deepseek-v3")))
    assert with_thinking["--apply-chat-template-kwargs"] == chosen


def test_fp8_rollout_refuses_weights_that_are_fp8_on_the_hub(stage: Stage) -> None:
    for script in ("train.sh", "prepare_model.sh"):
        refused = stage.run(script, "--dry-run", MODEL="minimax-m2", FP8_ROLLOUT="1", SLIME_MODEL="qwen3-8B")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "MiniMax-M2.5 is published in FP8" in refused.stderr


def test_missing_fp8_copy_names_command_that_makes_it(stage: Stage) -> None:
    refused = stage.run("train.sh", MODEL="qwen3-8B", FP8_ROLLOUT="1")
    assert "bash scripts/prepare_model.sh --model Qwen/Qwen3-8B --fp8-rollout" in refused.stderr


def test_prepare_model_casts_int4_only_for_missing_copies(stage: Stage) -> None:
    models = stage.root / "models"
    for name in ("", "_torch_dist", "-FP8"):
        (models / f"Kimi-K2-Thinking{name}").mkdir(parents=True)
    (models / "Kimi-K2-Thinking/config.json").write_text("{}")
    (models / "Kimi-K2-Thinking/model.safetensors").touch()
    (models / "Kimi-K2-Thinking_torch_dist/latest_checkpointed_iteration.txt").write_text("release")
    before = len(stage.calls)
    finished = stage.run("prepare_model.sh", MODEL="kimi-k2-thinking", MASTER_ADDR="10.0.0.1", SLIME_MODEL="qwen3-8B")
    assert finished.returncode == 0, finished.stderr
    assert not [call for call in stage.calls[before:] if "int4" in " ".join(call.words)]


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("qwen3-8B", {}, 64),  # limited by the cache
        ("qwen3-4B-Instruct-2507", {}, 32),  # an engine of one GPU
        ("qwen3-32B", {}, 144),  # one engine of 8 GPUs
        ("deepseek-v3", {}, 192),  # 48 groups of 8 on two engines
        ("deepseek-v3", {"ROLLOUT_BATCH_SIZE": "128"}, 384),
        ("deepseek-v3", {"ROLLOUT_BATCH_SIZE": "32", "MAX_SAMPLE_STALENESS": "1"}, 128),  # the groups of a step
        ("qwen3-8B", {"SGLANG_CONCURRENCY": "7"}, 7),
    ],
)
def test_async_concurrency_follows_from_cache_and_staleness(model: str, given: dict[str, str], expected: int) -> None:
    flags = flags_of(words_of(training_command("async", MODEL=model, **given)))
    assert flags["--sglang-server-concurrency"] == str(expected)


def test_row_values_are_defaults_of_settings() -> None:
    options = ["--pipeline-parallel", "1", "--tensor-parallel=8", "--routing-replay", "--eps-clip", "0.1"]
    flags = flags_of(words_of(training_command(*options, MODEL="qwen3.5-27B")))
    assert (flags["--tensor-model-parallel-size"], flags["--pipeline-model-parallel-size"]) == ("8", "1")
    assert "--decoder-last-pipeline-num-layers" not in flags  # the row's value is for two pipeline stages
    assert "--use-rollout-routing-replay" in flags
    assert flags["--eps-clip"] == "0.1"


@pytest.mark.parametrize("model", ROWS)
def test_prepare_model_converts_every_row(model: str) -> None:
    shown = training_command("--model", model, script="prepare_model.sh", MODEL_DIR="/models")
    hub, folder = ROWS[model]["hub"], f"/models/{ROWS[model]['hub'].rpartition('/')[2]}"
    assert shown.startswith(f"hf download {hub} ")
    assert shown.endswith(f"mv {folder}_torch_dist.partial {folder}_torch_dist\n")
    assert ("convert_k2_thinking_int4_to_bf16.py" in shown) == (ROWS[model]["weights"] == "int4")
    assert ("fp8_cast_bf16.py" in shown) == (ROWS[model]["weights"] == "fp8")
    assert ("convert_hf_to_fp8.py" in shown) == (model in {"qwen3-235B-A22B", "kimi-k2-thinking"})


def test_prepare_model_makes_fp8_copy_once(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    finished = stage.run("prepare_model.sh", FP8_ROLLOUT="1")
    assert finished.returncode == 1, "the fake conversion tool writes nothing, so the script fails"
    assert "-FP8.partial" in finished.stderr
    (tool,) = [call for call in stage.calls if any("convert_hf_to_fp8.py" in word for word in call.words)]
    assert tool.words[1:] == [
        "--model-dir", f"{stage.root}/models/Qwen3-8B", "--save-dir", f"{stage.root}/models/Qwen3-8B-FP8.partial",
        "--strategy", "block", "--block-size", "128", "128", "--max-workers", "4",
    ]  # fmt: skip
    (stage.root / "models/Qwen3-8B-FP8").mkdir()
    assert stage.run("prepare_model.sh", FP8_ROLLOUT="1").returncode == 0


def test_prepare_model_on_several_nodes_needs_address(stage: Stage) -> None:
    refused = stage.run("prepare_model.sh", "--dry-run", MODEL="deepseek-v3", SLIME_MODEL="qwen3-8B")
    assert "expected also MASTER_ADDR" in refused.stderr
    refused = stage.run("prepare_model.sh", "--dry-run", MODEL="foo")
    assert "expected a model's id on the hub, such as Qwen/Qwen3-8B, or one of: qwen2.5-0.5B" in refused.stderr
    given = {"MODEL": "deepseek-v3", "SLIME_MODEL": "qwen3-8B", "MASTER_ADDR": "10.0.0.1", "NODE_RANK": "3"}
    shown = stage.run("prepare_model.sh", "--dry-run", **given)
    assert shown.returncode == 0, shown.stderr
    assert "--node-rank 3" in shown.stdout
    assert "hf download" not in shown.stdout


def test_eval_takes_sizes_of_row(stage: Stage) -> None:
    shown = training_command("--model", "qwen3-30B-A3B", script="eval_aime.sh")
    flags = flags_of(words_of(shown))
    assert flags["--expert-model-parallel-size"] == "8"
    assert flags["--rollout-num-gpus-per-engine"] == "8"
    assert "--optimizer-cpu-offload" in flags


def test_models_file_has_no_unknown_keys() -> None:
    program = 'repository="$0"; fail() { echo "$*"; exit 1; }; source "$0/scripts/launch/models.sh"; row tokenz=3'
    done = subprocess.run(["bash", "-c", program, str(REPOSITORY)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "a row of scripts/launch/models.sh has the unknown key tokenz\n")
