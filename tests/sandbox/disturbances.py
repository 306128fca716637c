"""All that disturbs, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import disturbing_ends
import disturbing_errors
import disturbing_output
from disturbance import Disturbance

_SOON_S: Final = 0.2
DISTURBANCES: Final[tuple[Disturbance, ...]] = (
    *(replace(disturbance, timeout_s=_SOON_S) for disturbance in disturbing_output.LOOPS),
    *disturbing_output.OUTPUTS,
    *disturbing_ends.ENDS,
    *disturbing_errors.ERRORS,
    *disturbing_errors.CODES,
)
