"""CPUs: what the container allows, not what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from strands_rollout.sandbox.machine_size import usable_cpus


@pytest.fixture(autouse=True)
def sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("limit", "cpus"),
    [("max 100000", 16), ("400000 100000", 4), ("250000 100000", 3), ("50000 100000", 2), ("9900000 100000", 16)],
)
def test_a_quota_of_cgroup_v2_counts(tmp_path: Path, limit: str, cpus: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cpus(tmp_path) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("-1", 16), ("400000", 4)])
def test_a_quota_of_cgroup_v1_counts(tmp_path: Path, quota: str, cpus: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path) == cpus


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == 16
