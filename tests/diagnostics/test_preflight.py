"""`doctor --training` with a command: planted mistakes are found, and the summary has the run's own numbers."""

import json
import shlex
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import dead_url
from stand_in_machine import REPOSITORY, SHIPPED, assert_fault, doctor_options, find_only, write_program
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.diagnostics import DoctorOptions, Finding, doctor, preflight
from strands_rollout.diagnostics.preflight import Preflight, measure_prompts, read_preflight, with_files_of
from strands_rollout.diagnostics.training_command import TrainingCommand, engine_cache, model_size, training_memory

# slime's scripts/models/qwen3-8B.sh and qwen3-30B-A3B.sh
QWEN3_8B = (
    "--swiglu --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --vocab-size 151936 "
    "--untie-embeddings-and-output-weights"
)
QWEN3_30B = (
    "--swiglu --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --vocab-size 151936 --num-experts 128 "
    "--untie-embeddings-and-output-weights --moe-ffn-hidden-size 768"
)
RUN = (
    f"{QWEN3_8B} --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-batch-size 16 "
    "--n-samples-per-prompt 8 --global-batch-size 128 --num-rollout 100 --over-sampling-batch-size 24 "
    "--rollout-max-response-len 16384 --rollout-max-context-len 18432 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 18432 --tensor-model-parallel-size 2 --recompute-granularity full "
    "--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --save-interval 20 --eval-interval 20"
)
HERE = doctor_options(Path("nowhere"))
Check = Callable[[Preflight, DoctorOptions], Iterator[Finding]]


def run(*more: str) -> Preflight:
    return Preflight((*shlex.split(RUN), *shlex.split(" ".join(more))), "the command")


@pytest.mark.parametrize(
    ("words", "billions", "cache_bytes"),
    [(QWEN3_8B, 8.19, 147_456), (QWEN3_30B, 30.5, 98_304)],
    ids=["Qwen3-8B", "Qwen3-30B-A3B"],
)
def test_model_size_equals_published_parameters(words: str, billions: float, cache_bytes: int) -> None:
    size = model_size(TrainingCommand(tuple(words.split())))
    assert size is not None
    assert size.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert size.cache_bytes == cache_bytes


def test_model_size_is_unknown_without_megatron_arguments() -> None:
    assert model_size(TrainingCommand(("--lr", "1"))) is None
    assert model_size(TrainingCommand((*QWEN3_8B.split(), "--multi-latent-attention"))) is None


def test_memory_arithmetic_equals_the_documented_table() -> None:
    command = TrainingCommand(tuple(shlex.split(f"{RUN} --actor-num-gpus-per-node 4 --tensor-model-parallel-size 4")))
    size = model_size(command)
    assert size is not None
    parts = training_memory(command, size)
    assert {name: round(gb, 1) for name, gb in parts.items()} == {
        "weights and gradients": 12.3,
        "optimizer": 24.6,
        "logits": 9.8,
        "activations": 2.0,
        "CUDA and NCCL": 3.0,
    }
    cache = engine_cache(command, size, 80)
    assert cache is not None
    assert cache.tokens == pytest.approx(648_000, rel=0.01)


@pytest.mark.parametrize(
    ("check", "words", "name", "status", "found", "remedy"),
    [
        (Preflight.check_batch, "--global-batch-size 90 --micro-batch-size 1", "batch", "error", "90", "such as 92"),
        (Preflight.check_context, "--max-tokens-per-gpu 9000", "context", "error", "longer sample ends", "product"),
        (Preflight.check_context, "--rollout-max-response-len 18432", "context", "error", "leaves no prompt", "raise"),
        (Preflight.check_memory, "--tensor-model-parallel-size 1", "memory", "warning", "logits 39.2", "--tensor"),
        (
            Preflight.check_memory,
            "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.22",
            "KV cache",
            "error",
            "does not fit",
            "--rollout-num-gpus",
        ),
        (
            Preflight.check_memory,
            "--over-sampling-batch-size 64",
            "KV cache",
            "warning",
            "128 episodes of 9,216",
            "--sglang-server-concurrency to 70",
        ),
        (Preflight.check_disk, "--num-rollout 20000 --save /", "disk", "error", "1000 checkpoints of 115", "free"),
    ],
)
def test_preflight_finds_planted_mistakes(
    check: Check, words: str, name: str, status: str, found: str, remedy: str
) -> None:
    assert_fault(check(run(words), HERE), f"command: {name}", status, found, remedy=remedy)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--lrr 3", "--lrr"),
        ("--actor-num-gpus-per-node 7", "--actor-num-gpus-per-node"),
        ("--global-batch-size 90", "--global-batch-size"),
    ],
)
def test_check_flags_reports_unknown_flags_and_odd_replicas(words: str, flag: str) -> None:
    found = [finding for finding in run(words).check_flags(HERE) if finding.name == f"command: {flag}"]
    assert "error" in {finding.status for finding in found}


def test_preflight_accepts_the_right_command() -> None:
    for check in (Preflight.check_batch, Preflight.check_context, Preflight.check_memory, Preflight.check_flags):
        assert {finding.status for finding in check(run(), HERE)} == {"ok"}


@pytest.mark.parametrize(("batch", "status"), [(128, "ok"), (64, "error")])
def test_check_batch_asks_the_installed_megatron(batch: int, status: str, tmp_path: Path) -> None:
    module = tmp_path / "megatron" / "core" / "num_microbatches_calculator.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "class ConstantNumMicroBatchesCalculator:\n"
        "    def __init__(self, batch, micro, replicas, decrease, rank):\n"
        "        assert batch == 128, f'{batch} with {replicas} replicas'\n"
    )
    options = doctor_options(tmp_path, megatron_dir=tmp_path)
    found = find_only(run(f"--global-batch-size {batch}").check_batch(options), "command: batch")
    assert (found.status, "Megatron-LM's own rule" in found.found) == (status, True), found
    assert status == "ok" or "64 with 4 replicas" in found.found


