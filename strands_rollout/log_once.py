"""Logging what is the same for hundreds of episodes, such as a wrong setting, only once.

Once is once in the life of a process: the driver and each episode worker log it for themselves, and again after a
restart. A forked process does not repeat what its parent has logged.
"""

import logging
from collections import defaultdict
from collections.abc import Hashable
from typing import Final

_MAX_VARIANTS: Final = 50
_LOGGED: Final[defaultdict[str, set[Hashable]]] = defaultdict(set)  # keys, by message


def log_once(
    logger: logging.Logger,
    level: int,
    message: str,
    *args: object,
    key: Hashable = None,
    exc_info: BaseException | None = None,
) -> bool:
    """Log a message unless this process has logged it with this key, and return whether it was logged.

    At most 50 keys of a message are logged, so that texts which differ each time, as those of errors may, neither fill
    the log nor the memory.

    Args:
        logger: Logs it.
        level: The message's level.
        message: The message, with places for `args` as in `Logger.log`.
        args: What goes into the message.
        key: What makes two messages the same; default: the texts of `args`.
        exc_info: An exception whose traceback is logged too.
    """
    known = _LOGGED[message]
    seen = tuple(map(str, args)) if key is None else key
    if seen in known or len(known) >= _MAX_VARIANTS:
        return False
    known.add(seen)
    logger.log(level, message, *args, exc_info=exc_info, stacklevel=2)
    return True
