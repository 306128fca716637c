"""`doctor --training` with a command: memory arithmetic, planted mistakes, and a summary with the run's own numbers."""

import inspect
import json
import random
import re
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
from strands_rollout.diagnostics import DoctorOptions, Finding, doctor, preflight, training_command
from strands_rollout.diagnostics.flag_check import RECORD
from strands_rollout.diagnostics.preflight import Preflight, measure_prompts, read_preflight
from strands_rollout.diagnostics.run_files import check_data
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
# slime's scripts/models/deepseek-v3.sh and moonlight.sh
LATENT = "--swiglu --untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 512 "
LATENT += "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
DEEPSEEK_V3 = (
    f"{LATENT} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--vocab-size 129280 --q-lora-rank 1536 --num-experts 256 --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048"
)
MOONLIGHT = (
    f"{LATENT} --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16 --vocab-size 163840 "
    "--num-experts 64 --moe-layer-freq [0,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1] "
    "--moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816"
)
RUN = (
    f"{QWEN3_8B} --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-batch-size 16 "
    "--n-samples-per-prompt 8 --global-batch-size 128 --num-rollout 100 --over-sampling-batch-size 24 "
    "--rollout-max-response-len 16384 --rollout-max-context-len 18432 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 18432 --input-key prompt --tensor-model-parallel-size 2 --recompute-granularity full "
    "--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --save-interval 20 --eval-interval 20"
)
HERE = doctor_options(Path("nowhere"))
Check = Callable[[Preflight, DoctorOptions], Iterator[Finding]]


def run(*more: str) -> Preflight:
    return Preflight((*shlex.split(RUN), *shlex.split(" ".join(more))), "the command")


@pytest.mark.parametrize(
    ("words", "billions", "cache_bytes"),
    [(QWEN3_8B, 8.19, 147_456), (QWEN3_30B, 30.5, 98_304), (DEEPSEEK_V3, 671, 70_272), (MOONLIGHT, 15.96, 31_104)],
    ids=["Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "Moonlight-16B-A3B"],
)
def test_model_size_equals_published_parameters(words: str, billions: float, cache_bytes: int) -> None:
    size = model_size(TrainingCommand(tuple(words.split())))
    assert size is not None
    assert size.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert size.cache_bytes == cache_bytes


def test_model_size_is_unknown_without_megatron_arguments() -> None:
    assert model_size(TrainingCommand(("--lr", "1"))) is None
    assert model_size(TrainingCommand(())) is None


@pytest.mark.parametrize(
    ("frequency", "sparse"),
    [("1", 48), ("2", 24), ("[0]*3+[1]*45", 45), ("[0, 1]*24", 24), ("[1]*99", 48), ("null", 48), ("1e400", 48)],
)
def test_model_size_reads_the_layers_with_experts(frequency: str, sparse: int) -> None:
    size = model_size(TrainingCommand((*QWEN3_30B.split(), "--moe-layer-freq", frequency)))
    assert size is not None
    assert size.experts == sparse * 128 * 3 * 2048 * 768


def test_training_memory_splits_experts_like_layers_by_default() -> None:
    """Megatron-LM's --expert-tensor-parallel-size is the tensor parallel size by default."""
    words = shlex.split(f"{RUN} {QWEN3_30B} --tensor-model-parallel-size 4 --expert-model-parallel-size 2")
    size = model_size(TrainingCommand(tuple(words)))
    assert size is not None
    whole, split = (
        training_memory(TrainingCommand((*words, *more)), size)["weights and gradients"]
        for more in (("--expert-tensor-parallel-size", "1"), ())
    )
    assert (whole, split) == pytest.approx([6e-9 * (size.shared / 4 + size.experts / gpus) for gpus in (2, 8)])


def test_engine_cache_of_data_parallel_attention_is_in_parts() -> None:
    """Each GPU caches whole tokens of DeepSeek-V3; with data parallelism, 8 parts cache different episodes."""
    words = (*shlex.split(RUN), *DEEPSEEK_V3.split(), "--rollout-num-gpus-per-engine", "64")
    size = model_size(TrainingCommand(words))
    assert size is not None
    one = engine_cache(TrainingCommand(words), size, 80)
    more = engine_cache(TrainingCommand((*words, "--sglang-enable-dp-attention", "--sglang-dp-size", "8")), size, 80)
    assert one is not None
    assert more is not None
    assert one.tokens == pytest.approx((80 * 0.7 - 2 * 671.03 / 64) * 1e9 / 70_272, rel=0.001)
    assert (more.tokens, more.parts) == (8 * one.tokens, 8)


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
        (Preflight.check_context, "--max-tokens-per-gpu 9000", "context", "error", "longer sample may", "product"),
        (Preflight.check_context, "--rollout-max-response-len 18432", "context", "error", "get no tokens", "raise"),
        (Preflight.check_memory, "--tensor-model-parallel-size 1", "memory", "warning", "logits 39.2", "--tensor"),
        (
            Preflight.check_memory,
            "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.22",
            "KV cache",
            "warning",  # without the weights, it is unknown whether the model is quantized
            "GPU (in bf16, if the model is not quantized), 8,267 tokens of cache per engine; one episode of 18,432",
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
        (
            Preflight.check_batch,
            "--rollout-num-gpus-per-engine 3",
            "engines",
            "error",
            "8 GPUs generate; engines have 3",
            "--rollout-num-gpus",
        ),
        (Preflight.check_batch, "--num-steps-per-rollout 3", "batch", "error", "42 samples", "choose --num-steps-per"),
        (Preflight.check_batch, "--actor-num-gpus-per-node 0", "batch", "error", "no GPU trains", "--actor-num-nodes"),
        (
            Preflight.check_evaluation,
            "--rollout-function-path strands_rollout.generate_rollout_fully_async",
            "evaluation",
            "error",
            "first evaluation",
            "--watch",
        ),
        (
            Preflight.check_context,
            "--eval-max-response-len 30000 --eval-max-context-len 18432",
            "context",
            "error",
            "--eval-max-response-len is 30000; the evaluation's context has 18432 tokens",
            "--eval-max-context-len",
        ),
        (Preflight.check_evaluation, "--input-key prompt", "evaluation", "error", "no data set", "--eval-prompt-data"),
        (Preflight.check_evaluation, "--eval-interval=0", "evaluation", "error", "--eval-interval is 0", "at least 1"),
        (Preflight.check_disk, "--save-interval 0 --save /", "disk", "error", "--save-interval is 0", "at least 1"),
        (Preflight.check_disk, f"--save /{'n' * 300}", "disk", "error", "can't be used", "name a writable"),
        (Preflight.check_disk, "--num-rollout 20000 --save /", "disk", "error", "1000 checkpoints of 115", "free"),
    ],
)
def test_preflight_finds_planted_mistakes(
    check: Check, words: str, name: str, status: str, found: str, remedy: str
) -> None:
    assert_fault(check(run(words), HERE), f"command: {name}", status, found, remedy=remedy)


