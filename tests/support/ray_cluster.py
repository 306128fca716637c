"""A Ray cluster of several nodes on this machine, separate from any Ray that runs already."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextlib.contextmanager
def ray_cluster(cpus: Mapping[str, int], *folders: Path) -> Iterator[SimpleNamespace]:
    """Connect to a new cluster; `cpus` has its nodes' names and numbers of CPUs. All nodes import from `folders`."""
    if sys.platform != "linux":
        pytest.skip("Ray clusters of several nodes on one machine need Linux")
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets must be short
    Path(folder).chmod(0o755)  # other users' code enters the workers' scratch directories in it
    Path(folder, "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name, value in (QUIET | {"RAY_TMPDIR": folder, "TMPDIR": folder}).items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        for one in folders:
            patch.syspath_prepend(str(one))
        nodes = Cluster()
        stack.callback(nodes.shutdown)
        added = {name: nodes.add_node(num_cpus=count, include_dashboard=False) for name, count in cpus.items()}
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        stack.callback(ray.shutdown)
        yield SimpleNamespace(ray=ray, nodes=nodes, added=added, ids={name: one.node_id for name, one in added.items()})
