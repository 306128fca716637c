"""Secrets in nested plain values, masked: by their key in a mapping, as a password in a URL, or by their value.

Knows values; which keys mean a secret is its caller's to say, but for the values that `secret_values` collects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

MASK: Final = "***"
_USER_INFO: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s]*@", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@", re.IGNORECASE)
_NAME: Final = re.compile(
    r"(^|[_.-])(key|token|secret|passw(or)?d|pass|credentials?|authorization|auth|cookie)$"
    r"|(api|access|secret|private)key$|(auth|access|api)token$",
    re.IGNORECASE,
)
_LEAST_CHARS: Final = 8


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


def secret_values(*named: Any) -> frozenset[str]:  # noqa: ANN401 - any plain values
    """The secrets among these: what stands under the name of a secret, and passwords in URLs; 8 characters or more.

    Args:
        named: Mappings, such as the environment and settings, and what they hold.
    """
    return frozenset(text for value in named for text in _secrets(value) if len(text) >= _LEAST_CHARS)


def _secrets(value: Any) -> Iterator[str]:  # noqa: ANN401
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, str) and _NAME.search(str(key)):
                yield item.strip()
                yield item.split()[-1] if item.split() else ""  # of "Bearer ..." the token alone too
            else:
                yield from _secrets(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item)
    elif isinstance(value, str):
        yield from (found[1] for found in _PASSWORD.finditer(value))


def without_values(value: Any, secrets: Collection[str]) -> Any:  # noqa: ANN401
    """The value with each of these texts masked, wherever it stands; what holds none comes back as it is.

    Args:
        value: Mappings, lists and what they hold.
        secrets: As `secret_values` collects them.
    """
    if not secrets:
        return value
    return _replaced(value, re.compile("|".join(map(re.escape, sorted(secrets, key=len, reverse=True)))))


def _replaced(value: Any, secret: re.Pattern[str]) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return secret.sub(MASK, value) if secret.search(value) else value
    if isinstance(value, Mapping):
        return {_replaced(key, secret): _replaced(item, secret) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_replaced(item, secret) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
