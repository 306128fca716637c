"""All attacks, by name."""

from __future__ import annotations

from typing import Final

import attacks_by_starting
import attacks_on_files
import attacks_on_limits
import attacks_on_other_runs
import attacks_on_processes
import attacks_on_resources
import attacks_on_secrets
import attacks_on_the_kernel
import attacks_on_the_network
from attack import Attack

ATTACKS: Final[tuple[Attack, ...]] = (
    *attacks_on_secrets.OF_PROCESSES,
    *attacks_on_secrets.OF_FILES,
    *attacks_on_files.ALL,
    *attacks_on_the_network.ALL,
    *attacks_by_starting.ALL,
    *attacks_on_processes.ALL,
    *attacks_on_resources.ALL,
    *attacks_on_limits.ALL,
    *attacks_on_the_kernel.ALL,
    *attacks_on_other_runs.ALL,
)
