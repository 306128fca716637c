"""Parse training commands with slime's `parse_args`, and with the Megatron-LM and the SGLang that this Python imports.

Run this program in its own process. Each line of stdin is a command, as a JSON list of words. For each command, the
program prints a line of JSON: the error that refuses the command, or null. It exits with 3 if a package is missing.

No GPU is needed: torch gets the properties of an H100. Packages that parse no arguments (Ray, wandb) may be missing.
"""

import contextlib
import importlib
import io
import json
import sys
from unittest import mock

PARSE_NOTHING = [
    "ray",
    "ray.util",
    "ray.util.placement_group",
    "ray.util.scheduling_strategies",
    "tensorboard",
    "wandb",
]
PARSE_NOTHING += ["torch.utils.tensorboard", "torch.utils.tensorboard.writer"]
_SPARSE_ATTENTION = "GlmMoeDsaForCausalLM"  # slime allows --allgather-cp for models with this attention only


def make_engine_arguments(args: object) -> None:
    """Make the arguments of an engine as slime does, and let SGLang check them.

    The model's name `dummy` skips SGLang's checks of the model's files and of the machine.
    """
    from sglang.srt.server_args import ServerArgs

    engine = importlib.import_module("slime.backends.sglang_utils.sglang_engine")
    if hasattr(engine, "accelerator"):  # slime newer than 0.3.1
        engine.accelerator.resolve_visible_device_id = lambda device: device
    made = engine._compute_server_args(args, 0, "127.0.0.1:1", 1, "127.0.0.1", 2, base_gpu_id=0)
    values = made[0] if isinstance(made, tuple) else made
    server = ServerArgs(**{**values, "model_path": "dummy", "served_model_name": "dummy"})
    server.enable_grpc = False
    if server.chunked_prefill_size is None:
        server.chunked_prefill_size = -1  # SGLang chooses it by the memory of the GPU
    server.check_server_args()


def refusal_of(words: list[str]) -> str | None:
    """Return the error of the first parser or check that refuses a command; None if all accept it."""
    arguments = importlib.import_module("slime.utils.arguments")
    megatron = importlib.import_module("slime.backends.megatron_utils.arguments")
    from megatron.training.arguments import core_transformer_config_from_args

    model = mock.Mock(architectures=[_SPARSE_ATTENTION] if "--allgather-cp" in words else [])
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["train.py", *words]))
        stack.enter_context(mock.patch.object(megatron, "_hf_validate_args"))  # the model is not here
        stack.enter_context(mock.patch.object(megatron.AutoConfig, "from_pretrained", return_value=model))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        try:
            args = arguments.parse_args()
            args.apply_rope_fusion = args.moe_permute_fusion = False  # kernels of Transformer Engine, which needs a GPU
            core_transformer_config_from_args(args)
            make_engine_arguments(args)
        except SystemExit:
            return printed.getvalue().strip().splitlines()[-1]
        except Exception as e:  # the parsers and checks raise anything
            return f"{type(e).__name__}: {e}"
    return None


def main() -> int:
    """Print the error of slime, Megatron-LM or SGLang for each command on stdin, or null; return the exit status."""
    answers, sys.stdout = sys.stdout, sys.stderr  # packages print when they are imported
    for name in PARSE_NOTHING:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = mock.MagicMock()
    try:
        import torch

        for name in ("megatron.training.arguments", "sglang.srt.server_args", "sglang_router", "slime.utils.arguments"):
            importlib.import_module(name)
    except ImportError as e:
        print(e, file=sys.stderr)
        return 3
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: mock.Mock(major=9, minor=0)
    for line in sys.stdin:
        print(json.dumps(refusal_of(json.loads(line))), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
