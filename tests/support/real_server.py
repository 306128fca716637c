"""Start and stop the real SGLang and the real routers with scripts/sglang_cpu.sh and scripts/gateway.sh."""

import json
import os
import signal
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "scripts"
SGLANG = "sglang_cpu.sh"
GATEWAY = "gateway.sh"


@dataclass(frozen=True, slots=True)
class RealServer:
    """A server that a script has started; the server ends with this process at the latest."""

    script: str
    base_url: str
    pid: int
    log: Path

    def stop(self, grace_s: float = 0.0) -> None:
        run_script(self.script, "stop", str(self.pid), "--grace-s", str(grace_s))

    def kill(self) -> None:
        """Kill all processes of the server, like a crash of its node."""
        os.killpg(self.pid, signal.SIGKILL)


def start_sglang(model: Path | None = None, *flags: str, port: int = 0) -> RealServer:
    """Install SGLang if it is missing, start it with a model (default: the shipped one), and return the server."""
    chosen = [] if model is None else ["--model", str(model)]
    return _start(SGLANG, "--port", str(port), *chosen, "--", *flags)


def start_gateway(*workers: str, router: str = "smg", flags: tuple[str, ...] = ()) -> RealServer:
    """Start a router (smg or sglang-router) in front of workers, and wait until a worker is ready, if there are any."""
    named = [argument for worker in workers for argument in ("--worker", worker)]
    return _start(GATEWAY, "--router", router, *named, "--", *flags)


def run_script(script: str, *arguments: str) -> str:
    """Run a script and return its output; if the script fails, the test fails with the script's stderr."""
    done = subprocess.run(["bash", str(SCRIPTS / script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script} {arguments[0]} failed: {done.stderr}"
    return done.stdout


def version_of(base_url: str) -> str:
    """Return the version that an SGLang server reports."""
    with urllib.request.urlopen(f"{base_url}/server_info", timeout=20) as answer:  # noqa: S310 - http
        facts: dict[str, Any] = json.load(answer)
    return str(facts["version"])


def _start(script: str, *arguments: str) -> RealServer:
    started = json.loads(run_script(script, "start", "--owner", str(os.getpid()), *arguments))
    return RealServer(script, started["base_url"], started["pid"], Path(started["log"]))
