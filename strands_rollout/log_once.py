"""Log a message only once per process, such as a warning that hundreds of episodes would repeat.

The driver and each episode worker log the message separately, and again after a restart. A forked process doesn't
repeat its parent's messages.
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
    """Log a message unless this process has logged it with this key; return whether this call logged it.

    A message is logged with at most 50 keys. Otherwise, arguments that always differ, such as error texts, would fill
    the log and the memory.

    Args:
        logger: Logger of the message.
        level: Level of the message.
        message: Format string, as in `Logger.log`.
        args: Arguments of the format string.
        key: Calls with the same message and key are repetitions; default: the arguments as text.
        exc_info: Exception whose traceback is logged, too.
    """
    known = _LOGGED[message]
    seen = tuple(map(str, args)) if key is None else key
    if seen in known or len(known) >= _MAX_VARIANTS:
        return False
    known.add(seen)
    logger.log(level, message, *args, exc_info=exc_info, stacklevel=2)
    return True
