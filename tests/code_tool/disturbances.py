"""All that disturbs, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import disturbing_ends
import disturbing_errors
import disturbing_output
from disturbance import LONG_S, Disturbance

_SOON_S: Final = 0.15
DISTURBANCES: Final[tuple[Disturbance, ...]] = (
    *(
        replace(loop, timeout_s=_SOON_S if loop.timeout_s == LONG_S else loop.timeout_s)
        for loop in disturbing_output.LOOPS
    ),
    *disturbing_output.OUTPUTS,
    *disturbing_ends.ENDS,
    *disturbing_errors.ERRORS,
    *disturbing_errors.CODES,
)
