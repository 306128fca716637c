"""Stand-in for sgl_kernel's state space kernels, as this package's `__init__` is for its other kernels."""

from . import __getattr__ as __getattr__
