"""Start and stop the unmodified SGLang server on a CPU, for `bash scripts/sglang_cpu.sh`, in SGLang's environment."""

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from real_engines.command_line import CommandLine
from real_engines.server_process import Server

HERE: Final = Path(__file__).resolve().parent
SHIPPED_MODEL: Final = HERE.parents[1] / "strands_rollout/engine/checkpoint"
# SGLang uses the CPU only on request, and must not look up a local model on the hub
ENVIRONMENT: Final = {
    "PYTHONPATH": str(HERE / "shim"),
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # otherwise the first repetition penalty takes a dozen seconds to compile
    "TORCHDYNAMO_DISABLE": "1",
}
# use backends without compiled kernels, and a precision that makes logprobs comparable
FLAGS: Final = [
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch",
    "--grammar-backend", "none",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    "--dtype", "float32",
    "--mem-fraction-static", "0.1",
    "--max-total-tokens", "65536",
    "--skip-server-warmup",
    "--sleep-on-idle",
]  # fmt: skip


def server_of(parsed: argparse.Namespace) -> Server:
    """Return the server that the arguments describe."""
    place = ["--host", "127.0.0.1", "--port", str(parsed.port)]
    model = ["--model-path", str(parsed.model.resolve())]
    return Server(
        command=[sys.executable, "-m", "sglang.launch_server", *model, *place, *FLAGS, *parsed.flags],
        # a small model needs one thread; engines with a thread per CPU would wait for each other
        environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **ENVIRONMENT},
        ready_url=f"http://127.0.0.1:{parsed.port}/health",
        log=parsed.log,
    )


def main() -> int:
    """Run the command line."""
    line = CommandLine("scripts/sglang_cpu.sh", "sglang", start_timeout_s=600, grace_s=10)
    line.start_flags.add_argument(
        "--model", type=Path, default=SHIPPED_MODEL, help="Folder of a model. Default: the shipped model."
    )
    return line.run(sys.argv[1:], server_of)


if __name__ == "__main__":
    sys.exit(main())
