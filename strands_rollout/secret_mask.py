"""Secrets in nested plain values, masked: by their key in a mapping, or as a password in a URL.

Knows values; which keys mean a secret is its caller's to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

MASK: Final = "***"
_USER_INFO: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s]*@", re.IGNORECASE)


def masked(value: Any, secret_key: re.Pattern[str]) -> Any:  # noqa: ANN401 - any plain value
    """The value with its secrets masked; what holds none comes back as an equal value.

    Args:
        value: Mappings, lists and what they hold.
        secret_key: Found in the key of a secret. Nothing, and what is only on or off, is never one.
    """
    if isinstance(value, Mapping):
        return {
            key: MASK
            if secret_key.search(str(key)) and item not in (None, "", True, False)
            else masked(item, secret_key)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [masked(item, secret_key) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return _USER_INFO.sub(rf"\g<1>{MASK}@", value) if isinstance(value, str) else value
