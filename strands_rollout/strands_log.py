"""Keeps Strands from logging what is reported elsewhere: each failure of an episode is logged once.

Strands logs every exception of its loop as an error, also an aborted generation, of which a rollout has hundreds at the
end of each step. Knows Strands' logger and this package's errors.
"""

from __future__ import annotations

import logging
from typing import Final

from strands_rollout import errors

_LOGGER: Final = "strands.event_loop.event_loop"
_OWN_ERRORS: Final = frozenset(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.RolloutError)
)


class _ReportedElsewhere(logging.Filter):
    """Drops the records of failed cycles whose error is one of this package's."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it; the first argument of such a record is the error's class."""
        named = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return not (record.levelno == logging.ERROR and named in _OWN_ERRORS)


_FILTER: Final = _ReportedElsewhere()


def log_failures_once() -> None:
    """Install the filter; calling it again changes nothing."""
    logging.getLogger(_LOGGER).addFilter(_FILTER)
