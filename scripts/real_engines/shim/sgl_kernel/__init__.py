"""Stand-in for sgl_kernel, which has no CPU wheel on PyPI: SGLang imports its functions, and calls none on a CPU."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build; choose SGLang's flags so that it isn't called")

    return missing
