"""Real servers for tests, started and stopped as a user does it: by scripts/sglang_cpu.sh and scripts/gateway.sh."""

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
    """A server that a script has started; it ends with this process, if it is not ended before."""

    script: str
    base_url: str
    pid: int
    log: Path

    def stop(self, grace_s: float = 0.0) -> None:
        run_script(self.script, "stop", str(self.pid), "--grace-s", str(grace_s))

    def kill(self) -> None:
        """End all its processes at once, as a crash of its node would."""
        os.killpg(self.pid, signal.SIGKILL)


def start_sglang(model: Path | None = None, *flags: str, port: int = 0) -> RealServer:
    """The real SGLang with a model, or the shipped one; the first time, it is installed."""
    chosen = [] if model is None else ["--model", str(model)]
    return _start(SGLANG, "--port", str(port), *chosen, "--", *flags)


def start_gateway(*workers: str, router: str = "smg", flags: tuple[str, ...] = ()) -> RealServer:
    """A router, smg or sglang-router, before workers; ready when one of them is, if there is any."""
    named = [argument for worker in workers for argument in ("--worker", worker)]
    return _start(GATEWAY, "--router", router, *named, "--", *flags)


def run_script(script: str, *arguments: str) -> str:
    """What a script prints; its failure is this test's, in its words."""
    done = subprocess.run(["bash", str(SCRIPTS / script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script} {arguments[0]} failed: {done.stderr}"
    return done.stdout


def version_of(base_url: str) -> str:
    """SGLang's version, as a server tells it."""
    with urllib.request.urlopen(f"{base_url}/server_info", timeout=20) as answer:  # noqa: S310 - http
        facts: dict[str, Any] = json.load(answer)
    return str(facts["version"])


def _start(script: str, *arguments: str) -> RealServer:
    told = json.loads(run_script(script, "start", "--owner", str(os.getpid()), *arguments))
    return RealServer(script, told["base_url"], told["pid"], Path(told["log"]))
