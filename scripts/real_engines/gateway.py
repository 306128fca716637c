"""Start and stop a router (smg or its predecessor) in front of SGLang servers, for `bash scripts/gateway.sh`."""

import argparse
import sys
from typing import Final

from real_engines.command_line import CommandLine
from real_engines.server_process import Server, free_port

MODULES: Final = {"smg": "smg.launch_router", "sglang-router": "sglang_router.launch_router"}
# consistent_hashing is smg's only policy that routes by key. sglang-router 0.3.2 offers no such policy on its command
# line; here it routes by prefix.
POLICIES: Final = {"smg": ["--policy", "consistent_hashing"], "sglang-router": ["--policy", "cache_aware"]}
HEALTH_CHECK_FLAGS: Final = [
    "--health-check-interval-secs", "2",
    "--health-failure-threshold", "2",
    "--health-success-threshold", "1",
]  # fmt: skip


def server_of(parsed: argparse.Namespace) -> Server:
    """Return the router that the arguments describe."""
    place = ["--host", "127.0.0.1", "--port", str(parsed.port)]
    # each router also needs a free port for its metrics
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    workers = ["--worker-urls", *parsed.worker] if parsed.worker else []
    policy = [] if "--policy" in parsed.flags else POLICIES[parsed.router]
    module = MODULES[parsed.router]
    return Server(
        command=[sys.executable, "-m", module, *place, *metrics, *policy, *HEALTH_CHECK_FLAGS, *parsed.flags, *workers],
        environment={"PYTHONPATH": ""},
        # /health always answers 200; /readiness answers 200 only while a worker is healthy, so never without workers
        ready_url=f"http://127.0.0.1:{parsed.port}/{'readiness' if parsed.worker else 'health'}",
        log=parsed.log,
    )


def main() -> int:
    """Run the command line."""
    line = CommandLine("scripts/gateway.sh", "router", start_timeout_s=300, grace_s=5)
    line.start_flags.add_argument("--router", choices=MODULES, default="smg", help="Router to start. Default: smg.")
    line.start_flags.add_argument(
        "--worker", action="append", metavar="URL", help="URL of an SGLang server; may be repeated. Default: none."
    )
    return line.run(sys.argv[1:], server_of)


if __name__ == "__main__":
    sys.exit(main())