def test_check_context_reads_the_models_positions(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 20000}')
    options = doctor_options(tmp_path)
    assert_fault(
        run("--eval-max-context-len 40960").check_context(options),
        "command: context",
        "error",
        "of evaluation is 40960",
        remedy="20000",
    )


def test_memory_is_compared_with_this_machines_gpu(tmp_path: Path) -> None:
    env = write_program(tmp_path / "bin", "nvidia-smi", "echo '24564, NVIDIA RTX'")
    found = run().check_memory(doctor_options(tmp_path, env))
    assert_fault(list(found)[:1], "command: memory", "warning", "of 26 GB of NVIDIA RTX", remedy="--tensor")


ROW = {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "label": "2"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{**ROW, "prompt": [{"role": "user", "content": "word " * number}]} for number in range(1, 301)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_measure_prompts_counts_system_prompt_and_tools(data: Path) -> None:
    options = doctor_options(REPOSITORY, tokenizer=SHIPPED)
    measured = measure_prompts(data, options)
    assert (measured.rows, len(measured.lengths)) == (300, 100)
    without = measure_prompts(data, doctor_options(data.parent, tokenizer=SHIPPED, changes=["tools=[]"]))
    assert min(measured.lengths) - min(without.lengths) > 100


@pytest.mark.parametrize(
    ("words", "status", "found"),
    [
        ("", "ok", "5.3 passes over the data"),
        ("--rollout-max-prompt-len 50", "error", "the limit is 50"),
        ("--rollout-max-response-len 18000", "warning", "which leave"),
    ],
)
def test_check_data_compares_prompts_with_the_context(words: str, status: str, found: str, data: Path) -> None:
    options = doctor_options(REPOSITORY, tokenizer=SHIPPED)
    (result,) = run(f"--prompt-data {data} {words}").check_data(options)
    assert (result.status, found in result.found) == (status, True), result


class Judge(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.headers["authorization"] == "Bearer right" else 401)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize(("key", "status"), [("right", "ok"), ("wrong", "error")])
def test_check_judges_asks_each_judge(key: str, status: str, tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        found = list(run().check_judges(with_judge(tmp_path, url, key)))
        server.shutdown()
    assert [finding.status for finding in found] == [status]
    assert "right" not in found[0].found


def test_check_judges_reports_a_dead_judge(tmp_path: Path) -> None:
    found = run().check_judges(with_judge(tmp_path, dead_url(), "k"))
    assert_fault(found, "judge style", "error", "nothing answers at", remedy="start the judge's server")


def with_judge(folder: Path, url: str, key: str) -> DoctorOptions:
    judge = {"base_url": url, "model": "m", "api_key": key}
    config = {"strands_rollout": {"reward": {"parts": {"style": {"judge": judge}}}}}
    (folder / "rollout.yaml").write_text(json.dumps(config))
    return doctor_options(folder, config=folder / "rollout.yaml")


def test_summary_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "aime.jsonl").write_text("{}\n" * 30)
    more = f"--save {tmp_path} --save-retain-interval 2000 --eval-prompt-data aime {tmp_path}/aime.jsonl"
    lines = list(run(more, "--n-samples-per-eval-prompt 16").summarize(doctor_options(tmp_path)))
    shown = "\n".join(f"{line.name}: {line.found}" for line in lines)
    assert len(lines) == 10
    for words in (
        "8.2 billion parameters",
        "8 train as 4 replicas (TP 2, PP 1, CP 1)",
        "100 steps of 16 prompts x 8 episodes = 128 samples",
        "at most 2,359,296 a step",
        "up to 192 episodes on 4 engines",
        "24 prompts start at once",
        "5 of 115 GB, each 20 steps, 2 at once",
        "6, each 20 steps, of aime: 16 samples a problem = 480 episodes",
    ):
        assert words in shown, shown


def test_summary_of_an_evaluation_has_no_steps() -> None:
    lines = list(run("--num-rollout 0 --eval-interval 1").summarize(HERE))
    shown = {line.name.removeprefix("this run: "): line.found for line in lines}
    assert shown["samples"] == "none for training: the job only evaluates"
    assert shown["evaluations"].startswith("1, ")
    assert not {"tokens", "in flight", "rollout"} & set(shown)


def test_files_of_the_command_replace_those_of_the_environment(tmp_path: Path) -> None:
    command = TrainingCommand(("--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--custom-config-path", "/c.yaml"))
    options = with_files_of(doctor_options(tmp_path, {"HF_CHECKPOINT": "/other"}), command)
    assert (options.model, options.data, options.config_file) == (Path("/m"), [Path("/d.jsonl")], Path("/c.yaml"))


def test_training_reads_the_default_script_only_for_its_model() -> None:
    found = read_preflight(None, (), doctor_options(REPOSITORY))
    assert found is not None
    assert found.command.samples == 128
    assert read_preflight(None, (), doctor_options(REPOSITORY, model_name="Qwen3-4B")) is None
    given = read_preflight(None, ["--rollout-batch-size", "4"], doctor_options(REPOSITORY))
    assert given is not None
    assert given.command.samples == 4


def test_doctor_with_training_checks_machine_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(doctor, "run_doctor", lambda _, found: asked.append(found) or doctor.diagnostics.Diagnosis([]))
    done = CliRunner().invoke(app, ["doctor", "--training", "--", "--rollout-batch-size", "4"])
    assert done.exit_code == 0, done.output
    (found,) = asked
    assert isinstance(found, preflight.Preflight)
    assert found.command.number("--rollout-batch-size") == 4