@pytest.mark.parametrize(
    ("words", "fails"),
    [
        ("", False),
        ("--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async", True),
        ("--eval-function-path slime.rollout.sglang_rollout.generate_rollout", True),
        ("--eval-function-path mine.evaluate", False),
        ("--eval-interval x", False),
    ],
)
def test_check_evaluation_of_fully_async_runs(words: str, fails: bool) -> None:
    path = "strands_rollout.generate_rollout_fully_async" if words else "slime.rollout.sglang_rollout.generate_rollout"
    command = f"--rollout-function-path {path} --eval-prompt-data aime aime.jsonl {words}"
    found = list(run(command).check_evaluation(HERE))
    assert [finding.status for finding in found] == ["error"] * fails


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


@pytest.mark.parametrize(
    ("config", "words", "positions"),
    [
        ({"text_config": {"max_position_embeddings": 8192}}, "", 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "linear", "factor": 4}}, "", None),
        (
            {"max_position_embeddings": 8192, "rope_scaling": {"factor": 4, "original_max_position_embeddings": 1}},
            "",
            8192,
        ),
        ({"max_position_embeddings": 8192}, "--sglang-context-length 32768", None),
        ({"max_position_embeddings": "many"}, "", None),
    ],
)
def test_check_context_reads_positions_as_sglang_does(
    config: dict[str, Any], words: str, positions: int | None, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    found = [each.found for each in run(words).check_context(doctor_options(tmp_path)) if each.status == "error"]
    assert [f"the model has {positions} positions" in text for text in found] == ([True, True] if positions else [])


def test_check_memory_takes_the_weights_from_the_models_files(tmp_path: Path) -> None:
    """A model in FP8 leaves more memory for the cache than the same model in bf16; too little memory is an error."""
    folder = tmp_path / "models" / "Qwen3-8B"
    folder.mkdir(parents=True)
    with (folder / "model-1.safetensors").open("wb") as file:
        file.truncate(8 * 10**9)
    found = find_only(run().check_memory(doctor_options(tmp_path)), "command: KV cache")
    assert "4 GB of weights per GPU, " in found.found
    short = find_only(
        run("--sglang-mem-fraction-static 0.05").check_memory(doctor_options(tmp_path)), "command: KV cache"
    )
    assert (short.status, "does not fit" in short.found) == ("error", True)


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
    measured = measure_prompts(str(data), options)
    assert (measured.rows, len(measured.lengths)) == (300, 100)
    without = measure_prompts(str(data), doctor_options(data.parent, tokenizer=SHIPPED, changes=["tools=[]"]))
    assert min(measured.lengths) - min(without.lengths) > 100


@pytest.mark.parametrize(
    ("words", "status", "found"),
    [
        ("", "ok", "5.3 passes over the data"),
        ("--rollout-max-prompt-len 50", "error", "the limit is 50"),
        ("--rollout-max-response-len 18000", "warning", "which leave"),
        ("--rollout-batch-size 301", "warning", "a step has 301 prompts, so it repeats some"),
    ],
)
def test_check_data_compares_prompts_with_the_context(words: str, status: str, found: str, data: Path) -> None:
    options = doctor_options(REPOSITORY, tokenizer=SHIPPED)
    (result,) = run(f"--prompt-data {data} {words}").check_data(options)
    assert (result.status, found in result.found) == (status, True), result


def test_check_data_finds_the_only_row_over_the_context(data: Path) -> None:
    rows = data.read_text().splitlines()
    rows[1] = json.dumps({**ROW, "prompt": [{"role": "user", "content": "word " * 20_000}]})
    data.write_text("\n".join(rows))
    (result,) = run(f"--prompt-data {data}").check_data(doctor_options(REPOSITORY, tokenizer=SHIPPED))
    assert (result.status, "the limit is 18431" in result.found) == ("error", True), result


def test_check_data_finds_the_only_broken_row(data: Path) -> None:
    data.write_text(data.read_text() + '{"label": "2"}\n')
    (result,) = run(f"--prompt-data {data}").check_data(doctor_options(REPOSITORY, tokenizer=SHIPPED))
    assert (result.status, "train.jsonl:301: " in result.found) == ("error", True), result


def test_data_of_the_command_is_read_as_slime_reads_it(data: Path) -> None:
    """The command selects rows with `@[start:end]`, and names keys with --input-key and --label-key."""
    rows = [{"question": json.loads(line)["prompt"], "answer": "2"} for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    preflight = run(f"--prompt-data {data}@[10:40] --input-key question --label-key answer")
    options = preflight.with_command_values(doctor_options(REPOSITORY, tokenizer=SHIPPED))
    (result,) = preflight.check_data(options)
    assert "30 of 30 prompts" in result.found
    assert {finding.status for finding in check_data(options)} == {"ok"}
    (empty,) = run(f"--prompt-data {data}@[300:]").check_data(options)
    assert (empty.status, "selects no rows" in empty.found) == ("error", True)


def test_data_without_an_input_key_is_read_from_slimes_default(data: Path) -> None:
    preflight = Preflight(("--prompt-data", str(data)), "the command")
    options = preflight.with_command_values(doctor_options(REPOSITORY, tokenizer=SHIPPED))
    (result,) = preflight.check_data(options)
    assert (result.status, '"input"' in result.found) == ("error", True), result
    assert {finding.status for finding in check_data(options)} == {"error"}


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_check_data_reports_an_empty_file(text: str, data: Path) -> None:
    data.write_text(text)
    (result,) = run(f"--prompt-data {data}").check_data(HERE)
    assert (result.status, "no rows" in result.found) == ("error", True), result


def test_check_evaluation_reads_the_eval_config(tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    (missing,) = run(f"--eval-config {path}").check_evaluation(HERE)
    assert (missing.status, "does not exist" in missing.found) == ("warning", True)
    path.write_text("eval: {datasets: [{name: aime, path: /nowhere.jsonl}]}")
    (wrong,) = run(f"--eval-config {path}").check_evaluation(HERE)
    assert (wrong.status, "/nowhere.jsonl" in wrong.found) == ("error", True), wrong


ODD_VALUES = [
    *("0", "-1", "1", "3", "x", "", "null", '{"a":1}', "1e400", "nan", "9" * 5000, "9" * 30, "²", "1.5", "[1,1", "a=b"),
    *("\0", f"/{'n' * 300}", "/root/x", "[0]*3+[1]*99999999999999999999"),
]


def test_preflight_survives_any_command() -> None:
    """No check raises for a command with random flags of slime, Megatron-LM and SGLang, and odd values."""
    rng = random.Random(35)
    known = [flag["names"][-1] for flag in json.loads(RECORD.read_text(encoding="utf-8"))["flags"]]
    sources = map(inspect.getsource, (preflight, training_command))
    read = re.findall(r'"(--[a-z-]+)"', "".join(sources))
    checks = ("check_context", "check_memory", "check_disk", "check_data", "check_evaluation", "summarize")
    for _ in range(150):
        flags = [rng.choice(rng.choice([known, read, read])) for _ in range(rng.randint(1, 6))]
        values = [rng.choices(ODD_VALUES, k=rng.choice([0, 1, 1, 1, 2])) for _ in flags]
        words = [word for flag, given in zip(flags, values, strict=True) for word in (flag, *given)]
        found = Preflight((*shlex.split(f"{RUN} {rng.choice([QWEN3_8B, QWEN3_30B, DEEPSEEK_V3])}"), *words), "it")
        for name in checks:
            assert list(getattr(found, name)(found.with_command_values(HERE))) is not None, words


def test_check_memory_survives_a_nul_in_a_path() -> None:
    """From Python 3.13 on, `Path.glob` raises ValueError for a path with a NUL."""
    found = Preflight((*shlex.split(f"{RUN} {QWEN3_8B}"), "--hf-checkpoint", "\0"), "it")
    assert list(found.check_memory(found.with_command_values(HERE)))


class Judge(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.headers["authorization"] == "Bearer right" else 401)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize(("key", "status"), [("right", "ok"), ("wrong", "error"), ("clé", "error")])
def test_check_judges_asks_each_judge(key: str, status: str, tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        found = list(run().check_judges(with_judge(tmp_path, url, key)))
        server.shutdown()
    assert [finding.status for finding in found] == [status]
    assert "right" not in found[0].found


def test_check_judges_reports_a_dead_judge(tmp_path: Path) -> None:
    url = dead_url().replace("://", "://me:hush@")
    found = list(run().check_judges(with_judge(tmp_path, url, "k")))
    assert_fault(found, "judge style", "error", "nothing answers at http://***@127", remedy="start the judge's server")
    assert "hush" not in found[0].found


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, []),
        ({"episode_timeout_s": 1800, "engine_patience_s": 400}, []),
        ({"episode_timeout_s": 120}, ["episode_timeout_s is 120 s"]),
        ({"engine_patience_s": 90}, ["engine_patience_s is 90 s"]),
    ],
)
def test_check_outage_warns_of_limits_below_five_minutes(
    settings: dict[str, float], names: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "rollout.yaml"
    config.write_text(json.dumps({"strands_rollout": settings}))
    found = list(run().check_outage(doctor_options(tmp_path, config=config)))
    assert [(finding.status, finding.found.partition(":")[0]) for finding in found] == [
        ("warning", name) for name in names
    ]


@pytest.mark.parametrize(("words", "fan_out"), [("--log-passrate", True), ("--log-passrate", False), ("", True)])
def test_check_pass_rates_refuses_fan_out(words: str, fan_out: bool, tmp_path: Path) -> None:
    config = tmp_path / "rollout.yaml"
    config.write_text(json.dumps({"strands_rollout": {"fan_out": fan_out}}))
    found = list(run(words).check_pass_rates(doctor_options(tmp_path, config=config)))
    assert [finding.status for finding in found] == ["error"] * (words != "" and fan_out)


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
        "5 of 115 GB, every 20 steps, 2 on disk at once",
        "6, every 20 steps, of aime: 16 samples a problem = 480 episodes",
    ):
        assert words in shown, shown


def test_summary_of_an_evaluation_has_no_steps() -> None:
    lines = list(run("--num-rollout 0 --eval-interval 1").summarize(HERE))
    shown = {line.name.removeprefix("this run: "): line.found for line in lines}
    assert shown["samples"] == "none for training: the job only evaluates"
    assert shown["evaluations"].startswith("1, ")
    assert not {"tokens", "in flight", "rollout"} & set(shown)


def test_files_of_the_command_replace_those_of_the_environment(tmp_path: Path) -> None:
    words = ("--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--custom-config-path", "/c.yaml")
    options = Preflight(words, "it").with_command_values(doctor_options(tmp_path, {"HF_CHECKPOINT": "/other"}))
    assert (options.model, options.data, options.config_file) == (Path("/m"), [Path("/d.jsonl")], Path("/c.yaml"))


def test_remedies_name_the_model_of_the_command(tmp_path: Path) -> None:
    options = run("--hf-checkpoint /models/Qwen3-4B").with_command_values(doctor_options(tmp_path))
    assert options.prepare_model_command == "bash scripts/prepare_model.sh --model Qwen/Qwen3-4B"


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
    assert found.command.int_value("--rollout-batch-size") == 4
