"""The errors of preparation; settings that can't be right are `strands_rollout`'s ConfigError.

Knows nothing of the rest of the package.
"""

from __future__ import annotations

from strands_rollout.errors import RolloutError


class PreparationError(RolloutError):
    """A data set can't be read, or what was read can't be made into a data file."""


class RowError(PreparationError):
    """One row can't be used; its message is the reason that is written beside it."""
