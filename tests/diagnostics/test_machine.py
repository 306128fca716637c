"""The doctor on the machine: GPUs, disks, limits, proxies, Ray and wandb."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fake_sglang import dead_url
from processes import ends
from stand_in_machine import assert_fault, only, program, question

from strands_rollout.doctor.disk_space import Place, check_disk, check_shared_memory, places_of
from strands_rollout.doctor.gpus import check_gpus
from strands_rollout.doctor.ray_cluster import check_ray
from strands_rollout.doctor.surroundings import check_memory, check_open_files, check_proxies
from strands_rollout.doctor.wandb_login import check_wandb

TWO_GPUS = "echo '0, NVIDIA H100 80GB HBM3, 81559, 570.1'; echo '1, NVIDIA H100 80GB HBM3, 81559, 570.1'"
KEY = "0123456789abcdef0123456789abcdef01234567"


def test_gpus_are_counted_with_their_memory(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", TWO_GPUS)
    found = only(check_gpus(question(tmp_path, env, gpus=2)), "gpus")
    assert found.status == "ok"
    assert "2 GPUs: NVIDIA H100 80GB HBM3 with 80 GiB; driver 570.1" in found.found


def test_fewer_gpus_than_asked_for_are_an_error(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", TWO_GPUS)
    found = check_gpus(question(tmp_path, env, gpus=8))
    assert_fault(found, "gpus", "error", "2 GPUs", "8 were asked for", remedy="--gpus 2")
    found = check_gpus(question(tmp_path, {**env, "CUDA_VISIBLE_DEVICES": "1"}, gpus=2))
    assert_fault(found, "gpus", "error", "1 GPUs of 2 (CUDA_VISIBLE_DEVICES=1)", remedy="--gpus 1")


@pytest.mark.parametrize(
    ("chosen", "count"),
    [("0,1", 2), ("5", 0), ("0,5,1", 1), ("-1,0", 0), ("", 0), ("1, 0", 2), ("GPU-8a3f,GPU-9b", 2)],
)
def test_hidden_gpus_are_counted_as_cuda_does(chosen: str, count: int, tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", TWO_GPUS)
    found = only(check_gpus(question(tmp_path, {**env, "CUDA_VISIBLE_DEVICES": chosen}, gpus=0)), "gpus")
    assert found.found.startswith(f"{count} GPUs of 2")


def test_the_gpus_that_the_scripts_take_are_asked_for(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", TWO_GPUS)
    for asked in (question(tmp_path, {**env, "NUM_GPUS": "4"}), question(tmp_path, {**env, "NUM_GPUS": "8"}, gpus=4)):
        assert_fault(check_gpus(asked), "gpus", "error", "4 were asked for", remedy="NUM_GPUS=2")
    assert_fault(check_gpus(question(tmp_path, {"NUM_GPUS": "all"})), "gpus", "error", "'all'", remedy="NUM_GPUS=8")


def test_a_training_run_needs_gpus_here_unless_ray_is_elsewhere(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", TWO_GPUS)
    found = check_gpus(question(tmp_path, env, training=True))
    assert_fault(found, "gpus", "error", "8 were asked for", remedy="--gpus 2")
    elsewhere = {"RAY_ADDRESS": "http://elsewhere:8265"}
    assert check_gpus(question(tmp_path, {**env, **elsewhere}, training=True))[0].status == "ok"
    assert check_gpus(question(tmp_path, elsewhere, training=True))[0].status == "warning"


def test_a_driver_that_fails_is_quoted(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", "echo 'Failed to initialize NVML: Driver mismatch'; exit 18")
    found = check_gpus(question(tmp_path, env))
    assert_fault(found, "gpus", "warning", "Failed to initialize NVML: Driver mismatch", remedy="nvidia-smi")


def test_a_driver_that_hangs_does_not_hang_the_doctor(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "nvidia-smi", f"sleep 60 & echo $! > {tmp_path / 'pid'}; sleep 60")
    found = check_gpus(question(tmp_path, env, gpus=8), limit_s=0.2)
    assert_fault(found, "gpus", "error", "did not answer within 0.2 s", remedy="nvidia-smi")
    pid = tmp_path / "pid"
    started = pid.read_text() if pid.is_file() else ""  # "": it was ended before it came so far
    assert not started or ends(int(started))


def test_a_machine_without_gpus_is_an_error_only_where_some_were_asked_for(tmp_path: Path) -> None:
    assert_fault(check_gpus(question(tmp_path)), "gpus", "warning", "no nvidia-smi", remedy="--gpus all")
    assert_fault(check_gpus(question(tmp_path, gpus=8)), "gpus", "error", "8 were asked for", remedy="--gpus all")
    assert check_gpus(question(tmp_path, gpus=0))[0].status == "warning"


@pytest.mark.parametrize(("enough", "least", "status"), [(1e6, 0, "warning"), (1e6, 1e6, "error"), (0, 0, "ok")])
def test_a_disk_with_too_little_room_is_named(enough: float, least: float, status: str, tmp_path: Path) -> None:
    place = Place("checkpoints", tmp_path / "not" / "yet" / "there", enough, least, "set SAVE_DIR")
    found = check_disk([place])
    if status == "ok":
        assert [finding.status for finding in found] == ["ok"]
    else:
        assert_fault(found, "disk: checkpoints", status, str(place.path), "GB", remedy="SAVE_DIR")


def test_a_file_where_a_folder_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "models").touch()
    found = check_disk([Place("models", tmp_path / "models" / "Qwen3-8B", 0, 0, "set MODEL_DIR")])
    assert_fault(found, "disk: models", "error", "is a file", remedy="MODEL_DIR")


def test_the_places_of_a_run_are_those_of_its_environment(tmp_path: Path) -> None:
    env = {"SAVE_DIR": "/a", "MODEL_DIR": "/b", "DATA_DIR": "/c", "TMPDIR": "/d"}
    assert [str(place.path) for place in places_of(question(tmp_path, env))] == ["/a", "/b", "/c", "/d"]
    assert places_of(question(tmp_path))[0].path == tmp_path / "checkpoints"


def test_little_shared_memory_is_a_warning(tmp_path: Path) -> None:
    assert_fault(
        check_shared_memory(tmp_path, enough_gb=1e6), "shared memory", "warning", str(tmp_path), remedy="--shm-size"
    )
    assert check_shared_memory(tmp_path, enough_gb=0)[0].status == "ok"


def test_too_few_open_files_are_a_warning() -> None:
    assert_fault(check_open_files(1024), "open files", "warning", "1024", remedy="ulimit -n 65535")
    assert check_open_files(100_000)[0].status == "ok"


def test_little_memory_is_a_warning() -> None:
    assert_fault(check_memory(8.0), "memory", "warning", "8 GB", remedy="32 GB")
    assert check_memory(512.0)[0].status == "ok"


def test_a_proxy_before_the_router_is_a_warning() -> None:
    env = {"http_proxy": "http://user:secret@proxy.example:3128", "SLIME_HOST_IP": "10.1.2.3"}
    found = check_proxies({**env, "no_proxy": "localhost,127.0.0.1"})
    assert_fault(
        found, "proxies", "warning", "http_proxy", "10.1.2.3", remedy="export no_proxy=localhost,127.0.0.1,10.1.2.3"
    )
    assert "secret" not in repr(found)
    assert check_proxies({**env, "no_proxy": "127.0.0.1, 10.1.2.3"})[0].status == "ok"
    assert check_proxies({**env, "NO_PROXY": "*"})[0].status == "ok"
    assert check_proxies({})[0].status == "ok"


def test_a_ray_address_at_which_nothing_listens_is_an_error() -> None:
    port = dead_url().rpartition(":")[2]
    for address in (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        found = check_ray({"RAY_ADDRESS": address}, installed=True)
        assert_fault(found, "ray cluster", "error", address, f"127.0.0.1:{port}", remedy="unset RAY_ADDRESS")
    assert_fault(
        check_ray({"RAY_ADDRESS": "http://:x"}, installed=True), "ray cluster", "error", remedy="unset RAY_ADDRESS"
    )


def test_a_ray_that_listens_is_found(tmp_path: Path) -> None:
    env = program(tmp_path / "bin", "ray", "true")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        given_port = check_ray({**env, "RAY_ADDRESS": f"http://127.0.0.1:{port}"}, installed=True)
        default_port = check_ray({**env, "RAY_ADDRESS": "127.0.0.1", "RAY_DASHBOARD_PORT": str(port)}, installed=True)
    assert [finding.status for finding in (*given_port, *default_port)] == ["ok"] * 4


@pytest.mark.parametrize("address", ["http://me:hunter2@127.0.0.1:{port}?token=hunter2", "me:hunter2@127.0.0.1:{port}"])
def test_a_password_in_rays_address_is_not_shown(address: str) -> None:
    port = dead_url().rpartition(":")[2]
    found = check_ray({"RAY_ADDRESS": address.format(port=port)}, installed=True)
    assert_fault(found, "ray cluster", "error", f"127.0.0.1:{port}, but", remedy="unset RAY_ADDRESS")
    broken = check_ray({"RAY_ADDRESS": address.format(port="hunter2")}, installed=True)
    assert_fault(broken, "ray cluster", "error", "RAY_ADDRESS is", remedy="unset RAY_ADDRESS")
    assert "hunter2" not in repr([*found, *broken])


def test_a_missing_ray_is_a_warning_or_ends_a_training_run() -> None:
    assert_fault(check_ray({}, installed=False), "ray", "warning", "not installed", remedy="pip install")
    assert_fault(check_ray({}, installed=False, training=True), "ray", "error", "not installed", remedy="pip install")
    assert_fault(check_ray({}, installed=True, training=True), "ray", "error", "PATH", remedy="activate")


@pytest.mark.parametrize("key", [f" {KEY}", f"{KEY}\n", f'"{KEY}"', "$WANDB_KEY", "abc"])
@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_KEY"])
def test_a_malformed_wandb_key_is_an_error_that_does_not_show_it(name: str, key: str) -> None:
    found = check_wandb({name: key}, installed=True)
    assert_fault(found, "wandb", "error", name, remedy="export WANDB_API_KEY")
    assert key.strip() not in repr(found).replace("WANDB_KEY has", "")


def test_wandb_is_off_or_on_as_the_environment_says(tmp_path: Path) -> None:
    assert "off" in check_wandb({"HOME": str(tmp_path)}, installed=True)[0].found
    for env in ({"WANDB_API_KEY": KEY}, {"WANDB_MODE": "offline"}, {"WANDB_API_KEY": f"local-{KEY}"}):
        assert check_wandb({"HOME": str(tmp_path), **env}, installed=True)[0].status == "ok"
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert "netrc" in check_wandb({"HOME": str(tmp_path)}, installed=True)[0].found
    assert KEY not in repr(check_wandb({"HOME": str(tmp_path), "WANDB_API_KEY": KEY}, installed=True))


def test_wandb_that_is_asked_for_needs_a_login(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "USE_WANDB": "1"}
    assert_fault(check_wandb(env, installed=True), "wandb", "error", "USE_WANDB", remedy="export WANDB_API_KEY")
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    for login in ({"WANDB_API_KEY": KEY}, {"WANDB_MODE": "offline"}, {"NETRC": str(tmp_path / "netrc")}):
        assert check_wandb({**env, **login}, installed=True)[0].status == "ok"
    off = check_wandb({"USE_WANDB": "0", "WANDB_API_KEY": KEY}, installed=False)
    assert off[0].found.startswith("off: USE_WANDB=0")


def test_wandb_faults_are_named(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    missing = check_wandb({**home, "WANDB_API_KEY": KEY}, installed=False)
    assert_fault(missing, "wandb", "error", "not installed", remedy="strands-rollout[wandb]")
    two = check_wandb({**home, "WANDB_API_KEY": KEY, "WANDB_KEY": KEY[::-1]}, installed=True)
    assert_fault(two, "wandb", "warning", "differ", remedy="unset WANDB_KEY")
    mode = check_wandb({**home, "WANDB_MODE": "of"}, installed=True)
    assert_fault(mode, "wandb", "error", "'of'", remedy="WANDB_MODE=")
