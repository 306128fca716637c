"""Stands in for sgl_kernel's state space kernels, as the package itself does for the others."""

from . import __getattr__ as __getattr__
