"""The scripts that start and stop real servers: with stand-ins for the servers, which take no time to start."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ends, is_running
from scripts_checkout import Checkout, check_out

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the servers are Linux's")
# writes its arguments and environment down, starts a child, and answers 200 at one path
STAND_IN = """
import http.server, json, os, pathlib, subprocess, sys

port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
facts = {"arguments": sys.argv[1:], "environment": dict(os.environ), "child": child.pid}
pathlib.Path(os.environ["FACTS"]).write_text(json.dumps(facts))
print("loading weights", flush=True)
if "--broken" in sys.argv:
    sys.exit("no such model")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == os.environ["READY_PATH"] else 503)
        self.end_headers()
    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Servers:
    """Starts stand-ins by the scripts, and ends what a test leaves behind."""

    def __init__(self, checkout: Checkout, tmp_path: Path) -> None:
        self._checkout = checkout
        self._facts = tmp_path / "facts.json"
        self._tmp = tmp_path
        shim = checkout.root / "scripts/real_engines/shim"
        (shim / "sitecustomize.py").unlink()  # it would import torch, where there is one
        (shim / "sglang").mkdir()
        (shim / "sglang/launch_server.py").write_text(STAND_IN)

    @property
    def facts(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._facts.read_text())
        return value

    def run(self, script: str, *arguments: str, ready: str = "/health") -> subprocess.CompletedProcess[str]:
        more = {"FACTS": str(self._facts), "READY_PATH": ready, "TMPDIR": str(self._tmp)}
        return self._checkout.run(script, *arguments, **more)

    def start(self, *arguments: str) -> dict[str, Any]:
        started = self.run("sglang_cpu.sh", "start", *arguments)
        assert started.returncode == 0, started.stderr
        printed: dict[str, Any] = json.loads(started.stdout)
        return printed

    def end_all(self) -> None:
        if self._facts.exists():
            group = os.getpgid(self.facts["child"]) if is_running(self.facts["child"]) else None
            if group is not None:
                os.killpg(group, 9)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(check_out(tmp_path / "a check out"), tmp_path)
    yield servers
    servers.end_all()


def test_start_prints_a_server_that_is_ready_and_stop_ends_all_its_processes(servers: Servers) -> None:
    started = servers.start()
    assert servers.facts["arguments"][1].endswith("strands_rollout/engine/checkpoint")  # unless another is named
    assert urllib.request.urlopen(f"{started['base_url']}/health").status == 200  # noqa: S310 - http
    assert "loading weights" in Path(started["log"]).read_text()
    child = servers.facts["child"]
    assert is_running(child)
    assert servers.run("sglang_cpu.sh", "stop", str(started["pid"])).returncode == 0
    assert ends(started["pid"])
    assert ends(child)


def test_sglang_is_told_to_use_the_cpu_the_model_and_the_callers_flags(servers: Servers) -> None:
    started = servers.start("--model", str(Path(__file__).parent), "--", "--max-running-requests", "4")
    arguments, environment = servers.facts["arguments"], servers.facts["environment"]
    assert arguments[:2] == ["--model-path", str(Path(__file__).parent)]
    assert ["--port", started["base_url"].rpartition(":")[2]] == arguments[4:6]
    assert arguments[-2:] == ["--max-running-requests", "4"]
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_a_server_that_ends_is_an_error_with_the_end_of_its_log_and_leaves_nothing(servers: Servers) -> None:
    failed = servers.run("sglang_cpu.sh", "start", "--", "--broken")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "ended with exit code 1 before it was ready" in failed.stderr
    assert "no such model" in failed.stderr
    assert ends(servers.facts["child"])


def test_a_port_that_is_taken_is_refused(servers: Servers) -> None:
    port = servers.start()["base_url"].rpartition(":")[2]
    refused = servers.run("sglang_cpu.sh", "start", "--port", port)
    assert refused.returncode == 1
    assert f"port {port} of 127.0.0.1 is taken" in refused.stderr


@pytest.mark.slow
def test_a_server_that_is_never_ready_is_ended(servers: Servers) -> None:
    failed = servers.run("sglang_cpu.sh", "start", "--timeout-s", "2", ready="/never")
    assert failed.returncode == 1
    assert "was not ready within 2 s" in failed.stderr
    assert ends(servers.facts["child"])


@pytest.mark.slow
def test_a_server_ends_with_its_owner(servers: Servers) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as owner:
        started = servers.start("--owner", str(owner.pid))
        assert is_running(started["pid"])
        owner.kill()
    assert ends(started["pid"])
    assert ends(servers.facts["child"])


@pytest.mark.parametrize("other", ["another program", "no process"])
def test_stop_ends_nothing_but_what_start_has_started(servers: Servers, other: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        if other == "no process":
            stranger.kill()
            stranger.wait()
        refused = servers.run("sglang_cpu.sh", "stop", str(stranger.pid))
        assert refused.returncode == 1
        assert f"process {stranger.pid} is" in refused.stderr
        assert "expected the id that start has printed" in refused.stderr
        assert is_running(stranger.pid) == (other != "no process")
        stranger.kill()
