"""The limits under which attacks run: small, so that going beyond them is cheap."""

from __future__ import annotations

from typing import Final

TIMEOUT_S: Final = 6
MEMORY_MB: Final = 640
DISK_MB: Final = 32
MAX_FILES: Final = 512
MAX_THREADS: Final = 32
