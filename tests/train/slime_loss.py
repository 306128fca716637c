"""slime's own loss, from a checkout, in one process without Megatron-LM.

The loss is in a package whose `__init__` imports all of Megatron-LM, although the loss itself only asks Megatron-LM for
the number of processes. The loss's two files are therefore imported as a separate package, with a stand-in for
Megatron-LM that answers 1.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_PACKAGE = "slimes_megatron_utils"
_MPU = """
def get_context_parallel_world_size():
    return 1


def get_data_parallel_world_size(with_context_parallel=False):
    return 1


def get_tensor_model_parallel_group():
    return None
"""


def checkout() -> Path:
    """Return the folder of slime's checkout; skip the test without a checkout."""
    root = os.environ.get("SLIME_PATH")
    if not root or not (Path(root) / "slime/backends/megatron_utils/loss.py").is_file():
        pytest.skip("needs THUDM/slime: set SLIME_PATH to a checkout of it")
    return Path(root)


@contextmanager
def slimes_loss(folder: Path) -> Iterator[Any]:
    """Import `slime/backends/megatron_utils/loss.py`, with a stand-in for Megatron-LM that is written to the folder."""
    root = checkout()
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron/__init__.py").touch()
    (folder / "megatron/core/__init__.py").write_text("from . import mpu\n")
    (folder / "megatron/core/mpu.py").write_text(_MPU)
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(root / "slime/backends/megatron_utils")]
    before = set(sys.modules)
    sys.modules[_PACKAGE] = package
    sys.path[:0] = [str(root), str(folder)]
    try:
        with warnings.catch_warnings():
            # torch's compiler, which slime's decorators load, uses deprecated functions of torch
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(f"{_PACKAGE}.loss")
        yield module
    finally:
        sys.path.remove(str(root))
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name.split(".")[0] in (_PACKAGE, "megatron", "slime"):
                del sys.modules[name]
