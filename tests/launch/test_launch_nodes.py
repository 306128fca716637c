"""Training on several nodes: Ray started by the script, an existing Ray, and Slurm; with fakes of Ray and srun."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from launch_stage import Stage, make_stage

TRAIN = "strands_qwen3_8b.sh"
JOIN = "ray start --address=10.0.0.1:6379 --num-gpus=8 --disable-usage-stats --block"
SRUN = '#!/bin/sh\nprintf \'%s\\n\' "$MASTER_ADDR $NUM_GPUS" "$@" >"$HOME/srun"\nexec /bin/sleep 60\n'


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = make_stage(tmp_path)
    stage.provide_files()
    return stage


def environment_of(shown: str) -> dict[str, str]:
    (word,) = [word for word in shlex.split(shown.replace("\\\n", " ")) if word.startswith("--runtime-env-json=")]
    return json.loads(word.partition("=")[2])["env_vars"]  # type: ignore[no-any-return]


def test_script_starts_head_prints_join_line_and_waits(stage: Stage) -> None:
    finished = stage.run(TRAIN, NUM_NODES="2", MASTER_ADDR="10.0.0.1", FAKE_CLUSTER_GPUS="16")
    assert finished.returncode == 0, finished.stderr
    assert f"waiting for 1 nodes; run on each: {JOIN}\nall 2 nodes have joined\n" in finished.stderr
    (start,) = stage.calls_of("ray", "start")
    assert {"--head", "--node-ip-address=10.0.0.1", "--dashboard-host=127.0.0.1"} <= set(start.words)
    (submit,) = stage.calls_of("ray", "job", "submit")
    assert submit.runtime_env is not None
    assert submit.runtime_env["MASTER_ADDR"] == "10.0.0.1"
    assert not stage.ray_runs.exists()


def test_missing_nodes_end_the_script_without_a_job(stage: Stage) -> None:
    given = {"MASTER_ADDR": "10.0.0.1", "FAKE_CLUSTER_GPUS": "16", "JOIN_TIMEOUT_S": "1"}
    finished = stage.run(TRAIN, "--num-nodes", "4", **given)
    assert finished.returncode == 1
    assert (
        "Ray has 16 GPUs; expected 32 within 1 s: 4 nodes with 8 each. On each other node: ray start" in finished.stderr
    )
    assert not stage.calls_of("ray", "job", "submit")
    assert not stage.ray_runs.exists()


def test_ray_that_ends_while_nodes_join_ends_the_script(stage: Stage) -> None:
    finished = stage.run(TRAIN, NUM_NODES="2", MASTER_ADDR="10.0.0.1", FAKE_RAY_ENDS="1")
    assert finished.returncode == 1
    assert "error: Ray ended before all 2 nodes had joined: out of memory" in finished.stderr


def test_several_nodes_without_address_are_refused(stage: Stage) -> None:
    finished = stage.run(TRAIN, "--num-nodes", "2")
    assert finished.returncode == 1
    assert "NUM_NODES is 2, but no Ray runs here. Set MASTER_ADDR" in finished.stderr
    assert not stage.calls_of("ray", "start")


def test_dry_run_prints_join_line(stage: Stage) -> None:
    shown = stage.run(TRAIN, "--dry-run", "--num-nodes=4", MASTER_ADDR="10.0.0.1", SLIME_DIR="").stdout
    assert f"# on each of the 3 other nodes; the job starts when all have joined\n# {JOIN}\n" in shown
    assert "other nodes" not in stage.run(TRAIN, "--dry-run", MASTER_ADDR="10.0.0.1").stdout


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ({"MASTER_ADDR": "10.0.0.1"}, "10.0.0.1"),
        ({"RAY_ADDRESS": "http://raycluster-head-svc:8265"}, "raycluster-head-svc"),
        ({"RAY_ADDRESS": "10.0.0.2:6379"}, "10.0.0.2"),
    ],
)
def test_job_of_several_nodes_gets_slimes_variables(stage: Stage, given: dict[str, str], host: str) -> None:
    shown = stage.run(TRAIN, "--dry-run", NUM_NODES="2", SOCKET_IFNAME="eth0", no_proxy="mine.org", **given).stdout
    found = environment_of(shown)
    assert found["MASTER_ADDR"] == host
    assert found["no_proxy"] == f"localhost,127.0.0.1,0.0.0.0,{host},mine.org"
    assert found["NO_PROXY"] == f"localhost,127.0.0.1,0.0.0.0,{host}"
    assert {found[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "TP", "NCCL")} == {"eth0"}
    single = environment_of(stage.run(TRAIN, "--dry-run", **given).stdout)
    assert not {"MASTER_ADDR", "no_proxy", "GLOO_SOCKET_IFNAME"} & set(single)


def test_deepep_gets_its_variable(stage: Stage) -> None:
    given = {"SLIME_DIR": "", "MASTER_ADDR": "10.0.0.1"}
    with_deepep = environment_of(stage.run("train.sh", "--dry-run", MODEL="qwen3-next-80B-A3B", **given).stdout)
    assert with_deepep["NVSHMEM_DISABLE_NCCL"] == "1"
    assert (
        environment_of(stage.run("train.sh", "--dry-run", MODEL="glm5-744B-A40B", **given).stdout)[
            "INDEXER_ROPE_NEOX_STYLE"
        ]
        == "0"
    )
    assert "NVSHMEM_DISABLE_NCCL" not in environment_of(stage.run("train.sh", "--dry-run", **given).stdout)


def run_slurm(stage: Stage, *arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    return stage.run(
        "slurm.sh", *arguments, SLURM_JOB_NUM_NODES="2", SLURM_SUBMIT_DIR=str(stage.root), SLURMD_NODENAME="n1",
        SLURM_GPUS_ON_NODE="8", MASTER_ADDR="10.0.0.1", MODEL="qwen3-8B", **given,
    )  # fmt: skip


def test_slurm_dry_run_prints_srun_and_train(stage: Stage) -> None:
    finished = run_slurm(stage, "async", "--dry-run", "--num-rollout", "7")
    assert finished.returncode == 0, finished.stderr
    assert "# srun --nodes=1 --ntasks=1 --exclude=n1 bash -c " in finished.stdout
    words = shlex.split(finished.stdout.replace("\\\n", " "), comments=True)
    assert words[words.index("--num-rollout") + 1] == "7"
    assert words[words.index("--actor-num-nodes") + 1] == "1"
    assert not [call for call in stage.calls if call.name == "ray"]


def test_slurm_starts_workers_and_ends_them(stage: Stage) -> None:
    srun = stage.root.parent / "bin/srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    finished = run_slurm(stage, FAKE_CLUSTER_GPUS="16")
    assert finished.returncode == 0, finished.stderr
    address, *words = (stage.root.parent / "srun").read_text().splitlines()
    assert address == "10.0.0.1 8"
    assert words[:3] == ["--nodes=1", "--ntasks=1", "--exclude=n1"]
    assert words[-1].startswith('until ray start --address="$MASTER_ADDR:6379" --num-gpus="$NUM_GPUS"')
    assert len(stage.calls_of("ray", "job", "submit")) == 1
    assert stage.run("slurm.sh").returncode == 1  # outside of Slurm
