"""`find_broken_layer`: reports layers that don't confine a real child, and missing capabilities of root."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from strands_rollout.code_tool import sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's layers")
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to drop capabilities")
WITH_SETPRIV = pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs util-linux's setpriv")
# capabilities of a container with Docker's defaults
DOCKER_CAPABILITIES = """
    +chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,+setpcap,+net_bind_service
    +sys_chroot,+kill,+audit_write
"""

# Runs in its own process, because it forks and needs the low descriptors. It disables a layer only in the child.
SCRIPT = """
import os, sys, tempfile
from strands_rollout.code_tool.sandbox.kernel import ChildLimits
from strands_rollout.code_tool.sandbox.confinement import Confinement
from strands_rollout.code_tool.sandbox.fork_server import find_broken_layer
while os.open(os.devnull, os.O_RDONLY) <= 3:
    pass
class Broken(Confinement):
    def make_workspace(self, folder, index):
        place = super().make_workspace(folder, index)
        if sys.argv[1] == "files":
            object.__setattr__(place, "ruleset", None)
        return place
    def apply(self, place):
        if sys.argv[1] == "user":
            self._change_user = lambda user: None
        if sys.argv[1] == "syscalls":
            self._filter = None
        if sys.argv[1] == "limits":
            ChildLimits.apply = lambda self, own_user: None
        super().apply(place)
root = tempfile.mkdtemp(dir="/tmp")
os.chmod(root, 0o711)
broken = Broken({}, ChildLimits(4096, 64, 64, 60))
broken.open_folders()
print(find_broken_layer(broken, root + "/place"))
assert not os.path.exists(root + "/place")
os.rmdir(root)
"""


def find_broken_layer(broken: str) -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT, broken], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_find_broken_layer_passes_layers_that_hold() -> None:
    assert find_broken_layer("none") == "None\n"


@pytest.mark.parametrize("layer", ["limits", pytest.param("user", marks=AS_ROOT), "files", "syscalls"])
def test_find_broken_layer_finds_layer_that_does_not_hold(layer: str) -> None:
    assert find_broken_layer(layer).startswith(f"('{layer}', ")


RUN = """
import asyncio
from strands_rollout.code_tool import LocalExecutor
async def main():
    async with LocalExecutor(libraries=[]) as executor:
        result = await executor.run("import os; os.mkdir('a', 0); open('b', 'w').close(); os.getuid() > 60000")
        killed_by = (await executor.run("while 1: pass", timeout_s=0.2)).killed_by
        print((await executor.start()).isolation, result.stdout, killed_by)
asyncio.run(main())
"""


RUN_PROGRAMS = """
import asyncio
from strands_rollout.code_tool import LocalExecutor
async def main():
    fill = "import os, time\\nfor i in range(8):\\n    if os.fork() == 0:\\n        f = open(f'a{i}', 'wb')\\n"
    fill += "        os.unlink(f'a{i}'), f.write(bytes(9 << 20)), f.flush(), time.sleep(30)\\ntime.sleep(30)"
    async with LocalExecutor(libraries=[], isolation="files", programs=True, disk_mb=32) as executor:
        print((await executor.start()).isolation, (await executor.run(fill, timeout_s=60)).killed_by)
asyncio.run(main())
"""


def run_with(capabilities: str, script: str = RUN) -> subprocess.CompletedProcess[str]:
    command = ["setpriv", f"--bounding-set={capabilities}", "--inh-caps=-all", sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@AS_ROOT
@WITH_SETPRIV
def test_layers_need_only_dockers_default_capabilities() -> None:
    done = run_with(",".join(["-all", *DOCKER_CAPABILITIES.split()]))
    assert done.stdout.split() == ["full", "True", "time", "limit", "of", "0.2", "s"], done.stderr
    done = run_with(",".join(["-all", *DOCKER_CAPABILITIES.split()]), RUN_PROGRAMS)
    assert done.stdout == "files disk limit of 32 MiB, counting deleted files that are open\n", done.stderr


@AS_ROOT
@WITH_SETPRIV
@pytest.mark.parametrize(
    ("missing", "named"), [("kill", "CAP_KILL"), ("dac_override", "CAP_DAC_OVERRIDE"), ("setuid", "CAP_SETUID")]
)
def test_find_broken_layer_names_missing_capability(missing: str, named: str) -> None:
    done = run_with(f"-{missing}")
    assert done.returncode == 1
    assert "can't enforce isolation='full'" in done.stderr
    assert named in done.stderr


@pytest.mark.parametrize("file", sorted(Path(sandbox.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_sandbox_imports_only_standard_library(file: Path) -> None:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    own = {name for name in imported if f"{name}.".startswith(f"{sandbox.__name__}.")}
    assert {name.partition(".")[0] for name in imported - own} <= sys.stdlib_module_names
