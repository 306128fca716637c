"""Secrets in nested plain values, masked: by their key in a mapping, by their place in a text, or by their value.

A text's secrets are the user and password and the parameters of a URL, a bearer token, and of a command's arguments
those whose name means a secret (`--api-key x`, `TOKEN=x`).
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from strands_rollout.files.json_codec import Json

MASK: Final = "***"
_NAME: Final = re.compile(
    r"(^|[_.-])(key|token|secret|passw(or)?d|pass|passphrase|pat|credentials?|authorization|auth|cookie|sig|signature"
    r"|jwt|bearer)([_.-]?\d+)?$|(api|access|secret|private)key$|(auth|access|api)token$|password|passphrase|credential"
    r"|secret|(?-i:[a-z](Key|Token|Pass|Pat|Auth|Sig|Signature))$",
    re.IGNORECASE,
)
_USER_INFO: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s]*@", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@", re.IGNORECASE)
_PARAMETER: Final = re.compile(r"(?<=[?&;#])([\w.~%-]+)=([^&;#\s\"'<>]+)")
_BEARER: Final = re.compile(r"\b(bearer\s+)((?=\S*\d)[\w.~+/=-]{8,}|[\w.~+/=-]{16,})", re.IGNORECASE)
_ASSIGNED: Final = re.compile(r"-{0,2}([A-Za-z][\w.-]*)[=:](.*)", re.DOTALL)  # --name=value, NAME=value, Name: value
_FLAG: Final = re.compile(r"--?([A-Za-z][\w.-]*)")
_SPACES: Final = re.compile(r"(\s+)")
_REFERENCE: Final = re.compile(r"(bearer\s+)?\$\{\w+\}", re.IGNORECASE)
_HARMLESS_HEADERS: Final = (
    "accept",
    "accept-encoding",
    "accept-language",
    "cache-control",
    "connection",
    "content-type",
    "host",
    "user-agent",
)
_NO_SECRETS: Final = (None, "", True, False)


def masked(value: object, secret_key: re.Pattern[str]) -> Json:
    """The value with its secrets masked: those under a key in which `secret_key` is found, and those within texts."""
    if isinstance(value, Mapping):
        is_secret = {key: secret_key.search(str(key)) and item not in _NO_SECRETS for key, item in value.items()}
        return {key: MASK if is_secret[key] else masked(item, secret_key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [masked(item, secret_key) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """The text with the secrets of its URLs, and bearer tokens, masked."""
    text = _USER_INFO.sub(rf"\g<1>{MASK}@", text)
    text = _PARAMETER.sub(lambda found: f"{found[1]}={MASK}" if _NAME.search(found[1]) else found[0], text)
    return _BEARER.sub(rf"\g<1>{MASK}", text)


def masked_settings(value: object, secret_key: re.Pattern[str] = _NAME) -> Json:
    """As `masked`, for settings: also all variables of an `env`, all headers, and secrets in commands.

    References to variables (`${NAME}`) stay.
    """
    if isinstance(value, Mapping):
        return {key: _masked_setting(str(key), item, secret_key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [masked_settings(item, secret_key) for item in value]
        for place, (item, secret) in enumerate(_arguments(value)):
            if secret == item:  # else `masked_settings` has masked it within the item
                items[place] = MASK
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, str) or _REFERENCE.fullmatch(value):
        return value
    words = [MASK.join(word.rsplit(secret, 1)) if secret else word for word, secret in _arguments(_SPACES.split(value))]
    return masked_text("".join(words))


def _arguments(words: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Each word of a command with the secret in it, by the name in it or before it; "" for none."""
    is_awaited = False
    for word in words:
        bare = word.strip("\"'") if isinstance(word, str) else ""
        assigned, flag = _ASSIGNED.fullmatch(bare), _FLAG.fullmatch(bare)
        if not bare.strip() or (is_awaited and bare.lower() in ("bearer", "basic")):
            yield word, ""
        elif assigned and _NAME.search(assigned[1]):
            is_awaited = assigned[2].strip().lower() in ("", "bearer", "basic")
            yield word, "" if is_awaited or _REFERENCE.fullmatch(assigned[2]) else assigned[2]
        elif is_awaited and flag is None:
            is_awaited = False
            yield word, "" if _REFERENCE.fullmatch(bare) else bare
        else:
            is_awaited = flag is not None and _NAME.search(flag[1]) is not None
            yield word, ""


def _masked_setting(key: str, item: Json, secret_key: re.Pattern[str]) -> Json:
    if isinstance(item, str) and _REFERENCE.fullmatch(item):
        return item
    if isinstance(item, Mapping) and (kind := key.lower()) in ("env", "environment", "headers"):
        known = _HARMLESS_HEADERS if kind == "headers" else ()
        return {
            name: text if str(name).lower() in known or text in (None, "") or _REFERENCE.fullmatch(str(text)) else MASK
            for name, text in item.items()
        }
    if secret_key.search(key) or (isinstance(item, str) and _NAME.search(key)):
        return MASK if item not in _NO_SECRETS else item
    return masked_settings(item, secret_key)


def secret_values(*named: Json) -> frozenset[str]:
    """The secrets of 8 characters or more in mappings, such as the environment and settings.

    They are what a secret's name stands for, and what `masked_text` masks.
    """
    return frozenset(text for value in named for text in _secrets(value) if len(text) >= 8)


def _secrets(value: object, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            is_header = key.lower() == "headers" and str(name).lower() not in _HARMLESS_HEADERS
            if isinstance(item, str) and (is_header or _NAME.search(str(name))):
                # what `${NAME}` stands for, whatever the variable is called
                text = os.path.expandvars(item).strip()
                yield text
                yield text.split()[-1] if text else ""  # of "Bearer ..." the token alone too
            else:
                yield from _secrets(item, str(name))
    elif isinstance(value, list | tuple):
        yield from (os.path.expandvars(secret) for _, secret in _arguments(value))
        for item in value:
            yield from _secrets(item, key)
    elif isinstance(value, str):
        yield from (found[1] for found in _PASSWORD.finditer(value))
        yield from (found[2] for found in _PARAMETER.finditer(value) if _NAME.search(found[1]))
        yield from (found[2] for found in _BEARER.finditer(value))
        yield from (secret for _, secret in _arguments(_SPACES.split(value)))


def without_values(value: object, secrets: Collection[str]) -> Json:
    """The value with each of these texts masked wherever it stands, within mappings and lists too."""
    if not secrets:
        return value
    secret = re.compile("|".join(map(re.escape, sorted(secrets, key=len, reverse=True))))

    def replaced(part: object) -> Json:
        if isinstance(part, str):
            return secret.sub(MASK, part)
        if isinstance(part, Mapping):
            return {replaced(key): replaced(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return list(map(replaced, part)) if isinstance(part, list) else tuple(map(replaced, part))
        return part

    return replaced(value)
