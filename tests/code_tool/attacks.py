"""All attacks, by name."""

from typing import Final

import attacks_on_files
import attacks_on_other_runs
import attacks_on_processes
import attacks_on_resources
import attacks_on_the_kernel
import attacks_on_the_network
from attack import Attack

ATTACKS: Final[tuple[Attack, ...]] = (
    *attacks_on_files.OF_PROCESSES,
    *attacks_on_files.OF_FILES,
    *attacks_on_files.ALL,
    *attacks_on_the_network.ALL,
    *attacks_on_processes.BY_STARTING,
    *attacks_on_processes.ON_PROCESSES,
    *attacks_on_resources.ALL,
    *attacks_on_resources.ON_LIMITS,
    *attacks_on_the_kernel.ALL,
    *attacks_on_other_runs.ALL,
)
