"""A disk that is full, as far as this process's writes tell."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_file_size(count: int) -> Iterator[None]:
    """Writes stop there: one call writes what fits, the next one fails."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
