import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from strands_rollout.code_tool.sandbox import watch as run_watch
from strands_rollout.code_tool.sandbox.fork_server import ForkServer
from strands_rollout.code_tool.sandbox.watch import RunWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# process of an ordinary user that starts as many threads as possible, at most 1000 more than the machine has
PROGRAM = """
import _thread, json, os, resource, threading
from pathlib import Path
from strands_rollout.code_tool.sandbox.kernel import ChildLimits, shared_thread_limit
from strands_rollout.code_tool.sandbox.kernel import enter_user_namespace

as_root = shared_thread_limit(20)
if (ceiling := {ceiling}) is not None:
    resource.setrlimit(resource.RLIMIT_NPROC, (ceiling, ceiling))
os.setgroups([]), os.setgid(54399), os.setuid(54399)
present = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
alone = {alone} and enter_user_namespace()
ChildLimits(memory_mb=100_000, file_mb=1, max_threads=20, cpu_s=60).apply(own_user=alone)
threading.stack_size(32768)
wait, started = _thread.allocate_lock(), 0
wait.acquire()
try:
    while started < present + 1000:
        _thread.start_new_thread(wait.acquire, ())
        started += 1
except RuntimeError:
    pass
others = [resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in ("CORE", "SIGPENDING")]
rights = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapPrm", "CapEff"))]
print(json.dumps([alone, rights, as_root, present, started, *others]), flush=True)
os._exit(0)
"""


def run(*, ceiling=None, alone=False):
    command = [sys.executable, "-c", PROGRAM.format(ceiling=ceiling, alone=alone)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_root
def test_child_limits_threads_with_shared_user():
    _, _, as_root, present, started, core, pending = run()
    assert as_root is None
    assert 20 <= started < present + 1000
    assert (core, pending) == ([1, 1], [64, 64])
    ceiling = 40  # fewer than the threads of any machine; if no share were kept for others, 39 could start
    *_, started, _, _ = run(ceiling=ceiling)
    assert started == ceiling - ceiling // 8 - 1


@needs_root
def test_child_limits_threads_in_user_namespace():
    alone, rights, _, _, started, *_ = run(alone=True)
    if not alone:
        pytest.skip("this machine lets no ordinary user make a user namespace")
    assert (started, {int(right, 16) for right in rights}) == (19, {0})


def test_allow_threads_adjusts_limit_of_shared_user(monkeypatch):
    present, sent = [100], []
    link = SimpleNamespace(limit_threads=lambda child, number: sent.append((child.pid, number)))
    child = SimpleNamespace(pid=7, user=None, thread_limit=0)
    monkeypatch.setattr(run_watch, "shared_thread_limit", lambda more: present[0] + more)
    watch = RunWatch({"max_threads": 20, "max_concurrency": 2}, "/", link)
    for now in (100, 102, 99, 300, 301, 50):
        present[0] = now
        watch.allow_threads(child)
    assert sent == [(7, 140), (7, 340), (7, 90)]
    child.user = 60_000
    watch.allow_threads(child)
    assert len(sent) == 3


def test_fork_server_limits_threads_of_one_slot():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        fork_server = ForkServer(None, None, "/")
        fork_server._children = {process.pid: 3}
        before = resource.prlimit(process.pid, resource.RLIMIT_NPROC)
        for slot, expected in ((4, before), (3, (100, before[1]))):
            fork_server._signal_or_limit({"do": "limit", "slot": slot, "threads": 100})
            assert resource.prlimit(process.pid, resource.RLIMIT_NPROC) == expected
        process.communicate(b"\n")
